package sim

import (
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"sort"
	"text/tabwriter"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
)

// Quantiles of a time, seconds.
type Quantiles struct {
	N                                  int
	Mean, P10, P50, P90, P95, P99, Max float64
}

// Bin is one interval of the timeline, by intended send time.
type Bin struct {
	At                  float64
	Offered, Good, Shed int
	TTFTp95             float64 // of answered ones
	ttft                []float64
}

// Report of one simulation. Requests of the warm-up are in none of its
// figures.
type Report struct {
	Name     string
	Offered  int
	Outcomes [Open + 1]int
	Good     int
	Goodput  float64 // good / offered
	Refused  float64 // share of offered that was shed
	Long     float64 // goodput of the tenth of the requests with the longest prompts
	TTFT     Quantiles
	// OfferedP95 is the 95th percentile of TTFT over all that were offered: a
	// request that got no answer counts as Never, so refusing does not shorten it.
	OfferedP95 float64
	Admitted   Quantiles // TTFT from the last offer, without retry waits
	TPOT       Quantiles
	E2E        Quantiles
	Held       Quantiles // time at the router, of answered ones that were held
	Retry      Quantiles // Retry-After of the sheds
	// Promise is Retry-After / the true wait (kept), over the refusals of clients
	// that obey; 1 = right, 0 = never placed. Kept is the share of them within 30 %.
	Promise Quantiles
	Kept    float64
	// Reoffers are the returns of refused clients; Again is the share of them
	// that was refused once more.
	Reoffers int
	Again    float64
	// ReofferPeak is the largest number of returns in a second over the mean of
	// the seconds around it: clients that return in step. ReofferSigma is the
	// same in standard deviations of returns that know nothing of each other.
	ReofferPeak, ReofferSigma float64
	// IdleHeld is the longest time for which a request was held while a healthy
	// replica had nothing to do, s.
	IdleHeld float64
	// Withheld is the longest time for which a request was held while a replica
	// would have taken it, s; only with Config.CheckHeld.
	Withheld float64
	HitRate  float64   // prompt tokens from the cache / prompt tokens, of answered ones
	Ratio    float64   // median of observed / predicted TTFT
	Shares   []float64 // of requests sent, by replica
	Preempts float64
	Attempts float64 // per request
	Sheds    map[string]int
	Seconds  float64 // simulated, from warm-up to the last end
	OutRate  float64 // output tokens per second, of answered ones
	Timeline []Bin

	Stats admission.Stats // summed over the routers; Held is of the end
	Books string          // what is wrong with the accounts at the end; "" = nothing

	cfg                          *Config
	ttft, tpot, e2e, hold, retry []float64
	admitted                     []float64
	good                         map[int][2]int // by prompt tokens: offered, good
	reoffers                     []int          // per second
	again                        int
	ratio, promises              []float64
	sheds                        [admission.ReasonCount]int
	prompt, cached, out          float64
	attempts                     int
	last                         float64
}

// Never is the time to the first token of a request that had none, seconds.
const Never = 1e4

func newReport(c *Config) *Report {
	r := &Report{Name: c.Name, cfg: c, Sheds: map[string]int{}, good: map[int][2]int{}}
	n := len(c.Requests)
	r.ttft, r.tpot, r.e2e = make([]float64, 0, n), make([]float64, 0, n), make([]float64, 0, n)
	return r
}

func (r *Report) bin(at float64) *Bin {
	w := r.cfg.Timeline
	if w <= 0 {
		return nil
	}
	i := int(at / w)
	for len(r.Timeline) <= i {
		r.Timeline = append(r.Timeline, Bin{At: float64(len(r.Timeline)) * w})
	}
	return &r.Timeline[i]
}

// add counts one request.
func (r *Report) add(x *Result) {
	if x.Request.At < r.cfg.Warmup {
		return
	}
	r.Offered++
	r.Outcomes[x.Outcome]++
	r.attempts += x.Attempts
	r.last = max(r.last, x.Ended)
	b := r.bin(x.Request.At)
	if b != nil {
		b.Offered++
	}
	n := r.good[x.Request.Prompt]
	n[0]++
	if x.Good {
		n[1]++
		r.Good++
		if b != nil {
			b.Good++
		}
	}
	r.good[x.Request.Prompt] = n
	switch x.Outcome {
	case OK:
		r.ttft = append(r.ttft, x.TTFT)
		r.admitted = append(r.admitted, x.Admitted)
		if x.Request.Out > 1 {
			r.tpot = append(r.tpot, x.TPOT)
		}
		r.e2e = append(r.e2e, x.E2E)
		if x.Held > 0 {
			r.hold = append(r.hold, x.Held)
		}
		if x.Predict > 0 && x.Attempts == 1 && x.Offers == 1 {
			r.ratio = append(r.ratio, (x.TTFT-x.Held)/x.Predict)
		}
		r.prompt += float64(x.Request.Prompt)
		r.cached += float64(x.Cached)
		r.out += float64(x.Request.Out)
		if b != nil {
			b.ttft = append(b.ttft, x.TTFT)
		}
	case Shed:
		r.retry = append(r.retry, x.Retry)
		if b != nil {
			b.Shed++
		}
	}
}

// pool adds up one router's totals.
func (r *Report) pool(s admission.Stats) {
	t := &r.Stats
	t.Offered += s.Offered
	t.Placed += s.Placed
	t.Finished += s.Finished
	t.Failed += s.Failed
	t.Cancelled += s.Cancelled
	t.Left += s.Left
	t.EverHeld += s.EverHeld
	t.Revoked += s.Revoked
	t.Panics += s.Panics
	t.Held += s.Held
	for i := range s.Shed {
		t.Shed[i] += s.Shed[i]
	}
	for i := range s.Ejections {
		t.Ejections[i] += s.Ejections[i]
	}
}

// checkBooks is the invariant of every simulation: all that was admitted ended
// once, and the accounts are empty.
func (r *Report) checkBooks(p *admission.Pool, s admission.Stats) {
	shed := uint64(0)
	for _, n := range s.Shed {
		shed += n
	}
	if s.Placed != s.Finished+s.Failed+s.Cancelled {
		r.Books = fmt.Sprintf("placed %d is not finished %d + failed %d + cancelled %d", s.Placed, s.Finished, s.Failed, s.Cancelled)
	}
	if s.Offered != s.Placed+s.Left+shed {
		r.Books = fmt.Sprintf("offered %d is not placed %d + left %d + shed %d", s.Offered, s.Placed, s.Left, shed)
	}
	for i := range p.View().Replicas {
		v := &p.View().Replicas[i]
		own := v.Own
		own.LastFirst = 0
		if own != (fleet.Load{}) {
			r.Books = fmt.Sprintf("replica %s: account %+v at the end", v.Name, own)
		}
	}
}

// reoffer counts a client's coming back.
func (r *Report) reoffer(at float64) {
	i := int(at)
	for len(r.reoffers) <= i {
		r.reoffers = append(r.reoffers, 0)
	}
	r.reoffers[i]++
	r.Reoffers++
}

// peak is the largest second over the mean of the nine seconds around it, where
// at least 90 clients came back in these, and the same in standard deviations.
func peak(x []int) (worst, sigma float64) {
	const side = 4
	for i := side; i+side < len(x); i++ {
		sum := 0
		for _, n := range x[i-side : i+side+1] {
			sum += n
		}
		if mean := float64(sum) / (2*side + 1); sum >= 90 {
			worst = max(worst, float64(x[i])/mean)
			sigma = max(sigma, (float64(x[i])-mean)/math.Sqrt(mean))
		}
	}
	return worst, sigma
}

func (r *Report) finish(s *simulation) {
	r.ReofferPeak, r.ReofferSigma = peak(r.reoffers)
	r.reoffers = nil
	if r.Reoffers > 0 {
		r.Again = float64(r.again) / float64(r.Reoffers)
	}
	for _, x := range r.promises {
		if math.Abs(x-1) <= 0.3 {
			r.Kept++
		}
	}
	r.Kept /= max(1, float64(len(r.promises)))
	// What never ended is in no result list: count it as open.
	missing := 0
	for i := range s.Requests {
		if s.Requests[i].At >= s.Warmup {
			missing++
		}
	}
	missing -= r.Offered
	r.Offered += missing
	r.Outcomes[Open] += missing
	if r.Offered > 0 {
		r.Goodput = float64(r.Good) / float64(r.Offered)
		r.Refused = float64(r.Outcomes[Shed]) / float64(r.Offered)
		r.Attempts = float64(r.attempts) / float64(r.Offered)
	}
	r.Long = longest(r.good, 0.1)
	r.TTFT, r.TPOT, r.E2E, r.Admitted = quantiles(r.ttft), quantiles(r.tpot), quantiles(r.e2e), quantiles(r.admitted)
	r.Held, r.Retry, r.Promise = quantiles(r.hold), quantiles(r.retry), quantiles(r.promises)
	if i := int(math.Ceil(0.95*float64(r.Offered))) - 1; i >= 0 && i < len(r.ttft) {
		r.OfferedP95 = r.ttft[i] // sorted by now
	} else {
		r.OfferedP95 = Never
	}
	r.Ratio = quantiles(r.ratio).P50
	if r.prompt > 0 {
		r.HitRate = r.cached / r.prompt
	}
	total := 0.0
	for _, n := range s.nodes {
		total += n.requests
		r.Preempts += n.Stats(s.now).Preemptions
	}
	for _, n := range s.nodes {
		r.Shares = append(r.Shares, n.requests/max(total, 1))
	}
	for i, n := range r.sheds {
		if n > 0 {
			r.Sheds[admission.Reason(i).String()] = n
		}
	}
	r.Seconds = max(0, r.last-s.Warmup)
	if r.Seconds > 0 {
		r.OutRate = r.out / r.Seconds
	}
	for i := range r.Timeline {
		b := &r.Timeline[i]
		b.TTFTp95 = quantiles(b.ttft).P95
		b.ttft = nil
	}
	r.good = nil
	r.cfg, r.admitted, r.ttft, r.tpot, r.e2e, r.hold, r.retry, r.ratio, r.promises = nil, nil, nil, nil, nil, nil, nil, nil, nil
}

// longest is the goodput of the share of the requests with the longest prompts;
// those as long as the shortest of them are all in it.
func longest(good map[int][2]int, share float64) float64 {
	all, n, ok := 0, 0, 0
	for _, v := range good {
		all += v[0]
	}
	lengths := slices.Sorted(maps.Keys(good))
	for i := len(lengths) - 1; i >= 0 && float64(n) < share*float64(all); i-- {
		v := good[lengths[i]]
		n, ok = n+v[0], ok+v[1]
	}
	return float64(ok) / float64(max(1, n))
}

func quantiles(x []float64) Quantiles {
	n := len(x)
	if n == 0 {
		return Quantiles{}
	}
	sort.Float64s(x)
	sum := 0.0
	for _, v := range x {
		sum += v
	}
	at := func(p float64) float64 { return x[min(n-1, int(math.Ceil(p*float64(n)))-1)] }
	return Quantiles{N: n, Mean: sum / float64(n), P10: at(.1), P50: at(.5), P90: at(.9), P95: at(.95), P99: at(.99), Max: x[n-1]}
}

// Table writes the report for people.
func (r *Report) Table(w io.Writer) {
	fmt.Fprintf(w, "%s: offered %d  ok %d  goodput %.3f  shed %.3f  broken %d  failed %d  left %d  open %d\n", r.Name, r.Offered, r.Outcomes[OK],
		r.Goodput, r.Refused, r.Outcomes[Broken], r.Outcomes[Failed], r.Outcomes[Left], r.Outcomes[Open])
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "ms\tmean\tp50\tp90\tp95\tp99\tmax\t")
	for _, l := range []struct {
		name string
		q    Quantiles
	}{{"TTFT", r.TTFT}, {"since offer", r.Admitted}, {"TPOT", r.TPOT}, {"E2E", r.E2E}, {"held", r.Held}} {
		fmt.Fprintf(t, "%s\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t\n", l.name, 1e3*l.q.Mean, 1e3*l.q.P50, 1e3*l.q.P90, 1e3*l.q.P95, 1e3*l.q.P99, 1e3*l.q.Max)
	}
	_ = t.Flush()
	fmt.Fprintf(w, "hit rate %.3f  preemptions %.0f  attempts %.3f  observed/predicted TTFT %.2f  output %.0f tokens/s\nshares", r.HitRate, r.Preempts, r.Attempts, r.Ratio, r.OutRate)
	for _, x := range r.Shares {
		fmt.Fprintf(w, " %.3f", x)
	}
	fmt.Fprintln(w)
	if len(r.Sheds) > 0 {
		fmt.Fprintf(w, "sheds %v  Retry-After p50 %.2f s p95 %.2f s, over the true wait p10 %.2f p50 %.2f p90 %.2f, refused again %.3f\n", r.Sheds, r.Retry.P50, r.Retry.P95, r.Promise.P10, r.Promise.P50, r.Promise.P90, r.Again)
	}
	if r.IdleHeld > 0 {
		fmt.Fprintf(w, "longest time held while a replica was idle %.1f ms\n", 1e3*r.IdleHeld)
	}
	if r.Books != "" {
		fmt.Fprintln(w, "BOOKS:", r.Books)
	}
}
