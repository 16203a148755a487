package admission

import "slices"

// With one router a place at a replica goes to a held request that is warm
// there, when there is one among the first 128, and only then to one that is
// cold. Several routers have a part of the queue each, and one of them that has
// nobody warm for a place would give it to a cold one while a peer holds a warm
// one: with eight routers that cost 6 % of the goodput over capacity, since a
// prompt that is computed once more takes the time of several that are not. So
// routers tell each other how many requests they hold, and a place that would
// go to a cold one is left to the peers for about as long as they need to hear
// of it. An idle replica is left to nobody.

// peerHeld is how many requests a peer holds, by class.
type peerHeld struct {
	peer string
	held []int
}

// PeerHeld takes how many requests another router holds, by class, an absolute
// value; nil or none of all classes: it holds nothing. Peers forgets it with
// the router.
func (p *Pool) PeerHeld(peer string, held []int) {
	at := slices.IndexFunc(p.peersHeld, func(h peerHeld) bool { return h.peer == peer })
	switch {
	case at >= 0:
		p.peersHeld[at].held = append(p.peersHeld[at].held[:0], held...)
	case len(held) > 0:
		p.peersHeld = append(p.peersHeld, peerHeld{peer, slices.Clone(held)})
	}
	p.sumHeld()
}

// forgetHeld forgets what a peer holds.
func (p *Pool) forgetHeld(peer string) {
	p.peersHeld = slices.DeleteFunc(p.peersHeld, func(h peerHeld) bool { return h.peer == peer })
	p.sumHeld()
}

// sumHeld counts what peers hold of each class and those above it. A class that
// this router does not have counts as its last one.
func (p *Pool) sumHeld() {
	clear(p.elsewhere)
	for _, h := range p.peersHeld {
		for c, n := range h.held {
			p.elsewhere[min(c, len(p.elsewhere)-1)] += max(0, n)
		}
	}
	for c := 1; c < len(p.elsewhere); c++ {
		p.elsewhere[c] += p.elsewhere[c-1]
	}
}

// Held appends how many requests are held, by class.
func (p *Pool) Held(dst []int) []int {
	for c := range p.held.bands {
		dst = append(dst, p.held.bands[c].count)
	}
	return dst
}

// leaveMost is the longest part of a TTFT objective for which a place is left to
// peers.
const leaveMost = 0.4

// leaveFrom: with LookAhead / leaveFrom requests held by peers one of them is
// likely to be warm at whatever replica has a place.
const leaveFrom = 4

// crowded tells that so many requests of a class and those above it are held
// that there is a choice of them for each place that comes free. Of a queue that
// peers have a part of, fewer are enough (leaveFrom).
func (p *Pool) crowded(class int) bool {
	return p.held.countUpTo(class)+leaveFrom*p.elsewhere[class] >= p.cfg.LookAhead
}

// pressure is how much the room that a dear prompt takes is wanted by others:
// from nothing, when nobody waits, to 1, when those who wait are enough that some
// of them could have it. Part of what a prompt costs is the gaps that it makes
// between the tokens of all others there. When nobody waits, they mind only
// beyond their objective. Else a few short prompts fit where a long one is one
// too many, and it is let wait for more room; the less so the longer it has
// waited, and not at all when it comes back after a refusal, when it was told to
// (limitsOf).
func (p *Pool) pressure(class int) float64 {
	return min(1, leaveFrom*float64(p.held.countUpTo(class)+p.elsewhere[class])/float64(p.cfg.LookAhead))
}

// patience is how long a request of a class waits for a warmer replica while
// another would do. The more of the held requests are the peers', and as long as
// they are enough that one of them is likely to be warm there, the longer. When
// this router alone holds enough, one of them is warm at whatever place comes
// free, and gets it by the look down the queue: to wait would only leave places
// empty (docs/policies.md, queue_115).
func (p *Pool) patience(class int, limit float64) float64 {
	there := p.elsewhere[class]
	if there == 0 {
		if p.held.count >= p.cfg.LookAhead { // of all classes: else a lower one would not wait, and go first
			return 0
		}
		return p.cfg.WarmWait
	}
	part := float64(there) / float64(there+p.held.countUpTo(class)+1)
	enough := min(1, leaveFrom*float64(there)/float64(p.cfg.LookAhead))
	return max(p.cfg.WarmWait, min(part*enough*p.cfg.PeerWait, leaveMost*limit))
}
