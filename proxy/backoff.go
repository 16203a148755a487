package proxy

import (
	"math/rand/v2"
	"time"

	"github.com/penstock/penstock/fleet"
)

// failoverSpread bounds the wait before the next attempt, full jitter; it
// doubles with each attempt.
const failoverSpread = 25 * time.Millisecond

// backOff spreads what was refused together, so that it does not come to the
// next replica in step. Who reached nobody, or waited already, goes on at once.
func (f *flight) backOff(e fleet.Evidence) {
	switch e {
	case fleet.EvidenceRefused, fleet.EvidenceFirstTimeout, fleet.EvidenceStalled, fleet.EvidenceDraining:
		return
	}
	wait := time.Duration(rand.Float64() * float64(failoverSpread<<min(f.attempts, 4)))
	if by := f.deadlineAt; !by.IsZero() {
		wait = min(wait, time.Until(by)/4)
	}
	if by := f.climb.rungBy; !by.IsZero() {
		wait = min(wait, time.Until(by)/4)
	}
	if wait <= 0 {
		return
	}
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
	case <-f.wake: // cancelled; the next step finds out why
		f.signal()
	}
}
