package load

import (
	"fmt"
	"io"
	"math"
	"sort"
	"text/tabwriter"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Quantiles of a time, seconds.
type Quantiles struct {
	Count               int64
	Mean, P50, P90, P95 float64
	P99, Max            float64
}

// Report of a run. Requests of the warm-up are in none of its figures.
type Report struct {
	Offered    int            `json:"offered"`
	OK         int            `json:"ok"`
	Good       int            `json:"good"`
	Refused    int            `json:"refused"`
	Retried    int            `json:"retried"` // sent more than once
	Outcomes   map[string]int `json:"outcomes"`
	Seconds    float64        `json:"seconds"`     // of the run, without warm-up
	Goodput    float64        `json:"goodput"`     // good / offered
	RefusedPct float64        `json:"refused_pct"` // refused / offered, percent
	PerSecond  float64        `json:"per_second"`  // answers
	TokensIn   float64        `json:"tokens_in"`   // prompt tokens per second
	TokensOut  float64        `json:"tokens_out"`  // output tokens per second
	CachedPct  float64        `json:"cached_pct"`  // of prompt tokens, percent
	SendLag    Quantiles      `json:"send_lag"`    // first sent - intended: how late the generator itself was
	Resent     Quantiles      `json:"resent"`      // of those that were sent more than once: last sent - first sent
	TTFT       Quantiles      `json:"ttft"`        // intended send to first content event
	ITL        Quantiles      `json:"itl"`         // every gap between content events
	TPOT       Quantiles      `json:"tpot"`        // (end - first) / (tokens - 1)
	E2E        Quantiles      `json:"e2e"`         // intended send to end
	RetryAfter Quantiles      `json:"retry_after"` // of refusals
	Errors     []string       `json:"errors"`      // a few, for people
	Objective  string         `json:"objective"`
	Model      string         `json:"model"`
}

// histogram keeps 1 µs to 1 h with three digits.
type histogram struct {
	h   *hdrhistogram.Histogram
	sum float64
}

func newHistogram() *histogram { return &histogram{h: hdrhistogram.New(1, 3600e6, 3)} }

func (h *histogram) add(seconds float64) {
	h.sum += seconds
	_ = h.h.RecordValue(min(max(int64(math.Round(seconds*1e6)), 1), 3600e6-1))
}

func (h *histogram) quantiles() Quantiles {
	n := h.h.TotalCount()
	if n == 0 {
		return Quantiles{}
	}
	q := func(p float64) float64 { return float64(h.h.ValueAtQuantile(p)) / 1e6 }
	return Quantiles{Count: n, Mean: h.sum / float64(n), P50: q(50), P90: q(90), P95: q(95), P99: q(99), Max: float64(h.h.Max()) / 1e6}
}

type recorder struct {
	warm                       float64
	lag, ttft, itl, tpot, e2e  *histogram
	after, resent              *histogram
	outcomes                   map[string]int
	offered, ok, good, refused int
	in, out, cached            float64
	errors                     map[string]int
}

func newRecorder(o *Options) *recorder {
	return &recorder{warm: o.Warmup.Seconds(), lag: newHistogram(), ttft: newHistogram(), itl: newHistogram(), tpot: newHistogram(),
		e2e: newHistogram(), after: newHistogram(), resent: newHistogram(), outcomes: map[string]int{}, errors: map[string]int{}}
}

func (c *recorder) add(r *Record) {
	if r.At < c.warm {
		return
	}
	c.offered++
	c.outcomes[string(r.Outcome)]++
	if r.Sent > 0 {
		c.lag.add(max(0, r.Sent-r.At))
	}
	if r.Attempts > 1 {
		c.resent.add(max(0, r.Last-r.Sent))
	}
	if r.Good {
		c.good++
	}
	switch r.Outcome {
	case OK:
		c.ok++
		c.ttft.add(r.TTFT())
		c.e2e.add(r.E2E())
		if r.Out > 1 && len(r.Gaps) > 0 {
			c.tpot.add(r.TPOT())
		}
		for _, g := range r.Gaps {
			c.itl.add(g)
		}
		c.in += float64(r.Prompt)
		c.out += float64(r.Out)
		c.cached += float64(r.Cached)
	case Refused:
		c.refused++
		c.after.add(r.RetryAfter)
	default:
		if len(c.errors) < 100 {
			e := r.Error
			if len(e) > 200 {
				e = e[:200]
			}
			c.errors[fmt.Sprintf("%s %d %s", r.Outcome, r.Status, e)]++
		}
	}
}

func (c *recorder) report(o *Options, took time.Duration) *Report {
	s := max(took.Seconds()-c.warm, 1e-9)
	r := &Report{Model: o.Model, Retried: int(c.resent.h.TotalCount()), Resent: c.resent.quantiles(), Offered: c.offered, OK: c.ok, Good: c.good, Refused: c.refused, Outcomes: c.outcomes, Seconds: s,
		PerSecond: float64(c.ok) / s, TokensIn: c.in / s, TokensOut: c.out / s,
		SendLag: c.lag.quantiles(), TTFT: c.ttft.quantiles(), ITL: c.itl.quantiles(), TPOT: c.tpot.quantiles(), E2E: c.e2e.quantiles(), RetryAfter: c.after.quantiles()}
	if c.offered > 0 {
		r.Goodput = float64(c.good) / float64(c.offered)
		r.RefusedPct = 100 * float64(c.refused) / float64(c.offered)
	}
	if c.in > 0 {
		r.CachedPct = 100 * c.cached / c.in
	}
	for e, n := range c.errors {
		r.Errors = append(r.Errors, fmt.Sprintf("%dx %s", n, e))
	}
	sort.Strings(r.Errors)
	r.Errors = r.Errors[:min(len(r.Errors), 10)]
	r.Objective = "none"
	if o.TTFT > 0 || o.TPOT > 0 {
		per1k := ""
		if o.TTFTPer1K > 0 {
			per1k = fmt.Sprintf(" + %s per 1,000 prompt tokens", o.TTFTPer1K)
		}
		r.Objective = fmt.Sprintf("TTFT %s%s, TPOT %s", o.TTFT, per1k, o.TPOT)
	}
	return r
}

// Table writes the report for people.
func (r *Report) Table(w io.Writer) {
	fmt.Fprintf(w, "model %s  offered %d  ok %d  refused %d (%.1f %%)  sent again %d  goodput %.3f (%s)\n", r.Model, r.Offered, r.OK, r.Refused, r.RefusedPct, r.Retried, r.Goodput, r.Objective)
	fmt.Fprintf(w, "%.1f answers/s  %.0f prompt tokens/s (%.0f %% cached)  %.0f output tokens/s  %.1f s\n", r.PerSecond, r.TokensIn, r.CachedPct, r.TokensOut, r.Seconds)
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "ms\tmean\tp50\tp90\tp95\tp99\tmax\t")
	for _, l := range []struct {
		name string
		q    Quantiles
	}{{"TTFT", r.TTFT}, {"ITL", r.ITL}, {"TPOT", r.TPOT}, {"E2E", r.E2E}, {"send lag", r.SendLag}, {"sent again", r.Resent}} {
		if l.name == "sent again" && r.Retried == 0 {
			continue
		}
		fmt.Fprintf(t, "%s\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t\n", l.name, 1e3*l.q.Mean, 1e3*l.q.P50, 1e3*l.q.P90, 1e3*l.q.P95, 1e3*l.q.P99, 1e3*l.q.Max)
	}
	_ = t.Flush()
	for _, e := range r.Errors {
		fmt.Fprintln(w, "error:", e)
	}
}
