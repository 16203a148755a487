package ring

import (
	"math/bits"
	"slices"

	"github.com/zeebo/xxh3"
)

// Hash says where a new prefix goes: by rendezvous hashing, each key ranks all
// members by a score of (key, member name) and takes the best. A member that
// joins takes 1/(n+1) of the keys in the mean, all of them for itself, and one
// that leaves gives its keys to their second choices; nothing else moves. The
// answer depends on the set of names only, so that every router computes the
// same one in whatever order it learned them.
//
// A look-up costs two multiplications per member (0.6 µs for 100, measured),
// which a decision spends anyway on scoring them all; in exchange there are no
// virtual nodes to tune and the shares are even to the limit of chance.
//
// A Hash is immutable and safe for concurrent use.
type Hash struct {
	names []string // sorted
	seeds []uint64 // of names, same order
}

// NewHash returns the hash over these replica names; duplicates count once.
func NewHash(names []string) *Hash {
	h := &Hash{names: slices.Clone(names)}
	slices.Sort(h.names)
	h.names = slices.Compact(h.names)
	h.seeds = make([]uint64, len(h.names))
	for i, n := range h.names {
		h.seeds[i] = xxh3.HashString(n)
	}
	return h
}

// Len is the number of members.
func (h *Hash) Len() int { return len(h.names) }

// Name returns the name of member i, in the order of names.
func (h *Hash) Name(i int) string { return h.names[i] }

// Index returns the index of the member called name, -1 when there is none.
func (h *Hash) Index(name string) int {
	if i, ok := slices.BinarySearch(h.names, name); ok {
		return i
	}
	return -1
}

// score ranks a member for a key. Both words are spread over the whole
// 128-bit product and its halves folded (the core of wyhash); the constants
// keep a zero on either side from cancelling the other.
func score(key, seed uint64) uint64 {
	hi, lo := bits.Mul64(key^seed^0x9e3779b97f4a7c15, bits.RotateLeft64(seed, 32)^0xd6e8feb86659fd93)
	x := hi ^ lo
	hi, lo = bits.Mul64(x^key, 0xe7037ed1a0b428db)
	return hi ^ lo
}

// before tells whether member i with score s ranks before member j with score
// t; equal scores (one pair in 2^64) go to the lesser name.
func before(i int, s uint64, j int, t uint64) bool {
	return j < 0 || s > t || (s == t && i < j)
}

// Lookup returns the first and the second choice for key, -1 where there are
// fewer members.
func (h *Hash) Lookup(key uint64) (first, second int) {
	return h.within(key, nil, 0)
}

// LookupBounded is Lookup with bounded load: members whose load is over factor
// times the mean of all are passed over, so that a hot key spills to its next
// choices instead of drowning its first, and comes back when there is room.
// loads is by member index, in any one unit (seconds of queued work, say);
// factor is over 1 (1.25 is usual). A negative load means that the member may
// not be used at all; it does not count in the mean. When every member that
// may be used is over the bound, which only rounding can cause, the plain
// choice among them holds.
func (h *Hash) LookupBounded(key uint64, loads []float64, factor float64) (first, second int) {
	if len(loads) != len(h.seeds) {
		panic("BUG: ring: LookupBounded with loads of another member set")
	}
	sum, n := 0.0, 0
	for _, l := range loads {
		if l >= 0 {
			sum += l
			n++
		}
	}
	if n == 0 {
		return -1, -1
	}
	bound := factor * sum / float64(n)
	first, second = h.within(key, loads, bound)
	if first < 0 {
		bound = sum // nobody is over the sum of all
		first, second = h.within(key, loads, bound)
	}
	return first, second
}

// within is Lookup among the members whose load is not over bound; without
// loads among all.
func (h *Hash) within(key uint64, loads []float64, bound float64) (first, second int) {
	first, second = -1, -1
	var s1, s2 uint64
	for i, seed := range h.seeds {
		if loads != nil && (loads[i] < 0 || loads[i] > bound) {
			continue
		}
		switch s := score(key, seed); {
		case before(i, s, first, s1):
			second, s2 = first, s1
			first, s1 = i, s
		case before(i, s, second, s2):
			second, s2 = i, s
		}
	}
	return first, second
}
