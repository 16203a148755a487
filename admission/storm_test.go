package admission

import (
	"testing"

	"github.com/penstock/penstock/fleet"
)

// Whatever fails together, the repeats that clients are told to make come one
// after another, and with the router's own attempts they keep the bound.
func TestRepeatsOfWhatFailedTogetherAreSpread(t *testing.T) {
	b := NewAttemptBudget(BudgetConfig{})
	for i := range 600 {
		b.Request(float64(i) / 60)
	}
	last, first := 0.0, 0.0
	for i := range 100 {
		wait, ok := b.Later(10)
		if !ok || wait < laterLeast || i > 0 && wait <= last {
			t.Fatalf("repeat %d: in %v s, the one before in %v (%v)", i, wait, last, ok)
		}
		if i == 0 {
			first = wait
		}
		last = wait
	}
	if last-first < 1 || last > 10 {
		t.Errorf("100 repeats come from %.2f to %.2f s: in step, or much later than the budget asks", first, last)
	}
	// They are extra attempts when they come, and leave that much less to the router.
	for range 100 {
		b.Repeated(10)
	}
	allowed := 0
	for b.Allow(10) {
		allowed++
	}
	if allowed > 20 {
		t.Errorf("the router may make %d attempts more after 100 repeats of 600 requests", allowed)
	}
	b.Unused()
	if !b.Allow(10) || b.Allow(10) {
		t.Error("an attempt that was not made is not given back, or more than it")
	}
}

// A request that was allowed another attempt may wait for a place before it is
// known that no replica takes it.
func TestAnAttemptIsGivenBackHoweverLate(t *testing.T) {
	b := NewAttemptBudget(BudgetConfig{})
	for b.Allow(10) {
	}
	if b.Allow(12) {
		t.Fatal("more than the bound")
	}
	b.Unused()
	if !b.Allow(12) || b.Allow(12) {
		t.Error("an attempt that was not made is not given back two seconds later, or more than it")
	}
	b.Allow(40)
	b.Unused()
	b.Unused() // that one's window has passed
	if _, n, _ := b.Totals(40); n != 0 {
		t.Errorf("%v extra attempts are counted", n)
	}
}

func TestNoPromiseFurtherAwayThanAClientWaits(t *testing.T) {
	b := NewAttemptBudget(BudgetConfig{Floor: 1})
	refused := 0
	for range 500 {
		if wait, ok := b.Later(5); !ok {
			refused++
		} else if wait > laterMost {
			t.Fatalf("told to come in %v s", wait)
		}
	}
	if refused < 300 {
		t.Errorf("only %d of 500 refused at one attempt a second", refused)
	}
	if wait, ok := b.Later(500); !ok || wait > 2 {
		t.Errorf("long after it: %v %v", wait, ok)
	}
}

// A repeat that was never promised (its first was shed) had no attempt yet.
func TestARepeatOfAShedRequestIsNoExtraAttempt(t *testing.T) {
	b := NewAttemptBudget(BudgetConfig{})
	for range 100 {
		b.Repeated(1)
	}
	if requests, extra, _ := b.Totals(1); requests != 100 || extra != 0 {
		t.Errorf("%v requests, %v extra attempts", requests, extra)
	}
}

// A second attempt is not spent on a replica that fails as well just now; an
// ordinary request goes there.
func TestASecondAttemptAvoidsWhoFailsToo(t *testing.T) {
	p := pool(t, Config{}, 2)
	fail := func(now float64, id fleet.ID) {
		for {
			x := request(10)
			d := p.Admit(now, x)
			e := End{Outcome: Cancelled}
			if d.Replica == id {
				e = End{Outcome: Failed, Evidence: fleet.EvidenceStatus5xx}
			}
			p.Done(now, x, e)
			if d.Replica == id {
				return
			}
		}
	}
	fail(1, 2)
	again := request(10)
	again.Work.Exclude[0], again.Work.Excluded = 1, 1
	if d := p.Admit(1.1, again); d.Verdict != Shed || d.Reason != ReasonExhausted {
		t.Fatalf("0.1 s after replica 2 failed: %+v", d)
	}
	if !p.Proven(1.1, 1, &again.Work) {
		t.Error("no place without doubt: there is nothing to wait for")
	}
	// It answers a later request: no doubt any more.
	for {
		x := request(10)
		if d := p.Admit(1.2, x); d.Replica != 2 {
			p.Done(1.2, x, End{Outcome: Cancelled})
			continue
		}
		if p.Proven(1.25, 1.19, &fleet.Work{Model: x.Work.Model, Exclude: [4]fleet.ID{1}, Excluded: 1}) != true {
			t.Error("replica 2 is in doubt, the only other is excluded: nothing to wait for")
		}
		p.First(1.3, x)
		if !p.Proven(1.3, 1.19, &again.Work) {
			t.Error("replica 2 answers, and that is no proof")
		}
		p.Done(1.4, x, End{Outcome: Finished})
		break
	}
	if d := p.Admit(1.5, again); d.Verdict != Placed || d.Replica != 2 {
		t.Errorf("replica 2 works again: %+v", d)
	}
	p.Done(1.6, again, End{Outcome: Finished})
	// And a failure is forgotten by time alone.
	fail(3, 2)
	late := request(10)
	late.Work.Exclude[0], late.Work.Excluded = 1, 1
	if d := p.Admit(4.1, late); d.Verdict != Placed {
		t.Errorf("1.1 s after a single failure: %+v", d)
	}
}

// When every replica is ejected as hung, none is left alone for its whole
// ejection: one request at a time tries.
func TestAllOutIsTriedEarly(t *testing.T) {
	p := pool(t, Config{}, 2)
	p.Evidence(19, 1, fleet.EvidenceStalled)
	p.Evidence(19, 2, fleet.EvidenceStalled) // both for 5 s
	if d := p.Admit(19.5, request(10)); d.Verdict == Placed {
		t.Fatalf("half a second after it hung: %+v", d)
	}
	p.Advance(20.2, nil)
	a, b := request(10), request(10)
	if d := p.Admit(20.5, a); d.Verdict != Placed {
		t.Fatalf("a second later nobody tries: %+v, %+v", d, p.View().Replicas)
	}
	if d := p.Admit(20.5, b); d.Verdict == Placed && d.Replica == a.Decision.Replica {
		t.Errorf("two at once at a replica that was hung: %+v", d)
	}
	if p.Stats().Panics == 0 {
		t.Error("it is not counted")
	}
	p.First(20.6, a)
	p.Done(20.7, a, End{Outcome: Finished})
	p.Advance(20.8, nil)
	if d := b.Decision; d.Verdict != Placed || d.Replica != a.Decision.Replica {
		t.Errorf("it answered, and is not used: %+v", d)
	}
}

func TestFreeIsWhatTrafficCanUse(t *testing.T) {
	p := pool(t, Config{}, 2)
	if f := p.Free(); f != 1 {
		t.Errorf("an idle pool has %v free", f)
	}
	for range 20 {
		p.Admit(1, request(2000))
	}
	some := p.Free()
	if some <= 0 || some >= 1 {
		t.Errorf("a busy pool has %v free", some)
	}
	p.Evidence(1, 1, fleet.EvidenceProbeRefused)
	p.Evidence(1, 2, fleet.EvidenceProbeRefused)
	if f := p.Free(); f != 0 {
		t.Errorf("a pool without a replica has %v free", f)
	}
}

// Never more than half of the fleet is taken out of service for bad answers:
// what finds no room with the rest goes to the ejected ones, and is counted.
func TestAFleetIsNotEjectedAway(t *testing.T) {
	const n = 10
	p := pool(t, Config{Cap: 2}, n)
	eject := func(id fleet.ID) {
		for range 3 {
			for {
				x := request(10)
				d := p.Admit(1, x)
				if d.Verdict != Placed {
					t.Fatalf("replica %d gets nothing: %+v", id, d)
				}
				e := End{Outcome: Cancelled}
				if d.Replica == id {
					e = End{Outcome: Failed, Evidence: fleet.EvidenceStatus5xx}
				}
				p.Done(1, x, e)
				if d.Replica == id {
					break
				}
			}
		}
		if s := p.View().Replicas[id-1].Health.State; s != fleet.StateEjected {
			t.Fatalf("replica %d is %v", id, s)
		}
	}
	fill := func() (placed int, used map[fleet.ID]bool) {
		var all []*Ticket
		used = map[fleet.ID]bool{}
		for range 2 * n {
			x := request(10)
			if d := p.Admit(1, x); d.Verdict == Placed {
				placed++
				used[d.Replica] = true
			}
			all = append(all, x)
		}
		for _, x := range all {
			if x.Decision.Verdict == Placed {
				p.Done(1, x, End{Outcome: Cancelled})
			} else {
				p.Leave(1, x)
			}
		}
		return placed, used
	}
	for id := fleet.ID(1); id <= 5; id++ {
		eject(id)
	}
	if placed, used := fill(); placed != 2*5 || used[1] || p.Stats().Panics != 0 {
		t.Errorf("half is out: %d placed at %v, %d fail-open", placed, used, p.Stats().Panics)
	}
	eject(6)
	placed, used := fill()
	if placed != 2*n || len(used) != n {
		t.Errorf("six of ten are out: %d of %d placed, at %d replicas", placed, 2*n, len(used))
	}
	if got := p.Stats().Panics; got != 2*6 {
		t.Errorf("%d placements are counted as fail-open, want 12: those in service are filled first", got)
	}
}

// A second attempt goes to another failure domain, when one has room.
func TestASecondAttemptLeavesTheFailureDomain(t *testing.T) {
	p := New(Config{Cap: 1})
	for id := fleet.ID(1); id <= 4; id++ { // 1, 2, 3 in one rack, 4 in another
		p.Join(0, ReplicaSpec{ID: id, Name: "r", Profile: h100(), Warm: true, Domain: 1 + uint32(id)/4})
	}
	second := func() *Ticket {
		x := request(10)
		x.Work.Exclude[0], x.Work.Excluded = 1, 1
		return x
	}
	a, b := second(), second()
	if d := p.Admit(1, a); d.Replica != 4 {
		t.Errorf("replica 1 failed; the next attempt is at %+v, in the same rack", d)
	}
	if d := p.Admit(1, b); d.Verdict != Placed || d.Replica == 4 || d.Replica == 1 {
		t.Errorf("the other rack is full: %+v", d)
	}
}

// The first answer of a process that was just started may take seconds; a
// replica that was hung before has no such time.
func TestATrialOfANewProcessHasPatience(t *testing.T) {
	for reason, wantOut := range map[fleet.Evidence]bool{fleet.EvidenceProbeRefused: false, fleet.EvidenceStalled: true} {
		p := pool(t, Config{}, 1)
		s := fleet.Sample{At: 1, Steps: 10, PromptTokens: 100, OutputTokens: 100}
		p.Observe(1, 1, s)
		s.At, s.Steps = 1.2, 20
		p.Observe(1.2, 1, s) // it did work
		p.Evidence(2, 1, reason)
		p.Advance(8, nil)
		p.Evidence(8, 1, fleet.EvidenceProbeOK)
		a := request(10)
		if d := p.Admit(8.1, a); d.Verdict != Placed {
			t.Fatalf("%v: no trial: %+v", reason, p.View().Replicas[0].Health)
		}
		for now := 8.2; now < 11; now += 0.2 {
			s.At = now
			p.Observe(now, 1, s)
			p.Advance(now, nil)
		}
		if out := p.View().Replicas[0].Health.State == fleet.StateEjected; out != wantOut {
			t.Errorf("%v: 2.9 s without a token, and ejected is %v", reason, out)
		}
	}
}
