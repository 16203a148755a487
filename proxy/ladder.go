package proxy

import (
	"encoding/binary"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	"github.com/VictoriaMetrics/metrics"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/internal/mutant"
	"github.com/penstock/penstock/ladder"
	"github.com/penstock/penstock/telemetry"
	"github.com/penstock/penstock/wire"
)

// RouteOptions is the ladder of one model name.
type RouteOptions struct {
	ladder.Route
	Rules ladder.Rules
	// Validated tells whether a tier's last good validation is young enough;
	// nil = every tier is.
	Validated func(*ladder.Validation) bool
}

// Why an answer is degraded; the closed set of X-Degraded-Reason.
const (
	degradedFailed   = "primary_failed"
	degradedSlow     = "primary_slow"
	degradedCapacity = "capacity"
	degradedGone     = "no_replica"
	degradedState    = "route_degraded"
	degradedContext  = "too_long"
)

// ladderRoute is a route's ladder while the router runs: its state machine
// and its metrics. It outlives changes of the table of routes.
type ladderRoute struct {
	opt RouteOptions
	mu  sync.Mutex
	st  *ladder.State

	answers map[string]*metrics.Counter
	changes [len(ladder.Phases)]*metrics.Counter
}

// rung is a tier of the ladder with what it means in this table of routes.
type rung struct {
	tier *ladder.Tier
	to   target // KindPool and KindReduce
	ok   bool   // the pool serves the model
}

func newLadderRoute(p *Proxy, o RouteOptions) *ladderRoute {
	lr := &ladderRoute{opt: o, st: ladder.NewState(o.Rules), answers: map[string]*metrics.Counter{}}
	for _, t := range []string{"0", "1", "2", "cached", "static", "3", "4"} {
		lr.answers[t] = p.reg.Counter(telemetry.TierAnswers, o.Model, t)
	}
	for i, ph := range ladder.Phases {
		lr.changes[i] = p.reg.Counter(telemetry.RouteChanges, o.Model, ph.String())
		p.reg.Gauge(telemetry.RouteState, func() float64 {
			lr.mu.Lock()
			defer lr.mu.Unlock()
			if lr.st.Phase() == ph {
				return 1
			}
			return 0
		}, o.Model, ph.String())
	}
	p.reg.Gauge(telemetry.RecoveryStalled, func() float64 {
		lr.mu.Lock()
		defer lr.mu.Unlock()
		if lr.st.Stalled(p.now()) {
			return 1
		}
		return 0
	}, o.Model)
	return lr
}

// tell runs f on the state machine and notes a change of phase.
func (lr *ladderRoute) tell(f func(*ladder.State) bool) {
	lr.mu.Lock()
	if f(lr.st) {
		lr.changes[lr.st.Phase()].Inc()
	}
	lr.mu.Unlock()
}

// routeLadders puts the ladders into the table. Under repMu.
func (p *Proxy) routeLadders(t *routes) {
	for _, lr := range p.ladders {
		r := t.byName[lr.opt.Model]
		if r == nil {
			r = &route{name: lr.opt.Model}
			t.byName[lr.opt.Model] = r
		}
		r.ladder = lr
		r.rungs = make([]rung, len(lr.opt.Tiers))
		var last rung
		for i := range lr.opt.Tiers {
			tier := &lr.opt.Tiers[i]
			r.rungs[i] = rung{tier: tier}
			switch tier.Kind {
			case ladder.KindPool:
				r.rungs[i].to, r.rungs[i].ok = p.tierTarget(t, lr, tier)
				last = r.rungs[i]
			case ladder.KindReduce:
				r.rungs[i].to, r.rungs[i].ok = last.to, last.ok
			}
		}
		if r.info.ID == "" && r.rungs[0].ok {
			if served := t.byName[r.rungs[0].to.model(lr.opt.Model)]; served != nil && served.info.ID != "" {
				r.info = served.info
				r.info.Root, r.info.ID = served.info.ID, lr.opt.Model
			}
		}
	}
}

func (t *target) model(asked string) string {
	if t.served != "" {
		return t.served
	}
	return asked
}

// tierTarget finds under which name a tier's pool serves the route.
func (p *Proxy) tierTarget(t *routes, lr *ladderRoute, tier *ladder.Tier) (target, bool) {
	pl := p.poolNamed(tier.Pool)
	if pl == nil {
		return target{}, false
	}
	name := tier.Model
	if name == "" {
		name = lr.opt.Model
	}
	if r := t.byName[name]; r != nil {
		for _, to := range r.pools {
			if to.pool == pl {
				to.served = to.model(name)
				return to, true
			}
		}
	}
	// The route's own name is no model of the pool: the pool's first one.
	if tier.Model == "" {
		if first := p.firstModelOf(pl); first != "" {
			return target{pool: pl, served: first, id: p.models.id(first)}, true
		}
	}
	return target{pool: pl, served: tier.Model, id: p.models.id(tier.Model)}, tier.Model != ""
}

func (p *Proxy) firstModelOf(pl *pool) string {
	if len(pl.opt.Models) > 0 {
		return pl.opt.Models[0]
	}
	first := ""
	for _, r := range p.byID {
		if r.pool == pl {
			for _, m := range r.spec.Models {
				if first == "" || m < first {
					first = m
				}
			}
		}
	}
	return first
}

// climb is where a request stands on its route's ladder.
type climb struct {
	lr     *ladderRoute
	rungs  []rung
	at     int       // index of the rung in use
	tier   int       // X-Degraded-Tier; 0 = not degraded
	kind   string    // X-Degraded-Kind: reduced, downgraded, cached, static
	reason string    // X-Degraded-Reason
	rungBy time.Time // when the rung in use has to have begun one
	by     time.Time // when the whole ladder has to have begun an answer; zero = the request's deadline
	trial  bool      // this request is trial traffic for the primary
	judged bool      // the state machine has been told of the attempt
	age    float64   // of a cached answer, seconds
	one    [1]target
	whole  []byte // the body as it came, while a reduced one is in use
	key    ladder.Key
	keep   bool // the answer may be kept for the cached tier
	shared bool
}

// begin puts the request on the ladder of its route. It returns false when it
// was answered (or refused) without a replica.
func (f *flight) beginLadder(r *route) bool {
	c := &f.climb
	*c = climb{lr: r.ladder, rungs: r.rungs}
	now := f.p.now()
	if b := c.lr.opt.Budget; b > 0 {
		c.by = time.Now().Add(b)
	}
	c.lr.mu.Lock()
	primary, trial := c.lr.st.Pick(now)
	c.lr.mu.Unlock()
	f.cacheKey()
	if primary && c.rungs[0].ok && c.rungs[0].tier.Kind == ladder.KindPool {
		c.trial = trial
		c.one[0] = c.rungs[0].to
		f.targets = c.one[:]
		return true
	}
	reason := degradedState
	if primary {
		reason = degradedGone
	}
	if f.descend(reason) {
		return f.outcome == outcomeNone
	}
	// Nothing below can take it: the primary is better than nothing.
	if c.rungs[0].ok {
		c.at, c.tier, c.reason, c.kind = 0, 0, "", ""
		c.one[0] = c.rungs[0].to
		f.targets = c.one[:]
		return true
	}
	f.refuse(admission.Decision{Reason: admission.ReasonNoReplica, RetryAfter: 4 + 2*rand.Float64()}, result{})
	return false
}

// cacheKey works out what the cached tier knows the request by.
func (f *flight) cacheKey() {
	c := &f.climb
	if f.p.cache == nil || f.body.Stream || !f.body.ZeroTemperature || !f.req.kind.Generates() {
		return
	}
	for i := range c.rungs {
		if t := c.rungs[i].tier; t.Kind == ladder.KindCached {
			c.keep, c.shared = true, t.Shared
		}
	}
	if !c.keep {
		return
	}
	tenant := ""
	if !c.shared {
		if tenant = f.tenantName(); tenant == "" {
			c.keep = false // nobody knows whose it is
			return
		}
	}
	k := wire.BodyKey(f.req.kind, tenant, f.req.body)
	c.key = ladder.Key{binary.LittleEndian.Uint64(k[:8]), binary.LittleEndian.Uint64(k[8:16])}
}

func (f *flight) tenantName() string {
	if f.req.identity.Tenant != "" {
		return f.req.identity.Tenant
	}
	return string(f.req.tenant)
}

// keepAnswer holds a whole tier 0 answer for the cached tier.
func (f *flight) keepAnswer(body []byte) {
	if c := &f.climb; c.lr != nil && c.keep && c.tier == 0 && f.status == 200 {
		f.p.cache.Put(c.key, body, f.p.now())
	}
}

// descend takes the next rung that can serve the request. It returns true
// when there is one: then either f.targets says where to go, or the request
// has been answered (f.outcome tells).
func (f *flight) descend(reason string) bool {
	c := &f.climb
	if c.lr == nil || f.wrote {
		return false
	}
	f.restoreBody()
	print := f.print()
	for i := c.at + 1; i < len(c.rungs); i++ {
		if f.takeRung(i, reason, print) {
			return true
		}
	}
	return false
}

func (f *flight) takeRung(i int, reason string, print uint64) bool {
	c := &f.climb
	r := &c.rungs[i]
	now := f.p.now()
	set := func(kind string) {
		c.at, c.tier, c.kind = i, r.tier.Number, kind
		if c.reason == "" {
			c.reason = reason
		}
		f.noteStorm(print, 0) // before the client has the answer: its next try may come at once
	}
	switch r.tier.Kind {
	case ladder.KindPool:
		v := r.tier.Validate
		if !r.ok || v != nil && c.lr.opt.Validated != nil && !c.lr.opt.Validated(v) || f.ladderLate() {
			return false
		}
		// Of the attempt budget this costs nothing: it is a first attempt, at a
		// pool that this request has not asked before, and counts as a request there.
		set("downgraded")
	case ladder.KindReduce:
		if !r.ok || reason != degradedCapacity && reason != degradedContext || f.ladderLate() ||
			f.attempts > 0 && !f.budget(r.to.pool) {
			return false
		}
		if !f.reduceBody(r.tier) {
			f.giveBack()
			return false
		}
		set("reduced")
	case ladder.KindCached:
		if !c.keep || r.tier.Shared != c.shared {
			return false
		}
		b, age, ok := f.p.cache.Get(c.key, r.tier.Staleness.Seconds(), now)
		if !ok {
			return false
		}
		set("cached")
		c.age = age
		f.outcome = outcomeFinished
		f.reply(reply{status: 200, ctype: "application/json", body: b, headers: "Age: " + strconv.Itoa(int(age)) + "\r\n"})
		c.lr.answers["cached"].Inc()
		return true
	case ladder.KindStatic:
		if f.req.kind != wire.KindChat {
			return false
		}
		set("static")
		f.outcome = outcomeFinished
		if f.body.Stream {
			f.reply(reply{status: 200, ctype: "text/event-stream; charset=utf-8", body: r.tier.Static.Stream})
		} else {
			f.reply(reply{status: 200, ctype: "application/json", body: r.tier.Static.JSON})
		}
		c.lr.answers["static"].Inc()
		return true
	default:
		return false
	}
	c.one[0] = r.to
	f.targets = c.one[:]
	f.ticket.Work.Excluded = 0
	return true
}

// ladderLate tells whether the ladder's budget is spent.
func (f *flight) ladderLate() bool {
	by := f.climb.by
	return !by.IsZero() && !time.Now().Before(by)
}

// rungDeadline is when the rung in use has to have begun an answer: its own
// limit, else half of what is left while there are rungs that need time
// below it, else what is left.
func (f *flight) rungDeadline() time.Time {
	c := &f.climb
	if c.lr == nil || c.by.IsZero() {
		return time.Time{}
	}
	now := time.Now()
	left := c.by.Sub(now)
	by := c.by
	if l := c.rungs[c.at].tier.Limit; l > 0 {
		if t := now.Add(l); t.Before(by) {
			by = t
		}
		return by
	}
	for _, r := range c.rungs[c.at+1:] {
		if r.tier.Kind == ladder.KindPool {
			return now.Add(left / 2)
		}
	}
	return by
}

// prepareRung sets what the rung in use changes of the work.
func (f *flight) prepareRung() {
	c := &f.climb
	if c.lr == nil {
		return
	}
	w := &f.ticket.Work
	w.Regions = c.lr.opt.Regions
	if mutant.On("region-open") {
		w.Regions = 0
	}
	w.Deadline = f.req.deadline
	if c.rungBy = f.rungDeadline(); !c.rungBy.IsZero() {
		w.Deadline = min(w.Deadline, f.p.now()+time.Until(c.rungBy).Seconds())
	}
}

func (f *flight) rungLate() bool {
	by := f.climb.rungBy
	return !by.IsZero() && !time.Now().Before(by)
}

// countTier counts an answer by the tier that gave it.
func (f *flight) countTier() {
	if c := &f.climb; c.lr != nil {
		c.lr.answers[[...]string{"0", "1", "2"}[min(c.tier, 2)]].Inc()
	}
}

// failClosed notes that the request ends in tier 4, an honest error: that is
// no degraded answer, whatever rung it came from.
func (f *flight) failClosed() {
	if c := &f.climb; c.lr != nil {
		c.tier = 0
		c.lr.answers["4"].Inc()
	}
}

// judge tells the state machine how a try of the primary went, once: at its
// first byte, or at its failure.
func (f *flight) judge(bad bool) {
	c := &f.climb
	if c.lr == nil || c.at != 0 || c.judged {
		return
	}
	c.judged = true
	now := f.p.now()
	fb := now - f.req.arrived
	c.lr.tell(func(s *ladder.State) bool {
		if c.trial {
			return s.Trial(now, bad, fb)
		}
		return s.Attempt(now, bad, fb)
	})
}

// judgeResult is judge for an attempt that ended without an answer.
func (f *flight) judgeResult(r result) {
	if r.kind == failed && r.evidence != fleet.EvidenceOK { // OK: the client's own deadline, see evidenceOf
		f.judge(true)
		f.climb.judged = false // the next attempt is judged by itself
	}
}

// whyDown is the word for leaving a rung after a shed; last is the attempt
// before it, if there was one.
func whyDown(r admission.Reason, last result) string {
	switch r {
	case admission.ReasonNoReplica, admission.ReasonNotPermitted:
		return degradedGone
	case admission.ReasonExhausted:
		return whyFailed(last.evidence)
	case admission.ReasonDeadline:
		return degradedSlow
	case admission.ReasonTooLong:
		return degradedContext
	}
	return degradedCapacity
}

// whyFailed is the word for leaving a rung after a failed attempt.
func whyFailed(e fleet.Evidence) string {
	switch e {
	case fleet.EvidenceFirstTimeout, fleet.EvidenceStalled:
		return degradedSlow
	case fleet.EvidenceBusy:
		return degradedCapacity
	}
	return degradedFailed
}

// appendDegraded writes the disclosure. No configuration can turn it off.
func (f *flight) appendDegraded(dst []byte) []byte {
	c := &f.climb
	if c.lr == nil || c.tier == 0 || mutant.On("undisclosed") {
		return dst
	}
	dst = append(dst, "X-Degraded: true\r\nX-Degraded-Tier: "...)
	dst = strconv.AppendInt(dst, int64(c.tier), 10)
	dst = append(append(dst, "\r\nX-Degraded-Reason: "...), c.reason...)
	dst = append(append(dst, "\r\nX-Degraded-Kind: "...), c.kind...)
	if c.kind == "static" {
		dst = append(dst, "\r\nCache-Control: public, max-age=30"...)
	} else {
		dst = append(dst, "\r\nCache-Control: private, no-store"...)
	}
	return append(dst, "\r\nRetry-After: 5\r\n"...)
}

// addLadders makes the ladders of the options.
func (p *Proxy) addLadders() {
	for _, o := range p.opt.Routes {
		p.ladders = append(p.ladders, newLadderRoute(p, o))
		for i := range o.Tiers {
			if o.Tiers[i].Kind == ladder.KindCached && p.cache == nil {
				p.cache = ladder.NewCache(p.opt.CacheBytes)
				p.reg.Gauge(telemetry.CacheBytes, func() float64 { return float64(p.cache.Bytes()) })
			}
		}
	}
}
