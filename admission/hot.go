package admission

import (
	"math/bits"

	"github.com/penstock/penstock/fleet"
)

// HotPrefix says that a replica holds a prefix: the chained fingerprint of 1,
// 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20 ... blocks (four steps to each
// doubling), so that a router that has it of a peer finds it in a prompt with
// a few looks.
type HotPrefix struct {
	Prefix  uint64
	Replica fleet.ID
}

// Bounds of what is shared.
const (
	hotMost = 64   // told by one router
	hotKept = 4096 // kept of what peers told
	// hotFirst is how many blocks of a prompt that nobody has seen before are
	// told, and what PrefixKey stands for: nobody knows yet how much of it others share.
	hotFirst = 8
)

// PrefixKey is what the consistent hash finds the home of a new prompt by: the
// fingerprint of its first blocks. ok is false when it has none.
func PrefixKey(blocks []uint64) (key uint64, ok bool) {
	n := stepUpTo(min(len(blocks), hotFirst))
	if n == 0 {
		return 0, false
	}
	return blocks[n-1], true
}

// stepUpTo is the greatest number of blocks that is told and not over n, 0 for
// none.
func stepUpTo(n int) int {
	if n < 8 {
		return max(n, 0)
	}
	shift := bits.Len(uint(n)) - 3 // all but the first three bits
	return n >> shift << shift
}

// hotPrefixes is what this router tells its peers, and what they told.
type hotPrefixes struct {
	recent []HotPrefix // the latest last
	told   map[uint64][]fleet.ID
	order  []uint64 // keys of told in order of arrival; some may be gone from it
	shared int      // blocks of the prompt looked up last that some replica holds
}

// used notes that a prompt goes to a replica. shared is how many of its blocks
// are known to be held somewhere: that much others have in common with it.
func (h *hotPrefixes) used(blocks []uint64, shared int, id fleet.ID) {
	if shared == 0 {
		shared = hotFirst
	}
	n := stepUpTo(min(shared, len(blocks)))
	if n == 0 {
		return
	}
	e := HotPrefix{blocks[n-1], id}
	at := len(h.recent) - 1
	for at >= 0 && h.recent[at] != e {
		at--
	}
	switch {
	case at >= 0:
		copy(h.recent[at:], h.recent[at+1:])
		h.recent[len(h.recent)-1] = e
	case len(h.recent) < hotMost:
		h.recent = append(h.recent, e)
	default:
		copy(h.recent, h.recent[1:])
		h.recent[hotMost-1] = e
	}
}

// Hot appends the prefixes that went to replicas last, the latest first, at
// most 64.
func (p *Pool) Hot(dst []HotPrefix) []HotPrefix {
	for i := len(p.hot.recent) - 1; i >= 0; i-- {
		if p.byID[p.hot.recent[i].Replica] != nil {
			dst = append(dst, p.hot.recent[i])
		}
	}
	return dst
}

// PeerHot takes prefixes that a peer has at replicas. They are taken over into
// the index when a prompt that begins with one comes.
func (p *Pool) PeerHot(list []HotPrefix) {
	h := &p.hot
	if h.told == nil {
		h.told = make(map[uint64][]fleet.ID)
	}
next:
	for _, e := range list {
		if p.byID[e.Replica] == nil {
			continue
		}
		ids, known := h.told[e.Prefix]
		for _, id := range ids {
			if id == e.Replica {
				continue next
			}
		}
		h.told[e.Prefix] = append(ids, e.Replica)
		if !known {
			h.order = append(h.order, e.Prefix)
		}
	}
	for len(h.order) > hotKept {
		delete(h.told, h.order[0])
		h.order = h.order[1:]
	}
}

// takeHot enters into the index what peers told of the beginnings of this
// prompt. counts is what the index says of it.
func (p *Pool) takeHot(blocks []uint64, counts []int32) {
	for n := stepUpTo(len(blocks)); n > 0; n = stepUpTo(n - 1) {
		ids, ok := p.hot.told[blocks[n-1]]
		if !ok {
			continue
		}
		delete(p.hot.told, blocks[n-1])
		for _, id := range ids {
			if r := p.byID[id]; r != nil && int(counts[r.slot]) < n {
				p.index.touch(r.slot, blocks[:n])
				counts[r.slot] = int32(n)
			}
		}
	}
}
