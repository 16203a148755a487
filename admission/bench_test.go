package admission

import (
	"testing"

	"github.com/penstock/penstock/fleet"
)

// benchPool is 100 replicas with a realistic index: 400 prefix families of
// 1,500 tokens, each on a few replicas, and some load everywhere.
func benchPool(b testing.TB, replicas int) (*Pool, [][]uint64) {
	b.Helper()
	p := pool(b, Config{Objective: Objective{TTFT: 2, TTFTPer1k: 0.5, ITL: 0.2}, HangAfter: 1e9}, replicas)
	families := make([][]uint64, 400)
	h := uint64(1)
	for f := range families {
		families[f] = make([]uint64, 96)
		for i := range families[f] {
			h = h*6364136223846793005 + 1442695040888963407
			families[f][i] = h
		}
	}
	for i := 0; i < 8*replicas; i++ {
		t := &Ticket{Work: fleet.Work{Model: 1, Prompt: 1600, Blocks: families[i*7%len(families)], Tokens: 16, MaxOut: 300}}
		p.Admit(1+float64(i)*1e-3, t)
		if i%2 == 0 && t.phase == phasePlaced {
			p.First(1+float64(i)*1e-3, t)
		}
	}
	return p, families
}

// BenchmarkPick is one whole request of the core: Admit (100 replicas, prefix
// look-up, cost of each, charge, index) and Done.
func BenchmarkPick(b *testing.B) {
	p, families := benchPool(b, 100)
	t := &Ticket{}
	now := 10.0
	b.ReportAllocs()
	b.ResetTimer()
	for i := 0; i < b.N; i++ {
		now += 1e-4
		t.Work = fleet.Work{Model: 1, Tenant: uint32(i % 50), Prompt: 1600, Blocks: families[i%len(families)], Tokens: 16, MaxOut: 300}
		if p.Admit(now, t).Verdict != Placed {
			b.Fatalf("%+v", t.Decision)
		}
		p.Done(now, t, End{Outcome: Finished, Prompt: 1600, Completion: 100})
	}
}

// A decision among 100 replicas allocates nothing, nor does one out of the held
// queue.
func TestDecisionsAllocateNothing(t *testing.T) {
	p, families := benchPool(t, 100)
	x, now, i := &Ticket{}, 10.0, 0
	pick := func() {
		now += 1e-4
		i++
		x.Work = fleet.Work{Model: 1, Tenant: uint32(i % 50), Prompt: 1600, Blocks: families[i%len(families)], Tokens: 16, MaxOut: 300}
		if p.Admit(now, x).Verdict != Placed {
			t.Fatalf("%+v", x.Decision)
		}
		p.Done(now, x, End{Outcome: Finished, Prompt: 1600, Completion: 100})
	}
	for range 2000 { // the index and its tables have their size then
		pick()
	}
	if n := testing.AllocsPerRun(2000, pick); n != 0 {
		t.Errorf("%g allocations for each decision", n)
	}

	q := pool(t, Config{Cap: 2, Classes: []Class{{Name: "a", Wait: 1e9, Patient: true}}, HangAfter: 1e9}, 4)
	var running []*Ticket
	out := make([]*Ticket, 0, 64)
	offer := func(y *Ticket) {
		i++
		y.Work = fleet.Work{Model: 1, Tenant: uint32(i % 7), Prompt: 500, MaxOut: 200}
		if q.Admit(now, y).Verdict == Placed {
			running = append(running, y)
		}
	}
	for range 200 {
		offer(&Ticket{})
	}
	turn := func() {
		now += 1e-3
		y := running[0]
		copy(running, running[1:])
		running = running[:len(running)-1]
		q.Done(now, y, End{Outcome: Finished, Completion: 100})
		out = q.Advance(now, out[:0])
		running = append(running, out...)
		offer(y)
	}
	for range 2000 {
		turn()
	}
	if n := testing.AllocsPerRun(2000, turn); n != 0 {
		t.Errorf("%g allocations for each placement out of the queue", n)
	}
}

// BenchmarkPickNoPrefix is the same for prompts that nobody has seen.
func BenchmarkPickNoPrefix(b *testing.B) {
	p, _ := benchPool(b, 100)
	t := &Ticket{}
	now := 10.0
	b.ReportAllocs()
	b.ResetTimer()
	for i := 0; i < b.N; i++ {
		now += 1e-4
		t.Work = fleet.Work{Model: 1, Prompt: 1600, MaxOut: 300}
		p.Admit(now, t)
		p.Done(now, t, End{Outcome: Cancelled})
	}
}

// BenchmarkHeld is one placement from a queue of 5,000: a request ends, a held
// one takes its place, a new one joins the queue.
func BenchmarkHeld(b *testing.B) {
	p := pool(b, Config{Cap: 16, Classes: []Class{{Name: "a", Wait: 1e9, Patient: true}}, HangAfter: 1e9}, 8)
	now := 1.0
	var running []*Ticket
	add := func(i int, t *Ticket) {
		t.Work = fleet.Work{Model: 1, Tenant: uint32(i * 7 % 100), Prompt: 500 + i*37%1000, MaxOut: 200, Bytes: 2000}
		if p.Admit(now, t).Verdict == Placed {
			running = append(running, t)
		}
	}
	for i := 0; i < 5000+8*16; i++ {
		add(i, &Ticket{})
	}
	if p.Stats().Held != 5000 {
		b.Fatalf("%d held", p.Stats().Held)
	}
	out := make([]*Ticket, 0, 64)
	b.ReportAllocs()
	b.ResetTimer()
	for i := 0; i < b.N; i++ {
		now += 1e-5
		t := running[i%len(running)]
		p.Done(now, t, End{Outcome: Finished, Completion: 100})
		out = p.Advance(now, out[:0])
		if len(out) != 1 {
			b.Fatalf("%d placed for one that ended", len(out))
		}
		running[i%len(running)] = out[0]
		t.Work = fleet.Work{Model: 1, Tenant: uint32(i * 7 % 100), Prompt: 500 + i*37%1000, MaxOut: 200, Bytes: 2000}
		if p.Admit(now, t).Verdict != Held {
			b.Fatal("not held")
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "placements/s")
}

func BenchmarkIndexLookup(b *testing.B) {
	p, families := benchPool(b, 100)
	out := make([]int32, p.index.words*64)
	b.ReportAllocs()
	b.ResetTimer()
	for i := 0; i < b.N; i++ {
		p.index.longest(families[i%len(families)], out)
	}
}
