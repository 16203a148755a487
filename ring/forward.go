package ring

import (
	"math"
	"slices"

	"github.com/penstock/penstock/fleet"
)

// history remembers this router's own account of the last seconds. What a
// peer said a second ago it said of a fleet as it was a second ago; supposing
// that the peer has done since then what this router did since then
// (decision-core.md, "Several routers") brings its words forward to now.
// Without it, slow gossip shows all routers the same gap, and all fill it.
type history struct {
	moments []moment // oldest first
}

type moment struct {
	at    float64
	loads []fleet.Load // in the order of table.order
}

// How much is remembered: longer than slow gossip takes, bounded in number.
const (
	historySpan = 4.0 // s
	historyMost = 64
)

// add takes the own account as it was at at. The replicas have to be the same
// as before; see reset.
func (h *history) add(at float64, own []Account) {
	if n := len(h.moments); n > 0 && at <= h.moments[n-1].at {
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
	m.loads = slices.Grow(m.loads[:0], len(own))
	for i := range own {
		m.loads = append(m.loads, own[i].Load)
	}
	h.moments = append(h.moments, m)
}

func (h *history) reset() { h.moments = h.moments[:0] }

// since returns what was added to replica i's account since at; what is older
// than the oldest moment counts from there.
func (h *history) since(i int, at float64) fleet.Load {
	n := len(h.moments)
	if n < 2 || at >= h.moments[n-1].at {
		return fleet.Load{}
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
	return sumLoads(between(b.loads[i], last, 1), between(a.loads[i], b.loads[i], part))
}

// between is part of the way from a to b.
func between(a, b fleet.Load, part float64) fleet.Load {
	round := func(d int) int { return int(math.Round(float64(d) * part)) }
	return fleet.Load{Requests: round(b.Requests - a.Requests), Prefilling: round(b.Prefilling - a.Prefilling),
		PrefillTokens: (b.PrefillTokens - a.PrefillTokens) * part, KVTokens: (b.KVTokens - a.KVTokens) * part, OutTokens: (b.OutTokens - a.OutTokens) * part}
}

// sumLoads adds, keeping the LastFirst of a.
func sumLoads(a, b fleet.Load) fleet.Load {
	first := a.LastFirst
	a = a.Add(b)
	a.LastFirst = first
	return a
}

// forward is a load that cannot be under nothing.
func forward(l, d fleet.Load) fleet.Load {
	l = sumLoads(l, d)
	l.Requests, l.Prefilling = max(0, l.Requests), max(0, l.Prefilling)
	l.PrefillTokens, l.KVTokens, l.OutTokens = max(0, l.PrefillTokens), max(0, l.KVTokens), max(0, l.OutTokens)
	return l
}
