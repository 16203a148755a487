package sim

import (
	"testing"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/bench/workload"
)

// incident is the classic one: four replicas at 88 % of what they can do, one
// dies, and three have to carry 118 %.
func incident(t *testing.T, p admission.Config, client Client) Config {
	s := workload.Spec{Rate: 150, Duration: 90, Families: 200, PrefixTokens: 1500, Zipf: 0.8, Seed: 1,
		Prompt: workload.Dist{Mean: 300, CV: 1, Max: 8000}, Out: workload.Dist{Mean: 150, CV: 1, Max: 2000}}
	return Config{Replicas: hosts(4, "h100-8b"), Requests: stream(t, s), Goal: Objective{TTFT: 0.5, TPOT: 0.05}, Warmup: 5, Seed: 1, Pool: p, Client: client,
		Events: []Event{{At: 20, Kind: Kill, Replica: 1}}}
}

func TestIncidentWithNaiveFailoverCollapses(t *testing.T) {
	r := simulate(t, incident(t, admission.Config{Policy: "least_requests", NoHold: true}, Client{}))
	if r.TTFT.P95 < 5 {
		t.Errorf("TTFT p95 %g s; a fleet without admission should queue past 5 s", r.TTFT.P95)
	}
	t.Logf("naive: goodput %.3f, TTFT p95 %.1f s", r.Goodput, r.TTFT.P95)
}

// Penstock sheds the excess, keeps the objective of what it admits, and
// clients that obey Retry-After do not come back in step.
func TestIncidentWithAdmission(t *testing.T) {
	c := incident(t, admission.Config{Objective: admission.Objective{TTFT: 0.5, ITL: 0.05}}, Client{Retry: Obey, Retries: 2})
	r := simulate(t, c)
	t.Logf("penstock: goodput %.3f, since the last offer p95 %.3f s p99 %.3f s, shed %.3f, Retry-After / true wait p50 %.2f p90 %.2f, re-offers peak/mean %.2f",
		r.Goodput, r.Admitted.P95, r.Admitted.P99, r.Refused, r.Promise.P50, r.Promise.P90, r.ReofferPeak)
	if r.Admitted.P99 > 0.55 {
		t.Errorf("TTFT p99 of admitted requests %g s, objective 0.5 s", r.Admitted.P99)
	}
	if lost := r.Outcomes[Failed] + r.Outcomes[Open]; lost > 0 {
		t.Errorf("%d requests failed or never ended", lost)
	}
	if r.ReofferPeak > 4 {
		t.Errorf("in its worst quarter of a second %g times the mean number of clients came back", r.ReofferPeak)
	}
	if r.IdleHeld > 0.01 {
		t.Errorf("a request was held for %g s while a replica was idle", r.IdleHeld)
	}
}
