package admission

import (
	"math"

	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/scorer"
)

// drainRate measures the token-work per second that can leave the router: for
// replicas, or shed from the queue.
type drainRate struct {
	rate float64
	sum  float64
	any  bool
}

func (d *drainRate) add(work float64) {
	d.any = true
	d.sum += work
}

// roll ends a window. What leaves while nobody waits is what was asked for, and
// only the least of what can leave: a quiet hour must not make the first wait
// after it look like an hour.
func (d *drainRate) roll(seconds float64, waited bool) {
	r := d.sum / seconds
	d.sum = 0
	switch {
	case !d.any:
	case d.rate == 0:
		d.rate = r
	case waited || r > d.rate:
		d.rate += 0.5 * (r - d.rate)
	}
}

// rateWindow is the time over which the rate is measured, seconds.
const rateWindow = 1.0

// rates are what leaves the router, by class.
type rates struct {
	left    []drainRate // for replicas, or shed from the queue
	placed  []drainRate // for replicas
	since   float64     // start of the window
	waiting bool        // somebody has waited since then
	refused bool        // somebody was refused in it
}

func (r *rates) init(classes int) {
	r.left, r.placed = make([]drainRate, classes), make([]drainRate, classes)
}

// wait takes note that somebody waits. The first one begins a window: what left
// just before it filled the replicas and is no rate.
func (r *rates) wait(now float64) {
	if r.waiting {
		return
	}
	r.waiting, r.since = true, now
	for i := range r.left {
		r.left[i].sum, r.placed[i].sum = 0, 0
	}
}

// refuse takes note that somebody is refused.
func (r *rates) refuse(now float64) {
	r.wait(now)
	r.refused = true
}

// roll ends a window that is over; waiting tells whether somebody waits now. One
// in which nothing left goes on: a second without replicas is not a rate.
func (r *rates) roll(now float64, waiting bool) {
	seconds, sum := now-r.since, 0.0
	for i := range r.left {
		sum += r.left[i].sum
	}
	if sum == 0 && !r.waiting {
		r.since = now // a quiet time is part of no window
	}
	if seconds < rateWindow || sum == 0 {
		return
	}
	waited := r.waiting && (waiting || r.refused)
	for i := range r.left {
		r.left[i].roll(seconds, waited)
		r.placed[i].roll(seconds, waited)
	}
	r.since, r.waiting, r.refused = now, waiting, false
}

// from is the rate of the classes from c on: what one of class c can have, since
// those above it go first. Of a class that had nothing yet nothing is known:
// the rate of all stands for it.
func from(d []drainRate, c int) (sum float64) {
	for i := c; i < len(d); i++ {
		sum += d[i].rate
	}
	if sum == 0 && c > 0 {
		return from(d, 0)
	}
	return sum
}

// forecast is how long a request of this class would wait in the queue as it is
// now, and behind those that were refused before it and will be back: work / the
// measured rate at which work leaves.
func (p *Pool) forecast(now float64, w *fleet.Work, why Reason) float64 {
	switch why {
	case ReasonNotPermitted, ReasonTooLong, ReasonDeadline:
		return 0
	case ReasonNoReplica:
		// Nothing drains, and the queue does not tell when a replica returns:
		// probes find one within that time.
		return noReplicaWait
	}
	p.rates.roll(now, p.held.count > 0)
	c := int(w.Class)
	above := 0.0
	for i := range c {
		above += p.held.bands[i].work
	}
	b := &p.held.bands[c]
	wait := 1.0
	if all, mine := from(p.rates.left, 0), from(p.rates.left, c); mine > 0 {
		wait = above/all + max(b.work, p.tokenWork(w))/mine
	}
	if q := b.last; q != nil && q.toldAt == 0 {
		q.toldAt, q.told = now, wait
	}
	wait *= math.Exp(b.bias)
	if mine := from(p.rates.placed, c); mine > 0 {
		wait += p.turns.ahead(now, c) / (returnShare * mine)
	}
	if why == ReasonExhausted {
		wait = max(wait, 1)
	}
	return wait
}

// noReplicaWait is Retry-After while no replica is there, seconds.
const noReplicaWait = 2

// Bounds of Retry-After, seconds.
const (
	leastWait = 0.1
	mostWait  = 120
)

// jitter is the part by which Retry-After is spread either way, so that clients
// that were refused together do not return together.
const jitter = 0.2

// retryAfter is the Retry-After of a refused ticket. A turn is kept for it.
func (p *Pool) retryAfter(now float64, t *Ticket, why Reason) float64 {
	wait := p.forecast(now, &t.Work, why)
	if wait == 0 {
		return 0
	}
	p.turns.serial++
	wait *= 1 - jitter + 2*jitter*unit(p.turns.serial)
	wait = max(leastWait, min(wait, mostWait))
	if why == ReasonCapacity || why == ReasonQueueFull {
		p.rates.refuse(now)
		t.turn = p.turns.add(now, wait, int(t.Work.Class), p.tokenWork(&t.Work))
	}
	return wait
}

// unit makes a number from 0 to 1 of a counter.
func unit(x uint64) float64 {
	return float64(scorer.Finalise(x*0x9e3779b97f4a7c15)>>11) / (1 << 53)
}

// learnWait compares what was forecast while t was the newest held request
// with the time that it really waited since: order in the queue, requests shed
// from it and a drain that changes all show there.
func (p *Pool) learnWait(now float64, t *Ticket) {
	if t.toldAt == 0 || t.told <= 0 || now <= t.toldAt {
		return
	}
	x := math.Log(clampRatio((now - t.toldAt) / t.told))
	b := &p.held.bands[t.Work.Class].bias
	*b += meanGain * (x - *b)
}
