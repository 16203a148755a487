package admission

import (
	"math"

	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/internal/mutant"
)

// span is a stretch of time.
type span struct{ from, to float64 }

// add takes a stretch that ends now: it goes on with the one before or takes
// its place.
func (s *span) add(from, now float64) {
	if from > s.to {
		s.from = from
	}
	s.from, s.to = min(s.from, from), now
}

const (
	// minSlow is the time to the first token, seconds, under which none is called late.
	minSlow = 0.1

	// minCompare is how many first tokens a replica must have given before it
	// is compared with others.
	minCompare = 5

	// slowRun is how many late first tokens in a row eject: the running mean
	// takes some 25 to believe in a sudden change, which at the few requests that
	// a slower replica still gets is ten seconds and more. So many in a row prove
	// more than a mean does: slowInRow of SlowRatio is enough. When the mean is over
	// SlowRatio, lateRun in a row are.
	slowRun   = 5
	lateRun   = 3
	slowInRow = 0.6

	// A request that has waited for its first token for lateAge seconds and
	// 2 * SlowRatio as long as the fleet takes is late before it comes; so many
	// of them at once eject: one alone may be another kind of work than was thought.
	lateAge      = 1.0
	lateTogether = 2
)

// clampPlain bounds one observation of the comparison between replicas.
func clampPlain(x float64) float64 { return max(1.0/64, min(64, x)) }

// ran is how long a ticket has been at its replica, without the time in which
// the router itself stood still; ok is false when that was most of it: what came
// just after it was late for that reason too.
func (p *Pool) ran(now float64, t *Ticket) (took float64, ok bool) {
	age, stood := now-t.placedAt, p.stood-t.stood
	return age - stood, stood <= age/2
}

// learnSlow compares a first token with the rest of the fleet's, and ejects a
// replica that is shown to be slow.
func (p *Pool) learnSlow(now float64, t *Ticket, v *fleet.Replica) {
	l := &t.rep.learn
	took, ok := p.ran(now, t)
	if !ok || took <= 0 || t.plain <= 0 {
		return
	}
	l.plain += gain(l.plainN) * (math.Log(clampPlain(took/t.plain)) - l.plain)
	l.plainN++
	late := took >= minSlow && took >= 2*t.ttft // against what was predicted, queue included: a full replica is not slow
	if late {
		t.rep.late.add(t.placedAt, now)
	}
	if took < minSlow || !p.muchSlower(t.rep, took/t.plain, slowInRow*p.cfg.SlowRatio) {
		l.lateRun, l.slowRun = 0, 0
		return
	}
	if !p.proves(now, t) {
		return
	}
	l.lateAt = now
	l.lateRun++
	if l.slowRun++; !late {
		l.slowRun = 0
	}
	mean := l.plainN >= minCompare && l.lateRun >= lateRun && l.obs > minSlow && p.muchSlower(t.rep, math.Exp(l.plain), p.cfg.SlowRatio)
	if v.Health.Open() && (mean || l.slowRun >= slowRun) {
		p.ejectSlow(now, t.rep, v)
	}
}

// proves tells whether a late first token says something of its replica, and
// not of the machine that all run on or of the way to them: the rest of the
// fleet answered meanwhile what was sent later. Where nothing was sent to the others, it does unless
// one of them was late too; but all that is late at one time counts as one.
func (p *Pool) proves(now float64, t *Ticket) bool {
	answered, late := p.meanwhile(now, t)
	return answered || !late && t.placedAt >= t.rep.learn.lateAt
}

// meanwhile tells what the other replicas did while t waited for its first
// token: whether at least half of them answered what was sent there in the
// second half of the wait and were not late themselves, and whether one of them was late for half of it too.
func (p *Pool) meanwhile(now float64, t *Ticket) (answered, late bool) {
	others, good, bad := 0, 0, 0
	for i, o := range p.reps {
		if o == t.rep || o.learn.plainN < minCompare || p.view.Replicas[i].Health.State == fleet.StateEjected {
			continue
		}
		others++
		switch {
		case o.lateToo(t.placedAt, now):
			bad++
		case o.good >= (t.placedAt+now)/2:
			good++
		}
	}
	return good > 0 && 2*good >= others, bad > 0
}

// lateToo tells whether the replica's first tokens were late, or still are, for
// half of that time.
func (r *replica) lateToo(from, now float64) bool {
	half := (now - from) / 2
	if min(now, r.late.to)-max(from, r.late.from) >= half {
		return true
	}
	for w := r.pend.head; w != nil && w.placedAt <= from+half; w = w.next {
		if age := now - w.placedAt; !w.Work.Whole && age >= minSlow && age >= 2*w.ttft {
			return true
		}
	}
	return false
}

// lateYet tells whether t, which still waits for its first token, shows that
// its replica is slow.
func (p *Pool) lateYet(now float64, t *Ticket) bool {
	took, ok := p.ran(now, t)
	if !ok || took < lateAge || t.plain <= 0 || !p.muchSlower(t.rep, took/t.plain, 2*p.cfg.SlowRatio) {
		return false
	}
	answered, _ := p.meanwhile(now, t)
	return answered
}

// slowAgain tells whether t, the trial of a replica that was ejected for being
// slow, shows that it still is.
func (p *Pool) slowAgain(now float64, t *Ticket) bool {
	took, ok := p.ran(now, t)
	if !ok || took < minSlow || !p.muchSlower(t.rep, took/t.plain, slowInRow*p.cfg.SlowRatio) {
		return false
	}
	answered, late := p.meanwhile(now, t)
	return answered || !late
}

// ejectSlow ejects within the share of the fleet that slowness may eject.
func (p *Pool) ejectSlow(now float64, r *replica, v *fleet.Replica) {
	if mutant.On("no-latency") {
		return
	}
	out := 0
	for i := range p.reps {
		if s := p.view.Replicas[i].Health.State; s == fleet.StateEjected || s == fleet.StateTrial {
			out++
		}
	}
	if allowed := max(1, int(p.cfg.MaxEjected*float64(len(p.reps)))); out >= allowed {
		return
	}
	p.take(now, r, v, fleet.EvidenceSlow, 0)
	// What it was ejected for is judged once: after its return only what it
	// does then counts, or the memory of a cold start ejects it again.
	l := &r.learn
	l.plain, l.plainN, l.obs, l.lateRun, l.slowRun = 0, 0, 0, 0, 0
}

// muchSlower tells whether ratio is factor times the median of the other
// replicas. The median need not be known: it is enough that more than half of
// the others are so much faster.
func (p *Pool) muchSlower(r *replica, ratio, factor float64) bool {
	others, faster := 0, 0
	for i, o := range p.reps {
		if o == r || o.learn.plainN < minCompare || p.view.Replicas[i].Health.State == fleet.StateEjected {
			continue
		}
		others++
		if math.Exp(o.learn.plain)*factor < ratio {
			faster++
		}
	}
	return others > 0 && 2*faster > others
}
