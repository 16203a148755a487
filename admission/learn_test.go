package admission

import (
	"math"
	"testing"
)

// What is learned leans with the load by some tenths: a profile that was given
// is not changed by that, but one that is far off is, and a guess always.
func TestAGivenProfileIsBelievedUnlessClearlyOff(t *testing.T) {
	factor := func(given bool, common float64) float64 {
		r := &replica{given: given}
		return r.actScale(0, common, &logScale{v: common, n: 100})
	}
	if f := factor(true, 0.2); f != 1 {
		t.Errorf("given, off by %.2f: factor %v", math.Exp(0.2), f)
	}
	if f := factor(false, 0.2); math.Abs(f-math.Exp(0.2)) > 1e-9 {
		t.Errorf("guessed, off by %.2f: factor %v", math.Exp(0.2), f)
	}
	for _, far := range []float64{math.Log(7), -math.Log(7)} {
		if f := factor(true, far); math.Abs(math.Log(f)-far) > 1e-9 {
			t.Errorf("given, off by %.2f: factor %v", math.Exp(far), f)
		}
	}
	// One replica of the fleet that is three times slower is, whatever the profile.
	r := &replica{given: true}
	if f := r.actScale(0, 0, &logScale{v: math.Log(3), n: 100}); math.Abs(f-3) > 1e-9 {
		t.Errorf("three times slower than the fleet: factor %v", f)
	}
}

// The share of time that prompts take is seen over as long as answers take.
func TestTheWindowFollowsTheAnswers(t *testing.T) {
	p := New(Config{})
	for range 2000 {
		p.learnWindow(0.8)
	}
	if math.Abs(p.window-0.8) > 0.01 {
		t.Errorf("answers of 0.8 s: a window of %v s", p.window)
	}
	for range 2000 {
		p.learnWindow(600)
	}
	if p.window > windowMost {
		t.Errorf("answers of ten minutes: a window of %v s", p.window)
	}
}

// A fleet that decodes somewhat faster than its profile says takes more; it is
// not taken for a faster one in the choice, and not where gaps vary much.
func TestAFasterFleetTakesMore(t *testing.T) {
	given := &replica{given: true}
	if f := given.pace(-0.1, 0.05); math.Abs(math.Log(f)+0.1) > 1e-9 {
		t.Errorf("a tenth faster: gaps are taken to be %v of the predicted", f)
	}
	for why, f := range map[string]float64{
		"slower":               given.pace(0.1, 0.05),
		"so far that it acts":  given.pace(-1, 0.05),
		"gaps vary":            given.pace(-0.1, 0.25),
		"it acts, for a guess": (&replica{}).pace(-0.1, 0.05),
	} {
		if f != 1 {
			t.Errorf("%s: gaps are taken to be %v of the predicted", why, f)
		}
	}
	if f := given.pace(-0.29, 0.05); f < math.Exp(-paceMost)-1e-9 {
		t.Errorf("much faster, but less than acts: %v", f)
	}
}

// A learned offset counts in admission when it matters beside the objective, and
// is left to the margin before.
func TestASmallOffsetIsLeftToTheMargin(t *testing.T) {
	p := New(Config{})
	for offset, want := range map[float64]float64{0.015: 0.015, 0.1: 0} {
		p.offset = offset
		if s := p.slight(0.5); math.Abs(s-want) > 1e-9 {
			t.Errorf("%v s of 0.5 s: %v left to the margin", offset, s)
		}
	}
	if p = New(Config{NoLearn: true}); p.slight(0.5) != 0 {
		t.Error("nothing is learned, and something taken off")
	}
}

// How far a class without an objective for ITL is from the prediction teaches
// nothing of how close the others may go to theirs.
func TestGapsOfAClassWithoutAnObjectiveTeachNoMargin(t *testing.T) {
	for class, moves := range map[uint8]bool{0: true, 1: false} {
		p := pool(t, Config{Classes: []Class{{Name: "a", Wait: -1, Objective: Objective{TTFT: 0.5, ITL: 0.007}}, {Name: "b", Wait: -1}}}, 1)
		was, now := p.marginITL, 1.0
		for range 50 {
			x := classed(1, class, 100)
			if d := p.Admit(now, x); d.Verdict != Placed {
				t.Fatalf("%+v", d)
			}
			p.First(now+0.02, x)
			p.Done(now+2, x, End{Outcome: Finished, Completion: 100}) // 20 ms a token
			now += 3
		}
		if (p.marginITL > was) != moves {
			t.Errorf("class %d: margin %v, was %v", class, p.marginITL, was)
		}
	}
}
