package admission

import (
	"testing"

	"github.com/penstock/penstock/fleet"
)

// A replica that came and went many times waits out its ejection while others
// serve. When it is the only one, it is tried as soon as a probe finds its
// process there.
func TestTheOnlyReplicaReturnsHoweverOftenItWasGone(t *testing.T) {
	p := pool(t, Config{}, 1)
	now := 1.0
	for range 8 { // eight times there, and gone at the first request
		p.Evidence(now, 1, fleet.EvidenceRefused)
		now += 70
		p.Advance(now, nil)
		now += 0.1
	}
	p.Evidence(now, 1, fleet.EvidenceRefused)
	h := &p.View().Replicas[0].Health
	if h.State != fleet.StateEjected || h.Until < now+30 {
		t.Fatalf("it is %v until %v s from now: the test is about a long ejection", h.State, h.Until-now)
	}
	for range 5 {
		now++
		p.Evidence(now, 1, fleet.EvidenceProbeRefused)
		p.Advance(now, nil)
		if d := p.Admit(now, request(10)); d.Verdict == Placed {
			t.Fatal("a request goes where nobody listens")
		}
	}
	back := now + 0.1
	for now = back; now < back+3; now += 0.25 {
		p.Evidence(now, 1, fleet.EvidenceProbeOK)
		p.Advance(now, nil)
		r := request(10)
		if d := p.Admit(now, r); d.Verdict == Placed {
			p.Done(now, r, End{Outcome: Finished})
			if now > back+2 {
				t.Errorf("used again %v s after its return", now-back)
			}
			return
		}
	}
	t.Errorf("not used within 3 s of its return: %+v", *h)
}

// With another replica there it waits.
func TestAFlappingReplicaWaitsWhileOthersServe(t *testing.T) {
	p := pool(t, Config{}, 2)
	now := 1.0
	for range 8 {
		p.Evidence(now, 1, fleet.EvidenceRefused)
		now += 70
		p.Advance(now, nil)
		now += 0.1
	}
	p.Evidence(now, 1, fleet.EvidenceRefused)
	for end := now + 5; now < end; now += 0.25 {
		p.Evidence(now, 1, fleet.EvidenceProbeOK)
		p.Advance(now, nil)
		if s := p.View().Replicas[0].Health.State; s != fleet.StateEjected {
			t.Fatalf("it is %v", s)
		}
	}
}
