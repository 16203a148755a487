package admission

import (
	"testing"

	"github.com/penstock/penstock/fleet"
)

// A page that does not come says nothing of the engine. Replicas that make answers
// in one piece show nothing else meanwhile: they are not taken for hung, and keep
// their requests, as long as their probes are answered. Where pages come and say
// that nothing moves, or where a stream shows nothing, they are.
func TestMissingPagesAreNoHang(t *testing.T) {
	for _, c := range []struct {
		name   string
		whole  bool
		page   bool // pages come, and say the same for ever
		probes fleet.Evidence
		hung   bool
	}{
		{"no pages", true, false, fleet.EvidenceProbeOK, false},
		{"no pages, no answer to probes", true, false, fleet.EvidenceProbeFailed, true},
		{"pages that stand still", true, true, fleet.EvidenceProbeOK, true},
		{"no pages, streams", false, false, fleet.EvidenceProbeOK, true},
	} {
		s := stopAll(t, 3, func(w *fleet.Work) { w.Whole = c.whole })
		back := 0
		for k := 1; k <= 200; k++ { // 10 s
			now := 2 + 0.05*float64(k)
			for id := fleet.ID(1); id <= s.n && k%5 == 0; id++ {
				if c.page {
					s.p.Observe(now, id, s.page(2))
				} else {
					s.p.Evidence(now, id, fleet.EvidenceScrapeFailed)
				}
				if k%20 == 0 {
					s.p.Evidence(now, id, c.probes)
				}
			}
			s.p.Advance(now, nil)
			back += len(s.p.Revoked(nil))
		}
		if out := s.ejected(); c.hung != (out == 3) || !c.hung && out > 0 {
			t.Errorf("%s: %d of 3 are out", c.name, out)
		}
		if back > 0 {
			t.Errorf("%s: %d are taken back, and no other replica could have them", c.name, back)
		}
	}
}
