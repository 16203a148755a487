package sim

import (
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"syscall"
	"testing"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/bench/model"
	"github.com/penstock/penstock/bench/workload"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/scorer"
)

// failer is what testing.TB and rapid.T have in common.
type failer interface {
	Helper()
	Fatal(args ...any)
	Errorf(format string, args ...any)
}

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

func stream(t failer, s workload.Spec) []workload.Request {
	t.Helper()
	r, err := workload.Generate(s)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func simulate(t failer, c Config) *Report {
	t.Helper()
	r, err := Run(c)
	if err != nil {
		t.Fatal(err)
	}
	if r.Books != "" {
		t.Errorf("%s: %s", c.Name, r.Books)
	}
	sum := 0
	for _, n := range r.Outcomes {
		sum += n
	}
	if sum != r.Offered {
		t.Errorf("%s: %d outcomes of %d offered", c.Name, sum, r.Offered)
	}
	return r
}

var usual = workload.Spec{Rate: 100, Duration: 20, Prompt: workload.Dist{Mean: 300, CV: 0.7}, Out: workload.Dist{Mean: 150, CV: 0.7}, Families: 64, PrefixTokens: 1000, Zipf: 0.8, Seed: 1}

func base(t testing.TB, n int, rate float64) Config {
	s := usual
	s.Rate = rate
	return Config{Replicas: hosts(n, "h100-8b"), Requests: stream(t, s), Goal: Objective{TTFT: 0.5, TPOT: 0.05}, Warmup: 2, Seed: 1,
		Pool: admission.Config{Objective: admission.Objective{TTFT: 0.5, ITL: 0.05}}}
}

// One request through router and replica takes what the step law says.
func TestOneRequestByHand(t *testing.T) {
	c := base(t, 1, 1)
	c.Requests = []workload.Request{{At: 5, Prompt: 1000, Out: 11, Segs: []workload.Seg{{ID: 1, Hash: 1, Tokens: 1000}}}}
	r := simulate(t, c)
	p := c.Replicas[0].Profile
	want := p.FrontEnd(1000) + p.StepTime(1, 1000, 0, 1000*500) + 0.001
	if math.Abs(r.TTFT.P50-want) > 1e-9 {
		t.Errorf("TTFT %g, want %g", r.TTFT.P50, want)
	}
	if tpot := p.StepTime(1, 1, 1004.5, 0); math.Abs(r.TPOT.P50-tpot) > 1e-9 {
		t.Errorf("TPOT %g, want %g", r.TPOT.P50, tpot)
	}
}

func TestSameSeedSameReport(t *testing.T) {
	run := func(seed uint64) *Report {
		c := base(t, 4, 120)
		c.Routers, c.Seed, c.Timeline = 3, seed, 1
		c.Client = Client{Patience: 5, Retry: Obey, Retries: 2}
		c.Events = []Event{{At: 6, Kind: Kill, Replica: 1}, {At: 9, Kind: Revive, Replica: 1}, {At: 10, Kind: Slow, Replica: 2, Factor: 3}}
		return simulate(t, c)
	}
	a, b := run(1), run(1)
	if !reflect.DeepEqual(a, b) {
		t.Errorf("two runs with one seed differ:\n%+v\n%+v", a, b)
	}
	if c := run(2); reflect.DeepEqual(a.TTFT, c.TTFT) {
		t.Error("another seed gives the same run")
	}
}

// A replica dies under load: what had no first token goes elsewhere, and only
// answers that had begun are broken.
func TestKillLosesOnlyWhatHadBegun(t *testing.T) {
	c := base(t, 4, 160)
	c.Events = []Event{{At: 10, Kind: Kill, Replica: 2}}
	again := 0
	c.OnResult = func(r *Result) {
		if r.Attempts > 1 && r.Outcome == OK {
			again++
		}
		if r.Outcome == Broken && (r.Replica != 2 || r.Ended > 10.1) {
			t.Errorf("broken at replica %d, %g s", r.Replica, r.Ended)
		}
	}
	r := simulate(t, c)
	if r.Outcomes[Broken] == 0 || r.Outcomes[Failed] > 0 || again == 0 || r.Outcomes[Open] > 0 {
		t.Errorf("broken %d, failed %d, served elsewhere %d, open %d", r.Outcomes[Broken], r.Outcomes[Failed], again, r.Outcomes[Open])
	}
}

// A hung replica answers its health checks; its requests without a first
// token are taken away, and it gets little more.
func TestFrozenReplicaIsLeft(t *testing.T) {
	c := base(t, 4, 60)
	c.Events = []Event{{At: 8, Kind: Freeze, Replica: 1}, {At: 16, Kind: Thaw, Replica: 1}}
	late := 0
	c.OnResult = func(r *Result) {
		if r.Request.At > 13 && r.Request.At < 16 && r.Replica == 1 {
			late++
		}
	}
	r := simulate(t, c)
	if r.Stats.Revoked+r.Stats.Ejections[fleet.EvidenceSlow]+r.Stats.Ejections[fleet.EvidenceStalled] == 0 || late > 5 || r.Outcomes[Open] > 0 {
		t.Errorf("revoked %d, sent there 5 s later %d, open %d, ejections %v", r.Stats.Revoked, late, r.Outcomes[Open], r.Stats.Ejections)
	}
}

func TestSlowReplicaGetsLess(t *testing.T) {
	c := base(t, 4, 80)
	c.Replicas[1].Slow = 5
	r := simulate(t, c)
	if r.Shares[1] > 0.8/4 {
		t.Errorf("shares %v", r.Shares)
	}
}

func TestJoinBringsWork(t *testing.T) {
	c := base(t, 3, 100)
	c.Replicas[2].Absent = true
	c.Events = []Event{{At: 5, Kind: Join, Replica: 2}, {At: 15, Kind: Leave, Replica: 0}}
	early, late := 0, 0
	c.OnResult = func(r *Result) {
		if r.Replica == 2 && r.Request.At < 5 {
			early++
		}
		if r.Replica == 0 && r.Request.At > 15 && r.Held == 0 {
			late++
		}
	}
	r := simulate(t, c)
	if early > 0 || late > 0 || r.Shares[2] < 0.1 {
		t.Errorf("before the join %d, after the leave %d, shares %v", early, late, r.Shares)
	}
}

// Impatient clients leave queues and replicas, and their accounts return.
func TestImpatience(t *testing.T) {
	c := base(t, 1, 120)
	c.Client.Patience = 0.3
	c.Pool = admission.Config{Policy: "least_requests", NoHold: true}
	r := simulate(t, c)
	if r.Outcomes[Left] == 0 || r.TTFT.Max > 0.31 {
		t.Errorf("left %d, longest TTFT %g", r.Outcomes[Left], r.TTFT.Max)
	}
}

// When the overload is short, clients that come back are served in the end,
// whether they obey Retry-After or not; those that obey are refused less often,
// since their turn is kept.
func TestRetriesOfClients(t *testing.T) {
	refusals := map[RetryMode]int{}
	for _, mode := range []RetryMode{NoRetry, Naive, Obey} {
		c := base(t, 2, 200)
		for i := range c.Requests {
			if c.Requests[i].At > 6 {
				c.Requests = c.Requests[:i]
				break
			}
		}
		c.Client = Client{Retry: mode, Retries: 50}
		r := simulate(t, c)
		for _, n := range r.Sheds {
			refusals[mode] += n
		}
		if mode == NoRetry && r.Outcomes[Shed] == 0 {
			t.Fatal("no overload")
		}
		if mode != NoRetry && r.Outcomes[OK] < r.Offered*9/10 {
			t.Errorf("mode %d: %d of %d served", mode, r.Outcomes[OK], r.Offered)
		}
	}
	t.Logf("refusals: naive %d, obeying %d", refusals[Naive], refusals[Obey])
	if refusals[Obey] >= refusals[Naive] {
		t.Errorf("refusals: obeying %d, naive %d", refusals[Obey], refusals[Naive])
	}
}

// Routers learn each other's accounts by gossip, and only by it.
func TestGossipReachesTheRouters(t *testing.T) {
	for _, gossip := range []float64{0.2, -1} {
		c := base(t, 4, 120)
		c.Routers, c.GossipEvery = 3, gossip
		if err := c.defaults(); err != nil {
			t.Fatal(err)
		}
		s := &simulation{Config: c, rng: rand.New(rand.NewPCG(1, 1))}
		s.rep = newReport(&s.Config)
		s.build()
		known := 0
		s.OnResult = func(r *Result) {
			if r.Request.At > 5 && r.Request.At < 15 {
				for i := range s.routers[0].pool.View().Replicas {
					known += s.routers[0].pool.View().Replicas[i].Peers.Requests
				}
			}
		}
		s.loop()
		if (known > 0) != (gossip > 0) {
			t.Errorf("gossip every %g s: %d peers' requests seen", gossip, known)
		}
	}
}

// All policies run in all weathers, and the books balance.
func TestRandomWeather(t *testing.T) {
	for seed := uint64(1); seed <= 24; seed++ {
		t.Run(fmt.Sprint("seed", seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 3))
			n := 1 + rng.IntN(6)
			c := base(t, n, 20+rng.Float64()*60*float64(n))
			s := usual
			s.Seed, s.Rate, s.Duration, s.Turns, s.Gap = seed, 20+rng.Float64()*60*float64(n), 8, 1+rng.IntN(3), 2
			s.ClassShares, s.Tenants = []float64{0.5, 0.5}, 3
			c.Requests = stream(t, s)
			c.Routers = 1 + rng.IntN(3)
			c.Pool.Policy = scorer.Names()[int(seed)%len(scorer.Names())]
			c.Pool.NoHold = rng.IntN(3) == 0
			c.Pool.Classes = []admission.Class{{Name: "a", Wait: -1}, {Name: "b", Wait: 3}}
			c.Client = Client{Patience: []float64{0, 1, 4}[rng.IntN(3)], Retry: RetryMode(rng.IntN(3)), Retries: rng.IntN(4)}
			c.Replicas[0].Profile.KVTokens = 16 * (600 + rng.IntN(4000))
			for range rng.IntN(5) {
				k := []EventKind{Kill, Freeze, Slow, Leave}[rng.IntN(4)]
				i, at := rng.IntN(n), rng.Float64()*8
				c.Events = append(c.Events, Event{At: at, Kind: k, Replica: i, Factor: 1 + 5*rng.Float64()},
					Event{At: at + 2, Kind: map[EventKind]EventKind{Kill: Revive, Freeze: Thaw, Slow: Slow, Leave: Join}[k], Replica: i, Factor: 1})
			}
			r := simulate(t, c)
			if r.Outcomes[Open] > 0 {
				t.Errorf("%d requests never ended", r.Outcomes[Open])
			}
		})
	}
}

func TestFingerprintsAgreeWithSharedPrefixes(t *testing.T) {
	a := []workload.Seg{{ID: 1, Hash: workload.Chain(0, 1), Tokens: 300}, {ID: 2, Hash: workload.Chain(workload.Chain(0, 1), 2), Tokens: 500}}
	b := []workload.Seg{a[0], {ID: 3, Hash: workload.Chain(workload.Chain(0, 1), 3), Tokens: 500}}
	x, y := fingerprints(nil, a, 100), fingerprints(nil, b, 100)
	if len(x) != 8 || len(y) != 8 {
		t.Fatal(len(x), len(y))
	}
	for i := range x {
		if (x[i] == y[i]) != (i < 3) {
			t.Errorf("block %d: equal %v", i, x[i] == y[i])
		}
	}
}

// BenchmarkSim reports simulated requests per second of one core's time: the
// processor time of the process, since wall time on a shared machine says
// what the neighbours do.
func BenchmarkSim(b *testing.B) {
	s := usual
	s.Rate, s.Duration = 200, 1000
	reqs := stream(b, s)
	cpu := func() float64 {
		var u syscall.Rusage
		_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
		return float64(u.Utime.Sec+u.Stime.Sec) + float64(u.Utime.Usec+u.Stime.Usec)/1e6
	}
	b.ReportAllocs()
	b.ResetTimer()
	began := cpu()
	for i := 0; i < b.N; i++ {
		simulate(b, Config{Replicas: hosts(8, "h100-8b"), Requests: reqs, Goal: Objective{TTFT: 0.5, TPOT: 0.05}})
	}
	n := float64(len(reqs)) * float64(b.N)
	b.ReportMetric(n/b.Elapsed().Seconds(), "requests/s")
	b.ReportMetric(n/(cpu()-began), "requests/cpu-s")
}

// Caches are cold and load rises from nothing to capacity: while it
// rises answers take longer than was predicted when they began, which is no
// slowness of the replicas, and hardly anybody is to be held for it.
func TestARisingLoadIsNoSlowReplica(t *testing.T) {
	s := workload.Spec{Rate: 172, Duration: 25, Families: 200, PrefixTokens: 1500, Zipf: 0.8, Seed: 3,
		Prompt: workload.Dist{Mean: 300, CV: 1, Max: 8000}, Out: workload.Dist{Mean: 150, CV: 1, Max: 2000}}
	r := simulate(t, Config{Replicas: hosts(4, "h100-8b"), Requests: stream(t, s), Goal: Objective{TTFT: 0.5, TPOT: 0.05}, Seed: 3,
		Pool: admission.Config{Objective: admission.Objective{TTFT: 0.5, ITL: 0.05}}})
	t.Logf("goodput %.4f, %d held, TTFT p95 %.0f ms, TPOT p95 %.1f ms", r.Goodput, r.Held.N, 1e3*r.TTFT.P95, 1e3*r.TPOT.P95)
	if r.Goodput < 0.975 || r.Held.N > r.Offered/10 {
		t.Errorf("goodput %.3f, %d of %d held", r.Goodput, r.Held.N, r.Offered)
	}
}
