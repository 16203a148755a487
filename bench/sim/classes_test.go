package sim

import (
	"testing"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/bench/workload"
)

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
				c.OnResult = func(r *Result) {
					if r.Request.At < c.Warmup {
						return
					}
					offered[r.Request.Class]++
					if r.Good {
						good[r.Request.Class]++
					}
				}
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
