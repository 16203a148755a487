package admission

import (
	"testing"

	"github.com/penstock/penstock/fleet"
)

// stopped is a pool whose replicas all work until time 2, with requests at each
// of them, and from then on say nothing.
type stopped struct {
	p    *Pool
	sent []*Ticket
	n    fleet.ID
}

func stopAll(t *testing.T, n fleet.ID, change func(*fleet.Work)) *stopped {
	s := &stopped{p: pool(t, Config{}, int(n)), n: n}
	for now := 1.0; now <= 2; now += 0.25 {
		for id := fleet.ID(1); id <= n; id++ {
			s.p.Observe(now+0.05*float64(id), id, s.page(now))
		}
	}
	for range 10 * n {
		a := request(60)
		a.Work.Deadline = 60
		if change != nil {
			change(&a.Work)
		}
		if d := s.p.Admit(2, a); d.Verdict != Placed {
			t.Fatalf("%+v", d)
		}
		s.sent = append(s.sent, a)
	}
	return s
}

func (s *stopped) page(now float64) fleet.Sample {
	return fleet.Sample{At: now, Steps: 100 * now, PromptTokens: 100 * now, OutputTokens: 100 * now}
}

// silent lets time pass in which no replica but those in alive shows anything:
// each one's probe and page fail every second, one after another.
func (s *stopped) silent(from, to float64, alive ...fleet.ID) (back []*Ticket) {
	for k := 1; ; k++ {
		now := from + 0.05*float64(k)
		if now > to {
			return back
		}
		for id := fleet.ID(1); id <= s.n; id++ {
			up := false
			for _, a := range alive {
				up = up || a == id
			}
			switch {
			case up && k%5 == 0:
				s.p.Observe(now, id, s.page(now))
			case !up && (k+4*int(id))%20 == 0:
				s.p.Evidence(now, id, fleet.EvidenceScrapeFailed)
				s.p.Evidence(now, id, fleet.EvidenceProbeFailed)
			}
		}
		s.p.Advance(now, nil)
		back = s.p.Revoked(back)
	}
}

// ejected counts the replicas that take no traffic.
func (s *stopped) ejected() (n int) {
	for i := range s.p.view.Replicas {
		if !s.p.view.Replicas[i].Health.Open() {
			n++
		}
	}
	return n
}

// When all replicas stand still at once, no request is taken back: no other
// replica could have it. When they go on, each has its answer where it is.
func TestAFleetThatStandsStillKeepsItsRequests(t *testing.T) {
	for _, n := range []fleet.ID{1, 2, 8} {
		s := stopAll(t, n, nil)
		if back := s.silent(2, 8); len(back) > 0 {
			t.Fatalf("%d replicas: %d of %d requests are taken back in 6 s", n, len(back), len(s.sent))
		}
		if s.ejected() != int(n) {
			t.Fatalf("%d of %d replicas are out: new requests would go there", s.ejected(), n)
		}
		for k, a := range s.sent { // they go on, one after another
			now := 8.1 + 0.1*float64(a.Decision.Replica) + 0.001*float64(k)
			s.p.First(now, a)
			s.p.Advance(now, nil)
			if back := s.p.Revoked(nil); len(back) > 0 {
				t.Fatalf("%d replicas: %d requests are taken back when the fleet goes on", n, len(back))
			}
		}
		a := request(10)
		if d := s.p.Admit(9.5, a); d.Verdict != Placed {
			t.Fatalf("%d replicas: the fleet goes on, and a new request: %+v", n, d)
		}
		s.sent = append(s.sent, a)
		for _, a := range s.sent {
			s.p.Done(10, a, End{Outcome: Finished})
		}
	}
}

// As soon as another replica could have them, they are taken back: one that was
// never silent at once, one that has come back when the others have had a moment
// to do as it did.
func TestASilentReplicaKeepsNothingThatAnotherCouldHave(t *testing.T) {
	s := stopAll(t, 3, nil)
	for _, a := range s.silent(2, 5, 3) {
		if a.Decision.Replica == 3 {
			t.Error("one is taken back from the replica that works")
		}
		s.p.Done(5, a, End{Outcome: Failed, Evidence: fleet.EvidenceStalled})
	}
	if n := s.p.view.Replicas[0].Own.Requests + s.p.view.Replicas[1].Own.Requests; n > 0 {
		t.Errorf("%d are left at the two that hang", n)
	}

	s = stopAll(t, 3, nil)
	if back := s.silent(2, 6); len(back) > 0 {
		t.Fatalf("%d are taken back", len(back))
	}
	for _, a := range s.sent {
		if a.Decision.Replica == 3 {
			s.p.First(6.1, a)
		}
	}
	a := request(10)
	if d := s.p.Admit(6.2, a); d.Replica != 3 {
		t.Fatalf("replica 3 is back: %+v", d)
	}
	s.p.First(6.3, a)
	if back := s.silent(6.3, 7, 3); len(back) > 0 {
		t.Errorf("%d are taken back in the first moment", len(back))
	}
	if back := s.silent(7, 8, 3); len(back) != 20 {
		t.Errorf("%d of the 20 at the two that hang are taken back", len(back))
	}
}

// A replica that is gone, not silent, keeps nothing; nor do requests wait that
// have somewhere else to go; nor does anyone for ever.
func TestASilentFleetKeepsNothingInVain(t *testing.T) {
	s := stopAll(t, 2, nil)
	s.silent(2, 6)
	s.p.Evidence(6, 1, fleet.EvidenceProbeRefused) // its process has ended meanwhile
	for _, a := range s.silent(6, 7) {
		if a.Decision.Replica != 1 {
			t.Error("one is taken back from the replica that is only silent")
		}
		s.p.Done(7, a, End{Outcome: Failed, Evidence: fleet.EvidenceStalled})
	}
	if n := s.p.view.Replicas[0].Own.Requests; n > 0 {
		t.Errorf("%d are left at the replica that is gone", n)
	}

	s = stopAll(t, 2, func(w *fleet.Work) { w.Further = true })
	if back := s.silent(2, 6); len(back) != len(s.sent) {
		t.Errorf("%d of %d that another pool would take are taken back", len(back), len(s.sent))
	}

	s = stopAll(t, 2, nil)
	if back := s.silent(2, 2+4*s.p.cfg.HangAfter); len(back) != len(s.sent) {
		t.Errorf("%d of %d are taken back after four times hang_after", len(back), len(s.sent))
	}
}
