package admission

import (
	"math"
	"testing"

	"github.com/penstock/penstock/fleet"
)

// Prompts of a patient class that could be in time on an idle replica, and are not
// on any that works, go to one all the same (9,500 tokens here), as longer ones do that cannot be in time
// anywhere. They waited for an idle one, and under load there is none.
func TestAPatientClassNeedsNoIdleReplica(t *testing.T) {
	for prompt := 6000; prompt <= 12000; prompt += 500 {
		p := nearly(t, Class{Name: "a", Wait: 60, Patient: true})
		p.margin = math.Log(1.2)
		l := fleet.Load{Requests: 40, KVTokens: 100_000, OutTokens: 4000}
		p.Peers(1.1, "x", map[fleet.ID]fleet.Load{1: l, 2: l, 3: {Requests: 50}})
		mustHold(t, p, 1.1, &Ticket{Work: fleet.Work{Model: 2, Prompt: 100, MaxOut: 10}}) // others wait
		x := &Ticket{Work: fleet.Work{Model: 1, Prompt: prompt, MaxOut: 10}}
		if p.Admit(1.1, x); x.Decision.Verdict == Held {
			p.Advance(1.2, nil)
		}
		if x.Decision.Verdict != Placed {
			t.Errorf("%d tokens: %+v", prompt, x.Decision)
		}
	}
}
