package proxy

import (
	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/internal/mutant"
	"github.com/penstock/penstock/ladder"
	"github.com/penstock/penstock/wire"
)

// course is where a request stands with its attempts.
type course struct {
	target  int    // index into the flight's targets
	allowed int    // attempts that it may make in all
	refused int    // attempts that reached nobody
	onward  bool   // to another replica, which is counted when one takes it
	last    result // of the attempt made last
}

// serve places the request and relays an answer, over as many attempts as it
// may have. Every way out has released the place (and a panic's handler does).
func (f *flight) serve() {
	defer f.dropSaved()
	defer f.giveBack() // also on a panic
	c := course{allowed: max(1, f.p.opt.Attempts-int(min(f.req.retries, 8)))}
	for {
		f.pool = f.targets[c.target].pool
		f.prepare(&f.targets[c.target])
		f.ticket.Work.Further = c.target+1 < len(f.targets) || f.lower()
		d, r, ok := f.pool.acquire(f)
		switch {
		case !ok:
			f.cancelledWhile(phaseHeld)
			return
		case d.Verdict == admission.Shed:
			f.giveBack()
			c.onward = false
			if !f.elsewhere(&c, d) {
				return
			}
			continue
		}
		f.allowance = nil
		if c.onward {
			f.failedOver(c.last)
			c.onward = false
		}
		f.predicted, f.replica = d.TTFT, r
		began := f.p.now()
		if r == nil { // left between the decision and now
			c.last = result{kind: failed, evidence: fleet.EvidenceRefused}
		} else {
			c.last = f.attempt(r, &d)
			for mutant.On("retry-storm") && c.last.kind == failed && f.attempts < 12 {
				c.last = f.attempt(r, &d)
			}
		}
		f.release(f.taught(c.last, f.p.now()-began, d.Own))
		f.judgeResult(c.last)
		if f.ended(&c) || !f.again(&c, d.Replica, began) {
			return
		}
	}
}

// lower tells whether a tier below the present one may answer what that one is too
// slow for.
func (f *flight) lower() bool {
	c := &f.climb
	if c.lr == nil {
		return false
	}
	for i := c.at + 1; i < len(c.rungs); i++ {
		switch r := &c.rungs[i]; r.tier.Kind {
		case ladder.KindPool:
			if r.ok {
				return true
			}
		case ladder.KindCached:
			if c.keep {
				return true
			}
		case ladder.KindStatic:
			return f.req.kind == wire.KindChat
		}
	}
	return false
}

// taught is r as the core is to learn of it. An answer that comes in one piece
// begins when all of it is made: a rung whose time ended before the replica
// could have made it says nothing of the replica.
func (f *flight) taught(r result, took, predicted float64) result {
	if r.evidence == fleet.EvidenceFirstTimeout && !f.body.Stream && f.rungLate() && took < f.p.opt.FirstTokenFactor*predicted {
		r.evidence = fleet.EvidenceOK
	}
	return r
}

// failedOver counts that the request goes on elsewhere, by what was found of the
// replica that it leaves.
func (f *flight) failedOver(r result) {
	e := r.evidence
	if r.taken {
		f.mu.Lock()
		e = f.taken
		f.mu.Unlock()
	}
	f.p.metrics.failovers[e].Inc()
}

// elsewhere decides where a request goes on for which one pool has no place.
// False: nowhere, it was answered.
func (f *flight) elsewhere(c *course, d admission.Decision) bool {
	f.reason = d.Reason
	if c.target+1 < len(f.targets) && maybeElsewhere(d.Reason) {
		c.target++
		return true
	}
	if !f.descend(whyDown(d.Reason, c.last)) {
		f.refuse(d, c.last)
		return false
	}
	c.target, c.allowed = 0, max(c.allowed, f.attempts+1)
	return f.outcome == outcomeNone
}

// ended tells whether the attempt was the request's end.
func (f *flight) ended(c *course) bool {
	switch c.last.kind {
	case answered:
		f.outcome = outcomeFinished
		f.countTier()
		return true
	case broken:
		f.outcome = outcomeFailed
		return true
	case cancelled:
		if f.why() != causeRevoked {
			f.cancelledWhile(phase(f.phase.Load()))
			return true
		}
		c.last = result{kind: failed, evidence: fleet.EvidenceStalled, taken: true}
		// The router itself took the attempt back from a replica that it
		// holds for dead: like a refused connection, this does not use up
		// what the request may still try.
		if c.refused < maxRefused {
			c.refused++
			c.allowed++
		}
	}
	if f.late() {
		f.expire()
		return true
	}
	return false
}

// again decides whether a request whose attempt failed is tried once more, on
// another replica or a lower rung. False: it was answered.
func (f *flight) again(c *course, tried fleet.ID, began float64) bool {
	if mutant.On("no-failover") || f.unsafe(c.last.evidence) {
		f.giveUp(c.last)
		return false
	}
	if c.last.evidence == fleet.EvidenceRefused && f.attempts < c.allowed {
		c.refused++
	}
	w := &f.ticket.Work
	if f.rungLate() || f.tooLate() || f.attempts >= c.allowed || c.refused > maxRefused || w.Excluded == len(w.Exclude) || !f.budget(f.pool) {
		if !f.descend(whyFailed(c.last.evidence)) {
			f.giveUp(c.last)
			return false
		}
		if f.outcome != outcomeNone {
			return false
		}
		c.target, c.allowed = 0, max(c.allowed, f.attempts+1)
		f.failedOver(c.last)
		return true
	}
	w.Exclude[w.Excluded] = tried
	w.Excluded++
	c.onward = true
	f.backOff(c.last.evidence, began)
	return true
}

// maxRefused bounds attempts that reached nobody, which count for nothing else.
const maxRefused = 3

// maybeElsewhere tells whether another pool of the route may still take what
// this one does not.
func maybeElsewhere(r admission.Reason) bool {
	switch r {
	case admission.ReasonNoReplica, admission.ReasonNotPermitted, admission.ReasonExhausted, admission.ReasonTooLong,
		admission.ReasonCapacity, admission.ReasonQueueFull:
		return true
	}
	return false
}
