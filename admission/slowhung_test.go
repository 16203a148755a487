package admission

import (
	"testing"

	"github.com/penstock/penstock/fleet"
)

// A replica that stops is seen late at first, and may be ejected as slow. When it
// then shows nothing at all its requests go elsewhere as those of any that hangs,
// also when probes fail meanwhile and its ejection goes on.
func TestAReplicaThatWasSlowFirstAndHangsKeepsNothing(t *testing.T) {
	for _, first := range []fleet.Evidence{fleet.EvidenceSlow, fleet.EvidenceStatus5xx, fleet.EvidenceProtocol, fleet.EvidenceAbort} {
		for _, whole := range []bool{false, true} {
			s := stopAll(t, 3, func(w *fleet.Work) { w.Whole = whole })
			r := s.p.byID[1]
			v := &s.p.view.Replicas[r.i]
			for range 3 {
				s.p.take(2.1, r, v, first, 0)
			}
			if v.Health.State != fleet.StateEjected || v.Health.Reason != first {
				t.Fatalf("%v: %+v", first, v.Health)
			}
			s.p.Advance(2.11, nil)
			gone := len(s.p.Revoked(nil))
			for now := 2.2; now < 2+4*s.p.cfg.HangAfter; now += 0.1 {
				for id := fleet.ID(2); id <= 3; id++ {
					s.p.Observe(now, id, s.page(now))
				}
				s.p.Evidence(now, 1, fleet.EvidenceProbeFailed)
				s.p.Advance(now, nil)
				for _, a := range s.p.Revoked(nil) {
					if gone++; a.Decision.Replica != 1 {
						t.Errorf("%v: one is taken back from a replica that works", first)
					}
				}
			}
			if want := s.atReplica(1); gone != want {
				t.Errorf("ejected for %v, whole %v: %d of %d are taken back", first, whole, gone, want)
			}
		}
	}
}
