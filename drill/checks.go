package drill

import (
	"fmt"
	"math"
	"slices"
	"sort"
	"strings"
)

type check func(*record, *Expect) (bool, string)

// checks is the closed set of assertions; a scenario file names them.
var checks map[string]check

func init() {
	checks = map[string]check{
		"failed":         checkFailed,
		"ok":             checkOK,
		"refused":        checkRefused,
		"status":         checkStatus,
		"header":         checkHeader,
		"disclosed":      checkDisclosed,
		"error_events":   checkErrorEvents,
		"left":           checkLeft,
		"metric":         checkMetric,
		"metric_reaches": checkMetricReaches,
		"state":          checkState,
		"no_state":       checkNoState,
		"share":          checkShare,
		"replica_saw":    checkReplicaSaw,
		"cancelled":      checkCancelled,
		"attempts_ratio": checkAttemptsRatio,
		"accounts_zero":  checkAccountsZero,
		"ttft_p95":       checkTTFT,
		"ttft_ratio":     checkTTFTRatio,
		"anchors":        checkAnchors,
		"retry_spread":   checkRetrySpread,
		"retry_after":    checkRetryAfter,
		"service_hits":   checkServiceHits,
		"log":            checkLog,
		"admin":          checkAdmin,
	}
}

func checkNames() []string {
	var n []string
	for k := range checks {
		n = append(n, k)
	}
	sort.Strings(n)
	return n
}

func sortedKeys(m map[string]float64) []string {
	k := make([]string, 0, len(m))
	for s := range m {
		k = append(k, s)
	}
	sort.Strings(k)
	return k
}

// pick returns the calls that the assertion is about.
func (r *record) pick(e *Expect) []*Call {
	var out []*Call
	for _, c := range r.calls {
		if (e.Load == "" || c.Load == e.Load) && c.Sent >= r.from(e) && (e.Before == 0 || c.Sent < e.Before.S()) {
			out = append(out, c)
		}
	}
	return out
}

func inRange(e *Expect, v float64) bool {
	return (e.Min == nil || v >= *e.Min) && (e.Max == nil || v <= *e.Max) && !math.IsNaN(v)
}

// limits words the bounds of an assertion: of a share in per cent.
func limits(e *Expect) string {
	num := func(v float64) string {
		if e.Args["share"] == 1 || e.Check == "share" {
			return fmt.Sprintf("%g %%", math.Round(v*1e4)/100)
		}
		return fmt.Sprintf("%g", v)
	}
	switch {
	case e.Min != nil && e.Max != nil && *e.Min == *e.Max:
		return "exactly " + num(*e.Min)
	case e.Min != nil && e.Max != nil:
		return num(*e.Min) + " to " + num(*e.Max)
	case e.Min != nil && e.Args["share"] == 1 && *e.Min == 1:
		return "all"
	case e.Min != nil:
		return "at least " + num(*e.Min)
	case e.Max != nil && *e.Max == 0:
		return "none"
	case e.Max != nil:
		return "at most " + num(*e.Max)
	}
	return "any number"
}

// span words the time that an assertion is about.
func (e *Expect) span() string {
	switch {
	case e.After > 0 && e.Before > 0:
		return fmt.Sprintf(" from %g to %g s", e.After.S(), e.Before.S())
	case e.After > 0:
		return fmt.Sprintf(" from %g s on", e.After.S())
	case e.Before > 0:
		return fmt.Sprintf(" before %g s", e.Before.S())
	}
	return ""
}

// series words a metric with the labels that are asked for.
func (e *Expect) series() string {
	if len(e.Labels) == 0 {
		return e.Metric
	}
	var l []string
	for k, v := range e.Labels {
		l = append(l, fmt.Sprintf("%s=%q", k, v))
	}
	sort.Strings(l)
	return e.Metric + "{" + strings.Join(l, ",") + "}"
}

// whose names the load that is judged, for the report.
func (e *Expect) whose() string {
	if e.Load == "" {
		return ""
	}
	return " of " + e.Load
}

// count judges the number of final calls for which f holds; with
// args.share = 1 the share of them.
func (r *record) count(e *Expect, what string, f func(*Call) bool) (bool, string) {
	n, all, first := 0, 0, ""
	for _, c := range r.pick(e) {
		if !c.Last {
			continue
		}
		all++
		if f(c) {
			n++
			if first == "" {
				first = fmt.Sprintf(" (first: %s #%d at %.2f s, status %d %s %s)", c.Load, c.N, c.Sent, c.Status, c.Code, c.Err)
			}
		}
	}
	if all == 0 {
		return false, "no request to judge"
	}
	v := float64(n)
	if e.Args["share"] == 1 {
		v /= float64(all)
	}
	if what != "failed" {
		first = ""
	}
	return inRange(e, v), fmt.Sprintf("%d of %d requests%s%s %s%s; wanted %s", n, all, e.whose(), e.span(), what, first, limits(e))
}

// failed: neither answered, nor refused honestly, nor left by the client.
func checkFailed(r *record, e *Expect) (bool, string) {
	if e.Args["unbegun"] == 1 { // of those whose answer had not begun
		return r.count(e, "failed before their first byte", func(c *Call) bool { return !c.OK() && !c.Honest() && !c.Left && c.First == 0 })
	}
	return r.count(e, "failed", func(c *Call) bool { return !c.OK() && !c.Honest() && !c.Left })
}

func checkOK(r *record, e *Expect) (bool, string) { return r.count(e, "answered", (*Call).OK) }

func checkRefused(r *record, e *Expect) (bool, string) {
	return r.count(e, "refused with a Retry-After", (*Call).Honest)
}

func checkLeft(r *record, e *Expect) (bool, string) {
	return r.count(e, "left by the client", func(c *Call) bool { return c.Left })
}

func checkStatus(r *record, e *Expect) (bool, string) {
	return r.count(e, strings.TrimSpace(fmt.Sprintf("answered %d %s", e.Status, e.Code)), func(c *Call) bool {
		return c.Status == e.Status && (e.Code == "" || c.Code == e.Code)
	})
}

func checkHeader(r *record, e *Expect) (bool, string) {
	with := "with " + e.Header
	if e.Value != "" {
		with += ": " + e.Value
	}
	return r.count(e, with, func(c *Call) bool {
		v := c.Header[e.Header]
		return v != "" && (e.Value == "" || v == e.Value)
	})
}

func checkErrorEvents(r *record, e *Expect) (bool, string) {
	return r.count(e, strings.TrimSpace("ended by an error event "+e.Code), func(c *Call) bool { return c.ErrorEvent && !c.Done && (e.Code == "" || c.Code == e.Code) })
}

// disclosed: every answer that carries one degraded header carries all of
// them; at least min answers are degraded; and the router counts no more
// answers of lower tiers than clients were told of.
func checkDisclosed(r *record, e *Expect) (bool, string) {
	if r.final == nil {
		return false, pageGone
	}
	n, bad := 0, 0
	for _, c := range r.pick(e) {
		has := 0
		for _, h := range []string{"X-Degraded", "X-Degraded-Tier", "X-Degraded-Reason"} {
			if c.Header[h] != "" {
				has++
			}
		}
		if has > 0 {
			n++
		}
		if has != 0 && (has != 3 || c.Header["X-Degraded"] != "true" || c.Header["Retry-After"] == "" || c.Header["Cache-Control"] == "") {
			bad++
		}
	}
	counted := 0.0
	for _, tier := range []string{"1", "2", "cached", "static"} {
		v, _ := sum(r.final, "penstock_tier_answers_total", map[string]string{"tier": tier})
		counted += v
	}
	return bad == 0 && inRange(e, float64(n)) && counted <= float64(n),
		fmt.Sprintf("%d degraded answers, %d without full disclosure (the router counts %g); wanted %s", n, bad, counted, limits(e))
}

// metric: what the page says at the end; with before, by how much it had grown
// by then.
func checkMetric(r *record, e *Expect) (bool, string) {
	if r.final == nil {
		return false, pageGone
	}
	v, found := sum(r.final, e.Metric, e.Labels)
	if e.Before > 0 {
		v = r.between(e.Metric, e.Labels, r.from(e), e.Before.S())
	}
	if !found && e.Max == nil {
		return false, e.series() + " is not on the page"
	}
	if inRange(e, v) {
		return true, fmt.Sprintf("%s%s = %g; wanted %s", e.series(), e.span(), v, limits(e))
	}
	var of []string // what it is made of, for whoever looks for the cause
	for _, k := range sortedKeys(r.final) {
		if base, _, _ := strings.Cut(k, "{"); base == e.Metric && base != k && r.final[k] != 0 {
			of = append(of, fmt.Sprintf("%s = %g", strings.TrimPrefix(k, base), r.final[k]))
		}
	}
	return false, fmt.Sprintf("%s%s = %g; wanted %s; on the page at the end: %s", e.series(), e.span(), v, limits(e), strings.Join(of, ", "))
}

// metric_reaches: the metric comes into [min, max] after `after`, within
// `within` of it.
func checkMetricReaches(r *record, e *Expect) (bool, string) {
	last := "never read"
	for _, p := range r.points {
		if p.at < r.from(e) || e.Before > 0 && p.at >= e.Before.S() {
			continue
		}
		v, found := sum(p.m, e.Metric, e.Labels)
		last = fmt.Sprintf("last %g", v)
		if found && inRange(e, v) {
			took := p.at - r.from(e)
			return e.Within == 0 || took <= e.Within.S(), fmt.Sprintf("%s = %g %.2f s after %g s; wanted %s within %g s", e.series(), v, took, e.After.S(), limits(e), e.Within.S())
		}
	}
	return false, fmt.Sprintf("%s never in range%s (%s); wanted %s", e.series(), e.span(), last, limits(e))
}

func isState(k string) bool {
	return strings.HasPrefix(k, "penstock_replica_state{") || strings.HasPrefix(k, "penstock_route_state{")
}

// stateWords says in words what a state's series stands for: replicas by
// their name in the scenario, not by their address.
func (st *stage) stateWords(k string) string {
	label := func(name string) string {
		_, rest, _ := strings.Cut(k, name+`="`)
		v, _, _ := strings.Cut(rest, `"`)
		return v
	}
	if route := label("route"); route != "" {
		return "route " + route + " is " + label("state")
	}
	who := label("replica")
	for name, a := range st.replicas {
		if a.addr == who {
			who = name
		}
	}
	return "replica " + who + " is " + label("state")
}

// of expands a replica's name to its host:port as the metrics have it.
func (r *record) of(name string) string {
	if a, ok := r.st.replicas[name]; ok {
		return a.addr
	}
	return name
}

func (r *record) stateAt(p point, e *Expect) bool {
	for k, v := range p.m {
		if v == 1 && isState(k) && strings.Contains(k, `state="`+e.State+`"`) && (e.Of == "" || strings.Contains(k, `="`+r.of(e.Of)+`"`)) {
			return true
		}
	}
	return false
}

// what names a state and whose it is.
func (e *Expect) what() string { return strings.TrimSpace(e.Of + " " + e.State) }

// state: the state is seen after `after` and within `within` of it.
func checkState(r *record, e *Expect) (bool, string) {
	for _, p := range r.points {
		if p.at >= r.from(e) && r.stateAt(p, e) {
			took := p.at - r.from(e)
			seen := fmt.Sprintf("%s seen %.2f s after %g s", e.what(), took, e.After.S())
			if e.Within > 0 {
				seen += fmt.Sprintf("; wanted within %g s", e.Within.S())
			}
			return e.Within == 0 || took <= e.Within.S(), seen
		}
	}
	return false, fmt.Sprintf("%s never seen%s", e.what(), e.span())
}

// no_state: the state is not seen between after and before.
func checkNoState(r *record, e *Expect) (bool, string) {
	for _, p := range r.points {
		if p.at >= r.from(e) && (e.Before == 0 || p.at < e.Before.S()) && r.stateAt(p, e) {
			return false, fmt.Sprintf("%s seen at %.2f s", e.what(), p.at)
		}
	}
	return len(r.points) > 0, fmt.Sprintf("%s not seen%s", e.what(), e.span())
}

// between returns how much a counter grew between two times.
func (r *record) between(name string, labels map[string]string, after, before float64) float64 {
	var a, b float64
	for _, p := range r.points {
		v, _ := sum(p.m, name, labels)
		if p.at <= after {
			a = v
		}
		if before == 0 || p.at <= before {
			b = v
		}
	}
	if before == 0 {
		b, _ = sum(r.final, name, labels)
	}
	return b - a
}

// share: a replica's share of the attempts between after and before.
func checkShare(r *record, e *Expect) (bool, string) {
	n := r.between("penstock_attempts_total", map[string]string{"replica": r.of(e.Of)}, r.from(e), e.Before.S())
	all := r.between("penstock_attempts_total", nil, r.from(e), e.Before.S())
	if all == 0 {
		return false, "no attempt to judge"
	}
	return inRange(e, n/all), fmt.Sprintf("%s took %g of %g attempts%s (%.1f %%); wanted %s", e.Of, n, all, e.span(), 100*n/all, limits(e))
}

func checkReplicaSaw(r *record, e *Expect) (bool, string) {
	a := r.st.replicas[e.Of]
	if a == nil {
		return false, "no replica " + e.Of
	}
	n := float64(a.requests())
	return inRange(e, n), fmt.Sprintf("%s saw %g requests; wanted %s", e.Of, n, limits(e))
}

// cancelled: so many requests were left by the router while the replica still
// had them, and it has none now: each abandoned connection was closed.
func checkCancelled(r *record, e *Expect) (bool, string) {
	a := r.st.replicas[e.Of]
	if a == nil {
		return false, "no replica " + e.Of
	}
	n := a.srv.Counts()
	return n.Running == 0 && inRange(e, float64(n.Aborted)), fmt.Sprintf("%s saw %d requests cancelled and still has %d; wanted %s, and 0", e.Of, n.Aborted, n.Running, limits(e))
}

// attempts_ratio: requests at the replicas for each request of the clients.
func checkAttemptsRatio(r *record, e *Expect) (bool, string) {
	var saw float64
	for _, a := range r.st.replicas {
		saw += float64(a.requests())
	}
	asked := map[string]bool{}
	for _, c := range r.pick(e) {
		asked[fmt.Sprint(c.Load, c.N)] = true
	}
	if len(asked) == 0 {
		return false, "no request to judge"
	}
	v := saw / float64(len(asked))
	return inRange(e, v), fmt.Sprintf("%g attempts at replicas for %d requests (%.3f); wanted %s", saw, len(asked), v, limits(e))
}

var accounts = []string{"penstock_requests_in_flight", "penstock_held_requests", "penstock_held_tokens", "penstock_replica_requests_in_flight",
	"penstock_replica_prefill_tokens", "penstock_replica_kv_tokens", "penstock_tenant_requests_in_flight"}

// pageGone is why nothing can be said of the router's own figures.
const pageGone = "the metrics page could not be read at the end"

func checkAccountsZero(r *record, _ *Expect) (bool, string) {
	var bad []string
	seen := 0
	for i, page := range append([]map[string]float64{r.final}, r.others...) {
		switch {
		case r.st.sc.ended(i):
			continue
		case page == nil:
			return false, fmt.Sprintf("router %d: %s", i, pageGone)
		}
		before := seen
		for _, k := range sortedKeys(page) {
			if base, _, _ := strings.Cut(k, "{"); !slices.Contains(accounts, base) {
				continue
			}
			seen++
			if page[k] != 0 {
				bad = append(bad, fmt.Sprintf("router %d: %s = %g", i, k, page[k]))
			}
		}
		if seen == before {
			return false, fmt.Sprintf("router %d has no account on its page", i)
		}
	}
	if len(bad) == 0 {
		return seen > 0, fmt.Sprintf("%d accounts, all exactly zero", seen)
	}
	return false, fmt.Sprintf("of %d accounts %d are not zero: %s", seen, len(bad), strings.Join(bad, ", "))
}

func quantile(v []float64, q float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	sort.Float64s(v)
	return v[min(len(v)-1, int(q*float64(len(v))))]
}

// ttft are the times to the first token of what was answered. Those in which
// the machine itself stood still are left out, if enough others remain.
func (r *record) ttft(e *Expect) []float64 {
	var all, calm []float64
	for _, c := range r.pick(e) {
		if c.OK() && c.First > 0 {
			all = append(all, c.First-c.Sent)
			if r.stoodStill(c.Sent, c.First) <= stillShare*(c.First-c.Sent) {
				calm = append(calm, c.First-c.Sent)
			}
		}
	}
	if len(calm) >= 10 && 3*len(calm) >= len(all) {
		return calm
	}
	return all
}

func checkTTFT(r *record, e *Expect) (bool, string) {
	v := r.ttft(e)
	p := quantile(v, .95)
	return inRange(e, p), fmt.Sprintf("TTFT p95 of %d answers%s%s: %.3f s; wanted %s", len(v), e.whose(), e.span(), p, limits(e))
}

// ttft_ratio: p95 TTFT after `after` over p95 before it.
func checkTTFTRatio(r *record, e *Expect) (bool, string) {
	before := Expect{Load: e.Load, Before: e.After}
	a, b := quantile(r.ttft(&before), .95), quantile(r.ttft(&Expect{Load: e.Load, After: e.After, Before: e.Before}), .95)
	return inRange(e, b/a), fmt.Sprintf("TTFT p95 %.3f s before, %.3f s after (ratio %.2f); wanted %s", a, b, b/a, limits(e))
}

func checkAnchors(r *record, e *Expect) (bool, string) {
	n, own, foreign := 0, 0, 0
	for _, c := range r.pick(e) {
		if c.OK() {
			n++
			if c.Anchored {
				own++
			}
			if c.Foreign != "" {
				foreign++
			}
		}
	}
	return n > 0 && own == n && foreign == 0 && inRange(e, float64(n)), fmt.Sprintf("%d answers: %d hold their own session's anchors, %d another's", n, own, foreign)
}

// retry_spread: repeats are spread, not in step: the busiest 100 ms holds at
// most `max` of all repeats. There have to be args.least of them.
func checkRetrySpread(r *record, e *Expect) (bool, string) {
	slots, n, most := map[int]int{}, 0, 0
	for _, c := range r.pick(e) {
		if c.Try > 0 {
			n++
			slots[int(c.Sent*10)]++
			most = max(most, slots[int(c.Sent*10)])
		}
	}
	if least := max(10, e.Args["least"]); float64(n) < least {
		return false, fmt.Sprintf("%d repeats show nothing, %g are needed", n, least)
	}
	return inRange(e, float64(most)/float64(n)), fmt.Sprintf("%d repeats, the busiest 100 ms holds %d; wanted %s", n, most, limits(e))
}

// retry_after: every refusal says when to return, in [min, max] seconds.
func checkRetryAfter(r *record, e *Expect) (bool, string) {
	n, bad := 0, 0
	lo, hi := math.Inf(1), 0.0
	for _, c := range r.pick(e) {
		if c.Status == 429 || c.Status == 503 {
			n++
			lo, hi = min(lo, c.RetryAfter), max(hi, c.RetryAfter)
			if !inRange(e, c.RetryAfter) || c.RetryAfter == 0 {
				bad++
			}
		}
	}
	if n == 0 {
		return false, "no refusal to judge"
	}
	return bad == 0, fmt.Sprintf("%d refusals%s, Retry-After from %.3f to %.2f s, %d outside; wanted %s s", n, e.whose(), lo, hi, bad, limits(e))
}

func checkServiceHits(r *record, e *Expect) (bool, string) {
	s := r.st.services[e.Of]
	if s == nil {
		return false, "no service " + e.Of
	}
	n := float64(s.hits.Load())
	return inRange(e, n), fmt.Sprintf("service %s saw %g requests; wanted %s", e.Of, n, limits(e))
}
