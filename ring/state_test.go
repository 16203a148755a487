package ring

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/penstock/penstock/fleet"
	"pgregory.net/rapid"
)

// checkSame fails unless a knows all that b knows.
func checkSame(t testing.TB, a, b *state) {
	t.Helper()
	for name, r := range b.routers {
		o := a.routers[name]
		if o == nil {
			t.Fatalf("router %s is not known", name)
			return // a TB that is not known to end here
		}
		if o.epoch != r.epoch || o.seq != r.seq || math.Abs(o.made-r.made) > 0.0011 || o.interval != r.interval {
			t.Fatalf("router %s: %d %d %v %v and %d %d %v %v", name, o.epoch, o.seq, o.made, o.interval, r.epoch, r.seq, r.made, r.interval)
		}
		for i := range r.buckets {
			x, y := &o.buckets[i], &r.buckets[i]
			if x.seq != y.seq || slices.CompareFunc(x.entries, y.entries, compareEntries) != 0 {
				t.Fatalf("router %s bucket %d: %v and %v", name, i, x, y)
			}
		}
		if o.meta.seq != r.meta.seq || compareMeta(&o.meta, &r.meta) != 0 {
			t.Fatalf("router %s: meta differ", name)
		}
		if o.hot.seq != r.hot.seq || compareHot(o.hot.list, r.hot.list) != 0 {
			t.Fatalf("router %s: hot prefixes differ", name)
		}
		if o.held.seq != r.held.seq || compareHeld(o.held.list, r.held.list) != 0 {
			t.Fatalf("router %s: held counts differ", name)
		}
	}
}

// drawState makes a state out of whatever words, honest or not: the same
// number may stand for different contents.
func drawState(t *rapid.T, label string) *state {
	s := newState()
	n := rapid.IntRange(0, 4).Draw(t, label+" messages")
	for range n {
		m := message{header: header{
			router:   rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "router"),
			epoch:    rapid.Uint64Range(1, 2).Draw(t, "epoch"),
			seq:      rapid.Uint64Range(1, 3).Draw(t, "seq"),
			interval: rapid.SampledFrom([]float64{0.2, 0.4}).Draw(t, "interval"),
		}}
		first := rapid.IntRange(0, 3).Draw(t, "first")
		g := bucketRange{first: first, last: rapid.IntRange(first, 3).Draw(t, "last")}
		for b := g.first; b <= g.last; b++ {
			for i := range rapid.IntRange(0, 2).Draw(t, "entries") {
				g.entries = append(g.entries, entry{id: replicaID(b)<<(idBits-8) + replicaID(i), requests: rapid.Uint32Range(1, 2).Draw(t, "requests")})
			}
		}
		m.ranges = []bucketRange{g}
		if m.hasMeta = rapid.Bool().Draw(t, "meta"); m.hasMeta {
			m.meta.addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, 1}), uint16(rapid.IntRange(1, 2).Draw(t, "port")))
			m.meta.leaving = rapid.Bool().Draw(t, "leaving")
			m.meta.config = rapid.Uint64Range(1, 2).Draw(t, "config")
		}
		if m.hasHot = rapid.Bool().Draw(t, "hot"); m.hasHot {
			m.hot.list = []wireHot{{rapid.Uint64Range(1, 2).Draw(t, "prefix"), 1}}
		}
		if m.hasHeld = rapid.Bool().Draw(t, "held"); m.hasHeld {
			m.held.list = []wireHeld{{1, 1, [MaxHeldClasses]uint32{rapid.Uint32Range(1, 2).Draw(t, "count")}}}
		}
		s.apply(&m, float64(rapid.IntRange(1, 3).Draw(t, "made")))
	}
	return s
}

func merged(states ...*state) *state {
	s := newState()
	for _, o := range states {
		s.merge(o)
	}
	return s
}

func same(t *rapid.T, law string, a, b *state) {
	t.Helper()
	if fmt.Sprint(dump(a)) != fmt.Sprint(dump(b)) {
		t.Fatalf("%s:\n%v\n%v", law, dump(a), dump(b))
	}
}

func dump(s *state) []string {
	var out []string
	for name, r := range s.routers {
		out = append(out, fmt.Sprint(name, r.epoch, r.seq, r.made, r.interval, r.meta, r.hot, r.held))
		for i := range r.buckets {
			if r.buckets[i].seq != 0 {
				out = append(out, fmt.Sprint(name, i, r.buckets[i]))
			}
		}
	}
	slices.Sort(out)
	return out
}

func TestMergeLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b, c := drawState(t, "a"), drawState(t, "b"), drawState(t, "c")
		same(t, "commutative", merged(a, b), merged(b, a))
		same(t, "associative", merged(merged(a, b), c), merged(a, merged(b, c)))
		same(t, "idempotent", merged(a, a), merged(a))
		same(t, "absorbs", merged(a, b, a), merged(a, b))
	})
}

func TestDatagramsMayBeLostRepeatedAndReordered(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "seed"), 0))
		us := &routerState{name: "a", epoch: 7}
		var early, last [][]byte
		for round := range 4 {
			parts, _ := say(us, randomSnapshot(rng, 150, 10), 10, true)
			if round < 3 {
				early = append(early, parts...)
			}
			last = parts
		}
		var heard [][]byte
		for _, p := range early {
			for range rng.IntN(3) {
				heard = append(heard, p)
			}
		}
		heard = append(append(heard, last...), last...)
		rng.Shuffle(len(heard), func(i, j int) { heard[i], heard[j] = heard[j], heard[i] })
		there, want := newState(), newState()
		for _, p := range heard {
			hear(t, there, p, 10)
		}
		for _, p := range last {
			hear(t, want, p, 10)
		}
		checkSame(t, there, want)
		for _, p := range heard {
			if _, news := hear(t, there, p, 11); news {
				t.Fatal("a replay was news")
			}
		}
		checkSame(t, there, want)
	})
}

func TestRestartVoidsWhatWasSaidBefore(t *testing.T) {
	load := func(names ...string) *Snapshot {
		s := &Snapshot{}
		for _, n := range names {
			s.Replicas = append(s.Replicas, Account{Name: n, Load: fleet.Load{Requests: 5}})
		}
		return s
	}
	there := newState()
	old := &routerState{name: "a", epoch: 1}
	var olds [][]byte
	for range 9 {
		parts, _ := say(old, load("x:1", "y:1", "z:1"), 1, true)
		olds = append(olds, parts...)
		for _, p := range parts {
			hear(t, there, p, 1)
		}
	}
	fresh := &routerState{name: "a", epoch: 2}
	parts, _ := say(fresh, load("x:1"), 2, true)
	for _, p := range append(parts, olds...) {
		hear(t, there, p, 2)
	}
	n := 0
	for i := range there.routers["a"].buckets {
		n += len(there.routers["a"].buckets[i].entries)
	}
	if n != 1 {
		t.Fatalf("%d replicas have load after the restart, want 1", n)
	}
}
