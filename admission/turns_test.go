package admission

import (
	"math"
	"testing"

	"github.com/penstock/penstock/fleet"
)

// overloaded is a pool with a cap of one whose queue of two is full, and the
// measured rate of a request each second.
func overloaded(t testing.TB) (p *Pool, now float64, running *Ticket) {
	p = pool(t, Config{Cap: 1, MaxHeld: 2, Classes: []Class{{Name: "a", Wait: 1e6}}, HangAfter: 1e6}, 1)
	running = classed(1, 0, 100)
	p.Admit(1, running)
	for i := range 2 {
		mustHold(t, p, 1+0.1*float64(i), classed(1, 0, 100))
	}
	for now = 2; now < 12; now++ {
		running = next(t, p, now, running)
		mustHold(t, p, now, classed(1, 0, 100))
	}
	return p, now, running
}

func refused(t testing.TB, p *Pool, now float64, print uint64) float64 {
	t.Helper()
	x := classed(1, 0, 100)
	x.Work.Print = print
	d := p.Admit(now, x)
	if d.Verdict != Shed || d.RetryAfter <= 0 {
		t.Fatalf("not refused: %+v", d)
	}
	p.Told(x, print)
	return d.RetryAfter
}

// A client that returns when it was told to goes before those that came while
// it was away, even when the queue is full of them; one that is too early, or
// whose turn was had already, does not.
func TestTurnOfARefusedClientIsKept(t *testing.T) {
	for _, c := range []struct {
		name  string
		print uint64
		at    float64 // of the wait that was told
		first bool
	}{{"in time", 7, 1, true}, {"a little late", 7, 1.2, true}, {"too early", 7, 0.5, false}, {"another client", 8, 1, false}, {"far too late", 7, 100, false}} {
		p, now, running := overloaded(t)
		wait := refused(t, p, now, 7)
		running = next(t, p, now+0.01, running) // one place in the queue is free
		x := classed(1, 0, 100)
		x.Work.Print = c.print
		mustHold(t, p, now+c.at*wait, x)
		if got := next(t, p, now+c.at*wait+0.1, running) == x; got != c.first {
			t.Errorf("%s: goes first %v", c.name, got)
		}
		if c.first {
			y := classed(1, 0, 100)
			y.Work.Print = c.print
			if p.Admit(now+c.at*wait+0.2, y); y.first {
				t.Errorf("%s: a turn was had twice", c.name)
			}
		}
	}
}

// Many that are refused together are told to return one after another, no
// faster than the share that is kept for them, and as far apart as that needs.
func TestRefusedTogetherReturnApart(t *testing.T) {
	p, now, _ := overloaded(t)
	const n = 60
	var waits [n]float64
	for i := range waits {
		waits[i] = refused(t, p, now, uint64(i+1))
	}
	perSecond := returnShare * 1 // a request each second is what the replica takes
	for i, w := range waits {
		straight := 2 + float64(i)/perSecond
		if w < mostWait && math.Abs(w/straight-1) > jitter+0.12 {
			t.Errorf("refused as number %d: told %.1f s, its turn is in %.1f s", i, w, straight)
		}
		if w > mostWait {
			t.Errorf("told %g s", w)
		}
	}
}

// Where nobody ever returns, the next ones are told the wait in the queue alone
// again.
func TestWhoNeverReturnsIsNotWaitedFor(t *testing.T) {
	p, now, running := overloaded(t)
	first := refused(t, p, now, 0)
	for i := range 400 {
		now += 0.5
		refused(t, p, now, uint64(i+1))
		if i%2 == 0 {
			running = next(t, p, now, running)
			mustHold(t, p, now, classed(1, 0, 100))
		}
	}
	if w := refused(t, p, now, 0); w > 2*first {
		t.Errorf("told %g s at first, %g s after 400 that never returned", first, w)
	}
}

func TestTurnsAreBounded(t *testing.T) {
	var q turns
	q.init(1)
	for i := range uint64(3 * maxTurns) {
		q.name(q.add(1, 10, 0, 100), i+1)
	}
	if len(q.list) != maxTurns || len(q.byPrint) != maxTurns || q.work[0] != 100*maxTurns {
		t.Errorf("%d turns, %d prints, %g work", len(q.list), len(q.byPrint), q.work[0])
	}
	if q.back(11, 1) || !q.back(11, 3*maxTurns) || q.back(11, 3*maxTurns) {
		t.Error("the oldest turn was kept, or the newest was not, or was had twice")
	}
	q.roll(1000)
	if len(q.list) != 0 || len(q.byPrint) != 0 || q.work[0] != 0 {
		t.Errorf("when all are over: %d turns, %d prints, %g work", len(q.list), len(q.byPrint), q.work[0])
	}
}

// A lower class waits for the ones above it, also for those of them that will
// be back, and its Retry-After says so.
func TestLowerClassIsToldALongerWait(t *testing.T) {
	p := pool(t, Config{Cap: 1, MaxHeld: 4, Classes: []Class{{Name: "a", Wait: 1e6}, {Name: "b", Wait: 1e6}}, HangAfter: 1e6}, 1)
	running := classed(1, 0, 100)
	p.Admit(1, running)
	for now := 1.0; now < 12; now++ {
		for p.Stats().Held < 4 {
			mustHold(t, p, now, classed(1, 0, 100))
		}
		running = next(t, p, now+0.5, running)
	}
	mustHold(t, p, 12, classed(1, 0, 100))
	high, low := p.Admit(12, classed(1, 0, 100)), p.Admit(12, &Ticket{Work: fleet.Work{Model: 1, Tenant: 1, Class: 1, Prompt: 100, MaxOut: 100}})
	if high.Verdict != Shed || low.Verdict != Shed || low.RetryAfter < high.RetryAfter {
		t.Errorf("the class above is told %+v, the one below %+v", high, low)
	}
}

// What a quiet time asks for is not what the replicas can do: the first wait
// after it is told by what could leave, not by how little did.
func TestQuietTimeDoesNotLengthenTheForecast(t *testing.T) {
	busy, now, _ := overloaded(t)
	want := refused(t, busy, now, 7)

	p, now, running := overloaded(t)
	for range 2 { // the queue empties
		running = next(t, p, now, running)
		now++
	}
	p.Done(now, running, End{Outcome: Finished})
	for range 600 { // one request in ten seconds
		now += 10
		x := classed(1, 0, 100)
		p.Admit(now, x)
		if x.Decision.Verdict != Placed {
			t.Fatalf("not placed in a quiet time: %+v", x.Decision)
		}
		p.Done(now+0.5, x, End{Outcome: Finished})
	}
	now += 10
	p.Admit(now, classed(1, 0, 100))
	for range 2 {
		mustHold(t, p, now, classed(1, 0, 100))
	}
	if got := refused(t, p, now, 7); got > 2*want || got < want/2 {
		t.Errorf("Retry-After after a quiet time %.2f s, without one %.2f s", got, want)
	}
}

// Nor is the time before the first request of all.
func TestIdleStartDoesNotLengthenTheForecast(t *testing.T) {
	busy, now, _ := overloaded(t)
	want := refused(t, busy, now, 7)
	p := pool(t, Config{Cap: 1, MaxHeld: 2, Classes: []Class{{Name: "a", Wait: 1e6}}, HangAfter: 1e6}, 1)
	now = 3600
	p.Admit(now, classed(1, 0, 100))
	for now += 0.4; now < 3601.5; now += 0.4 {
		if p.Stats().Held < 2 {
			mustHold(t, p, now, classed(1, 0, 100))
			continue
		}
		if got := refused(t, p, now, uint64(now*10)); got > 20*want {
			t.Errorf("Retry-After %.1f s, %.1f s after the first request; in a busy pool %.1f s", got, now-3600, want)
		}
	}
}
