package ring

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"
)

func drawNames(t *rapid.T, least, most int) []string {
	n := rapid.IntRange(least, most).Draw(t, "members")
	base := rapid.IntRange(0, 1000).Draw(t, "base")
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("10.0.%d.%d:8000", (base+i)/256, (base+i)%256)
	}
	return names
}

func TestJoinMovesOnlyItsShareAndOnlyToTheNewcomer(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		names := drawNames(t, 1, 40)
		joiner := rapid.StringMatching(`node-[a-z]{1,8}:8000/v[0-9]`).Draw(t, "joiner")
		seed := rapid.Uint64().Draw(t, "keys")
		was, is := NewHash(names), NewHash(append(names, joiner))
		rng := rand.New(rand.NewPCG(seed, 1))
		const keys = 4000
		moved := 0
		for range keys {
			k := rng.Uint64()
			a1, a2 := was.Lookup(k)
			b1, b2 := is.Lookup(k)
			if was.Name(a1) != is.Name(b1) {
				moved++
				if is.Name(b1) != joiner {
					t.Fatalf("key %x moved from %s to %s, not to the newcomer", k, was.Name(a1), is.Name(b1))
				}
				if is.Name(b2) != was.Name(a1) {
					t.Fatalf("key %x: the old first choice is not the second", k)
				}
			} else if a2 >= 0 && is.Name(b2) != joiner && is.Name(b2) != was.Name(a2) {
				t.Fatalf("key %x: second choice moved between old members", k)
			}
		}
		p := 1 / float64(len(names)+1)
		sd := math.Sqrt(keys * p * (1 - p))
		if d := float64(moved) - keys*p; math.Abs(d) > 6*sd {
			t.Fatalf("%d of %d keys moved, expected %.0f ± %.0f", moved, keys, keys*p, 6*sd)
		}
	})
}

func TestChoiceDoesNotDependOnTheOrderOfLearning(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		names := drawNames(t, 0, 30)
		shuffled := rapid.Permutation(append(names, names...)).Draw(t, "order")
		a, b := NewHash(names), NewHash(shuffled)
		k := rapid.Uint64().Draw(t, "key")
		a1, a2 := a.Lookup(k)
		b1, b2 := b.Lookup(k)
		if a1 != b1 || a2 != b2 || a.Len() != b.Len() {
			t.Fatalf("key %x: %d,%d and %d,%d", k, a1, a2, b1, b2)
		}
		if a.Len() > 1 && a1 == a2 {
			t.Fatal("first and second choice are one")
		}
	})
}

func TestSharesAreEven(t *testing.T) {
	for _, n := range []int{2, 3, 8, 100} {
		names := make([]string, n)
		for i := range names {
			names[i] = fmt.Sprintf("10.0.0.%d:8000", i)
		}
		h := NewHash(names)
		first, second := make([]int, n), make([]int, n)
		rng := rand.New(rand.NewPCG(7, uint64(n)))
		const keys = 200_000
		for i := range keys {
			k := rng.Uint64()
			if i%2 == 0 {
				k = uint64(i) // poorly spread keys must not matter
			}
			a, b := h.Lookup(k)
			first[a]++
			second[b]++
		}
		mean := float64(keys) / float64(n)
		for i := range n {
			for _, got := range []int{first[i], second[i]} {
				if math.Abs(float64(got)-mean) > 6*math.Sqrt(mean) {
					t.Errorf("n=%d member %d has %d keys, mean %.0f", n, i, got, mean)
				}
			}
		}
	}
}

func TestBoundedLoadKeepsEveryMemberUnderItsBound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := NewHash(drawNames(t, 1, 20))
		factor := rapid.Float64Range(1.05, 2).Draw(t, "factor")
		hot := rapid.IntRange(1, 3).Draw(t, "hot keys")
		loads := make([]float64, h.Len())
		n := float64(h.Len())
		total := 0.0
		for i := range 400 {
			a, b := h.LookupBounded(uint64(i%hot)*77, loads, factor)
			if a < 0 || a == b {
				t.Fatalf("choice %d, %d", a, b)
			}
			loads[a]++
			total++
			if loads[a] > factor*total/n+1 {
				t.Fatalf("member %d has %v of %v on %v members", a, loads[a], total, n)
			}
		}
	})
}

func TestBoundedLoadIsThePlainChoiceWhenLoadsAreEven(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := NewHash(drawNames(t, 1, 20))
		loads := make([]float64, h.Len())
		l := rapid.Float64Range(0, 1e6).Draw(t, "load")
		for i := range loads {
			loads[i] = l
		}
		k := rapid.Uint64().Draw(t, "key")
		a1, a2 := h.Lookup(k)
		if b1, b2 := h.LookupBounded(k, loads, 1.25); a1 != b1 || a2 != b2 {
			t.Fatalf("%d,%d and %d,%d", a1, a2, b1, b2)
		}
		// One that may not be used hands its keys to their second choice.
		loads[a1] = -1
		if b1, _ := h.LookupBounded(k, loads, 1.25); b1 != a2 {
			t.Fatalf("first choice barred: got %d, second choice was %d", b1, a2)
		}
	})
}

func TestLookupDoesNotAllocate(t *testing.T) {
	h := NewHash([]string{"a:1", "b:1", "c:1"})
	loads := []float64{1, 2, 3}
	if n := testing.AllocsPerRun(100, func() {
		h.Lookup(42)
		h.LookupBounded(42, loads, 1.25)
		h.Index("b:1")
	}); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}

func BenchmarkLookup100(b *testing.B) {
	names := make([]string, 100)
	for i := range names {
		names[i] = fmt.Sprintf("10.0.0.%d:8000", i)
	}
	h := NewHash(names)
	b.ReportAllocs()
	k := uint64(1)
	for b.Loop() {
		a, _ := h.Lookup(k)
		k += uint64(a) + 0x9e3779b97f4a7c15
	}
}
