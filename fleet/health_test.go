package fleet

import "testing"

func rules() *HealthRules {
	r := &HealthRules{}
	r.Defaults()
	return r
}

func started(now float64) *Health {
	h := &Health{}
	h.Start(now, true, rules())
	return h
}

func TestKilledReplicaIsBackByProbeAndTrial(t *testing.T) {
	r, h := rules(), started(0)
	h.Apply(10, EvidenceRefused, 0, r)
	if h.State != StateEjected || h.Open() {
		t.Fatalf("after a refused connection: %v", h.State)
	}
	for now := 11.0; now < 100; now++ { // a long outage, probed all the time
		h.Apply(now, EvidenceProbeRefused, 0, r)
		h.Tick(now, r)
		if h.State != StateEjected {
			t.Fatalf("%v at %v though every probe is refused", h.State, now)
		}
	}
	h.Apply(100, EvidenceProbeOK, 0, r)
	if !h.OneOnly(100) {
		t.Fatalf("a good probe after an outage: %v", h.State)
	}
	h.Apply(100.6, EvidenceOK, 0, r)
	if h.State != StateRamping || !h.Open() {
		t.Fatalf("a good trial: %v", h.State)
	}
	h.Tick(105, r)
	if h.Share <= r.RampFrom || h.Share >= 1 {
		t.Fatalf("share in mid-ramp is %v", h.Share)
	}
	h.Tick(111, r)
	if h.State != StateUp {
		t.Fatalf("after the ramp: %v", h.State)
	}
}

func TestBadTrialEjectsLonger(t *testing.T) {
	r, h := rules(), started(0)
	last := 0.0
	now := 10.0
	for i := 0; i < 6; i++ {
		h.Apply(now, EvidenceAbort, 0, r)
		length := h.Until - now
		if h.State != StateEjected || length < last || length > r.EjectMax {
			t.Fatalf("flap %d: %v for %v s, before %v", i, h.State, length, last)
		}
		last = length
		now = h.Until
		h.Tick(now, r)
		if h.State != StateTrial {
			t.Fatalf("after its time: %v", h.State)
		}
	}
	if last != r.EjectMax {
		t.Fatalf("six bad trials and it is out for only %v s", last)
	}
}

func TestBusyIsNotDead(t *testing.T) {
	r, h := rules(), started(0)
	h.Apply(10, EvidenceBusy, 3, r)
	if h.State != StateBusy || h.OneOnly(12.9) || !h.OneOnly(13) {
		t.Fatalf("Retry-After 3 s: %v until %v", h.State, h.Until)
	}
	h.Apply(11, EvidenceBusy, 30, r) // an answer to a request of before
	if h.Until != 13 {
		t.Fatalf("a late answer moved the back-off to %v", h.Until)
	}
	h.Apply(13.1, EvidenceOK, 0, r)
	if h.State != StateUp {
		t.Fatalf("the probe request was answered: %v", h.State)
	}
	for i := 0; i < 20; i++ {
		h.Apply(20+100*float64(i), EvidenceBusy, 0, r)
		if h.State != StateBusy {
			t.Fatalf("busy again and again is %v", h.State)
		}
	}
}

func TestDrainingIsLeftAloneThoughHealthy(t *testing.T) {
	r, h := rules(), started(0)
	h.Apply(10, EvidenceDraining, 0, r)
	for now := 10.0; now < 200; now++ {
		h.Apply(now, EvidenceProbeOK, 0, r) // vLLM's /health stays 200 meanwhile
		h.Apply(now, EvidenceOK, 0, r)      // and what runs there ends well
		h.Tick(now, r)
		if h.State != StateDraining {
			t.Fatalf("%v at %v", h.State, now)
		}
	}
	h.Apply(200, EvidenceProbeRefused, 0, r) // it ended
	h.Apply(203, EvidenceProbeOK, 0, r)      // and was started again
	if h.State != StateTrial {
		t.Fatalf("a restarted replica is %v", h.State)
	}
}

func TestConsecutiveFailuresEject(t *testing.T) {
	r, h := rules(), started(0)
	h.Apply(1, EvidenceStatus5xx, 0, r)
	h.Apply(2, EvidenceFirstTimeout, 0, r)
	h.Apply(3, EvidenceOK, 0, r)
	h.Apply(4, EvidenceStatus5xx, 0, r)
	h.Apply(5, EvidenceReset, 0, r)
	if h.State != StateUp {
		t.Fatal("two failures, a good answer, two failures: ejected")
	}
	h.Apply(6, EvidenceProtocol, 0, r)
	if h.State != StateEjected {
		t.Fatal("three failures in a row: not ejected")
	}
	h.Apply(7, EvidenceProbeOK, 0, r)
	if h.State != StateEjected {
		t.Fatal("a good /health lifted what bad answers led to")
	}
}

// A thawed replica is tried at once; its doubled ejection would keep it away
// for most of a minute.
func TestAThawedReplicaIsTriedAtOnce(t *testing.T) {
	var r HealthRules
	r.Defaults()
	h := Health{State: StateUp, Share: 1}
	h.Apply(10, EvidenceStalled, 0, &r)
	if h.State != StateEjected || h.OneOnly(11) {
		t.Fatalf("not ejected: %v", h.State)
	}
	if !h.Moved(12) || !h.OneOnly(12) {
		t.Fatalf("its counters move, and it may have no trial: %v", h.State)
	}
	h = Health{State: StateUp, Share: 1}
	h.Apply(10, EvidenceRefused, 0, &r)
	if h.Moved(12) {
		t.Fatal("a process that is gone is not brought back by counters")
	}
}

// Whatever it did before: a slow replica is looked at again soon.
func TestASlowReplicaIsLookedAtAgainSoon(t *testing.T) {
	r, h := rules(), started(0)
	h.flaps[flapSlow] = 6
	h.Apply(10, EvidenceSlow, 0, r)
	if h.State != StateEjected || h.Until > 10+2*r.Eject {
		t.Errorf("%v until %v", h.State, h.Until)
	}
}

// What it was ejected for before, of another kind, makes no ejection longer.
func TestEachKindOfReasonHasItsOwnBackOff(t *testing.T) {
	r, h := rules(), started(0)
	h.Apply(1, EvidenceDraining, 0, r)
	h.Apply(2, EvidenceProbeRefused, 0, r) // it ended, as it had said
	h.Apply(10, EvidenceProbeOK, 0, r)
	h.Apply(11, EvidenceOK, 0, r)
	h.Apply(12, EvidenceSlow, 0, r)
	h.Apply(13, EvidenceOK, 0, r)
	h.Apply(14, EvidenceStalled, 0, r)
	if h.State != StateEjected || h.Until != 14+r.Eject {
		t.Errorf("hung for the first time, after a drain and a slow time: %v until %v", h.State, h.Until)
	}
	h.Tick(h.Until, r)
	h.Apply(20, EvidenceStalled, 0, r)
	if h.Until != 20+2*r.Eject {
		t.Errorf("hung for the second time: out until %v", h.Until)
	}
	h.Tick(h.Until, r)
	h.Apply(31, EvidenceRefused, 0, r)
	if h.Until != 31+r.Eject {
		t.Errorf("gone for the first time but for its announced end: out until %v", h.Until)
	}
}

// A slow replica that stood still and moves again may be tried, and one whose
// pages come and go while it hangs is not tried each time.
func TestSignsOfLifeThatShortenAnEjection(t *testing.T) {
	r, h := rules(), started(0)
	h.Apply(10, EvidenceSlow, 0, r)
	if !h.Moved(12) || !h.OneOnly(12) {
		t.Errorf("slow, and it moves again: %v", h.State)
	}
	h = started(0)
	tried := 0
	for now := 10.0; now < 30; now++ {
		h.Apply(now, EvidenceStalled, 0, r)
		if h.Returned(now + 0.5) {
			tried++
		}
	}
	if tried == 0 || tried > liftFlaps {
		t.Errorf("its pages came again 20 times while it hung: tried %d times", tried)
	}
	h = started(0)
	h.Apply(10, EvidenceEngineDead, 0, r)
	if h.Moved(12) || h.Returned(12) {
		t.Error("a page brought a dead engine back")
	}
}
