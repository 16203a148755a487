// Package compare runs the scenario suite: every policy on the same request
// streams, several seeds, with confidence intervals, losses shown.
package compare

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/bench/model"
	"github.com/penstock/penstock/bench/sim"
	"github.com/penstock/penstock/bench/workload"
	"github.com/penstock/penstock/scorer"
)

// Scenario is one situation of the suite.
type Scenario struct {
	Name  string
	Title string
	Note  string // the numbers behind it
	// Ideal is the goodput that no policy can pass (capacity / offered); 0 = 1.
	Ideal float64
	// Retry, Patience ... are in the configuration that Build makes. scale
	// shortens or lengthens the run, 1 = as documented.
	Build func(e *Env, seed uint64, scale float64) (sim.Config, error)
}

// Env is what scenarios need from outside.
type Env struct {
	Traces string // folder with the traces; "" = trace scenarios are left out
}

// Objective of the suite unless a scenario has its own: first token within
// 0.5 s, 50 ms per output token.
var suiteGoal = sim.Objective{TTFT: 0.5, TPOT: 0.05}

func hosts(profile string, n int) []sim.ReplicaSpec {
	p, ok := model.ByName(profile)
	if !ok {
		panic("BUG: compare: no profile " + profile)
	}
	out := make([]sim.ReplicaSpec, n)
	for i := range out {
		out[i].Profile = p
	}
	return out
}

// sharedCapacity is what 8 H100/8B replicas carry of the shared stream within
// the objectives, requests/s: the highest rate, in steps of 5, at which some
// policy of the suite keeps a mean goodput of 0.99 in the steady state, that is
// over 120 s counted from 30 s on (`bench compare --capacity`; in shorter runs
// counted from the start more is carried, since the fleet starts empty). The
// capacity share of a rate is this / the rate: no more of what is offered can
// be good for long, but for choosing the cheaper requests.
const sharedCapacity = 345.0

// shared is the suite's usual stream: 200 prefixes of 1,500 tokens (Zipf 0.8),
// 300 own tokens, 150 output tokens, all log-normal with CV 1.
func shared(rate, duration float64) workload.Spec {
	return workload.Spec{Rate: rate, Duration: duration, Families: 200, PrefixTokens: 1500, Zipf: 0.8,
		Prompt: workload.Dist{Mean: 300, CV: 1, Max: 8000}, Out: workload.Dist{Mean: 150, CV: 1, Max: 2000}}
}

func configOf(spec workload.Spec, seed uint64, replicas []sim.ReplicaSpec) (sim.Config, error) {
	spec.Seed = seed
	reqs, err := workload.Generate(spec)
	if err != nil {
		return sim.Config{}, err
	}
	return sim.Config{Replicas: replicas, Requests: reqs, Goal: suiteGoal, Seed: seed, Warmup: min(10, spec.Duration/4)}, nil
}

// Suite is the scenario suite in the order of the documentation.
func Suite() []Scenario {
	return append(append(loadScenarios(), faultScenarios()...), traceScenarios()...)
}

func loadScenarios() []Scenario {
	return []Scenario{
		{Name: "near_saturation", Title: "Near saturation, many shared prefixes", Note: "8 x H100/8B, 200 prefixes of 1,500 tokens, 320 req/s (93 % of capacity)",
			Build: func(_ *Env, seed uint64, scale float64) (sim.Config, error) {
				return configOf(shared(320, 60*scale), seed, hosts("h100-8b", 8))
			}},
		{Name: "mixed_lengths", Title: "3 % of prompts have 20,000 to 40,000 tokens", Note: "8 x H100/8B, 100 req/s, 50 prefixes of 1,000 tokens; a long prompt alone takes 0.4 to 0.9 s, so about 0.97 to 0.98 is the most",
			Build: func(_ *Env, seed uint64, scale float64) (sim.Config, error) {
				s := shared(100, 100*scale)
				s.Families, s.PrefixTokens, s.LongShare, s.LongMin, s.LongMax = 50, 1000, 0.03, 20000, 40000
				return configOf(s, seed, hosts("h100-8b", 8))
			}},
		{Name: "conversations", Title: "Conversations of 4 turns, bursty", Note: "8 x H100/8B, 235 req/s, sessions arrive with CV 3, 8 s between turns, 20 system prompts of 500 tokens, 600 own tokens per turn",
			Build: func(_ *Env, seed uint64, scale float64) (sim.Config, error) {
				s := shared(235, 80*scale)
				s.Arrival, s.CV, s.Turns, s.Gap = workload.Gamma, 3, 4, 8
				s.Families, s.PrefixTokens, s.Prompt.Mean = 20, 500, 600
				return configOf(s, seed, hosts("h100-8b", 8))
			}},
		{Name: "hot_prefixes", Title: "A few hot prefixes", Note: "8 x H100/8B, 6 prefixes of 6,000 tokens (Zipf 1), 150 own tokens, 130 req/s",
			Build: func(_ *Env, seed uint64, scale float64) (sim.Config, error) {
				s := shared(130, 60*scale)
				s.Families, s.PrefixTokens, s.Zipf, s.Prompt.Mean = 6, 6000, 1, 150
				return configOf(s, seed, hosts("h100-8b", 8))
			}},
		{Name: "no_prefixes", Title: "No shared prefixes", Note: "8 x H100/8B, prompts of 1,200 tokens (CV 1), 200 req/s",
			Build: func(_ *Env, seed uint64, scale float64) (sim.Config, error) {
				s := shared(200, 60*scale)
				s.Families, s.Prompt.Mean = 0, 1200
				return configOf(s, seed, hosts("h100-8b", 8))
			}},
		overload("overload_115", 1.15), overload("overload_145", 1.45),
		routers("routers_4", 4), routers("routers_16", 16),
	}
}

func overload(name string, factor float64) Scenario {
	return Scenario{Name: name, Title: fmt.Sprintf("Overload %.2fx", factor), Ideal: 1 / factor,
		Note: fmt.Sprintf("8 x H100/8B, the stream of near_saturation at %.0f req/s, counted from 30 s on", sharedCapacity*factor),
		Build: func(_ *Env, seed uint64, scale float64) (sim.Config, error) {
			c, err := configOf(shared(sharedCapacity*factor, 30+60*scale), seed, hosts("h100-8b", 8))
			c.Warmup = 30
			return c, err
		}}
}

func routers(name string, n int) Scenario {
	return Scenario{Name: name, Title: fmt.Sprintf("%d routers", n), Note: "the stream of near_saturation at 300 req/s, accounts gossiped each second, no shared index",
		Build: func(_ *Env, seed uint64, scale float64) (sim.Config, error) {
			c, err := configOf(shared(300, 60*scale), seed, hosts("h100-8b", 8))
			c.Routers, c.GossipEvery, c.GossipAge = n, 1, 0.01
			return c, err
		}}
}

func faultScenarios() []Scenario {
	return []Scenario{
		{Name: "slow_replica", Title: "One replica 3x slower, nobody was told", Note: "8 x H100/8B, the stream of near_saturation at 240 req/s",
			Build: func(_ *Env, seed uint64, scale float64) (sim.Config, error) {
				c, err := configOf(shared(240, 60*scale), seed, hosts("h100-8b", 8))
				c.Replicas[3].Slow = 3
				return c, err
			}},
		{Name: "loss_of_one", Title: "Loss of one of four at peak", Note: "4 x H100/8B at 150 req/s (87 % of capacity; 116 % of what three can); the loss at half time", Ideal: 0.5 + 0.5*sharedCapacity/2*0.75/150,
			Build: func(_ *Env, seed uint64, scale float64) (sim.Config, error) {
				d := 80 * scale
				c, err := configOf(shared(150, d), seed, hosts("h100-8b", 4))
				c.Events = []sim.Event{{At: d / 2, Kind: sim.Kill, Replica: 2}}
				return c, err
			}},
		{Name: "cold_join", Title: "Cold join at peak", Note: "4 x H100/8B at 180 req/s (104 % of capacity), a fifth joins with an empty cache at a quarter of the time",
			Build: func(_ *Env, seed uint64, scale float64) (sim.Config, error) {
				d := 80 * scale
				c, err := configOf(shared(180, d), seed, hosts("h100-8b", 5))
				c.Replicas[4].Absent = true
				c.Events = []sim.Event{{At: d / 4, Kind: sim.Join, Replica: 4}}
				return c, err
			}},
		prior("prior_7x_high", "Profile 7x too slow, overload 1.15x", 7),
		prior("prior_7x_low", "Profile 7x too fast, overload 1.15x", 1.0/7),
	}
}

func prior(name, title string, factor float64) Scenario {
	return Scenario{Name: name, Title: title, Ideal: 1 / 1.15, Note: "overload_115, and the routers believe all time coefficients to be so wrong; counted from 30 s on",
		Build: func(_ *Env, seed uint64, scale float64) (sim.Config, error) {
			c, err := configOf(shared(sharedCapacity*1.15, 30+50*scale), seed, hosts("h100-8b", 8))
			c.Warmup = 30
			for i := range c.Replicas {
				c.Replicas[i].Prior = sim.Scale(sim.ToFleet(c.Replicas[i].Profile), factor)
			}
			return c, err
		}}
}

func traceScenarios() []Scenario {
	trace := func(name, title, note, file string, n int, profile string, goal sim.Objective, o workload.TraceOptions) Scenario {
		return Scenario{Name: name, Title: title, Note: note, Build: func(e *Env, seed uint64, scale float64) (sim.Config, error) {
			if e.Traces == "" {
				return sim.Config{}, errNoTraces
			}
			o := o
			o.Seed = seed
			o.Duration *= min(1, scale)
			reqs, err := workload.ReadTrace(filepath.Join(e.Traces, file), o)
			return sim.Config{Replicas: hosts(profile, n), Requests: reqs, Goal: goal, Seed: seed, Warmup: 30, BlockTokens: 512}, err
		}}
	}
	return []Scenario{
		trace("mooncake", "Mooncake conversation trace", "4 x H100/8B, TTFT 2 s, TPOT 25 ms; arrivals jittered inside their 3 s; the seed moves the jitter only", "mooncake_fast25_conversation_head.jsonl",
			4, "h100-8b", sim.Objective{TTFT: 2, TPOT: 0.025}, workload.TraceOptions{Jitter: 3, Duration: 3600, Speed: 1}),
		trace("azure_code", "Azure 2023 code trace", "4 x H100/8B at 6x, bursts with CV 13, no prefixes; TTFT 1 s, TPOT 50 ms; the seed moves each arrival by up to 1 s of the trace", "azure2023_code.csv",
			4, "h100-8b", sim.Objective{TTFT: 1, TPOT: 0.05}, workload.TraceOptions{Jitter: 1, Duration: 3600, Speed: 6}),
	}
}

var errNoTraces = fmt.Errorf("no folder of traces was given (--traces)")

// Policy is one column of the comparison.
type Policy struct {
	Name string            // as in tables
	Flag string            // as --policies has it; "" = as in tables
	Core string            // scorer's name
	Hold bool              // with Penstock's admission (hold, shed, late binding); else places at once, as its makers' router does
	Flat bool              // keeps the profile's coefficients: nothing is learned
	vary func(*sim.Config) // an experiment's change
}

// NoLearn is our policy without learned scales: what is learned must never do
// worse.
const NoLearn = "penstock, not learning"

// DefaultPolicies are ours in full, ours without admission, and all others as
// they are shipped: without admission.
func DefaultPolicies() []Policy {
	out := []Policy{{Name: "penstock", Core: "work", Hold: true}, {Name: "penstock, no admission", Flag: "penstock_nohold", Core: "work"},
		{Name: NoLearn, Flag: "penstock_nolearn", Core: "work", Hold: true, Flat: true}}
	for _, n := range []string{"round_robin", "random", "power_of_two", "least_requests", "llmd", "llmd_sticky", "sglang_cache_aware", "bounded_hash", "dynamo", "lmetric", "preble"} {
		out = append(out, Policy{Name: n, Core: n})
	}
	return out
}

func (p *Policy) flag() string {
	if p.Flag != "" {
		return p.Flag
	}
	return p.Name
}

// policyFlags lists the names that ParsePolicies takes, +hold apart.
func policyFlags() (names []string) {
	for _, p := range DefaultPolicies() {
		names = append(names, p.flag())
	}
	return names
}

// ParsePolicies reads names separated by commas; "+hold" behind one gives it
// Penstock's admission.
func ParsePolicies(s string) ([]Policy, error) {
	var out []Policy
	names := strings.Split(s, ",")
	for i, n := range names {
		if n == "" || slices.Contains(names[:i], n) {
			return nil, fmt.Errorf("--policies: %q is empty or there twice", n)
		}
		core, hold := strings.CutSuffix(n, "+hold")
		p := Policy{Name: n, Core: core, Hold: hold}
		for _, d := range DefaultPolicies() {
			if n == d.flag() {
				p = d
			}
		}
		if !slices.Contains(scorer.Names(), p.Core) {
			return nil, fmt.Errorf("policy: %q is not known (known: %s; +hold behind one of another router gives it Penstock's admission)", n, strings.Join(policyFlags(), ", "))
		}
		out = append(out, p)
	}
	return out, nil
}

// apply puts a policy into a scenario's configuration.
func (p *Policy) apply(c *sim.Config, tune func(*admission.Config)) {
	c.Pool.Policy, c.Pool.NoHold, c.Pool.NoLearn = p.Core, !p.Hold, p.Flat
	c.Pool.Objective = admission.Objective{TTFT: c.Goal.TTFT, TTFTPer1k: c.Goal.TTFTPer1k, ITL: c.Goal.TPOT}
	if tune != nil && p.Core == "work" {
		tune(&c.Pool)
	}
	if p.vary != nil {
		p.vary(c)
	}
}
