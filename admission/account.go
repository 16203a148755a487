package admission

import (
	"math"

	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/scorer"
)

// ticketList is an intrusive list; a ticket is in one at a time.
type ticketList struct{ head, tail *Ticket }

func (l *ticketList) push(t *Ticket) {
	t.prev, t.next = l.tail, nil
	if l.tail != nil {
		l.tail.next = t
	} else {
		l.head = t
	}
	l.tail = t
}

func (l *ticketList) remove(t *Ticket) {
	if t.prev != nil {
		t.prev.next = t.next
	} else {
		l.head = t.next
	}
	if t.next != nil {
		t.next.prev = t.prev
	} else {
		l.tail = t.prev
	}
	t.prev, t.next = nil, nil
}

// idle tells that none of this router's requests is there.
func (r *replica) idle() bool { return r.pend.head == nil && r.begun.head == nil }

// prefillFrom is since when the replica is at work on the oldest prompt that
// has no first token: now, or later while the front end still has it.
func (r *replica) prefillFrom(now float64) float64 {
	from := math.Inf(1)
	for t := r.pend.head; t != nil; t = t.next {
		from = min(from, t.placedAt+r.profile.Front(t.Work.Prompt))
		if from <= now {
			return now
		}
	}
	if math.IsInf(from, 1) {
		return now
	}
	return from
}

// prefillBusy adds a prefill to the share of time that is spent on them.
// With it come those that were sent by another road meanwhile.
func (p *Pool) prefillBusy(now float64, r *replica, v *fleet.Replica, seconds float64) {
	v.PrefillShare = v.PrefillShare*math.Exp(-(now-r.busyAt)/p.window) + seconds*(1+r.beside)/p.window
	v.Window = p.window
	r.busyAt, r.stale = now, true
}

// loadedOf is what predictions need of replica i, brought up to date. Whatever
// changes a replica in the view has to say so by its stale flag.
func (p *Pool) loadedOf(i int) *scorer.Loaded {
	r := p.reps[i]
	if r.stale {
		r.stale = false
		p.loaded[i].Of(&p.view.Replicas[i])
	}
	return &p.loaded[i]
}

// countCrowd follows how many requests are with a replica for each one that this
// router sent there, which its next one will come with, and how many came by
// another road for each one of the routers.
// It is a mean over as long as answers take, and each replica's own: a router
// that sends more than its share to one would take what it does there itself for
// the half of it, that replica for a fast one, and send it more still.
func (p *Pool) countCrowd(now float64) {
	g := 1 - math.Exp(-(now-p.crowdAt)/p.window)
	p.crowdAt = now
	own, known, all := 0.0, 0.0, 0.0
	for i, r := range p.reps {
		v := &p.view.Replicas[i]
		n, k := float64(v.Own.Requests), float64(v.Own.Requests+v.Peers.Requests)
		r.own += g * (n - r.own)
		r.known += g * (k - r.known)
		r.all += g * (k + float64(v.Other.Requests) - r.all)
		own += r.own
		known += r.known
		all += r.all
	}
	crowd, road := 1.0, 1.0
	if own > 0 {
		crowd = all / own
	}
	if known > 0 {
		road = min(otherMost, all/known)
	}
	most := p.crowdMost()
	for i, r := range p.reps {
		// Where it has next to nothing, as elsewhere.
		p.view.Replicas[i].Crowd = max(1, min(most, (r.all+min(most, crowd))/(r.own+1)))
		r.beside = max(0, min(otherMost, (r.all+road)/(r.known+1))-1)
	}
}

// crowdMost bounds what one request of this router stands for. Of a router that
// had next to nothing for a while the mean is that of nothing: without a bound its
// first requests stood for thousands, no replica seemed to have time for them, and
// after an hour the ratio was infinite. Routers are taken to have no less than
// half of an even share of the requests; what came by another road may be more.
func (p *Pool) crowdMost() float64 {
	routers, other := 1, false
	for i, r := range p.reps {
		routers = max(routers, 1+len(r.peers))
		other = other || p.view.Replicas[i].Other.Requests > 0
	}
	most := 2 * float64(routers)
	if other {
		most = max(most, otherMost)
	}
	return most
}

// otherMost bounds it with traffic that came by another road.
const otherMost = 10

// The share of time that prefills take is looked at over as long as an answer
// takes, within these bounds (seconds): a burst of prompts passes in a long
// answer, and is all there is of a short one.
const (
	windowLeast = 0.5
	windowMost  = 10.0
	windowGain  = 0.01
)

// learnWindow follows the time that answers take from their first token on.
func (p *Pool) learnWindow(seconds float64) {
	p.window += windowGain * (max(windowLeast, min(windowMost, seconds)) - p.window)
}
