package drill

import (
	"context"
	"sync"
	"time"
)

// A drill may run on a machine that others use too. What the machine does is
// not held against the router: the runner takes note of when it stood still
// itself, and of how late its own steps were.

// still is a time in which this process did not run though it should have.
type still struct{ from, to float64 }

const (
	heartbeat  = 10 * time.Millisecond
	stillLeast = 0.03 // seconds beyond a heartbeat that are taken note of
	stillShare = 0.03 // a time to first token of which more than this share is such is not judged
)

// watchMachine notes when this process stood still.
func watchMachine(ctx context.Context, start time.Time, rec *record, mu *sync.Mutex) {
	last := time.Since(start).Seconds()
	for ctx.Err() == nil {
		time.Sleep(heartbeat)
		now := time.Since(start).Seconds()
		if now-last > heartbeat.Seconds()+stillLeast {
			mu.Lock()
			rec.stills = append(rec.stills, still{last, now})
			mu.Unlock()
		}
		last = now
	}
}

// stoodStill is for how long of a time the process stood still.
func (r *record) stoodStill(from, to float64) (sum float64) {
	for _, s := range r.stills {
		sum += max(0, min(to, s.to)-max(from, s.from))
	}
	return sum
}

// lag is a step that was done later than the scenario says.
type lag struct{ at, by float64 }

// from is when the time that an assertion is about begins: later than the
// scenario says if the last step before it was late.
func (r *record) from(e *Expect) float64 {
	after := e.After.S()
	by := 0.0
	for _, l := range r.lags { // in order of time
		if l.at <= after {
			by = l.by
		}
	}
	return after + by
}

// end is when the last request ended.
func (r *record) end() (end float64) {
	for _, c := range r.calls {
		end = max(end, c.End)
	}
	return end
}
