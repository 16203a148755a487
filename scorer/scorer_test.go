package scorer

import (
	"testing"

	"github.com/penstock/penstock/fleet"
)

func profile() *fleet.Profile {
	return &fleet.Profile{Base: 0.00736, PerPrefill: 1.68e-5, PerSeq: 1.13e-5, PerKV: 4.2e-8, PerAttn: 1.84e-9,
		KVTokens: 446_652, MaxSeqs: 1024, MaxBatched: 8192, BlockTokens: 16}
}

func view(n int) *fleet.View {
	v := &fleet.View{Now: 10}
	p := profile()
	for i := 0; i < n; i++ {
		v.Replicas = append(v.Replicas, fleet.Replica{ID: fleet.ID(i + 1), Profile: p, ScalePrefill: 1, ScaleDecode: 1,
			Own: fleet.Load{Requests: 20 + i*7%13, Prefilling: i % 3, PrefillTokens: float64(i % 3 * 900), KVTokens: float64(20000 + i*977%5000), OutTokens: 2000, LastFirst: 9.99}})
	}
	return v
}

func context(v *fleet.View, w *fleet.Work) *Context {
	c := &Context{View: v, Work: w, Hits: make([]float64, len(v.Replicas)), Par: DefaultParams}
	for i := range v.Replicas {
		c.Cand = append(c.Cand, int32(i))
	}
	return c
}

func work(prompt int) *fleet.Work { return &fleet.Work{Prompt: prompt, Seqs: 1, Out: 200} }

func predict(r *fleet.Replica, w *fleet.Work, hit float64) Prediction {
	var p Prediction
	Predict(10, r, w, hit, &DefaultParams, &p)
	return p
}

func TestEveryPolicyChoosesACandidate(t *testing.T) {
	for _, name := range Names() {
		p := Find(name)
		c := context(view(10), work(1000))
		c.Cand = []int32{2, 5, 7}
		seen := map[int]bool{}
		for s := uint64(0); s < 200; s++ {
			c.Seed = s
			i := p.Pick(c)
			if i != 2 && i != 5 && i != 7 {
				t.Fatalf("%s chose %d", name, i)
			}
			if again := p.Pick(c); again != i {
				t.Fatalf("%s: the same input gave %d and %d", name, i, again)
			}
			seen[i] = true
		}
		if (name == "round_robin" || name == "random") && len(seen) != 3 {
			t.Errorf("%s used only %v", name, seen)
		}
		c.Cand = nil
		if i := p.Pick(c); i != -1 {
			t.Errorf("%s chose %d of none", name, i)
		}
	}
}

func TestPrefixHitIsWorthItsPrefill(t *testing.T) {
	v := view(2)
	v.Replicas[1].Own = v.Replicas[0].Own
	c := context(v, work(4000))
	c.Hits[1] = 3500
	if i := PickWork(c); i != 1 {
		t.Fatal("two equally loaded replicas: the warm one was not chosen")
	}
	cold, warm := predict(&v.Replicas[0], c.Work, 0), predict(&v.Replicas[1], c.Work, 3500)
	if cold.TTFT-warm.TTFT < 0.05 {
		t.Fatalf("TTFT cold %v, warm %v: 3,500 tokens take 59 ms", cold.TTFT, warm.TTFT)
	}
}

func TestLoadedWarmReplicaLosesToIdleColdOne(t *testing.T) {
	v := view(2)
	v.Replicas[0].Own = fleet.Load{}
	v.Replicas[1].Own = fleet.Load{Requests: 60, Prefilling: 20, PrefillTokens: 60_000, KVTokens: 200_000, OutTokens: 12_000, LastFirst: 10}
	c := context(v, work(4000))
	c.Hits[1] = 3500
	if i := PickWork(c); i != 0 {
		t.Fatal("a replica with a second of prefill before it was chosen for a hit worth 59 ms")
	}
}

func TestMemoryWaitAppearsWhenKVIsFull(t *testing.T) {
	r := &view(1).Replicas[0]
	r.Own = fleet.Load{Requests: 100, KVTokens: 440_000, Unique: 440_000, OutTokens: 10_000, LastFirst: 10}
	if p := predict(r, work(20_000), 0); p.Wait <= 0 || p.KVOver <= 0 {
		t.Fatalf("20,000 tokens into 6,652 free ones: %+v", p)
	}
	r.Own.Unique = 100_000 // the rest is one shared prefix
	if p := predict(r, work(20_000), 0); p.Wait != 0 || p.KVOver != 0 {
		t.Fatalf("a shared prefix was counted for each of its users: %+v", p)
	}
}

func TestQueueShrinksByNoMoreThanOneShare(t *testing.T) {
	r := &view(1).Replicas[0]
	w := work(100)
	queue := func(each int, silent float64) float64 {
		r.Own = fleet.Load{Requests: 4, Prefilling: 4, PrefillTokens: 4 * float64(each), KVTokens: 4 * float64(each), OutTokens: 800, LastFirst: 10 - silent}
		return predict(r, w, 0).Queue
	}
	for _, each := range []int{2000, 20_000} {
		full, soon, late := queue(each, 0), queue(each, 0.01), queue(each, 5)
		if soon >= full || late >= soon || late < 0.74*full {
			t.Fatalf("four prompts of %d: %v, after 10 ms %v, after 5 s of silence %v", each, full, soon, late)
		}
	}
}

func TestHarmGrowsWithOthers(t *testing.T) {
	v := view(2)
	v.Replicas[0].Own = fleet.Load{Requests: 2, KVTokens: 2000, Unique: 2000}
	v.Replicas[1].Own = fleet.Load{Requests: 50, KVTokens: 2000, Unique: 2000}
	w := work(8000)
	if a, b := predict(&v.Replicas[0], w, 0), predict(&v.Replicas[1], w, 0); b.Harm < 20*a.Harm {
		t.Fatalf("harm to 2 others %v, to 50 %v", a.Harm, b.Harm)
	}
}

// BenchmarkPick is the choice among 100 replicas alone; the whole of a
// request's decision is admission's benchmark of the same name.
func BenchmarkPick(b *testing.B) {
	for _, name := range Names() {
		b.Run(name, func(b *testing.B) {
			c := context(view(100), work(1000))
			pick := Find(name).Pick
			b.ReportAllocs()
			b.ResetTimer()
			for i := 0; i < b.N; i++ {
				c.Seed = uint64(i)
				pick(c)
			}
		})
	}
}
