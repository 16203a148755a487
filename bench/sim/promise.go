package sim

import "math"

// promise is a Retry-After that was told at a time.
type promise struct{ at, wait float64 }

// quiet are the times in which no request was held: whoever came would have
// been taken at once.
type quiet struct {
	since []float64 // beginnings of those that lasted for quietFor
	from  float64   // when held last fell to nothing
	held  bool
}

// quietFor is how long nothing has to be held, seconds, for the wait of all who
// were refused to be over: between two arrivals is no such time.
const quietFor = 0.5

func (q *quiet) end(now float64) {
	if now-q.from >= quietFor {
		q.since = append(q.since, q.from)
	}
	q.held = true
}

func (q *quiet) begin(now float64) { q.from, q.held = now, false }

// after is the first such time after at, up to now; +Inf = none.
func (q *quiet) after(at, now float64) float64 {
	for _, t := range q.since {
		if t > at {
			return t
		}
	}
	if !q.held && q.from > at && now-q.from >= quietFor {
		return q.from
	}
	return math.Inf(1)
}

// kept compares what a client was told with the true wait: from its refusal to
// its placement when it obeyed, or to the time from which anybody was taken at
// once, whichever came first. One that was never placed waited for nothing (0).
// A promise that reaches beyond the end of the stream is not judged: the load
// that it was made for has ended.
func (s *simulation) kept(f *flight, placed bool) {
	for _, p := range f.told {
		if p.at+p.wait > s.last || p.at < s.Warmup {
			continue
		}
		ratio := 0.0
		if placed {
			ratio = p.wait / (min(s.now, s.quiet.after(p.at, s.now)) - p.at)
		}
		s.rep.promises = append(s.rep.promises, ratio)
	}
	f.told = f.told[:0]
}
