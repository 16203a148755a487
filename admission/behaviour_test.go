package admission

import (
	"testing"

	"github.com/penstock/penstock/fleet"
)

// busyPool has one replica with cap 1 and a request on it: all others wait.
func busyPool(t testing.TB, classes []Class) (*Pool, *Ticket) {
	p := pool(t, Config{Cap: 1, Classes: classes, MaxHeld: 6}, 1)
	first := request(100)
	if p.Admit(1, first).Verdict != Placed {
		t.Fatal("an idle replica did not take a request")
	}
	return p, first
}

func classed(tenant uint32, class uint8, out int) *Ticket {
	return &Ticket{Work: fleet.Work{Model: 1, Tenant: tenant, Class: class, Prompt: 100, MaxOut: out}}
}

func mustHold(t testing.TB, p *Pool, now float64, x *Ticket) *Ticket {
	t.Helper()
	if d := p.Admit(now, x); d.Verdict != Held {
		t.Fatalf("not held: %+v", d)
	}
	return x
}

// next ends the running one and returns who takes its place.
func next(t testing.TB, p *Pool, now float64, running *Ticket) *Ticket {
	t.Helper()
	p.Done(now, running, End{Outcome: Cancelled})
	for _, x := range p.Advance(now, nil) {
		if x.Decision.Verdict == Placed {
			return x
		}
	}
	t.Fatal("nobody took the place")
	return nil
}

func TestMoreImportantClassGoesFirst(t *testing.T) {
	p, run := busyPool(t, []Class{{Name: "a", Wait: 60}, {Name: "b", Wait: 60}})
	low := mustHold(t, p, 1, classed(1, 1, 10))
	high := mustHold(t, p, 1.1, classed(1, 0, 10))
	if got := next(t, p, 1.2, run); got != high {
		t.Fatal("the lower class went first")
	}
	if got := next(t, p, 1.3, high); got != low {
		t.Fatal("the lower class was lost")
	}
}

func TestTenantsShareByWork(t *testing.T) {
	p := pool(t, Config{Cap: 1, Classes: []Class{{Name: "a", Wait: 1e6}}, HangAfter: 1e6}, 1)
	run := classed(9, 0, 10)
	p.Admit(1, run)
	// Tenant 1 floods; tenant 2 asks for a few, later.
	for i := 0; i < 50; i++ {
		mustHold(t, p, 1, classed(1, 0, 100))
	}
	for i := 0; i < 5; i++ {
		mustHold(t, p, 1.1, classed(2, 0, 100))
	}
	first12 := 0
	for i := 0; i < 12; i++ {
		run = next(t, p, 2+float64(i), run)
		if run.Work.Tenant == 2 {
			first12++
		}
	}
	if first12 != 5 {
		t.Fatalf("of 12 places the quiet tenant had %d of its 5", first12)
	}
}

func TestLowClassKeepsItsMinimumShare(t *testing.T) {
	p := pool(t, Config{Cap: 1, Classes: []Class{{Name: "a", Wait: 1e6}, {Name: "b", Wait: 1e6, MinShare: 0.1}}, HangAfter: 1e6}, 1)
	run := classed(1, 0, 100)
	p.Admit(1, run)
	for i := 0; i < 10; i++ {
		mustHold(t, p, 1, classed(2, 1, 100))
	}
	served := 0
	for i := 0; i < 100; i++ {
		mustHold(t, p, 2+float64(i), classed(1, 0, 100)) // the top class always waits too
		run = next(t, p, 2+float64(i), run)
		if run.Work.Class == 1 {
			served++
		}
	}
	if served < 8 || served > 10 {
		t.Fatalf("minimum share 10%%: %d of 100", served)
	}
}

func TestOverflowShedsLeastImportantNewest(t *testing.T) {
	p, _ := busyPool(t, []Class{{Name: "a", Wait: 60}, {Name: "b", Wait: 60}})
	var low []*Ticket
	for i := 0; i < 6; i++ {
		low = append(low, mustHold(t, p, 1, classed(uint32(i), 1, 10)))
	}
	if d := p.Admit(1, classed(7, 1, 10)); d.Verdict != Shed || d.Reason != ReasonQueueFull || d.RetryAfter <= 0 {
		t.Fatalf("a newcomer of the least class to a full queue: %+v", d)
	}
	mustHold(t, p, 1, classed(1, 0, 10))
	out := p.Advance(1, nil)
	if len(out) != 1 || out[0] != low[5] || out[0].Decision.Reason != ReasonQueueFull {
		t.Fatalf("a more important one came: %d were shed", len(out))
	}
}

func TestQuietTenantIsNotShutOutByAFlood(t *testing.T) {
	p, _ := busyPool(t, []Class{{Name: "a", Wait: 60}})
	for i := 0; i < 6; i++ {
		mustHold(t, p, 1, classed(1, 0, 10))
	}
	mustHold(t, p, 1, classed(2, 0, 10))
	if out := p.Advance(1, nil); len(out) != 1 || out[0].Work.Tenant != 1 {
		t.Fatal("the flood of one tenant kept another's only request out")
	}
}

func TestNeverHeldClassIsShedAtOnce(t *testing.T) {
	p, _ := busyPool(t, []Class{{Name: "a", Wait: 60}, {Name: "b", Wait: 0}})
	if d := p.Admit(1, classed(1, 1, 10)); d.Verdict != Shed || d.Reason != ReasonCapacity {
		t.Fatalf("%+v", d)
	}
}

func TestHeadroomIsKeptForTheTopClass(t *testing.T) {
	p := pool(t, Config{HeadroomN1: true, Classes: []Class{{Name: "a", Wait: 60}, {Name: "b", Wait: 60}}, HangAfter: 1e6}, 2)
	n := map[uint8]int{}
	for i := 0; i < 400; i++ {
		x := classed(1, 1, 100)
		x.Work.Prompt = 4000
		if p.Admit(1, x).Verdict == Placed {
			n[1]++
		}
	}
	if n[1] == 0 || n[1] == 400 {
		t.Fatalf("the lower class took %d of 400 places; half is to stay free", n[1])
	}
	if d := p.Admit(1, classed(1, 0, 100)); d.Verdict != Placed {
		t.Fatalf("the top class found no room in what was kept for it: %+v", d)
	}
}

// What a lower class may use of the first one's time is measured as the first
// one's own requests are judged: with the decoding between the prefills.
func TestHeadroomCountsDecodingBetweenPrefills(t *testing.T) {
	p := pool(t, Config{HeadroomN1: true, HangAfter: 1e6, Classes: []Class{
		{Name: "a", Wait: 2, Objective: Objective{TTFT: 0.5}}, {Name: "b", Wait: 60, Objective: Objective{TTFT: 10}}}}, 3)
	flood := func(now float64) (placed []*Ticket) {
		for range 300 {
			x := &Ticket{Work: fleet.Work{Model: 1, Class: 1, Prompt: 1500, MaxOut: 200}}
			if d := p.Admit(now, x); d.Verdict != Placed {
				if d.Verdict == Held {
					p.Leave(now, x)
				}
				break
			}
			placed = append(placed, x)
		}
		return placed
	}
	now, decoding := 1.0, 0
	for range 12 {
		some := flood(now)
		now++
		for _, x := range some {
			p.First(now, x)
		}
		decoding += len(some)
	}
	if n := len(flood(now)); decoding < 30 {
		t.Fatalf("%d decode and %d are before their first token: no such load", decoding, n)
	}
	if d := p.Admit(now, &Ticket{Work: fleet.Work{Model: 1, Class: 0, Prompt: 400, MaxOut: 50}}); d.Verdict != Placed {
		t.Errorf("beside %d of the lower class the first one gets %+v", decoding, d)
	}
}

func TestReasonsOfRefusal(t *testing.T) {
	p := pool(t, Config{}, 1)
	p.Join(0, ReplicaSpec{ID: 1, Models: []uint32{1}, Caps: 1, Region: 2, Profile: h100(), Warm: true})
	for _, c := range []struct {
		w    fleet.Work
		want Reason
	}{
		{fleet.Work{Model: 2, Prompt: 10}, ReasonNoReplica},
		{fleet.Work{Model: 1, Prompt: 10, Needs: 2}, ReasonNotPermitted},
		{fleet.Work{Model: 1, Prompt: 10, Regions: 4}, ReasonNotPermitted},
		{fleet.Work{Model: 1, Prompt: 1_000_000}, ReasonTooLong},
		{fleet.Work{Model: 1, Prompt: 10, Exclude: [4]fleet.ID{1}, Excluded: 1}, ReasonExhausted},
	} {
		if d := p.Admit(1, &Ticket{Work: c.w}); d.Verdict != Shed || d.Reason != c.want {
			t.Errorf("%+v: %+v, want %v", c.w, d, c.want)
		}
	}
	p.Evidence(1, 1, fleet.EvidenceProbeRefused)
	if d := p.Admit(1, request(10)); d.Reason != ReasonNoReplica {
		t.Errorf("the only replica is gone: %+v", d)
	}
}

func TestHungReplicaIsEjectedAndItsRequestsReturn(t *testing.T) {
	p := pool(t, Config{}, 2)
	a := request(1000)
	id := p.Admit(1, a).Replica
	s := fleet.Sample{At: 1, Steps: 10, PromptTokens: 100, OutputTokens: 100}
	p.Observe(1, id, s)
	s.Steps, s.At = 20, 1.2
	p.Observe(1.2, id, s) // it did work
	for now := 1.4; now < 8; now += 0.2 {
		s.At = now
		p.Observe(now, id, s) // frozen: the page answers, nothing moves
		p.Advance(now, nil)
		if out := p.Revoked(nil); len(out) > 0 {
			if now > 6.5 || out[0] != a {
				t.Fatalf("revoked at %v", now)
			}
			p.Done(now, a, End{Outcome: Failed, Evidence: fleet.EvidenceReset})
			a.Work.Exclude[0], a.Work.Excluded = id, 1
			if d := p.Admit(now, a); d.Verdict != Placed || d.Replica == id {
				t.Fatalf("second attempt: %+v", d)
			}
			return
		}
	}
	t.Fatal("a hung replica was not seen within 6.5 s")
}

func TestBusyEngineIsNotHung(t *testing.T) {
	p := pool(t, Config{}, 1)
	a := request(30_000)
	p.Admit(1, a)
	s := fleet.Sample{At: 1, Steps: 10, PromptTokens: 100, OutputTokens: 100}
	for now := 1.0; now < 60; now += 0.5 {
		s.At = now
		s.Steps++ // no byte for a minute, and yet it works
		p.Observe(now, 1, s)
		p.Advance(now, nil)
		if out := p.Revoked(nil); len(out) > 0 {
			t.Fatalf("revoked at %v while the engine's steps moved", now)
		}
	}
}

func TestKilledReplicaIsUsedAgainWithinTwoSecondsOfItsReturn(t *testing.T) {
	p := pool(t, Config{}, 3)
	p.Evidence(1, 2, fleet.EvidenceProbeRefused)
	now := 1.0
	for ; now < 20; now += 0.25 {
		p.Evidence(now, 2, fleet.EvidenceProbeRefused)
		a := request(200)
		if d := p.Admit(now, a); d.Replica == 2 {
			t.Fatal("a request went to the dead replica")
		}
		p.Done(now+0.1, a, End{Outcome: Finished})
	}
	back := now
	used := 0
	for ; now < back+2; now += 0.05 {
		if int(now*20)%10 == 0 {
			p.Evidence(now, 2, fleet.EvidenceProbeOK)
		}
		a := request(200)
		if d := p.Admit(now, a); d.Replica == 2 {
			used++
		}
		p.First(now+0.03, a)
		p.Done(now+0.04, a, End{Outcome: Finished, Completion: 3})
	}
	if used < 2 {
		t.Fatalf("%d requests in the 2 s after its return", used)
	}
}

func TestBusyReplicaGetsOneProbeRequestPerWindow(t *testing.T) {
	p := pool(t, Config{}, 2)
	sent := 0
	for now := 1.0; now < 31; now += 0.1 {
		a := request(200)
		if d := p.Admit(now, a); d.Replica == 1 {
			sent++
			p.Done(now, a, End{Outcome: Failed, Evidence: fleet.EvidenceBusy, RetryAfter: 5})
			continue
		}
		p.First(now+0.02, a)
		p.Done(now+0.03, a, End{Outcome: Finished})
	}
	if sent < 3 || sent > 7 {
		t.Fatalf("%d requests in 30 s to a replica that always says: come back in 5 s", sent)
	}
}

func TestSlowReplicaIsEjectedButNotTheFleet(t *testing.T) {
	p := pool(t, Config{}, 4)
	slow := map[fleet.ID]bool{2: true}
	toSlow, all := 0, 0
	type run struct {
		t  *Ticket
		at float64
	}
	var open []run
	for now := 1.0; now < 30; now += 0.02 {
		for i := 0; i < len(open); i++ {
			if open[i].at <= now {
				p.First(now, open[i].t)
				p.Done(now, open[i].t, End{Outcome: Finished, Completion: 5})
				open[i] = open[len(open)-1]
				open = open[:len(open)-1]
				i--
			}
		}
		a := request(1000)
		d := p.Admit(now, a)
		if d.Verdict != Placed {
			t.Fatalf("%+v", d)
		}
		took := 0.03
		if slow[d.Replica] {
			took = 0.6
		}
		if now > 6 {
			all++
			if slow[d.Replica] {
				toSlow++
			}
		}
		open = append(open, run{a, now + took})
	}
	if float64(toSlow) > 0.02*float64(all) {
		t.Fatalf("%d of %d requests went to the 20x slower replica after 5 s", toSlow, all)
	}
	for _, o := range open {
		p.Done(30, o.t, End{Outcome: Finished})
	}
	// All slow: nobody is slower than the others, nobody is ejected.
	for id := fleet.ID(1); id <= 4; id++ {
		slow[id] = true
	}
	for now := 30.0; now < 50; now += 0.5 {
		a := request(1000)
		p.Admit(now, a)
		p.First(now+0.45, a)
		p.Done(now+0.46, a, End{Outcome: Finished, Completion: 5})
	}
	open4 := 0
	for i := range p.View().Replicas {
		if p.View().Replicas[i].Health.Open() {
			open4++
		}
	}
	if open4 < 3 {
		t.Fatalf("a fleet that is slow as a whole has %d of 4 replicas left", open4)
	}
}

// A replica that is five times slower from one moment to the next gets few
// requests to be judged by, and a mean over the calm before believes it late.
func TestSuddenlySlowReplicaIsEjectedWithinAFewRequests(t *testing.T) {
	p := pool(t, Config{}, 3)
	toSlow := 0
	for now, n := 1.0, 0; now < 30; now, n = now+0.4, n+1 {
		a := request(1000)
		d := p.Admit(now, a)
		if d.Verdict != Placed {
			t.Fatalf("%+v", d)
		}
		took := 0.06
		if d.Replica == 2 && now > 20 {
			took = 0.33
			toSlow++
		}
		p.First(now+took, a)
		p.Done(now+took+0.01, a, End{Outcome: Finished, Completion: 5})
	}
	if toSlow > slowRun+1 { // and one trial
		t.Fatalf("%d requests went to the replica that is slow of a sudden", toSlow)
	}
	if h := p.View().Replicas[1].Health; toSlow >= slowRun && h.Open() {
		t.Fatalf("after %d slow answers it is %v", toSlow, h.State)
	}
}

func TestFailOpenWhenAllAnswerBadly(t *testing.T) {
	p := pool(t, Config{}, 2)
	for i := 0; i < 6; i++ {
		a := request(10)
		if p.Admit(1, a).Verdict == Placed {
			p.Done(1, a, End{Outcome: Failed, Evidence: fleet.EvidenceStatus5xx})
		}
	}
	if d := p.Admit(1.1, request(10)); d.Verdict != Placed || p.Stats().Panics == 0 {
		t.Fatalf("all replicas answered 500: %+v, %d panics", d, p.Stats().Panics)
	}
}

func TestStalePeersAreCorrected(t *testing.T) {
	p := pool(t, Config{}, 1)
	p.Peers(1, "x", map[fleet.ID]fleet.Load{1: {Requests: 3, PrefillTokens: 300, KVTokens: 300}})
	p.Peers(1, "y", map[fleet.ID]fleet.Load{1: {Requests: 1}})
	v := &p.View().Replicas[0]
	if v.Peers.Requests != 4 {
		t.Fatalf("peers have %d", v.Peers.Requests)
	}
	var sent []*Ticket
	for n := 1; n <= 40; n++ {
		a := request(100)
		p.Admit(1.1, a)
		sent = append(sent, a)
		switch got := v.Peers.Requests; {
		case n == 1 && got > 5: // one request says little of two others
			t.Fatalf("after one own placement peers are supposed to have %d", got)
		case n == 40 && (got < 4+70 || got > 4+80): // each of the two is supposed to have done the same
			t.Fatalf("after 40 own placements peers are supposed to have %d", got)
		}
	}
	for _, a := range sent {
		p.Done(1.2, a, End{Outcome: Finished})
	}
	p.Peers(1.3, "x", nil)
	p.Peers(1.3, "y", nil)
	if v.Peers != (fleet.Load{}) {
		t.Fatalf("peers that left keep %+v", v.Peers)
	}
}

func TestOperatorsDrainOutlastsProbes(t *testing.T) {
	p := pool(t, Config{}, 2)
	p.Drain(1, 1, true)
	for now := 1.0; now < 1000; now += 10 {
		p.Evidence(now, 1, fleet.EvidenceProbeOK)
		a := request(10)
		if d := p.Admit(now, a); d.Replica != 2 {
			t.Fatalf("%+v", d)
		}
		p.Done(now+1, a, End{Outcome: Finished})
	}
	p.Drain(1000, 1, false)
	if !p.View().Replicas[0].Health.Open() {
		t.Fatal("the drain is over and it takes nothing")
	}
}

func TestPromptEstimateLearnsBothAlphabets(t *testing.T) {
	p := pool(t, Config{}, 1)
	for i := 0; i < 300; i++ {
		ascii, other := 1000+i*37%500, i*91%2000
		a := &Ticket{Work: fleet.Work{Model: 7, Prompt: 10, ASCII: ascii, Other: other}}
		p.Admit(float64(i)+1, a)
		p.Done(float64(i)+1, a, End{Outcome: Finished, Prompt: ascii/5 + other/2, Completion: 1})
	}
	if n := p.EstimatePrompt(7, 5000, 2000); n < 1900 || n > 2100 {
		t.Fatalf("5,000 ASCII bytes and 2,000 others are 2,000 tokens, estimated %d", n)
	}
}

// Replicas that all say the same few requests for ever (case P12): samples
// that come in the middle of the first burst do not set them apart.
func TestFirstBurstIsSpreadThoughSamplesComeApart(t *testing.T) {
	p := pool(t, Config{}, 3)
	sample := func(at float64, id fleet.ID) {
		p.Observe(at, id, fleet.Sample{At: at, Running: 2, Waiting: 2, KVUsage: 0.3})
	}
	for id := fleet.ID(1); id <= 3; id++ {
		sample(1, id)
		sample(1.5, id)
	}
	got := map[fleet.ID]int{}
	for i := range 45 {
		now := 2 + float64(i)*0.002
		d := p.Admit(now, request(2))
		if d.Verdict != Placed {
			t.Fatalf("%+v", d)
		}
		got[d.Replica]++
		if i == 8 { // one page is read now; the others' turn is after the burst
			sample(now, d.Replica)
		}
	}
	for id := fleet.ID(1); id <= 3; id++ {
		if got[id] < 9 || got[id] > 27 {
			t.Fatalf("the burst was spread %v", got)
		}
	}
}

// What the loss of the only replica would need cannot be kept free, and an idle
// replica is nobody's headroom, whatever its prefix cache holds.
func TestHeadroomDoesNotShutOutWhereNothingRuns(t *testing.T) {
	for _, n := range []int{1, 2} {
		p := pool(t, Config{HeadroomN1: true, Classes: []Class{{Name: "a", Wait: 60}, {Name: "b", Wait: 60}}}, n)
		for id := range n {
			for k := range 30 {
				p.Observe(1+float64(k), fleet.ID(id+1), fleet.Sample{At: 1 + float64(k), KVUsage: 0.95, Steps: 5, PromptTokens: 5, OutputTokens: 5})
			}
		}
		if d := p.Admit(40, classed(1, 1, 100)); d.Verdict != Placed {
			t.Errorf("%d idle replicas: %+v", n, d)
		}
	}
}
