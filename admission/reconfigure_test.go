package admission

import "testing"

func TestReconfigureTakesEffectOnWhatIsHeld(t *testing.T) {
	classes := []Class{{Name: "first", Wait: 30}, {Name: "second", Wait: 0}}
	p := pool(t, Config{Cap: 1, Classes: classes}, 1)
	a, b, c := request(100), request(100), request(100)
	if p.Admit(1, a).Verdict != Placed || p.Admit(1, b).Verdict != Held || p.Admit(1, c).Verdict != Held {
		t.Fatal("a cap of 1 does not hold the others")
	}
	low := request(100)
	low.Work.Class = 1
	if d := p.Admit(1, low); d.Verdict != Shed {
		t.Fatalf("a class that never waits: %+v", d)
	}
	classes[1].Wait = 10
	if err := p.Reconfigure(Config{Cap: 2, Classes: classes}); err != nil {
		t.Fatal(err)
	}
	if out := p.Advance(1.1, nil); len(out) != 1 || out[0] != b {
		t.Fatalf("placed after the cap became 2: %d", len(out))
	}
	if d := p.Admit(1.2, low); d.Verdict != Held {
		t.Fatalf("the class may wait now: %+v", d)
	}
	for _, bad := range [][]Class{{{Name: "first"}}, {{Name: "second"}, {Name: "first"}}} {
		if err := p.Reconfigure(Config{Cap: 9, Classes: bad}); err == nil || p.Config().Cap != 2 {
			t.Errorf("other classes %v: error %v, cap %d", bad, err, p.Config().Cap)
		}
	}
	for _, x := range []*Ticket{a, b} {
		p.Done(2, x, End{Outcome: Finished})
	}
	p.Leave(2, low)
	for _, x := range p.Advance(2, nil) {
		p.Done(3, x, End{Outcome: Finished})
	}
	assertZero(t, p)
}
