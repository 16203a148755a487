package bench

import (
	"bytes"
	"context"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/bench/load"
	"github.com/penstock/penstock/bench/model"
	"github.com/penstock/penstock/bench/replica"
	"github.com/penstock/penstock/bench/sim"
	"github.com/penstock/penstock/bench/workload"
)

func TestMainKnowsItsVerbs(t *testing.T) {
	var out, errs bytes.Buffer
	if code := Main([]string{"help"}, &out, &errs); code != 0 || !strings.Contains(out.String(), "compare") {
		t.Error(code, out.String())
	}
	if code := Main([]string{"nothing"}, &out, &errs); code != 2 || !strings.Contains(errs.String(), `unknown verb "nothing"`) {
		t.Error(code, errs.String())
	}
	if code := Main([]string{"sim", "--scenario", "hot_prefixes", "--scale", "0.05"}, &out, &errs); code != 0 {
		t.Error(code, errs.String())
	}
}

// The simulator against the emulated replica over real sockets: p50 and p95 of
// TTFT and TPOT within 10 %. It measures time, so it wants a quiet machine and
// runs only when asked for: PENSTOCK_FIDELITY=1.
func TestFidelityOverSockets(t *testing.T) {
	if os.Getenv("PENSTOCK_FIDELITY") == "" {
		t.Skip("set PENSTOCK_FIDELITY=1 on a quiet machine")
	}
	p, _ := model.ByName("h100-8b")
	for _, rate := range []float64{8, 25} {
		reqs, err := workload.Generate(workload.Spec{Rate: rate, Duration: 25, Families: 8, PrefixTokens: 640, Prompt: workload.Dist{Mean: 600, CV: 1, Max: 6000}, Out: workload.Dist{Mean: 60, CV: 0.7}, Seed: 3})
		if err != nil {
			t.Fatal(err)
		}
		s, err := replica.Start(replica.Options{Profile: &p})
		if err != nil {
			t.Fatal(err)
		}
		real, err := load.Run(context.Background(), load.Options{URL: s.URL(), Requests: reqs, API: "completions"})
		_ = s.Close()
		if err != nil || real.OK != real.Offered {
			t.Fatal(err, real)
		}
		virtual, err := sim.Run(sim.Config{Replicas: []sim.ReplicaSpec{{Profile: p}}, Requests: reqs, Pool: admission.Config{Policy: "round_robin", NoHold: true}, Net: 1e-9})
		if err != nil {
			t.Fatal(err)
		}
		for _, q := range []struct {
			name      string
			got, want float64
		}{
			{"TTFT p50", real.TTFT.P50, virtual.TTFT.P50}, {"TTFT p95", real.TTFT.P95, virtual.TTFT.P95},
			{"TPOT p50", real.TPOT.P50, virtual.TPOT.P50}, {"TPOT p95", real.TPOT.P95, virtual.TPOT.P95},
		} {
			off := q.got/q.want - 1
			t.Logf("%g req/s: %s %.2f ms over sockets, %.2f ms simulated, %+.1f %%", rate, q.name, 1e3*q.got, 1e3*q.want, 100*off)
			if math.Abs(off) > 0.1 {
				t.Errorf("%g req/s: %s is off by %.1f %%", rate, q.name, 100*off)
			}
		}
	}
}
