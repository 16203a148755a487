package proxy

import (
	"bytes"
	"math/rand/v2"
	"time"

	"github.com/penstock/penstock/fleet"
)

// failoverSpread bounds the wait before the next attempt, full jitter; it
// doubles with each attempt.
const failoverSpread = 25 * time.Millisecond

// proofWait bounds the wait for a sign that what failed is one replica and not
// all of them; proofLook is how often it is looked for.
const (
	proofWait = 150 * time.Millisecond
	proofLook = 5 * time.Millisecond
)

// backOff spreads what was refused together, so that it does not come to the
// next replica in step. Who reached nobody, or waited already, goes on at once.
// The last attempt after a server error is not spent before another replica was
// seen to answer, if that is soon: when all fail, the client's own repeat in a
// second is worth more than an attempt now. began is when the attempt did.
func (f *flight) backOff(e fleet.Evidence, began float64) {
	switch e {
	case fleet.EvidenceRefused, fleet.EvidenceFirstTimeout, fleet.EvidenceStalled, fleet.EvidenceDraining:
		return
	}
	wait := time.Duration(rand.Float64() * float64(failoverSpread<<min(f.attempts, 4)))
	most := wait
	if e == fleet.EvidenceStatus5xx || e == fleet.EvidenceReset || e == fleet.EvidenceProtocol {
		most += proofWait
	}
	for _, by := range [...]time.Time{f.deadlineAt, f.climb.rungBy} {
		if !by.IsZero() {
			most = min(most, time.Until(by)/4)
		}
	}
	wait = min(wait, most)
	for wait > 0 {
		if !f.pause(wait) {
			return
		}
		if most -= wait; most <= 0 || f.proven(began) {
			return
		}
		wait = min(proofLook, most)
	}
}

// proven asks the pool's core, see admission.Pool.Proven.
func (f *flight) proven(since float64) bool {
	f.pool.mu.Lock()
	defer f.pool.mu.Unlock()
	return f.pool.core.Proven(f.p.now(), since, &f.ticket.Work)
}

// pause waits; false means that the request was cancelled meanwhile (the next
// step finds out why).
func (f *flight) pause(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-f.wake:
		f.signal()
		return false
	}
}

// budget asks the pool for one attempt more than requests. Until a replica takes
// that attempt the flight owes the allowance, see giveBack.
func (f *flight) budget(pl *pool) bool {
	b := pl.opt.Budget
	if b == nil {
		return true
	}
	pl.mu.Lock()
	defer pl.mu.Unlock()
	if !b.Retry(f.p.now()) {
		return false
	}
	f.allowance = pl
	return true
}

// giveBack returns an allowance that no replica took, if there is one.
func (f *flight) giveBack() {
	pl := f.allowance
	if pl == nil {
		return
	}
	f.allowance = nil
	pl.mu.Lock()
	defer pl.mu.Unlock()
	pl.opt.Budget.Unused()
}

// unsafe tells whether the request must not be sent once more after an attempt
// that ended so: a replica that acts outside of the answer may have begun, and
// the client has not said by an Idempotency-Key that a repeat does no harm.
func (f *flight) unsafe(e fleet.Evidence) bool {
	if !f.pool.opt.SideEffects {
		return false
	}
	switch e {
	case fleet.EvidenceRefused, fleet.EvidenceBusy, fleet.EvidenceDraining, fleet.EvidenceOK:
		return false // it was not taken on
	}
	return !f.namesItself()
}

// namesItself tells whether the client says by an Idempotency-Key that a repeat
// does no harm.
func (f *flight) namesItself() bool {
	for line := range bytes.Lines(f.req.headers) {
		if name, _, ok := bytes.Cut(line, []byte(":")); ok && bytes.EqualFold(name, []byte("Idempotency-Key")) {
			return true
		}
	}
	return false
}

// tooLate tells that not even the first token of another attempt would be in
// time.
func (f *flight) tooLate() bool {
	return !f.deadlineAt.IsZero() && time.Until(f.deadlineAt).Seconds() < f.predicted
}
