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
func (p *Pool) prefillBusy(now float64, r *replica, v *fleet.Replica, seconds float64) {
	v.PrefillShare = v.PrefillShare*math.Exp(-(now-r.busyAt)/fleet.PrefillWindow) + seconds/fleet.PrefillWindow
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
