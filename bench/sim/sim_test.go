package sim

import (
	"testing"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/bench/model"
	"github.com/penstock/penstock/bench/workload"
)

func hosts(n int, profile string) (out []ReplicaSpec) {
	p, ok := model.ByName(profile)
	if !ok {
		panic("no profile " + profile)
	}
	for range n {
		out = append(out, ReplicaSpec{Profile: p})
	}
	return out
}

func stream(t testing.TB, s workload.Spec) []workload.Request {
	r, err := workload.Generate(s)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func simulate(t testing.TB, c Config) *Report {
	t.Helper()
	r, err := Run(c)
	if err != nil {
		t.Fatal(err)
	}
	if r.Books != "" {
		t.Errorf("%s: %s", c.Name, r.Books)
	}
	return r
}

var shared = workload.Spec{Rate: 100, Duration: 30, Prompt: workload.Dist{Mean: 300, CV: 0.7}, Out: workload.Dist{Mean: 150, CV: 0.7}, Families: 64, PrefixTokens: 1000, Zipf: 0.8, Seed: 1}

func TestPrint(t *testing.T) {
	for _, p := range []string{"work", "round_robin", "least_requests", "dynamo", "lmetric", "llmd"} {
		c := Config{Name: p, Replicas: hosts(8, "h100-8b"), Requests: stream(t, shared), Goal: Objective{TTFT: 0.5, TPOT: 0.05}, Warmup: 5}
		c.Pool = admission.Config{Policy: p, NoHold: true}
		r := simulate(t, c)
		r.Table(testWriter{t})
	}
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) { w.t.Log(string(p)); return len(p), nil }

func BenchmarkSim(b *testing.B) {
	s := shared
	s.Rate, s.Duration = 200, 1000
	reqs := stream(b, s)
	b.ResetTimer()
	for i := 0; i < b.N; i++ {
		c := Config{Replicas: hosts(8, "h100-8b"), Requests: reqs, Goal: Objective{TTFT: 0.5, TPOT: 0.05}}
		simulate(b, c)
	}
	b.ReportMetric(float64(len(reqs))*float64(b.N)/b.Elapsed().Seconds(), "requests/s")
}
