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
