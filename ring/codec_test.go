package ring

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/penstock/penstock/fleet"
	"pgregory.net/rapid"
)

// randomSnapshot has n replicas of which most carry load and some are unwell.
func randomSnapshot(rng *rand.Rand, n int, now float64) *Snapshot {
	s := &Snapshot{ConfigHash: rng.Uint64()}
	for i := range n {
		a := Account{Name: fmt.Sprintf("10.0.%d.%d:8000", i/256, i%256)}
		if rng.IntN(5) > 0 {
			a.Load = fleet.Load{Requests: 1 + rng.IntN(200), KVTokens: rng.Float64() * 5e5, OutTokens: rng.Float64() * 1e5, LastFirst: now - rng.Float64()*3}
			if rng.IntN(2) == 0 {
				a.Load.Prefilling = 1 + rng.IntN(a.Load.Requests)
				a.Load.PrefillTokens = rng.Float64() * 1e5
			}
		}
		if rng.IntN(10) == 0 {
			a.State, a.Reason, a.Since = fleet.StateEjected, fleet.Evidence(rng.IntN(fleet.EvidenceCount)), now-rng.Float64()*20
		}
		s.Replicas = append(s.Replicas, a)
	}
	for i := range rng.IntN(MaxBudgets + 3) {
		s.Budgets = append(s.Budgets, Budget{fmt.Sprint("pool", i), rng.IntN(100000), rng.IntN(100000)})
	}
	for range rng.IntN(MaxStorms + 3) {
		s.Storms = append(s.Storms, Storm{rng.Uint64(), rng.IntN(100)})
	}
	for i := range rng.IntN(MaxBudgets + 3) {
		h := Held{Pool: fmt.Sprint("pool", i)}
		for range rng.IntN(MaxHeldClasses + 3) {
			h.Count = append(h.Count, rng.IntN(2)*rng.IntN(20000))
		}
		s.Held = append(s.Held, h)
	}
	for i := range rng.IntN(MaxHot + 3) {
		s.Hot = append(s.Hot, Hot{rng.Uint64(), fmt.Sprintf("10.0.0.%d:8000", i)})
	}
	return s
}

// say returns the datagrams of one round of a router.
func say(r *routerState, s *Snapshot, now float64, withHot bool) (parts [][]byte, truncated int) {
	r.seq++
	r.own(s, now)
	var e encoder
	e.reset(maxPayload)
	e.round(&header{router: r.name, epoch: r.epoch, seq: r.seq, stamp: 1, interval: 0.2}, r, withHot)
	return e.parts(nil), e.truncated
}

func hear(t testing.TB, s *state, p []byte, made float64) (string, bool) {
	t.Helper()
	var m message
	if err := m.decode(p); err != nil {
		t.Fatalf("own datagram refused: %v", err)
	}
	return m.router, s.apply(&m, made)
}

func TestAccountSurvivesTheWireWhateverItsSize(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "seed"), 0))
		n := rapid.SampledFrom([]int{0, 1, 30, 100, 700}).Draw(rt, "replicas")
		now := 1000.0
		snap := randomSnapshot(rng, n, now)
		us := &routerState{name: string(slices.Repeat([]byte("r"), rapid.IntRange(1, MaxName).Draw(rt, "name"))), epoch: 1 << 41}
		parts, truncated := say(us, snap, now, true)
		if truncated != 0 {
			t.Fatal("truncated")
		}
		if n == 100 && len(parts) > 4 {
			t.Fatalf("%d datagrams for 100 replicas", len(parts))
		}
		rng.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		there := newState()
		for _, p := range parts {
			if len(p) > maxPayload {
				t.Fatalf("a datagram of %d bytes", len(p))
			}
			if _, news := hear(t, there, p, now); !news {
				t.Fatal("a part was no news")
			}
		}
		got := there.routers[us.name]
		seen := 0
		for i := range snap.Replicas {
			want := &snap.Replicas[i]
			e := got.load(idOf(want.Name))
			if e == nil {
				if want.Load != (fleet.Load{}) || want.State != 0 {
					t.Fatalf("%v is lost", want)
				}
				continue
			}
			seen++
			checkClose(t, *want, e.account(want.Name, now))
		}
		total := 0
		for i := range got.buckets {
			total += len(got.buckets[i].entries)
			if got.buckets[i].seq != us.seq {
				t.Fatalf("bucket %d was not told", i)
			}
		}
		if total != seen {
			t.Fatalf("%d entries, %d known", total, seen)
		}
		if compareMeta(&got.meta, &us.meta) != 0 || compareHot(got.hot.list, us.hot.list) != 0 || compareHeld(got.held.list, us.held.list) != 0 {
			t.Fatal("meta, hot prefixes or held counts changed on the way")
		}
		checkHeld(t, snap.Held, &PeerView{held: got.held.list})
	})
}

// checkHeld fails unless a view tells what was held: classes beyond those told
// apart count in the last one.
func checkHeld(t *testing.T, want []Held, got *PeerView) {
	t.Helper()
	told := 0
	for _, h := range want {
		sum := 0
		for _, n := range h.Count {
			sum += n
		}
		if sum == 0 {
			continue
		}
		if told++; told > MaxBudgets {
			return
		}
		count := got.Held(nil, h.Pool)
		for c, n := range count {
			if sum -= n; c < MaxHeldClasses-1 && n != h.Count[c] {
				t.Fatalf("%s holds %v, told as %v", h.Pool, h.Count, count)
			}
		}
		if sum != 0 {
			t.Fatalf("%s holds %v, told as %v", h.Pool, h.Count, count)
		}
	}
}

func checkClose(t *testing.T, want, got Account) {
	t.Helper()
	near := func(what string, a, b, abs, rel float64) {
		if math.Abs(a-b) > abs+rel*math.Abs(a) {
			t.Fatalf("%s: %v became %v", what, a, b)
		}
	}
	if got.Load.Requests != want.Load.Requests || got.Load.Prefilling != want.Load.Prefilling || got.State != want.State || got.Reason != want.Reason && want.State != 0 {
		t.Fatalf("%+v became %+v", want, got)
	}
	near("prefill", want.Load.PrefillTokens, got.Load.PrefillTokens, 1, 1./4096)
	near("kv", want.Load.KVTokens, got.Load.KVTokens, 1, 1./4096)
	near("out", want.Load.OutTokens, got.Load.OutTokens, 1, 1./4096)
	near("last first", want.Load.LastFirst, got.Load.LastFirst, 0.1, 0)
	near("since", want.Since, got.Since, 1, 0)
}

func TestQuantisationIsOrderedAndClose(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := rapid.Float64Range(0, 1e12).Draw(t, "a")
		b := rapid.Float64Range(0, 5000).Draw(t, "b")
		if d := math.Abs(quant16(a).float() - a); d > 1+a/4096 {
			t.Fatalf("%v is off by %v", a, d)
		}
		if quant16(b) < quant16(b/2) || quant16(a+b) < quant16(a) {
			t.Fatal("order is lost")
		}
		if s := rapid.Float64Range(0, 500).Draw(t, "age"); math.Abs(quantAge(s).seconds()-s) > 0.001+s/32 {
			t.Fatalf("age %v became %v", s, quantAge(s).seconds())
		}
	})
	for _, v := range []float64{math.NaN(), math.Inf(-1), -1, 0} {
		if quant16(v) != 0 || quantAge(v) != 0 {
			t.Fatalf("%v is not nothing", v)
		}
	}
	for v := range 4096 {
		if quant16(float64(v)).float() != float64(v) {
			t.Fatalf("%d is not exact", v)
		}
	}
	if quant16(math.Inf(1)) != math.MaxUint16 || quantAge(math.Inf(1)) != q8Top {
		t.Fatal("infinity is not the top")
	}
}

func TestRelayPassesOnWhatWasHeardUnchanged(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 3))
	us := &routerState{name: "a", epoch: 5}
	there, third := newState(), newState()
	for round := range 5 {
		parts, _ := say(us, randomSnapshot(rng, 200, 100+float64(round)), 100+float64(round), round == 2)
		for _, p := range parts {
			if rng.IntN(3) > 0 { // some are lost: the parts known are of several rounds
				hear(t, there, p, 100+float64(round))
			}
		}
	}
	relayAll(t, there, third, 110)
	checkSame(t, there, third)
	checkSame(t, third, there)
}

// relayAll passes all that from knows to to, as push/pull does.
func relayAll(t testing.TB, from, to *state, now float64) {
	var e encoder
	for _, r := range from.routers {
		e.reset(maxPayload)
		e.relay(r, now)
		for _, p := range e.parts(nil) {
			var m message
			if err := m.decode(p); err != nil || len(p) > maxPayload {
				t.Fatal(len(p), err)
			}
			to.apply(&m, now-m.age)
		}
	}
}

func TestUnknownSectionsAreSkippedAndUnknownVersionsRefused(t *testing.T) {
	us := &routerState{name: "a", epoch: 5}
	parts, _ := say(us, &Snapshot{}, 1, false)
	p := append(slices.Clone(parts[0]), 99, 2, 'x', 'y')
	var m message
	if err := m.decode(p); err != nil || len(m.ranges) == 0 {
		t.Fatalf("a section of a newer router: %v", err)
	}
	p[1] = 2
	if err := m.decode(p); !errors.Is(err, errUnknownVersion) {
		t.Fatalf("version 2: %v", err)
	}
	if err := m.decode(parts[0][:len(parts[0])-1]); !errors.Is(err, errGarbage) {
		t.Fatalf("cut: %v", err)
	}
}

func TestTooManyReplicasStillFit(t *testing.T) {
	snap := &Snapshot{}
	for i := range 40_000 {
		snap.Replicas = append(snap.Replicas, Account{Name: fmt.Sprintf("r%d:1", i), Load: fleet.Load{Requests: 1000, Prefilling: 999, PrefillTokens: 1, KVTokens: 1}})
	}
	parts, truncated := say(&routerState{name: "a", epoch: 1}, snap, 1, true)
	s := newState()
	for _, p := range parts {
		if len(p) > maxPayload {
			t.Fatalf("%d bytes", len(p))
		}
		hear(t, s, p, 1)
	}
	if truncated == 0 {
		t.Fatal("nothing was said to be left out")
	}
}

// FuzzDecode: no bytes panic, and what is accepted is encoded again to
// something that means the same.
func FuzzDecode(f *testing.F) {
	rng := rand.New(rand.NewPCG(1, 1))
	for _, n := range []int{0, 3, 60} {
		parts, _ := say(&routerState{name: "router-1", epoch: 1_790_000_000_000}, randomSnapshot(rng, n, 50), 50, true)
		for _, p := range parts {
			f.Add(p)
		}
	}
	f.Add([]byte{})
	f.Add([]byte("P\x01"))
	f.Fuzz(func(t *testing.T, p []byte) {
		var m message
		if m.decode(p) != nil {
			return
		}
		a, b := newState(), newState()
		a.apply(&m, 10)
		relayAll(t, a, b, 10)
		checkSame(t, a, b)
	})
}

func BenchmarkEncode100(b *testing.B) {
	us := &routerState{name: "router-1", epoch: 1}
	snap := randomSnapshot(rand.New(rand.NewPCG(1, 1)), 100, 50)
	var e encoder
	var parts [][]byte
	b.ReportAllocs()
	for b.Loop() {
		us.seq++
		us.own(snap, 50)
		e.reset(maxPayload)
		e.round(&header{router: us.name, epoch: 1, seq: us.seq, stamp: 1, interval: 0.2}, us, false)
		parts = e.parts(parts[:0])
	}
	n := 0
	for _, p := range parts {
		n += len(p)
	}
	b.ReportMetric(float64(n), "bytes")
	b.ReportMetric(float64(len(parts)), "datagrams")
}

func BenchmarkDecodeAndMerge100(b *testing.B) {
	us := &routerState{name: "router-1", epoch: 1}
	parts, _ := say(us, randomSnapshot(rand.New(rand.NewPCG(1, 1)), 100, 50), 50, false)
	s := newState()
	var m message
	seq := uint64(1)
	b.ReportAllocs()
	for b.Loop() {
		seq++
		for _, p := range parts {
			if err := m.decode(p); err != nil {
				b.Fatal(err)
			}
			m.seq = seq
			s.apply(&m, 1)
		}
	}
}
