package admission

import (
	"testing"

	"github.com/penstock/penstock/fleet"
)

// Images take tokens that their prompt's text does not explain. They are learned
// as images: the estimate of a text prompt stays what it was, and one with images
// is estimated with them.
func TestImagesAreNotTakenForText(t *testing.T) {
	p := pool(t, Config{}, 1)
	if n := p.EstimateMedia(7, 3); n != 0 {
		t.Errorf("3 images before any was seen: %d tokens", n)
	}
	for i := range 400 {
		now := float64(i) + 1
		a := &Ticket{Work: fleet.Work{Model: 7, Prompt: 10, ASCII: 4000}}
		tokens := 1000
		switch i % 10 {
		case 3:
			a.Work.ASCII, a.Work.Media, tokens = 200, 1, 50+1500
		case 7:
			a.Work.ASCII, a.Work.Media, tokens = 20, 2, 5+3000
		}
		p.Admit(now, a)
		p.Done(now, a, End{Outcome: Finished, Prompt: tokens, Completion: 1})
	}
	if n := p.EstimatePrompt(7, 4000, 0); n < 900 || n > 1100 {
		t.Errorf("4,000 bytes are 1,000 tokens, estimated %d", n)
	}
	if n := p.EstimateMedia(7, 2); n < 2900 || n > 3100 {
		t.Errorf("two images are 3,000 tokens, estimated %d", n)
	}
}

// Small images are not refused for what large ones took.
func TestAnEstimateOfImagesRefusesNothing(t *testing.T) {
	p := New(Config{})
	f := fleet.Generic()
	f.KVTokens = 20_000
	p.Join(0, ReplicaSpec{ID: 1, Warm: true, MaxLen: 8192, Profile: &f})
	a := &Ticket{Work: fleet.Work{Model: 1, Prompt: 100 + 60_000, OfMedia: 60_000, Media: 10, MaxOut: 10}}
	if d := p.Admit(1, a); d.Verdict == Shed {
		t.Errorf("%+v", d)
	}
}
