package sim

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/bench/workload"
	"github.com/penstock/penstock/fleet"
)

type weather struct {
	name      string
	every     float64
	age, loss float64
}

// several runs one load over a number of routers and tells beside the report
// the worst replica's work over the mean: the mean of the looks at every answer.
func several(t testing.TB, routers int, w weather, rate float64, seed uint64, change func(*Config)) (*Report, float64, float64) {
	t.Helper()
	s := workload.Spec{Rate: rate, Duration: 60, Families: 200, PrefixTokens: 1500, Zipf: 0.8, Seed: seed,
		Prompt: workload.Dist{Mean: 300, CV: 1, Max: 8000}, Out: workload.Dist{Mean: 150, CV: 1, Max: 2000}}
	c := Config{Name: fmt.Sprintf("%d routers, %s", routers, w.name), Replicas: hosts(8, "h100-8b"), Requests: stream(t, s), Routers: routers, Warmup: 10, Seed: seed,
		Goal: Objective{TTFT: 0.5, TPOT: 0.05}, Pool: admission.Config{Objective: admission.Objective{TTFT: 0.5, ITL: 0.05}},
		GossipEvery: w.every, GossipAge: w.age, GossipLoss: w.loss, GossipLossFrom: 3}
	if change != nil {
		change(&c)
	}
	if err := c.defaults(); err != nil {
		t.Fatal(err)
	}
	sim := &simulation{Config: c, rng: rand.New(rand.NewPCG(c.Seed, 0x51a))}
	sim.rep = newReport(&sim.Config)
	var requests, work, looks float64
	sim.OnResult = func(r *Result) {
		if r.Ended < 10 || r.Ended > 60 {
			return
		}
		var worst, sum, worstWork, sumWork float64
		for i, n := range sim.nodes {
			var l fleet.Load
			for _, o := range sim.routers {
				l = l.Add(o.pool.View().Replicas[i].Own)
			}
			p := &n.Profile
			x := l.PrefillTokens*p.PB + l.OutTokens*(p.C+p.D*l.KVTokens/max(1, float64(l.Requests)))
			worst, sum = max(worst, float64(l.Requests)), sum+float64(l.Requests)
			worstWork, sumWork = max(worstWork, x), sumWork+x
		}
		k := float64(len(sim.nodes))
		requests, work, looks = requests+worst*k/max(sum, 1), work+worstWork*k/max(sumWork, 1e-9), looks+1
	}
	sim.build()
	sim.loop()
	sim.finish()
	return sim.rep, requests / looks, work / looks
}

var weathers = []weather{{"200 ms", .2, .002, 0}, {"200 ms late", .2, .2, 0}, {"1 s", 1, .002, 0}, {"1 s late", .2, 1, 0}, {"a fifth lost", .2, .002, .2}, {"lost", .2, .002, 1}}

// The acceptance line: several routers do as well as one at the same load, by
// goodput and by prefix hits, and with late and lost gossip they do not herd:
// the worst replica has at most 1.3 x the mean queued work. 270 requests a
// second are near what the fleet can do.
func TestSeveralRoutersActAsOne(t *testing.T) {
	one, requests, work := several(t, 1, weather{name: "alone"}, 270, 1, nil)
	t.Logf("one router: goodput %.3f, hits %.3f, shed %.3f, worst replica / mean: requests %.2f, work %.2f", one.Goodput, one.HitRate, one.Refused, requests, work)
	for _, n := range []int{3, 8} {
		for _, w := range weathers {
			r, requests, work := several(t, n, w, 270, 1, nil)
			t.Logf("%d routers, gossip %-12s goodput %.3f (x %.3f), hits %.3f (x %.3f), shed %.3f, worst/mean: requests %.2f, work %.2f", n, w.name,
				r.Goodput, r.Goodput/one.Goodput, r.HitRate, r.HitRate/one.HitRate, r.Refused, requests, work)
			if work > 1.3 || requests > 1.3 {
				t.Errorf("%s: the worst replica has %.2f x the mean work, %.2f x the mean requests", r.Name, work, requests)
			}
			least := 0.98
			if w.loss == 1 {
				least = 0.95 // what nobody hears nobody can share
			}
			if r.Goodput < least*one.Goodput || r.HitRate < least*one.HitRate {
				t.Errorf("%s: goodput %.3f of %.3f, hits %.3f of %.3f", r.Name, r.Goodput, one.Goodput, r.HitRate, one.HitRate)
			}
		}
	}
}

// Beyond what the fleet can do, several routers with a held queue each serve a
// little less than one: no better is claimed than 0.92 of it, and no herding.
func TestSeveralRoutersInOverload(t *testing.T) {
	one, _, _ := several(t, 1, weather{name: "alone"}, 360, 1, nil)
	for _, n := range []int{3, 8} {
		for _, w := range weathers[:1] {
			r, requests, work := several(t, n, w, 360, 1, nil)
			t.Logf("%d routers, gossip %-10s goodput %.3f (x %.3f), hits %.3f (x %.3f), shed %.3f of one router's %.3f, worst/mean: requests %.2f, work %.2f", n, w.name,
				r.Goodput, r.Goodput/one.Goodput, r.HitRate, r.HitRate/one.HitRate, r.Refused, one.Refused, requests, work)
			if work > 1.3 || requests > 1.3 || r.Goodput < 0.92*one.Goodput {
				t.Errorf("%s: goodput %.3f of %.3f; the worst replica has %.2f x the mean work", r.Name, r.Goodput, one.Goodput, work)
			}
		}
	}
}
