package fleet

import "math"

// HealthRules are the numbers of the health rules. Durations are seconds. The
// zero value of a field means its default (see Defaults).
type HealthRules struct {
	Fails      int     // consecutive failures (reset, 5xx, first-token time-out, broken protocol) that eject; default 3
	ProbeFails int     // consecutive failed probes that eject; default 3
	Eject      float64 // length of a first ejection; default 5, doubled for each flap
	EjectMax   float64 // bound of that doubling; default 60
	Drain      float64 // how long a replica that said it drains is left alone; default 300
	Busy       float64 // back-off after 429/503 without Retry-After; default 1, doubled while it repeats
	BusyMax    float64 // bound of the back-off, and of a Retry-After that is obeyed; default 30
	RampFrom   float64 // share of capacity at the start of a ramp, 0..1; default 0.25
	Ramp       float64 // length of a ramp; default 10
	Good       float64 // time without ejection after which flaps are forgotten; default 60
}

// Defaults fills the fields that are zero.
func (r *HealthRules) Defaults() {
	def := func(p *float64, v float64) {
		if *p == 0 {
			*p = v
		}
	}
	if r.Fails == 0 {
		r.Fails = 3
	}
	if r.ProbeFails == 0 {
		r.ProbeFails = 3
	}
	def(&r.Eject, 5)
	def(&r.EjectMax, 60)
	def(&r.Drain, 300)
	def(&r.Busy, 1)
	def(&r.BusyMax, 30)
	def(&r.RampFrom, 0.25)
	def(&r.Ramp, 10)
	def(&r.Good, 60)
}

// hard tells evidence that a process or its connection is gone. A good probe
// proves the opposite, so it lifts such an ejection at once; it proves nothing
// about a hung or broken engine behind a healthy front end.
func hard(e Evidence) bool {
	return e == EvidenceRefused || e == EvidenceProbeRefused || e == EvidenceProbeFailed || e == EvidenceReset
}

// A replica that was ejected for one kind of reason is not left alone for
// longer because it was ejected for another kind before: that it was slow once
// says nothing of how long it will be hung.
const (
	flapGone = iota // its process or connection
	flapHung
	flapBad // what it answered
	flapSlow
	flapKinds
)

func flapKind(e Evidence) int {
	switch {
	case hard(e):
		return flapGone
	case hung(e):
		return flapHung
	case e == EvidenceSlow:
		return flapSlow
	}
	return flapBad
}

// hung tells evidence that nothing came from a replica which took requests.
func hung(e Evidence) bool { return e == EvidenceStalled || e == EvidenceFirstTimeout }

// liftFlaps is how many ejections in a row a good probe, or another sign that
// does not prove that the engine works, may cut short; a replica that flaps more
// often waits its time out.
const liftFlaps = 3

// Apply takes one piece of evidence. retryAfter is what a busy replica asked
// for, seconds, 0 = nothing. It returns true when the state changed.
//
// A client's own 4xx and a cancelled request are no evidence; callers must not
// report them.
func (h *Health) Apply(now float64, e Evidence, retryAfter float64, r *HealthRules) bool {
	switch e {
	case EvidenceOK:
		return h.good(now)
	case EvidenceRefused, EvidenceAbort, EvidenceEngineDead, EvidenceStalled, EvidenceSlow, EvidenceProbeRefused:
		if e == EvidenceProbeRefused {
			h.ProbeSeen = now
		}
		return h.eject(now, e, r)
	case EvidenceDraining:
		h.ProbeFails = 0
		changed := h.State != StateDraining
		h.set(now, StateDraining, e)
		h.Until, h.Share = now+r.Drain, 0
		return changed
	case EvidenceBusy:
		return h.busy(now, retryAfter, r)
	case EvidenceReset, EvidenceFirstTimeout, EvidenceStatus5xx, EvidenceProtocol:
		h.Fails++
		h.FailAt = now
		if h.Fails >= r.Fails || h.State == StateTrial {
			return h.eject(now, e, r)
		}
	case EvidenceProbeFailed:
		h.ProbeFails++
		h.ProbeSeen = now
		if h.ProbeFails >= r.ProbeFails {
			return h.eject(now, e, r)
		}
	case EvidenceProbeOK:
		h.ProbeFails = 0
		if h.State == StateEjected && hard(h.Reason) {
			h.ProbeGood = now
			if h.flaps[flapGone] <= liftFlaps {
				h.set(now, StateTrial, h.Reason)
				return true
			}
		}
	}
	return false
}

func (h *Health) set(now float64, s State, e Evidence) {
	if h.State != s {
		h.Since = now
	}
	h.State, h.Reason = s, e
}

func (h *Health) good(now float64) bool {
	h.Fails, h.Busies = 0, 0
	switch h.State {
	case StateTrial, StateEjected: // ejected: fail-open traffic succeeded
		h.set(now, StateRamping, EvidenceOK)
		h.Until = 0
		return true
	case StateBusy:
		if now < h.Until {
			return false // an answer to a request placed before it said busy
		}
		h.Until = 0
		if h.Share < 1 {
			h.set(now, StateRamping, EvidenceOK)
		} else {
			h.set(now, StateUp, EvidenceOK)
		}
		return true
	}
	return false
}

func (h *Health) busy(now, retryAfter float64, r *HealthRules) bool {
	switch h.State {
	case StateEjected, StateDraining:
		return false // it was known to be worse than busy
	case StateBusy:
		if now < h.Until {
			return false // the same window: an answer to an earlier request
		}
	case StateTrial:
		h.Share = r.RampFrom
	}
	wait := r.Busy * math.Pow(2, float64(min(h.Busies, 16)))
	if retryAfter > 0 {
		wait = retryAfter
	}
	h.Busies++
	changed := h.State != StateBusy
	h.set(now, StateBusy, EvidenceBusy)
	h.Until = now + min(wait, r.BusyMax)
	return changed
}

func (h *Health) eject(now float64, e Evidence, r *HealthRules) bool {
	if hard(e) {
		h.ProbeGood = 0
	}
	if h.State == StateEjected {
		if hard(e) {
			// Still dead. Keep it out without calling it a flap; its reason is
			// now one that a good probe lifts.
			h.Reason = e
			h.Until = max(h.Until, now+r.Eject)
		}
		return false
	}
	if h.State == StateDraining && e != EvidenceRefused && e != EvidenceProbeRefused && e != EvidenceProbeFailed {
		return false // it said itself that it ends; streams that break belong to that
	}
	kind := flapKind(e)
	length := min(r.Eject*math.Pow(2, float64(min(h.flaps[kind], 16))), r.EjectMax)
	if e == EvidenceSlow {
		// It answers: to look again costs one late answer, and one that was only
		// cold is well by then.
		length = min(length, 2*r.Eject)
	}
	if h.State != StateDraining { // that end was announced
		h.Flaps++
		h.flaps[kind]++
	}
	h.set(now, StateEjected, e)
	h.Until, h.Share = now+length, 0
	h.Fails, h.Busies, h.ProbeGood = 0, 0, 0
	return true
}

// Tick moves the state by time alone. It returns true when the state changed.
func (h *Health) Tick(now float64, r *HealthRules) bool {
	switch h.State {
	case StateUp:
		h.Share = 1
		if h.Flaps > 0 && now-h.Since >= r.Good {
			h.Flaps, h.flaps = 0, [flapKinds]int{}
		}
	case StateRamping:
		h.Share = min(1, r.RampFrom+(1-r.RampFrom)*max(0, now-h.Since)/r.Ramp)
		if h.Share >= 1 {
			h.set(now, StateUp, h.Reason)
			return true
		}
	case StateEjected, StateDraining:
		if now >= h.Until {
			h.set(now, StateTrial, h.Reason)
			return true
		}
	}
	return false
}

// Start gives a new replica its state: full share when it was known to be warm
// (start-up), else a ramp.
func (h *Health) Start(now float64, warm bool, r *HealthRules) {
	*h = Health{State: StateRamping, Since: now, Share: r.RampFrom}
	if warm {
		h.State, h.Share = StateUp, 1
	}
}

// Restarted is called when the replica's counters went backwards: it is a new
// process, whatever was known of the old one.
func (h *Health) Restarted(now float64) bool {
	switch h.State {
	case StateEjected, StateDraining:
		h.set(now, StateTrial, h.Reason)
		return true
	}
	return false
}

// Open tells whether the replica may be given ordinary traffic.
func (h *Health) Open() bool { return h.State == StateUp || h.State == StateRamping }

// OneOnly tells whether it may be given one request, to see how it fares: a
// recovering replica, or a busy one whose back-off is over.
func (h *Health) OneOnly(now float64) bool {
	return h.State == StateTrial || h.State == StateBusy && now >= h.Until
}

// Moved takes note that the replica's engine works again after nothing of it
// moved: its counters do, or its running requests have ended. A replica that was
// ejected because nothing came, or came late, may have a trial at once. A hung
// one's counters do not move, so this does not shorten its ejection.
func (h *Health) Moved(now float64) bool {
	if h.State != StateEjected || !hung(h.Reason) && h.Reason != EvidenceSlow {
		return false
	}
	h.set(now, StateTrial, h.Reason)
	h.Until = 0
	return true
}

// Returned takes note that the replica's pages come again after none came. It
// tells of the front end only: a replica whose pages come and go and that is
// found hung each time waits its time out.
func (h *Health) Returned(now float64) bool {
	return h.flaps[flapHung] <= liftFlaps && h.Moved(now)
}

// doubtFor is how long a failure makes a replica a bad place for what has
// failed elsewhere already, seconds.
const doubtFor = 1.0

// Doubtful tells whether the replica failed a request a moment ago and has not
// begun to answer a later one. An
// ordinary request may go there (one failure is no proof), but the last attempt
// of a request that has just failed elsewhere is not to be spent on it.
func (h *Health) Doubtful(now float64) bool {
	if h.State == StateEjected {
		switch h.Reason {
		case EvidenceReset, EvidenceFirstTimeout, EvidenceStatus5xx, EvidenceProtocol:
			return true
		}
		return false
	}
	return h.FailAt > 0 && now-h.FailAt < doubtFor
}

// earlyAfter is how long a replica is left alone at least, seconds.
const earlyAfter = 1.0

// Early tells whether an ejected replica may be tried before its time is over,
// when no other is left: its process is not known to be gone, or a probe found
// it there since, however often it has come and gone.
func (h *Health) Early(now float64) bool {
	return h.State == StateEjected && (!hard(h.Reason) || h.ProbeGood > 0) && now-h.Since >= earlyAfter && now < h.Until
}

// Try ends an ejection early, see Early.
func (h *Health) Try(now float64) { h.set(now, StateTrial, h.Reason) }
