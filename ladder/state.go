package ladder

import "github.com/penstock/penstock/internal/mutant"

// Phase is where a route stands (degradation.md). The words are the contract's.
type Phase uint8

// The phases.
const (
	PrimaryHealthy Phase = iota
	DegradedFallback
	RecoveringProbe
)

func (p Phase) String() string {
	return [...]string{"PRIMARY_HEALTHY", "DEGRADED_FALLBACK", "RECOVERING_PROBE"}[p]
}

// Phases lists them.
var Phases = [...]Phase{PrimaryHealthy, DegradedFallback, RecoveringProbe}

// Rules are the numbers of a route's state machine; a zero field is its
// default. Times are seconds.
type Rules struct {
	FailShare    float64 // share of failed attempts that degrades; default 0.15
	MinAttempts  int     // and at least so many attempts in the window; default 20
	Window       float64 // default 30
	FirstByteP95 float64 // p95 time to the first byte that degrades; 0 = not looked at
	HealthyFor   float64 // good health evidence before trials; default 30
	AgainFor     float64 // more time in fallback after a bad trial; default 60
	TrialShare   float64 // share of requests that are trials; default 0.02
	TrialMin     float64 // trials per second at least; default 1
	Trials       int     // good trials that end the trial; default 5
	TrialSuccess float64 // share of trials that have to succeed; default 0.995
	RampFrom     float64 // share of traffic that the primary gets at once after the trial; default 0.25
	Ramp         float64 // until it has all; default 5
	Stalled      float64 // good evidence for so long without PRIMARY_HEALTHY raises the alert; default 60
}

// Defaults fills the fields that are zero.
func (r *Rules) Defaults() {
	f := func(p *float64, v float64) {
		if *p == 0 {
			*p = v
		}
	}
	f(&r.FailShare, 0.15)
	f(&r.Window, 30)
	f(&r.HealthyFor, 30)
	f(&r.AgainFor, 60)
	f(&r.TrialShare, 0.02)
	f(&r.TrialMin, 1)
	f(&r.TrialSuccess, 0.995)
	f(&r.RampFrom, 0.25)
	f(&r.Ramp, 5)
	f(&r.Stalled, 60)
	if r.MinAttempts == 0 {
		r.MinAttempts = 20
	}
	if r.Trials == 0 {
		r.Trials = 5
	}
}

// attempt is one finished attempt at the primary.
type attempt struct {
	at, firstByte float64
	failed        bool
}

// recent bounds the attempts that the window looks at.
const recent = 512

// quick is the shorter look that catches a brownout within seconds: p95 is
// taken over the last MinAttempts attempts of this many seconds.
const quick = 3.0

// State is one route's state machine. It is pure: time and the number that
// decides a share come from outside. Not safe for concurrent use.
type State struct {
	r        Rules
	phase    Phase
	since    float64
	ring     [recent]attempt
	n        int
	goodFrom float64 // since when all health evidence was good; <0 = it was not
	notUntil float64 // no trial before
	trials   int
	good     int
	slow     int
	lastTry  float64
	rampFrom float64 // when the ramp began; <0 = no ramp
	credit   float64
	stalled  float64 // since when the primary is well but not used; <0 = it is not
}

// NewState returns the state of a healthy route.
func NewState(r Rules) *State {
	r.Defaults()
	return &State{r: r, goodFrom: -1, rampFrom: -1, stalled: -1}
}

// Phase is where the route stands.
func (s *State) Phase() Phase { return s.phase }

// Since is when it came there.
func (s *State) Since() float64 { return s.since }

// Share is how much of the traffic the primary gets now, 0 to 1.
func (s *State) Share(now float64) float64 {
	switch {
	case s.phase == DegradedFallback:
		return 0
	case s.phase == RecoveringProbe:
		return s.r.TrialShare
	case s.rampFrom >= 0 && now < s.rampFrom+s.r.Ramp:
		return s.r.RampFrom + (1-s.r.RampFrom)*(now-s.rampFrom)/s.r.Ramp
	}
	return 1
}

// Stalled is ALERT_RECOVERY_PROBE_STALLED: the primary shows good health for
// over Rules.Stalled seconds and the route is still not back.
func (s *State) Stalled(now float64) bool {
	return !mutant.On("no-stalled-alert") && s.phase != PrimaryHealthy && s.stalled >= 0 && now-s.stalled > s.r.Stalled
}

func (s *State) enter(now float64, p Phase) {
	s.phase, s.since = p, now
	s.trials, s.good, s.slow, s.credit = 0, 0, 0, 0
	if p != PrimaryHealthy {
		s.rampFrom = -1
		s.n = 0
	}
}

// Pick tells whether a request may try the primary now, and whether it is
// trial traffic whose end has to be told by Trial (all other ends by Attempt).
func (s *State) Pick(now float64) (primary, trial bool) {
	switch s.phase {
	case DegradedFallback:
		return false, false
	case RecoveringProbe:
		s.credit += s.r.TrialShare
		if s.credit >= 1 || now-s.lastTry >= 1/s.r.TrialMin {
			s.credit = max(0, s.credit-1)
			s.lastTry = now
			return true, true
		}
		return false, false
	}
	share := s.Share(now)
	if share >= 1 {
		s.rampFrom = -1
		return true, false
	}
	if s.credit += share; s.credit >= 1 {
		s.credit--
		return true, false
	}
	return false, false
}

// Attempt tells how an attempt at the primary ended: whether it failed, and
// the seconds to its first byte. It returns true when the phase changed.
func (s *State) Attempt(now float64, failed bool, firstByte float64) bool {
	if s.phase != PrimaryHealthy {
		return false // sent before the phase changed
	}
	s.ring[s.n%recent] = attempt{now, firstByte, failed}
	s.n++
	if s.sick(now) {
		s.enter(now, DegradedFallback)
		s.goodFrom, s.stalled = -1, -1
		s.notUntil = now
		return true
	}
	return false
}

// sick looks at the window.
func (s *State) sick(now float64) bool {
	total, failed, fresh, late := 0, 0, 0, 0
	for i := range min(s.n, recent) {
		a := &s.ring[(s.n-1-i)%recent]
		if now-a.at > s.r.Window {
			break
		}
		total++
		if a.failed {
			failed++
		}
		if now-a.at <= quick {
			fresh++
			if !a.failed && a.firstByte > s.r.FirstByteP95 {
				late++
			}
		}
	}
	if total >= s.r.MinAttempts && float64(failed) >= s.r.FailShare*float64(total) {
		return true
	}
	return s.r.FirstByteP95 > 0 && fresh >= s.r.MinAttempts && float64(late) > 0.05*float64(fresh)
}

// Probe tells what a health probe of the primary found. Evidence is gathered
// all the time, so that a route that is degraded loses no time. It returns
// true when the phase changed.
func (s *State) Probe(now float64, good bool) bool {
	if !good {
		s.goodFrom, s.stalled = -1, -1
		if s.phase == RecoveringProbe {
			s.enter(now, DegradedFallback)
			s.notUntil = now + s.r.AgainFor
			return true
		}
		return false
	}
	if s.goodFrom < 0 {
		s.goodFrom = now
	}
	if s.stalled < 0 {
		s.stalled = now
	}
	if s.phase == DegradedFallback && now-s.goodFrom >= s.r.HealthyFor && now >= s.notUntil {
		s.enter(now, RecoveringProbe)
		s.lastTry = now - 1/s.r.TrialMin
		return true
	}
	return false
}

// Trial tells how a trial ended. Any bad one goes back to the fallback for
// AgainFor more. It returns true when the phase changed.
func (s *State) Trial(now float64, failed bool, firstByte float64) bool {
	if s.phase != RecoveringProbe {
		return false
	}
	s.trials++
	switch {
	case failed:
	case s.r.FirstByteP95 > 0 && firstByte > s.r.FirstByteP95:
		s.slow++
	default:
		s.good++
	}
	if failed || float64(s.slow) > 0.05*float64(max(s.trials, s.r.Trials)) {
		s.enter(now, DegradedFallback)
		s.notUntil = now + s.r.AgainFor
		return true
	}
	if s.good >= s.r.Trials && float64(s.good+s.slow) >= s.r.TrialSuccess*float64(s.trials) {
		s.enter(now, PrimaryHealthy)
		s.rampFrom = now
		s.n = 0
		s.stalled = -1
		return true
	}
	return false
}
