package admission

import (
	"testing"

	"github.com/penstock/penstock/fleet"
)

// A request goes only where its context fits: surely where such a replica is in
// service, else where it may; what no replica could ever take is refused.
func TestContextThatFits(t *testing.T) {
	p := New(Config{})
	short := ReplicaSpec{ID: 1, Warm: true, MaxLen: 2048}
	p.Join(0, short)
	p.Join(0, ReplicaSpec{ID: 2, Warm: true, MaxLen: 8192})
	for _, c := range []struct {
		prompt, out int
		want        map[fleet.ID]bool
	}{
		{1000, 100, map[fleet.ID]bool{1: true, 2: true}},
		{1000, 2000, map[fleet.ID]bool{2: true}}, // prompt + max_tokens is too long for 1
		{1900, 10, map[fleet.ID]bool{2: true}},   // may be: an estimate is not exact
		{5000, 100, map[fleet.ID]bool{2: true}},
		{7900, 4000, map[fleet.ID]bool{2: true}}, // too long for both as asked; the replica's own answer is the better one
	} {
		got := map[fleet.ID]bool{}
		for i := range 20 {
			x := &Ticket{Work: fleet.Work{Model: 1, Prompt: c.prompt, MaxOut: c.out}}
			d := p.Admit(1+float64(i), x)
			if d.Verdict != Placed {
				t.Fatalf("%d + %d tokens: %+v", c.prompt, c.out, d)
			}
			got[d.Replica] = true
			p.First(1.1+float64(i), x)
			p.Done(1.2+float64(i), x, End{Outcome: Cancelled})
		}
		if len(got) != len(c.want) || !got[2] {
			t.Errorf("%d + %d tokens went to %v, want %v", c.prompt, c.out, got, c.want)
		}
	}
	if d := p.Admit(30, &Ticket{Work: fleet.Work{Model: 1, Prompt: 20_000}}); d.Verdict != Shed || d.Reason != ReasonTooLong {
		t.Errorf("20,000 tokens: %+v", d)
	}
	// With the long one gone the short one is tried with what it may hold, and
	// not with what it cannot.
	p.Remove(31, 2)
	if d := p.Admit(32, &Ticket{Work: fleet.Work{Model: 1, Prompt: 1900, MaxOut: 10}}); d.Verdict != Placed || d.Replica != 1 {
		t.Errorf("1,900 tokens, only the short one is left: %+v", d)
	}
	if d := p.Admit(32, &Ticket{Work: fleet.Work{Model: 1, Prompt: 5000}}); d.Reason != ReasonTooLong {
		t.Errorf("5,000 tokens, only the short one is left: %+v", d)
	}
	// The configuration's word counts more, and a replica that changes is taken
	// at its new word.
	f := fleet.Generic()
	f.MaxModelLen = 16_384
	short.Profile = &f
	p.Join(33, short)
	if d := p.Admit(33, &Ticket{Work: fleet.Work{Model: 1, Prompt: 5000}}); d.Verdict != Placed {
		t.Errorf("5,000 tokens, 16,384 configured: %+v", d)
	}
}
