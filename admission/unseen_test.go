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

// A server that tells no counters at all (vLLM's --disable-log-stats) is not taken
// for hung while it makes a long answer in one piece that it was asked for.
func TestALongAnswerWithoutCountersIsNoHang(t *testing.T) {
	p := pool(t, Config{}, 2)
	a := request(60)
	a.Work.Whole, a.Work.MaxOut, a.Work.Deadline = true, 8000, 300
	if d := p.Admit(1, a); d.Verdict != Placed {
		t.Fatalf("%+v", d)
	}
	itl := a.Decision.ITL
	end := 1 + 8000*itl
	if end < 30 {
		t.Fatalf("8,000 tokens are supposed to take %v s: the test shows nothing", end)
	}
	for now := 1.1; now < 1+1.5*8000*itl; now += 0.1 {
		for id := fleet.ID(1); id <= 2; id++ {
			p.Evidence(now, id, fleet.EvidenceProbeOK)
			p.Evidence(now, id, fleet.EvidenceScrapeFailed)
		}
		p.Advance(now, nil)
		if n := len(p.Revoked(nil)); n > 0 {
			t.Fatalf("taken back after %.0f s of %.0f", now-1, 8000*itl)
		}
	}
	// It ends, though: beyond twice of what it may take the replica hangs.
	back := 0
	for now := 1 + 1.5*8000*itl; now < 60+3*8000*itl; now += 0.5 {
		p.Evidence(now, a.Decision.Replica, fleet.EvidenceProbeOK)
		p.Advance(now, nil)
		back += len(p.Revoked(nil))
	}
	if back != 1 {
		t.Errorf("it is never taken back")
	}
}
