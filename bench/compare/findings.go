package compare

import (
	"slices"

	"github.com/penstock/penstock/bench/sim"
	"github.com/penstock/penstock/bench/workload"
	"github.com/penstock/penstock/scorer"
)

// experiment is a scenario beside the suite: ours with one thing changed, where
// an independent simulator found what that thing is worth (shapes.go).
type experiment struct {
	Scenario
	policies []Policy
}

// Variants of ours that experiments compare.
const (
	inOrder  = "penstock, first in first out"
	anyWarm  = "penstock, no wait for a warm one"
	lengths  = "penstock, lengths known"
	high4    = "penstock, not learning, 4x too slow"
	low4     = "penstock, not learning, 4x too fast"
	noHold4h = "penstock, no admission, not learning, 4x too slow"
	noHold4l = "penstock, no admission, not learning, 4x too fast"
	noHold1  = "penstock, no admission, not learning"
	stale    = "penstock, stale sums"
	dynStale = "dynamo, stale sums"
)

// oursWith is ours with something changed.
func oursWith(name string, vary func(*sim.Config)) Policy {
	return Policy{Name: name, Core: scorer.DefaultPolicy, Hold: true, vary: vary}
}

func queueOf(lookAhead int) func(*sim.Config) {
	return func(c *sim.Config) { c.Pool.LookAhead, c.Pool.WarmWait = lookAhead, 1e-9 }
}

// believed makes the routers believe in coefficients that are so wrong.
func believed(factor float64) func(*sim.Config) {
	return func(c *sim.Config) {
		c.Replicas = slices.Clone(c.Replicas)
		for i := range c.Replicas {
			c.Replicas[i].Prior = sim.Scale(sim.ToFleet(c.Replicas[i].Profile), factor)
		}
	}
}

func staleSums(c *sim.Config) { c.Pool.StalePeers, c.NoForward = true, true }

func experiments() []experiment {
	full := DefaultPolicies()[0]
	queues := []Policy{full, oursWith(anyWarm, queueOf(0)), oursWith(inOrder, queueOf(1))}
	known := oursWith(lengths, func(c *sim.Config) { c.KnownOut, c.Pool.KnownOut = true, true })
	flat := func(name string, hold bool, factor float64) Policy {
		return Policy{Name: name, Core: scorer.DefaultPolicy, Hold: hold, Flat: true, vary: believed(factor)}
	}
	of := func(name, base string) Scenario {
		for _, s := range Suite() {
			if s.Name == base {
				s.Name = name
				return s
			}
		}
		panic("BUG: compare: no scenario " + base)
	}
	return []experiment{
		{of("queue_115", "overload_115"), append(slices.Clone(queues), known)},
		{Scenario{Name: "queue_conversations", Title: "Conversations at 1.7 times the suite's rate", Note: "conversations at 400 req/s",
			Build: func(_ *Env, seed uint64, scale float64) (sim.Config, error) {
				s := shared(1.7*235, 80*scale)
				s.Arrival, s.CV, s.Turns, s.Gap = workload.Gamma, 3, 4, 8
				s.Families, s.PrefixTokens, s.Prompt.Mean = 20, 500, 600
				return configOf(s, seed, hosts("h100-8b", 8))
			}}, queues},
		{of("wrong_choice", "near_saturation"), []Policy{flat(noHold1, false, 1), flat(noHold4h, false, 4), flat(noHold4l, false, 0.25)}},
		{of("wrong_admission", "overload_115"), []Policy{full, flat(NoLearn, true, 1), flat(high4, true, 4), flat(low4, true, 0.25)}},
		{of("stale_sums", "routers_16"), []Policy{full, oursWith(stale, staleSums), {Name: "dynamo", Core: "dynamo"}, {Name: dynStale, Core: "dynamo", vary: staleSums}}},
	}
}

// findings runs the experiments.
func findings(o Options) ([]Row, error) {
	var rows []Row
	for _, e := range experiments() {
		o.Scenarios, o.Policies = []Scenario{e.Scenario}, e.policies
		out, err := Run(o)
		if err != nil {
			return nil, err
		}
		rows = append(rows, out.Rows...)
	}
	return rows, nil
}

// learningSeeds is over how many seeds learned scales are compared with none:
// the difference is smaller than what a few seeds tell apart.
const learningSeeds = 8

// learningRows runs ours with and without learned scales.
func learningRows(o Options) ([]Row, error) {
	all := DefaultPolicies()
	o.Policies, o.Seeds = []Policy{all[0], all[2]}, max(o.Seeds, learningSeeds)
	out, err := Run(o)
	if err != nil {
		return nil, err
	}
	return out.Rows, nil
}
