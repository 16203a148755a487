package proxy

import (
	"strconv"

	"github.com/VictoriaMetrics/metrics"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/telemetry"
	"github.com/penstock/penstock/wire"
)

// outcome is how a request ended, for penstock_request_outcomes_total.
type outcome uint8

const (
	outcomeNone      outcome = iota
	outcomeFinished          // a whole answer of a replica, its own 4xx included
	outcomeFailed            // no attempt succeeded, or the stream broke
	outcomeCancelled         // the client left, or the deadline passed
	outcomeShed              // refused for want of room
	outcomeRefused           // refused for what it is
	outcomeLocal             // answered by the router (models, health)
	outcomeCount
)

var outcomeWords = [outcomeCount]string{"none", "finished", "failed", "cancelled", "shed", "refused", "local"}

// Bounds of the histograms, seconds.
var (
	ttftBounds = []float64{.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 40, 80}
	itlBounds  = []float64{.002, .005, .01, .015, .02, .025, .03, .04, .05, .075, .1, .15, .2, .3, .5, 1, 2}
	e2eBounds  = []float64{.01, .05, .1, .25, .5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300, 600}
	holdBounds = []float64{.001, .005, .01, .025, .05, .1, .25, .5, 1, 2, 5, 10, 30}
)

// proxyMetrics are the pointers that the data path counts with: no name is
// looked up for a request that has been seen in kind before.
type proxyMetrics struct {
	reg          *telemetry.Registry
	requests     [wire.KindCount][600]*metrics.Counter
	outcomes     [outcomeCount]*metrics.Counter
	failovers    [fleet.EvidenceCount]*metrics.Counter
	sheds        [admission.ReasonCount]*metrics.Counter
	limited      *metrics.Counter
	storms       *metrics.Counter
	unknownClass *metrics.Counter
	cancels      [phaseCount]*metrics.Counter
	estimated    *metrics.Counter
	deadline     [2]*metrics.PrometheusHistogram // of first attempts, of others
	wasted       [fleet.EvidenceCount]*metrics.Counter
	integrity    []*metrics.Counter
	sloMet       *metrics.Counter
	sloMissed    *metrics.Counter
}

// statuses that the router and vLLM are known to give; others are made when
// first seen.
var usualStatuses = []int{200, 400, 401, 403, 404, 405, 408, 413, 422, 429, 431, 499, 500, 501, 502, 503, 504}

func newProxyMetrics(reg *telemetry.Registry, p *Proxy) *proxyMetrics {
	m := &proxyMetrics{reg: reg}
	for k := range m.requests {
		for _, s := range usualStatuses {
			m.requests[k][s] = reg.Counter(telemetry.Requests, wire.Kind(k).String(), strconv.Itoa(s))
		}
	}
	for o := outcomeFinished; o < outcomeCount; o++ {
		m.outcomes[o] = reg.Counter(telemetry.Outcomes, outcomeWords[o])
	}
	for e := range m.failovers {
		m.failovers[e] = reg.Counter(telemetry.Failovers, fleet.Evidence(e).String())
		m.wasted[e] = reg.Counter(telemetry.TokensWasted, fleet.Evidence(e).String())
	}
	m.limited = reg.Counter(telemetry.RateLimited)
	m.storms = reg.Counter(telemetry.RetryStorms)
	m.unknownClass = reg.Counter(telemetry.UnknownClass)
	m.sheds[admission.ReasonNone] = new(metrics.Counter) // no shed is without a reason: not on the page
	for r := admission.ReasonNone + 1; int(r) < admission.ReasonCount; r++ {
		m.sheds[r] = reg.Counter(telemetry.Sheds, r.String())
	}
	for ph := range m.cancels {
		m.cancels[ph] = reg.Counter(telemetry.Cancellations, phaseWords[ph])
	}
	for v := 0; v < wire.ViolationCount; v++ {
		m.integrity = append(m.integrity, reg.Counter(telemetry.Integrity, wire.Violation(v).String()))
	}
	m.estimated = reg.Counter(telemetry.UsageEstimated)
	for i, which := range [...]string{"first", "next"} {
		m.deadline[i] = reg.Histogram(telemetry.DeadlineLeft, deadlineBounds, which)
	}
	m.sloMet = reg.Counter(telemetry.GoodRequests, "true")
	m.sloMissed = reg.Counter(telemetry.GoodRequests, "false")
	reg.Gauge(telemetry.InFlight, func() float64 { return float64(p.inFlight.Load()) })
	return m
}

// deadlineBounds are of penstock_attempt_deadline_seconds: from a deadline that
// is as good as over to one of hours.
var deadlineBounds = []float64{0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3600}

// request counts a request's end by kind and by what the client was told.
func (m *proxyMetrics) request(k wire.Kind, status int) {
	if status < 0 || status >= 600 || int(k) >= wire.KindCount {
		return
	}
	c := m.requests[k][status]
	if c == nil {
		c = m.reg.Counter(telemetry.Requests, k.String(), strconv.Itoa(status)) // the registry keeps it
	}
	c.Inc()
}

// poolMetrics are one pool's.
type poolMetrics struct {
	hold      *metrics.PrometheusHistogram
	stats     func() admission.Stats // nil when the core has none
	ejections [fleet.EvidenceCount]*metrics.Counter
	panics    *metrics.Counter
	told      admission.Stats // what the counters say
}

// count brings the counters up to what the core says. Under the pool's mutex.
func (m *poolMetrics) count() {
	if m.stats == nil {
		return
	}
	s := m.stats()
	for i, n := range s.Ejections {
		if n > m.told.Ejections[i] {
			m.ejections[i].Add(int(n - m.told.Ejections[i]))
		}
	}
	if s.Panics > m.told.Panics {
		m.panics.Add(int(s.Panics - m.told.Panics))
	}
	m.told = s
}

func newPoolMetrics(reg *telemetry.Registry, pl *pool) *poolMetrics {
	reg.Gauge(telemetry.HeldRequests, func() float64 {
		pl.mu.Lock()
		defer pl.mu.Unlock()
		return float64(pl.held)
	}, pl.name)
	m := &poolMetrics{hold: reg.Histogram(telemetry.HoldTime, holdBounds, pl.name)}
	if c, ok := pl.core.(interface{ Stats() admission.Stats }); ok {
		if core, ok := pl.core.(interface{ Free() float64 }); ok {
			reg.Gauge(telemetry.PoolHeadroom, func() float64 {
				pl.mu.Lock()
				defer pl.mu.Unlock()
				return core.Free()
			}, pl.name)
		}
		reg.Gauge(telemetry.HeldTokens, func() float64 {
			pl.mu.Lock()
			defer pl.mu.Unlock()
			return c.Stats().HeldWork
		}, pl.name)
		m.stats = c.Stats
		m.panics = reg.Counter(telemetry.PanicMode, pl.name)
		for i := range m.ejections {
			m.ejections[i] = reg.Counter(telemetry.Ejections, pl.name, fleet.Evidence(i).String())
		}
	}
	return m
}

// replicaMetrics are one replica's; dropped when it leaves.
type replicaMetrics struct {
	name     string
	attempts *metrics.Counter
	in       *metrics.Counter
	cached   *metrics.Counter
	out      *metrics.Counter
	ttft     *metrics.PrometheusHistogram
	itl      *metrics.PrometheusHistogram
	e2e      *metrics.PrometheusHistogram
}

func newReplicaMetrics(reg *telemetry.Registry, name string) *replicaMetrics {
	return &replicaMetrics{name: name,
		attempts: reg.Counter(telemetry.Attempts, name),
		in:       reg.Counter(telemetry.TokensIn, name),
		cached:   reg.Counter(telemetry.TokensCached, name),
		out:      reg.Counter(telemetry.TokensOut, name),
		ttft:     reg.Histogram(telemetry.TTFT, ttftBounds, name),
		itl:      reg.Histogram(telemetry.ITL, itlBounds, name),
		e2e:      reg.Histogram(telemetry.E2E, e2eBounds, name),
	}
}

// register adds the gauges that read the core's view. Two pools may have one
// replica, as when it moves from one to the other: the gauges show what the pool
// that it joined last knows.
func (m *replicaMetrics) register(pl *pool, r *replica) {
	m.dropGauges(pl.p.reg)
	reg, id := pl.p.reg, r.spec.ID
	view := func(f func(v *fleet.Replica) float64) func() float64 {
		return func() float64 {
			pl.mu.Lock()
			defer pl.mu.Unlock()
			reps := pl.core.View().Replicas
			for i := range reps {
				if reps[i].ID == id {
					return f(&reps[i])
				}
			}
			return 0
		}
	}
	reg.Gauge(telemetry.ReplicaFlight, view(func(v *fleet.Replica) float64 { return float64(v.Own.Requests) }), m.name)
	reg.Gauge(telemetry.ReplicaPrefill, view(func(v *fleet.Replica) float64 { return v.Own.PrefillTokens }), m.name)
	reg.Gauge(telemetry.ReplicaKV, view(func(v *fleet.Replica) float64 { return v.Own.KVTokens }), m.name)
	reg.Gauge(telemetry.ReplicaShare, view(func(v *fleet.Replica) float64 { return v.Health.Share }), m.name)
	reg.Gauge(telemetry.ScalePrefill, view(func(v *fleet.Replica) float64 { return v.ScalePrefill }), m.name)
	reg.Gauge(telemetry.ScaleDecode, view(func(v *fleet.Replica) float64 { return v.ScaleDecode }), m.name)
	for s := fleet.StateUp; s <= fleet.StateDraining; s++ {
		reg.Gauge(telemetry.ReplicaState, view(func(v *fleet.Replica) float64 {
			if v.Health.State == s {
				return 1
			}
			return 0
		}), m.name, s.String())
	}
	if c, ok := pl.core.(interface {
		Info(fleet.ID) (admission.ReplicaInfo, bool)
	}); ok {
		reg.Gauge(telemetry.PredictRatio, func() float64 {
			pl.mu.Lock()
			defer pl.mu.Unlock()
			info, _ := c.Info(id)
			return info.Ratio
		}, m.name)
	}
}

// drop takes the replica's series away.
func (m *replicaMetrics) drop(reg *telemetry.Registry) {
	for _, d := range []*telemetry.Def{telemetry.Attempts, telemetry.TokensIn, telemetry.TokensCached, telemetry.TokensOut, telemetry.TTFT,
		telemetry.ITL, telemetry.E2E} {
		reg.Drop(d, m.name)
	}
	m.dropGauges(reg)
}

func (m *replicaMetrics) dropGauges(reg *telemetry.Registry) {
	for _, d := range []*telemetry.Def{telemetry.ReplicaFlight, telemetry.ReplicaPrefill, telemetry.ReplicaKV, telemetry.ReplicaShare,
		telemetry.ScalePrefill, telemetry.ScaleDecode, telemetry.PredictRatio} {
		reg.Drop(d, m.name)
	}
	for s := fleet.StateUp; s <= fleet.StateDraining; s++ {
		reg.Drop(telemetry.ReplicaState, m.name, s.String())
	}
}
