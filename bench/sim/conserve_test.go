package sim

import (
	"flag"
	"strconv"
	"testing"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/bench/workload"
	"pgregory.net/rapid"
)

// TestWorkIsConserved looks at every event of random fleets, streams and
// failures: no request is held for more than 10 ms while a replica would take
// it, or while one has nothing to do.
func TestWorkIsConserved(t *testing.T) {
	worst, idle := 0.0, 0.0
	// Each case is a whole simulation that looks at the queue at every event: a
	// fifth of the usual number of cases.
	checks := flag.Lookup("rapid.checks")
	usual := checks.Value.String()
	n, err := strconv.Atoi(usual)
	if err == nil {
		err = checks.Value.Set(strconv.Itoa(max(1, n/5)))
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = checks.Value.Set(usual) }()
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 6).Draw(t, "replicas")
		c := Config{Replicas: hosts(n, rapid.SampledFrom([]string{"h100-8b", "l40s-8b"}).Draw(t, "hardware")), Goal: Objective{TTFT: 0.5, TPOT: 0.05}, CheckHeld: true, ScrapeEvery: rapid.SampledFrom([]float64{0.25, -1}).Draw(t, "scrape")}
		c.Seed = uint64(rapid.IntRange(1, 1000).Draw(t, "seed"))
		s := workload.Spec{Rate: float64(n) * float64(rapid.IntRange(20, 90).Draw(t, "rate")), Duration: 2, Seed: c.Seed,
			Families: rapid.SampledFrom([]int{0, 4, 64}).Draw(t, "families"), PrefixTokens: 1000, Zipf: 0.8,
			Prompt: workload.Dist{Mean: float64(rapid.SampledFrom([]int{100, 300, 2000}).Draw(t, "prompt")), CV: 1, Max: 20000}, Out: workload.Dist{Mean: 80, CV: 1, Max: 500},
			Tenants: rapid.IntRange(1, 3).Draw(t, "tenants"), ClassShares: []float64{0.5, 0.3, 0.2}}
		c.Requests = stream(t, s)
		c.Pool = admission.Config{Objective: rapid.SampledFrom([]admission.Objective{{}, {TTFT: 0.5}, {TTFT: 0.5, ITL: 0.05}, {TTFT: 0.2, TTFTPer1k: 0.2, ITL: 0.03}}).Draw(t, "objective"),
			Classes: []admission.Class{{Name: "a", Wait: -1}, {Name: "b", Wait: 2, Objective: rapid.SampledFrom([]admission.Objective{{}, {TTFT: 10, ITL: 0.2}}).Draw(t, "second")},
				{Name: "c", Wait: 5, Patient: true}},
			HeadroomN1: rapid.Bool().Draw(t, "n-1"), Cap: rapid.SampledFrom([]int{0, 8, 40}).Draw(t, "cap")}
		c.Client = Client{Retry: RetryMode(rapid.IntRange(0, 2).Draw(t, "retry")), Retries: 2, Patience: rapid.SampledFrom([]float64{0, 1}).Draw(t, "patience")}
		if rapid.Bool().Draw(t, "failure") && n > 1 {
			c.Events = []Event{{At: 0.7, Kind: rapid.SampledFrom([]EventKind{Kill, Leave}).Draw(t, "kind"), Replica: 0}}
		}
		if rapid.Bool().Draw(t, "join") && n > 1 {
			c.Replicas[1].Absent = true
			c.Events = append(c.Events, Event{At: 1, Kind: Join, Replica: 1})
		}
		r := simulate(t, c)
		worst, idle = max(worst, r.Withheld), max(idle, r.IdleHeld)
		if r.Withheld > 0.01 || r.IdleHeld > 0.01 {
			t.Errorf("a request was held for %.1f ms while a replica would have taken it, for %.1f ms while one was idle", 1e3*r.Withheld, 1e3*r.IdleHeld)
		}
	})
	t.Logf("the longest in any run: %.2f ms, with an idle replica %.2f ms", 1e3*worst, 1e3*idle)
}
