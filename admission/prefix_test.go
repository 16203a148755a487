package admission

import (
	"runtime"
	"testing"

	"pgregory.net/rapid"
)

// refIndex is the index in its plainest form: a list per replica.
type refIndex struct {
	limit int
	lru   [][]uint64 // most recent first
}

func (x *refIndex) touch(slot int, blocks []uint64) {
	if len(blocks) > x.limit {
		blocks = blocks[:x.limit]
	}
	for i := len(blocks) - 1; i >= 0; i-- {
		l := x.lru[slot]
		for k, h := range l {
			if h == blocks[i] {
				l = append(l[:k:k], l[k+1:]...)
				break
			}
		}
		l = append([]uint64{blocks[i]}, l...)
		if len(l) > x.limit {
			l = l[:x.limit]
		}
		x.lru[slot] = l
	}
}

func (x *refIndex) longest(slot int, blocks []uint64) int {
	for i, b := range blocks {
		found := false
		for _, h := range x.lru[slot] {
			found = found || h == b
		}
		if !found {
			return i
		}
	}
	return len(blocks)
}

func TestIndexAgreesWithPlainLists(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		slots := rapid.SampledFrom([]int{1, 3, 64, 65, 130}).Draw(t, "slots")
		limit := rapid.IntRange(1, 40).Draw(t, "limit")
		var x prefixIndex
		x.setSlots(slots)
		ref := &refIndex{limit: limit, lru: make([][]uint64, slots)}
		for i := 0; i < slots; i++ {
			x.setLimit(i, limit)
		}
		// Chains that share heads: a path in a small tree.
		chain := func() []uint64 {
			n := rapid.IntRange(0, 25).Draw(t, "length")
			h := uint64(0)
			out := make([]uint64, n)
			for i := range out {
				branch := uint64(0)
				if i%4 == 0 {
					branch = uint64(rapid.IntRange(0, 2).Draw(t, "branch"))
				}
				h = (h ^ (branch + 1)) * 0x9e3779b97f4a7c15
				out[i] = h
			}
			return out
		}
		out := make([]int32, x.words*64)
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			slot := rapid.IntRange(0, slots-1).Draw(t, "slot")
			c := chain()
			if rapid.IntRange(0, 9).Draw(t, "what") == 0 {
				x.forget(slot)
				ref.lru[slot] = nil
			} else {
				x.touch(slot, c)
				ref.touch(slot, c)
			}
			q := chain()
			x.longest(q, out)
			for s := 0; s < slots; s++ {
				if got, want := int(out[s]), ref.longest(s, q); got != want {
					t.Fatalf("slot %d of %d: %d blocks, plain lists say %d", s, slots, got, want)
				}
				if x.lru[s].count != len(ref.lru[s]) || x.lru[s].count > limit {
					t.Fatalf("slot %d holds %d, plain list %d, limit %d", s, x.lru[s].count, len(ref.lru[s]), limit)
				}
			}
		}
		for s := 0; s < slots; s++ {
			x.forget(s)
		}
		if x.used != 0 {
			t.Fatalf("%d entries are left when all replicas are empty", x.used)
		}
	})
}

// The index holds no more than the replicas can: its memory is bounded by
// their KV caches, whatever comes.
func TestIndexMemoryIsBoundedByWhatReplicasHold(t *testing.T) {
	const replicas, blocks = 8, 1000
	var x prefixIndex
	x.setSlots(replicas)
	for i := range replicas {
		x.setLimit(i, blocks)
	}
	fill := func(n int) {
		h := uint64(n)
		chain := make([]uint64, 200)
		for k := range n {
			for i := range chain {
				h = h*6364136223846793005 + 1442695040888963407
				chain[i] = h
			}
			x.touch(k%replicas, chain)
		}
	}
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	fill(200) // 5 times what fits
	if x.used > replicas*blocks {
		t.Fatalf("%d entries, the replicas hold %d", x.used, replicas*blocks)
	}
	full := heap()
	fill(20_000)
	if x.used > replicas*blocks {
		t.Fatalf("%d entries, the replicas hold %d", x.used, replicas*blocks)
	}
	after := heap()
	runtime.KeepAlive(&x)
	per := float64(full-before) / float64(replicas*blocks)
	t.Logf("%.0f bytes per block held; after 100 times as many prompts %.0f", per, (float64(after)-float64(before))/float64(replicas*blocks))
	if after > full+full/10 || per > 300 {
		t.Errorf("%d bytes after 5 times what fits, %d after 500 times, %.0f per block", full-before, after-before, per)
	}
}
