package admission

import (
	"testing"

	"github.com/penstock/penstock/fleet"
)

// A replica that has come back gets a request that no other one takes at once, and
// not only when half a second has passed without a better trial: it has nothing to do.
func TestARecoveringReplicaTakesWhatOthersHaveNoTimeFor(t *testing.T) {
	p := pool(t, Config{Objective: Objective{TTFT: 0.5}, Classes: []Class{{Name: "a", Wait: -1}}}, 2)
	p.Evidence(1, 2, fleet.EvidenceProbeRefused)
	p.Peers(5, "x", map[fleet.ID]fleet.Load{1: {Requests: 30, Prefilling: 30, PrefillTokens: 58000}})
	held := mustHold(t, p, 5, request(1000))
	p.Evidence(5.1, 2, fleet.EvidenceProbeOK)
	p.Advance(5.1, nil)
	if d := held.Decision; d.Verdict != Placed || d.Replica != 2 {
		t.Errorf("held while a replica was back and idle: %+v", d)
	}
	// One at a time: the next one waits for it to begin.
	if d := p.Admit(5.11, request(1000)); d.Verdict != Held {
		t.Errorf("a second one beside the trial: %+v", d)
	}
}
