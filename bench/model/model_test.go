package model

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
)

func near(t *testing.T, what string, got, want float64) {
	t.Helper()
	if math.Abs(got-want) > 1e-9*math.Max(1, math.Abs(want)) {
		t.Fatalf("%s = %.12g, want %.12g", what, got, want)
	}
}

func h100(t testing.TB) Profile {
	p, ok := ByName("h100-8b")
	if !ok {
		t.Fatal("no profile h100-8b")
	}
	return p
}

// run steps r until nothing is left and returns the events.
func run(r *Replica, until float64) (evs []Event) {
	for {
		next := r.Next()
		if next > until || math.IsInf(next, 1) {
			return evs
		}
		_, e := r.Step(next)
		evs = append(evs, e...)
	}
}

func TestStepLawByHand(t *testing.T) {
	p := h100(t)
	// Decode only, weights bound: 6.36 + 0.0113*32 ms, 32 contexts of 1000, 1 ms.
	near(t, "decode", p.StepTime(32, 32, 32000, 0), (6.36+.0113*32)/1e3+4.2e-8*32000+1e-3)
	// Full prefill batch, compute bound: 4 + 0.0168*8192 ms and attention.
	near(t, "prefill", p.StepTime(1, 8192, 0, 8192*4096), (4+.0168*8192)/1e3+2*9.2e-10*8192*4096+1e-3)
}

func TestOneRequest(t *testing.T) {
	p := h100(t)
	r := New(p)
	s := &Seq{Prompt: 1000, Out: 3}
	r.Add(10, s)
	run(r, math.Inf(1))
	q := 10 + 15e-3 + 13e-6*1000
	near(t, "queued", s.Queued, q)
	first := q + p.StepTime(1, 1000, 0, 1000*500)
	near(t, "first", s.FirstAt, first)
	near(t, "end", s.EndAt, first+p.StepTime(1, 1, 1000, 0)+p.StepTime(1, 1, 1001, 0))
	if s.Ended != Length || r.cache.used() != 0 {
		t.Fatalf("ended %v, used blocks %d", s.Ended, r.cache.used())
	}
}

func TestChunkedPrefillSharesTheStepWithDecodes(t *testing.T) {
	p := h100(t)
	p.FrontBase, p.FrontPerToken = 0, 0
	r := New(p)
	a, b := &Seq{Prompt: 100, Out: 1000}, &Seq{Prompt: 10000, Out: 2}
	r.Add(0, a)
	t1 := p.StepTime(1, 100, 0, 100*50)
	r.Step(t1) // a decodes from t1
	r.Add(t1+1e-4, b)
	run(r, 0.6)
	t2 := t1 + p.StepTime(1, 1, 100, 0)                       // the step that was running when b came
	t3 := t2 + p.StepTime(2, 8192, 101, 8191*(8191.0/2))      // 1 decode + 8191 of b's prompt
	rest := float64(10000 - 8191)                             // second chunk
	t4 := t3 + p.StepTime(2, 1+1809, 102, rest*(8191+rest/2)) // and its attention over the first
	near(t, "first of the long prompt", b.FirstAt, t4)
}

func segs(base uint64, n, size int) (out []Seg) {
	h := uint64(14695981039346656037)
	for i := 0; i < n; i++ {
		h = (h ^ (base + uint64(i))) * 1099511628211
		out = append(out, Seg{h, size})
	}
	return out
}

func TestPrefixHitNeverCoversTheLastToken(t *testing.T) {
	r := New(h100(t))
	a := &Seq{Prompt: 160, Out: 1, Segs: segs(1, 10, 16)}
	b := &Seq{Prompt: 160, Out: 1, Segs: segs(1, 10, 16)}
	c := &Seq{Prompt: 161, Out: 1, Segs: segs(1, 10, 16)}
	r.Add(0, a)
	r.Add(1, b)
	r.Add(2, c)
	run(r, math.Inf(1))
	if a.Cached != 0 || b.Cached != 144 || c.Cached != 160 {
		t.Fatalf("cached %d %d %d, want 0 144 160 (floor((n-1)/16)*16)", a.Cached, b.Cached, c.Cached)
	}
}

func TestSamePrefixTogetherIsComputedOnce(t *testing.T) {
	r := New(h100(t))
	a := &Seq{Prompt: 500, Out: 1, Segs: segs(1, 31, 16)}
	b := &Seq{Prompt: 500, Out: 1, Segs: segs(1, 31, 16)}
	r.Add(0, a)
	r.Add(0, b)
	run(r, math.Inf(1))
	if b.Cached != 496 {
		t.Fatalf("second of two equal prompts in one step hit %d tokens, want 496", b.Cached)
	}
}

func TestConversationFindsItsOwnOutput(t *testing.T) {
	r := New(h100(t))
	s1 := []Seg{{11, 320}}
	a := &Seq{Prompt: 320, Out: 161, Segs: s1, OutHash: 12}
	r.Add(0, a)
	run(r, math.Inf(1))
	b := &Seq{Prompt: 320 + 161 + 100, Out: 1, Segs: append(s1, Seg{12, 161}, Seg{13, 100})}
	r.Add(100, b)
	run(r, math.Inf(1))
	if b.Cached != 480 { // the last generated token was never written to the cache
		t.Fatalf("second turn hit %d tokens, want 480", b.Cached)
	}
}

func TestEvictionIsLeastRecentAndTailFirst(t *testing.T) {
	p := h100(t)
	p.KVTokens = 16 * 30
	r := New(p)
	add := func(at float64, base uint64, blocks int) *Seq {
		s := &Seq{Prompt: blocks*16 + 1, Out: 1, Segs: segs(base, blocks, 16)}
		r.Add(at, s)
		run(r, math.Inf(1))
		return s
	}
	add(0, 100, 10) // A
	add(1, 200, 10) // B
	add(2, 100, 10) // A again: B is the oldest now
	add(3, 300, 14) // C needs 15 blocks (14 + the last token's): 9 or so are unused, the rest comes from B's tail
	if got := add(4, 200, 10).Cached; got == 0 || got == 160 {
		t.Fatalf("B kept %d of 160 tokens, want its head only", got)
	}
	r2 := New(p)
	r = r2
	add(0, 100, 10)
	add(1, 200, 10)
	add(2, 100, 10)
	add(3, 300, 14)
	if got := add(4, 100, 10).Cached; got != 160 {
		t.Fatalf("A was used after B and kept %d of 160 tokens", got)
	}
}

func TestPreemptionKeepsTheFirstEmission(t *testing.T) {
	p := h100(t)
	p.KVTokens, p.FrontBase, p.FrontPerToken = 16*20, 0, 0
	r := New(p)
	a, b := &Seq{Prompt: 150, Out: 100}, &Seq{Prompt: 150, Out: 100}
	r.Add(0, a)
	r.Add(0, b)
	evs := run(r, math.Inf(1))
	firsts := 0
	for _, e := range evs {
		if e.Kind == First && e.Seq == b {
			firsts++
		}
	}
	if b.Preempts == 0 || a.Preempts != 0 {
		t.Fatalf("preempted a %d, b %d times; the last admitted must go first", a.Preempts, b.Preempts)
	}
	if firsts != 1 || b.FirstAt > a.EndAt {
		t.Fatalf("first events %d, first at %g, a ended %g", firsts, b.FirstAt, a.EndAt)
	}
	if b.EndAt < a.EndAt || r.Made(b) != 100 {
		t.Fatalf("b ended %g with %d tokens", b.EndAt, r.Made(b))
	}
}

func TestAbortFreesAtTheStepBoundary(t *testing.T) {
	r := New(h100(t))
	s := &Seq{Prompt: 100, Out: 10000}
	r.Add(0, s)
	r.Step(1)
	if r.Abort(1.0001, s) {
		t.Fatal("a running sequence ended at once")
	}
	evs := run(r, 2)
	if len(evs) != 1 || evs[0].Kind != Finish || s.Ended != Aborted || s.EndAt > 1.01 {
		t.Fatalf("events %v, ended %v at %g", evs, s.Ended, s.EndAt)
	}
	if r.cache.used() != 0 || r.Queued() != 0 {
		t.Fatal("an aborted sequence kept blocks")
	}
}

func TestFreezeStopsTimeAndSlowStretchesIt(t *testing.T) {
	end := func(f func(*Replica)) float64 {
		r := New(h100(t))
		s := &Seq{Prompt: 100, Out: 200}
		r.Add(0, s)
		r.Step(0.5)
		f(r)
		run(r, math.Inf(1))
		return s.EndAt
	}
	plain := end(func(*Replica) {})
	near(t, "frozen for 3 s", end(func(r *Replica) { r.SetFrozen(0.5, true); r.Step(3); r.SetFrozen(3.5, false) }), plain+3)
	slow := end(func(r *Replica) { r.SetSlow(0.5, 4) })
	if want := 0.5 + 4*(plain-0.5); math.Abs(slow-want) > 0.03 {
		t.Fatalf("slowed end %g, want about %g", slow, want)
	}
}

// Bulk stretches must be the same as single steps, for any workload.
func TestBulkEqualsSingleSteps(t *testing.T) {
	for seed := uint64(1); seed <= 200; seed++ {
		t.Run(fmt.Sprint("seed", seed), func(t *testing.T) {
			p := h100(t)
			p.KVTokens, p.MaxSeqs, p.MaxBatched = 16*(60+int(seed%4)*100), 12, 512
			bulk, single := New(p), New(p)
			single.Tokens = true
			x, y := workload(seed, p), workload(seed, p)
			drive(bulk, x, seed)
			drive(single, y, seed)
			for i := range x {
				a, b := x[i], y[i]
				if math.Abs(a.FirstAt-b.FirstAt) > 1e-6 || math.Abs(a.EndAt-b.EndAt) > 1e-6 || a.Cached != b.Cached || a.Preempts != b.Preempts || a.Ended != b.Ended {
					t.Fatalf("sequence %d: bulk first %g end %g cached %d preempts %d %v, single %g %g %d %d %v", i,
						a.FirstAt, a.EndAt, a.Cached, a.Preempts, a.Ended, b.FirstAt, b.EndAt, b.Cached, b.Preempts, b.Ended)
				}
			}
			for _, r := range []*Replica{bulk, single} {
				if r.cache.used() != 0 || r.Queued() != 0 || r.cache.unused+r.cache.idle != r.cache.total {
					t.Fatalf("blocks used %d, queued %d at the end", r.cache.used(), r.Queued())
				}
			}
			if a, b := bulk.stats.OutputTokens, single.stats.OutputTokens; a != b {
				t.Fatalf("output tokens %g and %g", a, b)
			}
		})
	}
}

func workload(seed uint64, p Profile) (out []*Seq) {
	rng := rand.New(rand.NewPCG(seed, 7))
	for i := 0; i < 80; i++ {
		fam := rng.Uint64N(5)
		pre := segs(fam*1000, 1+rng.IntN(6), 16+16*rng.IntN(3))
		tokens := 0
		for _, g := range pre {
			tokens += g.Tokens
		}
		own := 1 + rng.IntN(300)
		pre = append(pre, Seg{uint64(i)<<32 | 5, own})
		out = append(out, &Seq{Prompt: tokens + own, Out: 1 + rng.IntN(150), Segs: pre, OutHash: uint64(i)<<32 | 6})
	}
	return out
}

func drive(r *Replica, seqs []*Seq, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 9))
	now := 0.0
	for i, s := range seqs {
		now += rng.ExpFloat64() * 0.05
		r.Step(now)
		r.Add(now, s)
		if i%11 == 10 {
			r.Abort(now, seqs[rng.IntN(i)])
		}
	}
	for !math.IsInf(r.Next(), 1) {
		r.Step(r.Next())
	}
}

func BenchmarkRequests(b *testing.B) {
	r := New(h100(b))
	rng := rand.New(rand.NewPCG(1, 1))
	now := 0.0
	pool := []*Seq{}
	for i := 0; i < b.N; i++ {
		now += rng.ExpFloat64() / 20
		for {
			next, evs := r.Step(now)
			for _, e := range evs {
				if e.Kind == Finish {
					pool = append(pool, e.Seq)
				}
			}
			if next > now {
				break
			}
		}
		var s *Seq
		if k := len(pool); k > 0 {
			s, pool = pool[k-1], pool[:k-1]
		} else {
			s = &Seq{}
		}
		fam := rng.Uint64N(50)
		s.Prompt, s.Out = 1500, 200
		s.Segs = append(s.Segs[:0], Seg{fam + 1, 1000}, Seg{uint64(i)<<20 | 1<<60, 500})
		r.Add(now, s)
	}
}
