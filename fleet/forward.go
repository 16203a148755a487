package fleet

import (
	"math"
	"slices"
)

// History remembers a router's own account of the last seconds. What a peer
// said a second ago it said of a fleet as it was a second ago; supposing that
// the peer has done since then what this router did since then
// (decision-core.md, "Several routers") brings its words forward to now.
// Without it, slow gossip shows all routers the same gap, and all fill it.
type History struct {
	moments []moment // oldest first
}

type moment struct {
	at    float64
	loads []Load
}

// How much is remembered: longer than slow gossip takes, bounded in number.
const (
	historySpan = 4.0 // s
	historyMost = 64
)

// Add takes the own account as it was at at, one Load for each of n replicas.
// They have to be the same replicas, in the same order, as before; see Reset.
func (h *History) Add(at float64, n int, own func(i int) Load) {
	if k := len(h.moments); k > 0 && at <= h.moments[k-1].at {
		return
	}
	var m moment
	drop := 0
	for drop < len(h.moments) && (h.moments[drop].at < at-historySpan || len(h.moments)-drop >= historyMost) {
		drop++
	}
	if drop > 0 {
		m = h.moments[0]
		h.moments = append(h.moments[:0], h.moments[drop:]...)
	}
	m.at = at
	m.loads = slices.Grow(m.loads[:0], n)
	for i := range n {
		m.loads = append(m.loads, own(i))
	}
	h.moments = append(h.moments, m)
}

// Reset forgets everything, since the replicas are others now.
func (h *History) Reset() { h.moments = h.moments[:0] }

// Since returns what was added to replica i's account since at; what is older
// than the oldest moment counts from there. LastFirst is 0.
func (h *History) Since(i int, at float64) Load {
	n := len(h.moments)
	if n < 2 || at >= h.moments[n-1].at {
		return Load{}
	}
	last := h.moments[n-1].loads[i]
	k := n - 1
	for k > 0 && h.moments[k-1].at > at {
		k--
	}
	if k == 0 {
		return between(h.moments[0].loads[i], last, 1)
	}
	// The account at at is taken on the line between its two neighbours.
	a, b := &h.moments[k-1], &h.moments[k]
	part := (b.at - at) / (b.at - a.at)
	return between(b.loads[i], last, 1).Add(between(a.loads[i], b.loads[i], part))
}

// between is part of the way from a to b.
func between(a, b Load, part float64) Load {
	round := func(d int) int { return int(math.Round(float64(d) * part)) }
	return Load{Requests: round(b.Requests - a.Requests), Prefilling: round(b.Prefilling - a.Prefilling),
		PrefillTokens: (b.PrefillTokens - a.PrefillTokens) * part, KVTokens: (b.KVTokens - a.KVTokens) * part, OutTokens: (b.OutTokens - a.OutTokens) * part}
}

// Forward is a peer's account l with what this router did since it was made
// (History.Since); no part of a load can be under nothing.
func Forward(l, since Load) Load {
	first := l.LastFirst
	l = l.Add(since)
	l.LastFirst = first
	l.Requests, l.Prefilling = max(0, l.Requests), max(0, l.Prefilling)
	l.PrefillTokens, l.KVTokens, l.OutTokens = max(0, l.PrefillTokens), max(0, l.KVTokens), max(0, l.OutTokens)
	return l
}
