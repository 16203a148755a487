package admission

import "testing"

// A hang takes longer to be noticed than any objective lasts. Its requests are
// late then, through no fault of theirs: they go to another replica that has
// room, and wait for it as others do, but are not shed for what the hang took.
func TestWhatAHangMadeLateGoesElsewhere(t *testing.T) {
	p := pool(t, Config{Classes: []Class{{Name: "a", Wait: 2, Objective: Objective{TTFT: 0.5}}}, HangAfter: 4}, 3)
	for range 9 { // none is idle: that one takes everything
		if x := request(500); p.Admit(1, x).Verdict != Placed {
			t.Fatal(x.Decision)
		} else {
			p.First(1.1, x)
		}
	}
	late := request(500)
	late.Work.Arrived = 1.1
	late.Work.Exclude[0], late.Work.Excluded = 1, 1
	if d := p.Admit(5.2, late); d.Verdict != Placed || d.Replica == 1 {
		t.Errorf("after a hang of 4 s: %+v", d)
	}
	first := request(500)
	first.Work.Arrived = 1.1
	if d := p.Admit(5.2, first); d.Verdict != Shed || d.Reason != ReasonCapacity {
		t.Errorf("one that is as late and was nowhere yet: %+v", d)
	}
}
