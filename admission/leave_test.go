package admission

import (
	"testing"

	"github.com/penstock/penstock/fleet"
)

// heldCold is a pool with a held request that is warm at replica 1, which is
// full for now; replica 2 would take it, cold.
func heldCold(t *testing.T, held []int, second fleet.Load) (*Pool, *Ticket) {
	t.Helper()
	p := pool(t, Config{Objective: Objective{TTFT: 1}, Classes: []Class{{Name: "a", Wait: -1}, {Name: "b", Wait: -1}}}, 2)
	blocks := make([]uint64, 750)
	for i := range blocks {
		blocks[i] = uint64(i)*7919 + 1
	}
	p.PrefixStored(1, blocks)
	p.Peers(1, "x", map[fleet.ID]fleet.Load{1: {Requests: 30, Prefilling: 30, PrefillTokens: 58000}, 2: second})
	p.PeerHeld("x", held)
	x := &Ticket{Work: fleet.Work{Model: 1, Prompt: 12000, MaxOut: 10, Blocks: blocks}}
	if d := p.Admit(1, x); d.Verdict != Held {
		t.Fatalf("the request was to wait for the replica that has its prefix: %+v", d)
	}
	return p, x
}

var busy = fleet.Load{Requests: 100, KVTokens: 30000, OutTokens: 10000}

// placedAt is when the request was placed, looking every millisecond.
func placedAt(t *testing.T, p *Pool, x *Ticket) float64 {
	t.Helper()
	for now := 1.0; now < 2; now += 0.001 {
		if len(p.Advance(now, nil)) > 0 {
			if x.Decision.Verdict != Placed || x.Decision.Replica != 2 {
				t.Fatalf("%+v", x.Decision)
			}
			return now - 1
		}
	}
	t.Fatal("never placed")
	return 0
}

func TestAPlaceIsLeftToPeersThatHoldRequests(t *testing.T) {
	for _, c := range []struct {
		name        string
		held        []int
		second      fleet.Load
		least, most float64
	}{
		{"peers hold nothing", nil, busy, 0, 0.01},
		{"a peer holds 40", []int{40}, busy, 0.2, 0.25},
		{"a peer holds 2", []int{2}, busy, 0.02, 0.1},
		{"a peer holds 40 of a lesser class", []int{0, 40}, busy, 0, 0.01},
	} {
		p, x := heldCold(t, c.held, c.second)
		if at := placedAt(t, p, x); at < c.least || at > c.most {
			t.Errorf("%s: placed after %.3f s, want %.3f to %.3f", c.name, at, c.least, c.most)
		}
	}
}

// What a peer held counts only for as long as that peer does.
func TestWhatALostPeerHeldIsForgotten(t *testing.T) {
	p, x := heldCold(t, []int{40}, busy)
	p.Peers(1.05, "y", map[fleet.ID]fleet.Load{1: {Requests: 30, Prefilling: 30, PrefillTokens: 58000}, 2: busy})
	p.Advance(1.05, nil)
	p.Peers(1.06, "x", nil)
	if p.Advance(1.07, nil); x.Decision.Replica != 2 {
		t.Errorf("still waiting for a peer that is gone: %+v", x.Decision)
	}
}

// An idle replica is given to a request that it is not the best one for as soon
// as without peers, whatever they hold.
func TestAnIdleReplicaIsLeftToNobody(t *testing.T) {
	for _, idle := range []bool{true, false} {
		p := pool(t, Config{Objective: Objective{TTFT: 2}, Classes: []Class{{Name: "a", Wait: -1}}}, 2)
		blocks := make([]uint64, 3750)
		for i := range blocks {
			blocks[i] = uint64(i)*7919 + 1
		}
		p.PrefixStored(1, blocks)
		second := fleet.Load{Requests: 1, KVTokens: 100, OutTokens: 100}
		if idle {
			second = fleet.Load{}
		}
		p.Peers(1, "x", map[fleet.ID]fleet.Load{1: {Requests: 30, Prefilling: 30, PrefillTokens: 125000}, 2: second})
		p.PeerHeld("x", []int{100})
		// Its prefix is most of the prompt: to compute it costs more than to wait.
		x := &Ticket{Work: fleet.Work{Model: 1, Prompt: 60000, MaxOut: 10, Blocks: blocks}}
		if d := p.Admit(1, x); d.Verdict != Held {
			t.Fatalf("%+v", d)
		}
		if at := placedAt(t, p, x); idle != (at <= 0.01) {
			t.Errorf("replica 2 idle %v: placed there after %.3f s", idle, at)
		}
	}
}

// With as many held as are looked at there is one for each place, and to leave
// it empty would help nobody.
func TestNoPlaceIsLeftEmptyForAWarmOneWhenManyWait(t *testing.T) {
	for lookAhead, at := range map[int]float64{3: 0, 4: 0.005} {
		p := pool(t, Config{Objective: Objective{TTFT: 1}, Classes: []Class{{Name: "a", Wait: -1}}, LookAhead: lookAhead}, 2)
		blocks := make([]uint64, 750)
		for i := range blocks {
			blocks[i] = uint64(i)*7919 + 1
		}
		p.PrefixStored(1, blocks)
		p.Peers(1, "x", map[fleet.ID]fleet.Load{1: {Requests: 30, Prefilling: 30, PrefillTokens: 58000}, 2: busy})
		for range 3 {
			mustHold(t, p, 1, &Ticket{Work: fleet.Work{Model: 1, Prompt: 12000, MaxOut: 10, Blocks: blocks}})
		}
		first := 0.0
		for now := 1.0; now < 1.5 && first == 0; now += 0.001 {
			for _, x := range p.Advance(now, nil) {
				if x.Decision.Verdict == Placed {
					first = now
				}
			}
		}
		if first < 1+at || first > 1+at+0.005 {
			t.Errorf("looking at %d of 3: placed after %.3f s, want %.3f", lookAhead, first-1, at)
		}
	}
}
