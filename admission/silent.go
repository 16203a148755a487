package admission

import (
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/internal/mutant"
)

// A request is taken back from a silent replica since another one answers it
// sooner. When all stand still at once (a paused host, a network that is gone
// for some seconds) none would: what is taken back then fails, and what waits
// where it is has its answer when they go on. So a silent replica keeps its
// requests while nobody else could have them, but not for ever.

// silence tells reasons to be out that are only that nothing came in time: a
// replica that is out for one of them may go on.
func silence(e fleet.Evidence) bool {
	switch e {
	case fleet.EvidenceStalled, fleet.EvidenceFirstTimeout, fleet.EvidenceProbeFailed:
		return true
	}
	return false
}

// backFor is how long a replica must be back, seconds, to be given what others
// that are still silent keep: they may have gone on as it did, and say so in a moment.
const backFor = 1.0

// keeps tells whether t is left at its replica r, which is out.
func (p *Pool) keeps(now float64, r *replica, t *Ticket) bool {
	v := &p.view.Replicas[r.i]
	if !silence(v.Health.Reason) || t.Work.Further || mutant.On("silent-fleet") {
		return false
	}
	// Three times as long as a silent replica has while others answer.
	return !p.hung(now-2*p.cfg.HangAfter, r, v, t.ttft) && !p.otherFor(now, t)
}

// otherFor tells whether a replica other than its own could have t.
func (p *Pool) otherFor(now float64, t *Ticket) bool {
	w := &t.Work
	for i, r := range p.reps {
		v := &p.view.Replicas[i]
		if r == t.rep || r.gone || r.drained || !v.Serves(w.Model) || !permits(v, w) || w.Excludes(v.ID) {
			continue
		}
		h := &v.Health
		switch h.State {
		case fleet.StateDraining:
			continue
		case fleet.StateEjected:
			if !mayBeAlive(h.Reason) {
				continue
			}
		case fleet.StateRamping:
			if now-h.Since < backFor {
				continue
			}
		}
		if !p.silentToo(now, r, v) {
			return true
		}
	}
	return false
}

// silentToo tells whether a replica is known to be silent, or looks so: it is
// found out a little later than another one that stopped with it, by when its
// last sign was and when it is probed.
func (p *Pool) silentToo(now float64, r *replica, v *fleet.Replica) bool {
	switch h := &v.Health; {
	case !h.Open() && h.State != fleet.StateBusy:
		return silence(h.Reason)
	case r.idle() || p.unseen(now, r, p.cfg.HangAfter):
		return h.ProbeFails > 0 // it owes nothing that would be seen, so only its probe can tell
	}
	return p.hung(now+0.75*p.cfg.HangAfter, r, v, 0)
}

// slowHangs tells whether a replica that was ejected as slow, and answers what it
// has, does not even do that: one that stops is seen late before it is seen to hang.
func (p *Pool) slowHangs(now float64, r *replica, v *fleet.Replica, patience float64) bool {
	if !silence(v.Health.Reason) && !p.hung(now, r, v, patience) {
		return false
	}
	r.slow = false
	if v.Health.Reason == fleet.EvidenceSlow { // else its probe has failed since
		v.Health.Reason = fleet.EvidenceStalled
	}
	return true
}

// takeOut makes a replica that is to leave take nothing more. What is known of
// its silence stays known.
func (p *Pool) takeOut(now float64, r *replica) {
	h := &p.view.Replicas[r.i].Health
	was := *h
	h.Apply(now, fleet.EvidenceDraining, 0, &p.cfg.Health)
	switch {
	case was.State == fleet.StateEjected && silence(was.Reason):
		h.Reason = was.Reason
	case r.gone:
		r.moving = false // its pages are not read any more
	}
}

// watchLeaving looks at a replica that takes nothing more. What runs there may
// end there, unless the replica hangs: then its requests go elsewhere, as they
// do from any other.
func (p *Pool) watchLeaving(now float64, r *replica, v *fleet.Replica, patience float64) {
	switch {
	case p.hung(now, r, v, patience):
		v.Health.Reason = fleet.EvidenceStalled
		r.revoke, p.revoking = true, true
	case silence(v.Health.Reason) && r.sign <= v.Health.Since: // as it was when it was taken out
		r.revoke, p.revoking = true, true
	case silence(v.Health.Reason): // it goes on
		v.Health.Reason, r.kept = fleet.EvidenceDraining, false
		r.moving = r.moving && !r.gone
	}
}
