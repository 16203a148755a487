package scorer

import (
	"math"

	"github.com/penstock/penstock/fleet"
)

// Policy chooses one of c.Cand (an index in View.Replicas), or -1 when there
// is none.
type Policy struct {
	Name string
	From string // whose rule it is, for people
	Pick func(c *Context) int
}

// policies is in the order of the documentation.
var policies = [...]Policy{
	{"work", "Penstock: least own cost + harm to others, in seconds", PickWork},
	{"round_robin", "every balancer", pickRoundRobin},
	{"random", "every balancer", pickRandom},
	{"power_of_two", "the less loaded of two at random", pickPowerOfTwo},
	{"least_requests", "fewest requests outstanding", pickLeastRequests},
	{"llmd", "llm-d: queue 2, kv 2, prefix 3, min-max normalised", pickLLMD},
	{"llmd_sticky", "llm-d: to the prefix until it is saturated", pickLLMDSticky},
	{"sglang_cache_aware", "SGLang router: prefix match unless unbalanced", pickSGLang},
	{"bounded_hash", "KubeAI: consistent hash with bounded load", pickBoundedHash},
	{"dynamo", "NVIDIA Dynamo: prefill blocks + decode blocks", pickDynamo},
	{"lmetric", "LMetric: uncached prefill tokens x batch", pickLMetric},
	{"preble", "Preble: exploit a long prefix, else explore by cost", pickPreble},
}

// DefaultPolicy is used when none is named.
const DefaultPolicy = "work"

// Find returns the policy of that name, nil when there is none.
func Find(name string) *Policy {
	for i := range policies {
		if policies[i].Name == name {
			return &policies[i]
		}
	}
	return nil
}

// Names lists all policies, the default first.
func Names() []string {
	out := make([]string, len(policies))
	for i := range policies {
		out[i] = policies[i].Name
	}
	return out
}

// mix spreads a counter or hash over 64 bits.
func mix(x uint64) uint64 { return Finalise(x + 0x9e3779b97f4a7c15) }

// Finalise is the finaliser of splitmix64.
func Finalise(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func pickRoundRobin(c *Context) int {
	if len(c.Cand) == 0 {
		return -1
	}
	return int(c.Cand[c.Seed%uint64(len(c.Cand))])
}

func pickRandom(c *Context) int {
	if len(c.Cand) == 0 {
		return -1
	}
	return int(c.Cand[mix(c.Seed)%uint64(len(c.Cand))])
}

func pickPowerOfTwo(c *Context) int {
	n := uint64(len(c.Cand))
	if n == 0 {
		return -1
	}
	a := mix(c.Seed) % n
	b := a
	if n > 1 {
		b = (a + 1 + mix(c.Seed^0xabcdef)%(n-1)) % n
	}
	la, _, _ := load(&c.View.Replicas[c.Cand[a]])
	lb, _, _ := load(&c.View.Replicas[c.Cand[b]])
	if lb < la {
		a = b
	}
	return int(c.Cand[a])
}

// pickLeast returns the candidate of the least value; ties go round by Seed, so
// that idle fleets are not all sent to the first.
func pickLeast(c *Context, value func(i int) float64) int {
	best, least := -1, math.Inf(1)
	n := len(c.Cand)
	if n == 0 {
		return -1
	}
	start := int(c.Seed % uint64(n))
	for k := 0; k < n; k++ {
		j := start + k
		if j >= n {
			j -= n
		}
		i := int(c.Cand[j])
		if v := value(i); v < least {
			best, least = i, v
		}
	}
	return best
}

func pickLeastRequests(c *Context) int {
	return pickLeast(c, func(i int) float64 {
		q, _, _ := load(&c.View.Replicas[i])
		return q
	})
}

// waiting is the queue length as those routers see it: the scraped gauge.
// Without one, the account's requests that have no first token.
func waiting(r *fleet.Replica) float64 {
	if w := r.Sample.Waiting; r.Sample.At > 0 && w == w {
		return w
	}
	return float64(r.Own.Prefilling + r.Peers.Prefilling)
}

func kvUsage(r *fleet.Replica) float64 {
	if u := r.Sample.KVUsage; r.Sample.At > 0 && u == u {
		return u
	}
	_, _, kv := load(r)
	return min(1, kv/float64(max(1, r.Profile.KVTokens)))
}

// llmdScore is llm-d's weighted sum: queue and KV-cache use min-max
// normalised over the candidates, prefix as the share of the prompt held.
func llmdScore(c *Context, wq, wk, wp float64) int {
	minQ, maxQ := math.Inf(1), math.Inf(-1)
	for _, i := range c.Cand {
		q := waiting(&c.View.Replicas[i])
		minQ, maxQ = min(minQ, q), max(maxQ, q)
	}
	prompt := float64(max(1, c.Work.Prompt))
	return pickLeast(c, func(i int) float64 {
		r := &c.View.Replicas[i]
		queue := 1.0
		if maxQ > minQ {
			queue = (maxQ - waiting(r)) / (maxQ - minQ)
		}
		return -(wq*queue + wk*(1-kvUsage(r)) + wp*c.Hits[i]/prompt)
	})
}

func pickLLMD(c *Context) int { return llmdScore(c, 2, 2, 3) }

// llm-d calls a replica saturated at 5 waiting or 80 % of its KV cache.
const (
	llmdSaturatedQueue = 5
	llmdSaturatedKV    = 0.8
)

func pickLLMDSticky(c *Context) int {
	best, hit := -1, 0.0
	for _, i := range c.Cand {
		r := &c.View.Replicas[i]
		if c.Hits[i] > hit && waiting(r) < llmdSaturatedQueue && kvUsage(r) < llmdSaturatedKV {
			best, hit = int(i), c.Hits[i]
		}
	}
	if best >= 0 {
		return best
	}
	return llmdScore(c, 2, 2, 0)
}

// SGLang's defaults: cache_threshold 0.5, balance_abs_threshold 32,
// balance_rel_threshold 1.0001 (router's python defaults: 64 and 1.5; the
// binary's are used here as published).
const (
	sglangCache = 0.5
	sglangAbs   = 32
	sglangRel   = 1.0001
)

func pickSGLang(c *Context) int {
	lo, hi := math.Inf(1), math.Inf(-1)
	best, hit := -1, -1.0
	for _, i := range c.Cand {
		q, _, _ := load(&c.View.Replicas[i])
		lo, hi = min(lo, q), max(hi, q)
		if c.Hits[i] > hit {
			best, hit = int(i), c.Hits[i]
		}
	}
	if hi-lo > sglangAbs && hi > lo*sglangRel {
		return pickLeastRequests(c)
	}
	if best >= 0 && hit/float64(max(1, c.Work.Prompt)) > sglangCache {
		return best
	}
	return pickLeastRequests(c) // their router: the replica with the smallest tree, that is the least used
}

// boundedLoad is KubeAI's default load factor.
const boundedLoad = 1.25

// prefixKey is what a prefix hash router hashes: the first block of the
// prompt, else the request itself.
func prefixKey(c *Context) uint64 {
	if len(c.Work.Blocks) > 0 {
		return c.Work.Blocks[0]
	}
	return c.Seed
}

// pickBoundedHash is rendezvous hashing over the first block with bounded
// load: the same placement as a ring walk, without the ring.
func pickBoundedHash(c *Context) int {
	total := 1.0
	for _, i := range c.Cand {
		q, _, _ := load(&c.View.Replicas[i])
		total += q
	}
	bound := math.Ceil(boundedLoad * total / float64(max(1, len(c.Cand))))
	key := prefixKey(c)
	best, rank := -1, uint64(0)
	for _, i := range c.Cand {
		r := &c.View.Replicas[i]
		if q, _, _ := load(r); q+1 > bound {
			continue
		}
		if h := mix(key ^ mix(uint64(r.ID))); best < 0 || h > rank {
			best, rank = int(i), h
		}
	}
	if best < 0 {
		return pickLeastRequests(c)
	}
	return best
}

func blocks(r *fleet.Replica, tokens float64) float64 {
	return tokens / float64(max(1, r.Profile.BlockTokens))
}

// pickDynamo: logit = overlap_weight (1) x blocks to prefill, those waiting
// included, + blocks of active decodes; least wins (temperature 0).
func pickDynamo(c *Context) int {
	return pickLeast(c, func(i int) float64 {
		r := &c.View.Replicas[i]
		_, prefill, kv := load(r)
		return blocks(r, prefill+float64(c.Work.Prompt)-c.Hits[i]) + blocks(r, kv)
	})
}

// pickLMetric: uncached prefill tokens (waiting + its own) x batch size.
func pickLMetric(c *Context) int {
	return pickLeast(c, func(i int) float64 {
		q, prefill, _ := load(&c.View.Replicas[i])
		return (prefill + max(1, float64(c.Work.Prompt)-c.Hits[i])) * (q + 1)
	})
}

// pickPreble: when more than half of the prompt is cached somewhere, exploit:
// the replica of the longest hit, the least loaded of equals. Else explore: the
// least of (load + what it would have to compute + what eviction would cost).
func pickPreble(c *Context) int {
	best, hit, cost := -1, 0.0, math.Inf(1)
	for _, i := range c.Cand {
		r := &c.View.Replicas[i]
		q, _, _ := load(r)
		if h := c.Hits[i]; h > hit || h == hit && q < cost {
			best, hit, cost = int(i), h, q
		}
	}
	if best >= 0 && 2*hit > float64(c.Work.Prompt) {
		return best
	}
	return pickLeast(c, func(i int) float64 {
		r := &c.View.Replicas[i]
		p := r.Profile
		n, prefill, kv := load(r)
		compute := p.PerPrefill * (prefill + max(1, float64(c.Work.Prompt)-c.Hits[i]))
		decode := n * c.Work.Out * (p.PerSeq + p.PerKV*kv/max(1, n))
		evict := 0.0
		if over := kv + float64(c.Work.Prompt) - float64(p.KVTokens); over > 0 {
			evict = over * p.PerPrefill
		}
		return compute + decode + evict
	})
}
