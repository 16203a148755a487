package admission

import (
	"math"
	"testing"

	"github.com/penstock/penstock/fleet"
)

// nearly is a pool whose margin has grown to more than half of each prediction, with two
// replicas that have next to nothing to do and a third, of model 2, that is full.
func nearly(t *testing.T, c Class) *Pool {
	t.Helper()
	p := New(Config{Objective: Objective{TTFT: 0.5, ITL: 0.05}, Classes: []Class{c}, LookAhead: 1, Cap: 50})
	for id := fleet.ID(1); id <= 3; id++ {
		p.Join(0, ReplicaSpec{ID: id, Models: []uint32{1 + uint32(id)/3}, Profile: h100(), Warm: true})
	}
	p.Peers(1, "x", map[fleet.ID]fleet.Load{1: {Requests: 2, KVTokens: 600, OutTokens: 100}, 2: {Requests: 2, KVTokens: 600, OutTokens: 100}, 3: {Requests: 50}})
	p.margin = math.Log(1.58)
	return p
}

// A prompt that would have its first token in two thirds of the objective is
// not refused because short ones are late by more than half of what they take.
func TestALongPromptIsNotRefusedByTheMarginOfShortOnes(t *testing.T) {
	p := nearly(t, Class{Name: "a", Wait: -1})
	x := &Ticket{Work: fleet.Work{Model: 1, Prompt: 8000, MaxOut: 10}}
	if d := p.Admit(1, x); d.Verdict != Placed || d.TTFT > 0.4 {
		t.Fatalf("%+v", d)
	}
	// One that cannot be in time is refused all the same.
	p = nearly(t, Class{Name: "a", Wait: -1})
	x = &Ticket{Work: fleet.Work{Model: 1, Prompt: 8000, MaxOut: 10, Arrived: 0.7}}
	if d := p.Admit(1, x); d.Verdict != Shed || d.Reason != ReasonCapacity {
		t.Fatalf("%+v", d)
	}
}

// With others held it would take the places of several of them.
func TestWhoIsLetInByAHairIsNotWhenOthersWait(t *testing.T) {
	p := nearly(t, Class{Name: "a", Wait: -1})
	mustHold(t, p, 1, &Ticket{Work: fleet.Work{Model: 2, Prompt: 100, MaxOut: 10}})
	x := mustHold(t, p, 1, &Ticket{Work: fleet.Work{Model: 1, Prompt: 8000, MaxOut: 10}})
	for now := 1.0; now < 1.6; now += 0.001 {
		p.Advance(now, nil)
	}
	if x.Decision.Verdict != Shed {
		t.Fatalf("%+v", x.Decision)
	}
}

// A class without an objective is never refused for being late.
func TestAPatientClassIsNotLate(t *testing.T) {
	p := nearly(t, Class{Name: "a", Wait: 60, Patient: true})
	p.margin = math.Log(2)
	p.Peers(1.1, "x", map[fleet.ID]fleet.Load{1: {Requests: 49, KVTokens: 900_000, OutTokens: 100}, 2: {Requests: 49, KVTokens: 900_000, OutTokens: 100}})
	x := &Ticket{Work: fleet.Work{Model: 1, Prompt: 6000, MaxOut: 10}}
	if d := p.Admit(1.1, x); d.Verdict == Shed {
		t.Fatalf("%+v", d)
	}
}
