package admission

import (
	"testing"

	"github.com/penstock/penstock/fleet"
)

// atItsGap is a pool of one replica at which the gaps between tokens are just
// under the objective, and of one of another model that is full.
func atItsGap(t *testing.T) *Pool {
	t.Helper()
	p := New(Config{Objective: Objective{TTFT: 2, ITL: 0.05}, Classes: []Class{{Name: "a", Wait: -1}}, Cap: 301})
	for id := fleet.ID(1); id <= 2; id++ {
		p.Join(0, ReplicaSpec{ID: id, Models: []uint32{uint32(id)}, Profile: h100(), Warm: true})
		p.view.Replicas[id-1].Own = fleet.Load{Requests: 299 + int(id), KVTokens: 400_000, OutTokens: 30_000}
	}
	p.view.Replicas[0].PrefillShare, p.view.Replicas[0].Window = 0.493, 5
	return p
}

func asked(model uint32, prompt int) *Ticket {
	return &Ticket{Work: fleet.Work{Model: model, Prompt: prompt, MaxOut: 10}}
}

// While others wait, a long prompt that would make the gaps of all others too
// long is let wait, and a short one is not: it takes the room.
func TestALongPromptWaitsForRoomWhileOthersDo(t *testing.T) {
	const long, short = 4000, 100
	p := atItsGap(t)
	if d := p.Admit(1, asked(1, long)); d.Verdict != Placed {
		t.Fatalf("nobody else waits: %+v", d)
	}
	p = atItsGap(t)
	for range 8 { // as many as some of which may have the room
		mustHold(t, p, 1, asked(2, short))
	}
	x, y := mustHold(t, p, 1, asked(1, long)), mustHold(t, p, 1, asked(1, short))
	if p.Advance(1, nil); x.Decision.Verdict != Held || y.Decision.Verdict != Placed {
		t.Fatalf("long %+v, short %+v", x.Decision, y.Decision)
	}
	p.Done(1, y, End{Outcome: Cancelled})
	// It is not passed over for ever: the longer it waits, the less it is asked.
	for now := 1.0; now < 3 && x.Decision.Verdict == Held; now += 0.01 {
		p.Advance(now, nil)
	}
	if x.Decision.Verdict != Placed {
		t.Fatalf("%+v", x.Decision)
	}
}

// Who was refused and comes back when it was told to is measured like a short
// one, however long its prompt.
func TestALongPromptThatComesBackInItsTurnIsNotLetWait(t *testing.T) {
	p := atItsGap(t)
	for range 8 {
		mustHold(t, p, 1, asked(2, 100))
	}
	p.Advance(1, nil)
	x := asked(1, 4000)
	x.Work.Print = 77
	p.turns.byPrint[77] = p.turns.add(0, 1, 0, 4000)
	if d := p.Admit(1, x); d.Verdict != Placed || !x.first {
		t.Fatalf("%+v, its turn: %v", d, x.first)
	}
}

// A prompt that can be in time nowhere goes where it harms least, but while
// others wait not where it makes all that are there miss their objective.
func TestAHopelessPromptDoesNotGoBeforeThoseThatWait(t *testing.T) {
	for _, held := range []int{0, 8} {
		p := atItsGap(t)
		p.view.Replicas[0].PrefillShare = 0.52 // over the objective already
		for range held {
			mustHold(t, p, 1, asked(2, 100))
		}
		p.Advance(1, nil)
		x := asked(1, 80_000)
		p.Admit(1, x)
		if p.Advance(1, nil); (x.Decision.Verdict == Placed) != (held == 0) {
			t.Errorf("%d held: %+v", held, x.Decision)
		}
	}
}
