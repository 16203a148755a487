package ladder

import (
	"testing"

	"pgregory.net/rapid"
)

// traffic sends rate requests a second and one probe a second from t0 to t1;
// slow says what the primary's first byte takes at a time.
func traffic(s *State, t0, t1, rate float64, fb func(float64) (float64, bool)) (changes []float64, phases []Phase) {
	last := s.Phase()
	note := func(now float64) {
		if s.Phase() != last {
			last = s.Phase()
			changes, phases = append(changes, now), append(phases, last)
		}
	}
	probe := t0
	for now := t0; now < t1; now += 1 / rate {
		if now >= probe {
			d, failed := fb(now)
			s.Probe(now, !failed && (s.r.FirstByteP95 == 0 || d <= s.r.FirstByteP95))
			probe++
			note(now)
		}
		if primary, trial := s.Pick(now); primary {
			d, failed := fb(now)
			if trial {
				s.Trial(now, failed, d)
			} else {
				s.Attempt(now, failed, d)
			}
			note(now)
		}
	}
	return changes, phases
}

func TestABrownoutDegradesWithinThreeSecondsAndIsOverWithin45(t *testing.T) {
	for _, rate := range []float64{10, 40, 500} {
		s := NewState(Rules{FirstByteP95: 0.3})
		at, ph := traffic(s, 0, 200, rate, func(now float64) (float64, bool) {
			if now >= 10 && now < 130 {
				return 0.55, false
			}
			return 0.05, false
		})
		if len(ph) != 3 || ph[0] != DegradedFallback || ph[1] != RecoveringProbe || ph[2] != PrimaryHealthy {
			t.Fatalf("rate %v: %v at %v", rate, ph, at)
		}
		if at[0]-10 > 3 || at[2]-130 > 45 {
			t.Errorf("rate %v: degraded after %.1f s, healthy %.1f s after the heal", rate, at[0]-10, at[2]-130)
		}
	}
}

func TestABadTrialMeansSixtyMoreSeconds(t *testing.T) {
	s := NewState(Rules{})
	traffic(s, 0, 5, 50, func(float64) (float64, bool) { return 0.1, true })
	if s.Phase() != DegradedFallback {
		t.Fatal("not degraded by failures")
	}
	for now := 5.0; s.Phase() == DegradedFallback; now++ {
		s.Probe(now, true)
		if now > 60 {
			t.Fatal("no trial")
		}
	}
	began := s.Since()
	s.Trial(began+1, true, 0)
	if s.Phase() != DegradedFallback {
		t.Fatal("a bad trial did not stop the trial")
	}
	for now := began + 1; now < began+60.9; now++ {
		if s.Probe(now, true) || func() bool { p, _ := s.Pick(now); return p }() {
			t.Fatalf("tried again after %v s", now-began-1)
		}
	}
	s.Probe(began+61.1, true)
	if s.Phase() != RecoveringProbe {
		t.Fatal("no trial after the time was over")
	}
}

func TestTheAlertIsRaisedWhenTheWayBackStalls(t *testing.T) {
	s := NewState(Rules{AgainFor: 600})
	traffic(s, 0, 5, 50, func(float64) (float64, bool) { return 0.1, true })
	now := 5.0
	for ; s.Phase() == DegradedFallback; now++ {
		s.Probe(now, true)
	}
	s.Trial(now, true, 0)
	for end := now + 70; now < end; now++ {
		s.Probe(now, true)
	}
	if !s.Stalled(now) {
		t.Fatal("well for over 60 s, not back, and no alert")
	}
}

func TestDegradedGetsNothingTrialsAreFewAndTheRampIsMonotone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := NewState(Rules{FirstByteP95: 0.2})
		now, share := 0.0, 0.0
		inTrial := map[int]int{}
		for range rapid.IntRange(50, 800).Draw(t, "steps") {
			now += rapid.Float64Range(0.001, 0.3).Draw(t, "dt")
			switch rapid.IntRange(0, 3).Draw(t, "what") {
			case 0:
				s.Probe(now, rapid.IntRange(0, 9).Draw(t, "good") > 0)
			default:
				before := s.Phase()
				primary, trial := s.Pick(now)
				if before == DegradedFallback && primary {
					t.Fatal("a degraded route sent to its primary")
				}
				if trial != (before == RecoveringProbe && primary) {
					t.Fatal("trial traffic is not marked")
				}
				if trial {
					inTrial[int(now)]++
				}
				fb := rapid.Float64Range(0, 0.4).Draw(t, "fb")
				failed := rapid.IntRange(0, 19).Draw(t, "failed") == 0
				if trial {
					s.Trial(now, failed, fb)
				} else if primary {
					s.Attempt(now, failed, fb)
				}
			}
			if s.Phase() == PrimaryHealthy && s.rampFrom >= 0 {
				if sh := s.Share(now); sh < share {
					t.Fatal("the ramp went back")
				} else {
					share = sh
				}
			} else {
				share = 0
			}
		}
	})
}
