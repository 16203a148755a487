package drill

import (
	"strings"
	"testing"
	"time"
)

func TestPhasesAreCutAtTheInjectorsActs(t *testing.T) {
	at := func(s float64) Duration { return Duration(s * float64(time.Second)) }
	ok := func(sent float64) *Call { return &Call{Sent: sent, First: sent + .5, Status: 200, Done: true} }
	calls := []*Call{ok(1), ok(4.9), {Sent: 5.5, Status: 502, Code: "upstream_error"}, {Sent: 6, Status: 503, Code: "capacity_exhausted", RetryAfter: 1}, {Sent: 9, Left: true}}
	got := phases(calls, []Step{{At: at(5)}, {At: at(5.2)}, {At: at(8)}})
	if len(got) != 3 || got[0].OK != 2 || got[0].To != 5 || got[1].Failed != 1 || got[1].Refused != 1 || got[1].Asked != 2 || got[2].Left != 1 {
		t.Fatalf("%+v", got)
	}
	var b strings.Builder
	phaseTable(&b, got)
	if !strings.Contains(b.String(), "0.0 to    5.0 s        2        2") || !strings.Contains(b.String(), "0.500 s") {
		t.Errorf("\n%s", b.String())
	}
}

// What a reader sees of an assertion is words, not Go's form of a value.
func TestAssertionsAreWorded(t *testing.T) {
	zero, one, some := 0.0, 1.0, 0.05
	share := map[string]float64{"share": 1}
	for want, e := range map[string]*Expect{
		"none":          {Check: "failed", Max: &zero},
		"all":           {Check: "ok", Min: &one, Args: share},
		"at most 5 %":   {Check: "share", Max: &some},
		"exactly 1":     {Check: "metric", Min: &one, Max: &one},
		"5 % to 100 %":  {Check: "refused", Min: &some, Max: &one, Args: share},
		"at least 0.05": {Check: "retry_after", Min: &some},
		"at least 5 %":  {Check: "ok", Min: &some, Args: share},
		"any number":    {Check: "left"},
		"at most 0.05":  {Check: "ttft_p95", Max: &some},
		"at least 1":    {Check: "metric", Min: &one},
		"at most 100 %": {Check: "share", Max: &one},
		"0.05 to 1":     {Check: "ttft_ratio", Min: &some, Max: &one},
	} {
		if got := limits(e); got != want {
			t.Errorf("%+v is worded %q, want %q", e, got, want)
		}
	}
	e := Expect{Check: "metric", Metric: "penstock_x_total", Labels: map[string]string{"b": "2", "a": "1"}, Min: &one, After: Duration(3 * time.Second)}
	if got := e.describe(); got != "`metric` (penstock_x_total{a=\"1\",b=\"2\"}, from 3 s on, at least 1)" {
		t.Error(got)
	}
	if got := faultWords(map[string]any{"mode": "cut_reset", "after": 2, "retry_after": 3}); got != "cut reset (after 2, retry after 3)" {
		t.Error(got)
	}
}

// A late step moves what is judged after it; what the machine lost is not held
// against the router, unless too little would remain.
func TestTheMachineIsNotHeldAgainstTheRouter(t *testing.T) {
	sec := func(s float64) Duration { return Duration(s * float64(time.Second)) }
	r := &record{lags: []lag{{2, 0}, {5, .4}, {9, 0}}}
	for after, want := range map[float64]float64{1: 1, 3: 3, 5: 5.4, 6: 6.4, 9: 9} {
		if got := r.from(&Expect{After: sec(after)}); got != want {
			t.Errorf("after %v s begins at %v, want %v", after, got, want)
		}
	}
	r = &record{stills: []still{{10, 10.5}}}
	for i := range 20 {
		r.calls = append(r.calls, &Call{Sent: float64(i), First: float64(i) + .1, Status: 200, Done: true})
	}
	r.calls = append(r.calls, &Call{Sent: 9.9, First: 10.6, Status: 200, Done: true})
	if v := r.ttft(&Expect{}); len(v) != 19 || quantile(v, 1) > .11 {
		t.Errorf("%d judged, the largest %v", len(v), quantile(v, 1))
	}
	r.stills = []still{{0, 30}}
	if v := r.ttft(&Expect{}); len(v) != 21 {
		t.Errorf("only %d of 21 judged on a machine that hardly runs", len(v))
	}
}
