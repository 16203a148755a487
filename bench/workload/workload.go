// Package workload makes streams of requests for the simulator and the load
// generator: arrival processes, lengths, shared prefixes, conversations and
// recorded traces. Equal Specs give equal streams; nothing depends on what
// becomes of earlier requests, so that policies are compared on the same input.
package workload

import (
	"fmt"
	"math"
	"math/rand/v2"
	"sort"
)

// Seg is a run of prompt tokens. ID names its text; Hash is chained over all
// runs up to and including it.
type Seg struct {
	ID     uint64
	Hash   uint64
	Tokens int
}

// Request is one request of a stream.
type Request struct {
	At      float64 // intended send time, seconds from the start
	Prompt  int     // tokens
	Out     int     // output tokens it will have
	Segs    []Seg
	OutID   uint64 // names the text of its answer
	OutHash uint64 // chained hash of prompt + answer; 0 = never continued
	Session int    // conversation, or the request's own number
	Turn    int    // 0 = first
	Tenant  uint32
	Class   uint8
}

// Dist is a length distribution: log-normal with Mean and CV (standard
// deviation / mean; 0 = constant), cut to Min..Max tokens.
type Dist struct {
	Mean, CV float64
	Min, Max int
}

func (d Dist) sample(rng *rand.Rand) int {
	x := d.Mean
	if d.CV > 0 {
		s2 := math.Log(1 + d.CV*d.CV)
		x = d.Mean * math.Exp(rng.NormFloat64()*math.Sqrt(s2)-s2/2)
	}
	n := int(math.Round(x))
	if d.Max > 0 {
		n = min(n, d.Max)
	}
	return max(n, d.Min, 1)
}

// Arrival is the kind of arrival process; a closed set.
type Arrival string

// The arrival processes.
const (
	Poisson  Arrival = "poisson"
	Constant Arrival = "constant"
	Gamma    Arrival = "gamma" // inter-arrival times with coefficient of variation CV
	Ramp     Arrival = "ramp"  // Poisson, rate from Rate to RateEnd over the duration
)

// Spec describes a stream.
type Spec struct {
	Arrival  Arrival // default poisson
	Rate     float64 // requests per second (all turns counted)
	RateEnd  float64 // of a ramp
	CV       float64 // of a gamma process; default 1
	Duration float64 // seconds
	Max      int     // most requests; 0 = no limit

	Prompt    Dist    // the part of the prompt that is the request's own
	Out       Dist    // output tokens
	LongShare float64 // share of requests with a prompt of LongMin..LongMax tokens instead
	LongMin   int
	LongMax   int

	Families     int     // shared prefixes, 0 = none
	PrefixTokens int     // length of each
	Zipf         float64 // skew of their popularity, 0 = even

	Turns int     // turns of a conversation; 0 or 1 = single requests
	Gap   float64 // mean time between two turns' sends, seconds (at least half of it); default 10

	Tenants int
	// ClassShares gives the share of each class, in order of importance; nil = one class.
	ClassShares []float64
	Seed        uint64
}

// mix is splitmix64's finaliser.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// Chain is the hash of a run after another.
func Chain(prev, id uint64) uint64 { return mix(prev ^ mix(id)) }

// Check tells what is wrong with a Spec.
func (s *Spec) Check() error {
	switch s.Arrival {
	case "", Poisson, Constant, Gamma, Ramp:
	default:
		return fmt.Errorf("arrival: %q is none of poisson, constant, gamma, ramp", s.Arrival)
	}
	if s.Rate <= 0 || s.Duration <= 0 {
		return fmt.Errorf("rate and duration must be above 0, are %g/s and %gs", s.Rate, s.Duration)
	}
	if s.Prompt.Mean < 1 || s.Out.Mean < 1 {
		return fmt.Errorf("prompt and output lengths must be at least 1 token")
	}
	if s.Rate*s.Duration > 5e7 {
		return fmt.Errorf("rate x duration: %g requests are too many", s.Rate*s.Duration)
	}
	return nil
}

// Generate makes the whole stream, sorted by time.
func Generate(s Spec) ([]Request, error) {
	if err := s.Check(); err != nil {
		return nil, err
	}
	g := generator{Spec: s, rng: rand.New(rand.NewPCG(s.Seed, 0x9e37)), arrivals: rand.New(rand.NewPCG(s.Seed, 0xa221))}
	if g.Turns < 1 {
		g.Turns = 1
	}
	if g.Gap <= 0 {
		g.Gap = 10
	}
	if g.Families > 0 {
		total := 0.0
		for i := range s.Families {
			total += math.Pow(float64(i+1), -s.Zipf)
			g.popular = append(g.popular, total)
		}
	}
	for t := g.next(0); t < s.Duration; t = g.next(t) {
		g.session(t)
		if s.Max > 0 && len(g.out) >= s.Max*2 {
			break
		}
	}
	sort.SliceStable(g.out, func(i, j int) bool { return g.out[i].At < g.out[j].At })
	if s.Max > 0 && len(g.out) > s.Max {
		g.out = g.out[:s.Max]
	}
	return g.out, nil
}

type generator struct {
	Spec
	rng, arrivals *rand.Rand
	popular       []float64 // cumulated popularity of the families
	sessions      int
	out           []Request
	segs          []Seg // arena
}

// next is the time of the next session after t.
func (g *generator) next(t float64) float64 {
	rate := g.Rate / float64(g.Turns)
	switch g.Arrival {
	case Constant:
		return t + 1/rate
	case Gamma:
		cv := g.CV
		if cv <= 0 {
			cv = 1
		}
		shape := 1 / (cv * cv)
		return t + gamma(g.arrivals, shape)/(shape*rate)
	case Ramp:
		most := max(g.Rate, g.RateEnd) / float64(g.Turns)
		for {
			t += g.arrivals.ExpFloat64() / most
			now := rate + (g.RateEnd/float64(g.Turns)-rate)*t/g.Duration
			if t >= g.Duration || g.arrivals.Float64()*most < now {
				return t
			}
		}
	}
	return t + g.arrivals.ExpFloat64()/rate
}

// gamma samples a gamma variable of the given shape and scale 1 (Marsaglia, Tsang).
func gamma(rng *rand.Rand, shape float64) float64 {
	boost := 1.0
	if shape < 1 {
		boost = math.Pow(rng.Float64(), 1/shape)
		shape++
	}
	d := shape - 1.0/3
	c := 1 / math.Sqrt(9*d)
	for {
		x := rng.NormFloat64()
		v := 1 + c*x
		if v <= 0 {
			continue
		}
		v = v * v * v
		if u := rng.Float64(); math.Log(u) < x*x/2+d-d*v+d*math.Log(v) {
			return d * v * boost
		}
	}
}

// session adds all turns of one conversation that starts at t.
func (g *generator) session(t float64) {
	id := g.sessions
	g.sessions++
	var segs []Seg
	hash, prompt := mix(g.Seed), 0
	push := func(segID uint64, tokens int) {
		hash = Chain(hash, segID)
		segs = append(segs, Seg{segID, hash, tokens})
		prompt += tokens
	}
	if g.Families > 0 {
		x := g.rng.Float64() * g.popular[len(g.popular)-1]
		fam := sort.SearchFloat64s(g.popular, x)
		push(mix(uint64(fam)^0xfa111e5), g.PrefixTokens)
	}
	tenant := uint32(0)
	if g.Tenants > 0 {
		tenant = uint32(g.rng.IntN(g.Tenants))
	}
	class := g.class()
	for turn := range g.Turns {
		own := g.Prompt.sample(g.rng)
		if turn == 0 && g.LongShare > 0 && g.rng.Float64() < g.LongShare {
			own = g.LongMin + g.rng.IntN(g.LongMax-g.LongMin+1)
		}
		out := g.Out.sample(g.rng)
		own1 := mix(uint64(id)<<16 ^ uint64(turn)<<1 ^ g.Seed<<40)
		push(own1, own)
		r := Request{At: t, Prompt: prompt, Out: out, Session: id, Turn: turn, Tenant: tenant, Class: class, OutID: mix(own1)}
		if g.Turns > 1 {
			r.OutHash = Chain(hash, r.OutID)
		}
		r.Segs = g.keep(segs)
		g.out = append(g.out, r)
		push(r.OutID, out)
		t += g.Gap * (0.5 + 0.5*g.rng.ExpFloat64())
	}
}

func (g *generator) class() uint8 {
	if len(g.ClassShares) < 2 {
		return 0
	}
	x := g.rng.Float64()
	for i, s := range g.ClassShares {
		if x < s {
			return uint8(i)
		}
		x -= s
	}
	return uint8(len(g.ClassShares) - 1)
}

// keep copies segs into the arena.
func (g *generator) keep(segs []Seg) []Seg {
	if len(g.segs)+len(segs) > cap(g.segs) {
		g.segs = make([]Seg, 0, max(1<<14, len(segs)))
	}
	at := len(g.segs)
	g.segs = append(g.segs, segs...)
	return g.segs[at:len(g.segs):len(g.segs)]
}
