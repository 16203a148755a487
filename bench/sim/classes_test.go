package sim

import (
	"cmp"
	"slices"
	"testing"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/bench/workload"
)

// byClass counts, by class, what was offered from warmup on and what of it was
// good, and gives each of these results to more.
func byClass(warmup float64, offered, good []float64, more func(*Result)) func(*Result) {
	return func(r *Result) {
		if r.Request.At < warmup {
			return
		}
		offered[r.Request.Class]++
		if r.Good {
			good[r.Request.Class]++
		}
		more(r)
	}
}

// Beyond what the fleet can do it is the lower classes that are refused or wait,
// whoever of them waits and for how long: a class that alone is well within what
// the fleet can do hardly sees the overload, and no class is served better than one
// above it. (How dear a prompt may be while others wait, and how long a place is
// left to a warm one, was once measured by those that wait in each class and those
// above it: the lowest class then had the loosest measure, and its share.)
func TestLowerClassesHaveTheOverload(t *testing.T) {
	for _, last := range []admission.Class{{Name: "c", Wait: -1}, {Name: "c", Wait: 60, Patient: true}} {
		for n, rate := range map[int]float64{1: 50, 4: 200} {
			var offered, good [3]float64
			for seed := uint64(1); seed <= 2; seed++ {
				s := workload.Spec{Rate: rate, Duration: 30, Families: 50, PrefixTokens: 1500, Zipf: 0.8, Seed: seed, Tenants: 3, ClassShares: []float64{0.5, 0.3, 0.2},
					Prompt: workload.Dist{Mean: 300, CV: 1, Max: 8000}, Out: workload.Dist{Mean: 150, CV: 1, Max: 2000}}
				c := Config{Replicas: hosts(n, "h100-8b"), Requests: stream(t, s), Seed: seed, Warmup: 10, Goal: Objective{TTFT: 0.5, TPOT: 0.05},
					Pool: admission.Config{Objective: admission.Objective{TTFT: 0.5, ITL: 0.05}, Classes: []admission.Class{{Name: "a", Wait: -1}, {Name: "b", Wait: -1}, last}}}
				c.OnResult = byClass(c.Warmup, offered[:], good[:], func(*Result) {})
				simulate(t, c)
			}
			a, b, c := good[0]/offered[0], good[1]/offered[1], good[2]/offered[2]
			t.Logf("%d replicas, %g/s, the last class patient %v: goodput %.3f, %.3f, %.3f", n, rate, last.Patient, a, b, c)
			if a < 0.97 || b > a || c > b {
				t.Errorf("%d replicas, %g/s, the last class patient %v: goodput %.3f of the first, %.3f of the second, %.3f of the last class", n, rate, last.Patient, a, b, c)
			}
		}
	}
}

// A flood of a lower class that may take its time, or that nobody gave an
// objective, leaves the class above what that needs at each replica, without any
// headroom; and the other way round it gets its minimum share. (It filled the
// replicas by its own measure: 0.00 to 0.48 of the first class was served.)
func TestALooserClassLeavesRoomForTheOneAbove(t *testing.T) {
	first := admission.Objective{TTFT: 0.5, TTFTPer1k: 0.12, ITL: 0.05}
	for _, k := range []struct {
		name         string
		last         admission.Objective
		a, b         float64 // req/s
		aLeast, work float64 // least goodput of the first class, share of the second's tokens in all
	}{
		{"no objective, beyond capacity", admission.Objective{}, 60, 340, 0.97, 0.5},
		{"no objective, within it", admission.Objective{}, 60, 140, 0.97, 0.6},
		{"10 s", admission.Objective{TTFT: 10}, 60, 340, 0.97, 0.5},
		{"somewhat looser", admission.Objective{TTFT: 1, ITL: 0.1}, 60, 340, 0.97, 0.5},
		{"no objective, the first beyond capacity", admission.Objective{}, 380, 20, 0.4, 0.02},
	} {
		var offered, good, tokens [2]float64
		s := workload.Spec{Rate: k.a + k.b, Duration: 30, Families: 50, PrefixTokens: 1500, Zipf: 0.8, Seed: 1, ClassShares: []float64{k.a / (k.a + k.b), k.b / (k.a + k.b)},
			Prompt: workload.Dist{Mean: 300, CV: 1, Max: 8000}, Out: workload.Dist{Mean: 150, CV: 1, Max: 2000}}
		c := Config{Replicas: hosts(4, "h100-8b"), Requests: stream(t, s), Seed: 1, Warmup: 10, Goal: Objective{TTFT: 0.5, TTFTPer1k: 0.12, TPOT: 0.05},
			Pool: admission.Config{Classes: []admission.Class{{Name: "a", Wait: 2, Objective: first}, {Name: "b", Wait: 30, Objective: k.last}}}}
		c.OnResult = byClass(c.Warmup, offered[:], good[:], func(r *Result) {
			if r.Outcome == OK {
				tokens[r.Request.Class] += float64(r.Request.Out)
			}
		})
		simulate(t, c)
		a, work := good[0]/offered[0], tokens[1]/(tokens[0]+tokens[1])
		t.Logf("%s: %.3f of the first class in time, %.3f of the tokens are the second's", k.name, a, work)
		if a < k.aLeast || work < k.work {
			t.Errorf("%s: %.3f of the first class in time, %.3f of the tokens are the second's", k.name, a, work)
		}
	}
}

// The same where steps are long and prompts all there is to wait for: the room is
// measured with what admission keeps in hand. (By the prompts alone 0.7 % of the
// first class was served.)
func TestRoomIsLeftWithWhatIsKeptInHand(t *testing.T) {
	for _, last := range []admission.Objective{{TTFT: 10}, {}} {
		first := stream(t, workload.Spec{Rate: 3, Duration: 40, Seed: 1, Prompt: workload.Dist{Mean: 300, CV: 0.1, Max: 8000}, Out: workload.Dist{Mean: 50, CV: 0.1, Max: 2000}})
		all := stream(t, workload.Spec{Rate: 60, Duration: 40, Seed: 2, Prompt: workload.Dist{Mean: 800, CV: 0.1, Max: 8000}, Out: workload.Dist{Mean: 150, CV: 0.1, Max: 2000}})
		for i := range all {
			all[i].Class = 1
		}
		all = append(all, first...)
		slices.SortStableFunc(all, func(a, b workload.Request) int { return cmp.Compare(a.At, b.At) })
		c := Config{Replicas: hosts(3, "l40s-8b"), Requests: all, Seed: 1, Warmup: 10, Goal: Objective{TTFT: 0.5, TTFTPer1k: 0.12},
			Pool: admission.Config{Classes: []admission.Class{{Name: "a", Wait: 2, Objective: admission.Objective{TTFT: 0.5, TTFTPer1k: 0.12}}, {Name: "b", Wait: 30, Objective: last}}}}
		var offered, good [2]float64
		c.OnResult = func(r *Result) {
			if r.Request.At < c.Warmup {
				return
			}
			if offered[r.Request.Class]++; r.Outcome == OK && (r.Request.Class > 0 || r.Good) {
				good[r.Request.Class]++
			}
		}
		simulate(t, c)
		a, b := good[0]/offered[0], good[1]/offered[1]
		t.Logf("the lower class's ttft %g s: %.3f of the first class in time, %.3f of the lower one answered", last.TTFT, a, b)
		if a < 0.97 || b < 0.5 {
			t.Errorf("the lower class's ttft %g s: %.3f of the first class in time, %.3f of the lower one answered", last.TTFT, a, b)
		}
	}
}

// Headroom is kept at each objective as it is predicted, the prefills between two
// tokens counted: beside a flood that leaves no more than it must, the first class
// is served faster by as much. (Without the prefills a share of 30 % changed
// nothing at all.)
func TestHeadroomIsKeptOfTheGaps(t *testing.T) {
	var mean [2]float64
	for i, headroom := range []float64{0, 0.3} {
		s := workload.Spec{Rate: 200, Duration: 30, Families: 50, PrefixTokens: 1500, Zipf: 0.8, Seed: 1, ClassShares: []float64{0.3, 0.7},
			Prompt: workload.Dist{Mean: 300, CV: 1, Max: 8000}, Out: workload.Dist{Mean: 150, CV: 1, Max: 2000}}
		c := Config{Replicas: hosts(4, "h100-8b"), Requests: stream(t, s), Seed: 1, Warmup: 10, Goal: Objective{TTFT: 0.5, TPOT: 0.05},
			Pool: admission.Config{Headroom: headroom, Objective: admission.Objective{TTFT: 0.5, ITL: 0.05}, Classes: []admission.Class{{Name: "a", Wait: 2}, {Name: "b", Wait: 30, Objective: admission.Objective{TTFT: 10}}}}}
		n := 0.0
		c.OnResult = func(r *Result) {
			if r.Request.At >= c.Warmup && r.Request.Class == 0 && r.Outcome == OK && r.TPOT > 0 {
				mean[i] += r.TPOT
				n++
			}
		}
		simulate(t, c)
		mean[i] /= n
	}
	t.Logf("mean gap of the first class %.1f ms, with 30 %% headroom %.1f ms", mean[0]*1e3, mean[1]*1e3)
	if mean[1] > 0.8*mean[0] {
		t.Errorf("mean gap of the first class %.1f ms, with 30 %% headroom %.1f ms", mean[0]*1e3, mean[1]*1e3)
	}
}
