package admission

import (
	"testing"

	"github.com/penstock/penstock/fleet"
)

// takenOut is what an operator, or discovery, does with a replica that is in trouble.
var takenOut = map[string]func(p *Pool, now float64, id fleet.ID){
	"removed": func(p *Pool, now float64, id fleet.ID) { p.Remove(now, id) },
	"drained": func(p *Pool, now float64, id fleet.ID) { p.Drain(now, id, true) },
}

// A replica that hangs, and is taken out by an operator or a reload, does not
// keep its requests: others could have them.
func TestAReplicaThatHangsAndIsTakenOutKeepsNothing(t *testing.T) {
	for how, out := range takenOut {
		for _, at := range []float64{2.1, 4, 6} { // before and after it is known to hang
			for _, whole := range []bool{false, true} {
				s := stopAll(t, 3, func(w *fleet.Work) { w.Whole = whole })
				back := s.silent(2, at)
				if len(back) > 0 {
					t.Fatalf("%s at %v: %d taken back while all are silent", how, at, len(back))
				}
				out(s.p, at, 1)
				for _, a := range s.sent {
					if a.Decision.Replica != 1 {
						s.p.First(at+0.01, a)
					}
				}
				b := request(10) // the others go on
				if d := s.p.Admit(at+0.02, b); d.Verdict != Placed || d.Replica == 1 {
					t.Fatalf("%s at %v: %+v", how, at, d)
				}
				s.p.First(at+0.03, b)
				got, from, until := 0, at+0.03, at+4*s.p.cfg.HangAfter
				if how == "removed" && whole && at < 6 {
					// Neither page nor probe tells of it any more, and a long answer
					// in one piece shows nothing while it is made: it may end there.
					for _, a := range s.silent(from, at+30, 2, 3) {
						if a.Decision.Replica == 1 {
							t.Fatalf("%s at %v: a long answer is taken back", how, at)
						}
					}
					from, until = at+30, 150
				}
				for _, a := range s.silent(from, until, 2, 3) {
					if a.Decision.Replica == 1 {
						got++
					}
				}
				if want := s.atReplica(1); got != want {
					t.Errorf("%s at %v, whole %v: %d of %d are taken back", how, at, whole, got, want)
				}
			}
		}
	}
}

// atReplica counts the requests that were sent to a replica.
func (s *stopped) atReplica(id fleet.ID) (n int) {
	for _, a := range s.sent {
		if a.Decision.Replica == id {
			n++
		}
	}
	return n
}

// One that is drained and whose process then ends keeps nothing either: where its
// connections do not break by themselves, nobody would know.
func TestADrainedReplicaWhoseProcessEndsKeepsNothing(t *testing.T) {
	s := stopAll(t, 2, nil)
	s.p.Drain(2.1, 1, true)
	s.p.Advance(2.15, nil)
	if back := s.p.Revoked(nil); len(back) > 0 {
		t.Fatalf("%d are taken back from a replica that only drains", len(back))
	}
	s.p.Evidence(2.2, 1, fleet.EvidenceProbeRefused)
	back := s.p.Revoked(nil)
	for _, a := range back {
		if a.Decision.Replica != 1 {
			t.Error("one is taken back from the other replica")
		}
	}
	if len(back) != s.atReplica(1) {
		t.Errorf("%d of %d are taken back", len(back), s.atReplica(1))
	}
}
