package admission

import (
	"math"

	"github.com/penstock/penstock/fleet"
)

// drainRate measures the token-work per second that leaves the router: for
// replicas, or shed from the queue.
type drainRate struct {
	rate  float64
	since float64
	sum   float64
	any   bool
}

// rateWindow is the time over which the rate is measured, seconds.
const rateWindow = 1.0

func (d *drainRate) add(now, work float64) {
	if !d.any {
		d.any, d.since = true, now
	}
	d.sum += work
	d.roll(now)
}

func (d *drainRate) roll(now float64) {
	if !d.any || now-d.since < rateWindow {
		return
	}
	r := d.sum / (now - d.since)
	if d.rate == 0 {
		d.rate = r
	} else {
		d.rate += 0.5 * (r - d.rate)
	}
	d.since, d.sum = now, 0
}

// forecast is Retry-After: the work before a request of this class / the
// measured drain rate; at least the back-off of busy replicas when there is
// nothing else.
func (p *Pool) forecast(now float64, w *fleet.Work, why Reason) float64 {
	switch why {
	case ReasonNotPermitted, ReasonTooLong, ReasonDeadline:
		return 0
	case ReasonNoReplica:
		// Nothing drains, and the queue does not tell when a replica returns:
		// probes find one within that time.
		return noReplicaWait
	}
	p.drain.roll(now)
	ahead := 0.0
	for c := 0; c <= int(w.Class); c++ {
		ahead += p.held.bands[c].work
	}
	wait := 1.0
	if p.drain.rate > 0 {
		ahead += returnShare * p.promised.ahead(now)
		wait = max(ahead, p.tokenWork(w)) / p.drain.rate
	}
	if q := p.held.bands[w.Class].last; q != nil && q.toldAt == 0 {
		q.toldAt, q.told = now, wait
	}
	wait *= aimUnder * math.Exp(p.waitBias)
	if why == ReasonExhausted {
		wait = max(wait, 1)
	}
	wait = max(0.1, min(wait, 120))
	p.promised.add(now, now+wait, p.tokenWork(w))
	return wait
}

// noReplicaWait is Retry-After while no replica is there, seconds.
const noReplicaWait = 2

// learnWait compares what was forecast while t was the newest held request
// with the time that it really waited since: order in the queue, requests shed
// from it and a drain that changes all show there.
func (p *Pool) learnWait(now float64, t *Ticket) {
	if t.toldAt == 0 || t.told <= 0 || now <= t.toldAt {
		return
	}
	x := math.Log(clampRatio((now - t.toldAt) / t.told))
	p.waitBias += meanGain * (x - p.waitBias)
}

// aimUnder corrects for the skew: the forecasts that are far off are too long.
const aimUnder = 0.95

// returnShare is how much of the work that was told to come back is expected
// to: clients may give up, and are not seen doing so.
const returnShare = 0.3

// promises is the work of shed requests by the time at which they were told to
// come back. It comes before whoever is shed next, so that those who obey
// return one after another at the rate of the drain, not together.
type promises struct {
	slots [promiseSlots]float64
	slot  int64
	sum   float64
}

const (
	promiseSlots = 512
	promiseGrain = 0.25 // seconds of one slot
)

func (q *promises) roll(now float64) {
	s := int64(now / promiseGrain)
	if s-q.slot >= promiseSlots {
		*q = promises{slot: s}
	}
	for q.slot < s {
		i := q.slot % promiseSlots
		q.sum -= q.slots[i]
		q.slots[i] = 0
		q.slot++
	}
	if q.sum < 1 {
		q.sum = max(0, q.sum)
	}
}

func (q *promises) add(now, back, work float64) {
	q.roll(now)
	s := min(int64(back/promiseGrain), q.slot+promiseSlots-1)
	q.slots[s%promiseSlots] += work
	q.sum += work
}

// ahead is the work that is still to come back.
func (q *promises) ahead(now float64) float64 {
	q.roll(now)
	return q.sum
}
