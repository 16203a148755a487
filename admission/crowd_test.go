package admission

import (
	"math"
	"testing"

	"github.com/penstock/penstock/fleet"
)

// A router that had no requests for a while, when peers, or clients by another
// road, had many, takes requests at once when they come to it. The ratio of all
// requests to its own was endless after an hour, what its first requests took was
// not a number, and it refused everything from then on.
func TestARouterThatHadNothingToDoTakesRequests(t *testing.T) {
	for _, road := range []string{"peers", "another road"} {
		for _, quiet := range []float64{5, 60, 4000} {
			p := pool(t, Config{Objective: Objective{TTFT: 0.5, ITL: 0.05}, Classes: []Class{{Name: "a", Wait: -1}}}, 4)
			first := request(100)
			p.Admit(1, first)
			p.First(1.02, first)
			p.Done(2, first, End{Outcome: Finished, Prompt: 100, Completion: 50})
			peers := func(now float64) {
				l := fleet.Load{Requests: 10, KVTokens: 5000, OutTokens: 1000}
				p.Peers(now, "x", map[fleet.ID]fleet.Load{1: l, 2: l, 3: l, 4: l})
			}
			now := 2.0
			for ; now < 2+quiet; now += 0.25 {
				if road == "peers" {
					peers(now)
				} else {
					for id := fleet.ID(1); id <= 4; id++ {
						p.Observe(now, id, fleet.Sample{At: now, Running: 10, KVUsage: 0.01, KVTokens: 400_000, Steps: now, PromptTokens: now, OutputTokens: now})
					}
				}
				p.Advance(now, nil)
			}
			for i := range 40 {
				now += 0.025
				if road == "peers" && i%8 == 0 {
					peers(now)
				}
				x := request(1000)
				if d := p.Admit(now, x); d.Verdict != Placed {
					t.Fatalf("%s, %v s without a request: number %d of 40 was not placed: %+v", road, quiet, i, d)
				}
				p.First(now+0.02, x)
			}
			for i := range p.View().Replicas {
				if s := p.View().Replicas[i].PrefillShare; math.IsNaN(s) || s > 0.5 {
					t.Errorf("%s, %v s without a request: prefills are taken to be %v of the time", road, quiet, s)
				}
			}
		}
	}
}
