package config

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/penstock/penstock/internal/mutant"
)

// routes checks the ladders: what a tier names must exist.
func (v *validator) routes() {
	c := v.c
	pools := map[string]*Pool{}
	names := []string{} // nil: not all are known
	regions := map[string]bool{}
	for i := range c.Pools {
		p := &c.Pools[i]
		pools[p.Name] = p
		names = append(names, p.Name)
		regions[p.Labels["region"]] = true
	}
	for i := range c.Pools {
		if v.lost(fmt.Sprintf("pools[%d].name", i)) {
			names = nil
		}
	}
	if len(c.Pools) == 0 { // which is told
		names = nil
	}
	seen := map[string]int{}
	permitted := map[string]bool{}
	for i := range c.Routes {
		for _, region := range c.Routes[i].Regions {
			permitted[region] = true
		}
	}
	if len(permitted) > 63 {
		v.fail("routes", "the routes permit %d different regions; at most 63", len(permitted))
	}
	for i := range c.Routes {
		r, key := &c.Routes[i], fmt.Sprintf("routes[%d]", i)
		switch {
		case r.Model == "":
			v.fail(key+".model", "is required")
		case seen[r.Model] > 0:
			v.fail(key+".model", "%q has a route already, routes[%d]", r.Model, seen[r.Model]-1)
		}
		seen[r.Model] = i + 1
		if r.Budget < time.Millisecond || r.Budget > time.Hour {
			v.fail(key+".budget", "%s is not from 1ms to 1h", r.Budget)
		}
		v.degrade(&r.Degrade, key+".degrade")
		for j, region := range r.Regions {
			if !regions[region] {
				v.warn("%s.regions[%d]: no pool has the label region: %s; only replicas found by discovery could be there", key, j, region)
			}
		}
		if len(r.Tiers) == 0 {
			v.fail(key+".tiers", "a route needs at least one tier; nothing is implied")
		}
		for j := range r.Tiers {
			v.tier(r, j, fmt.Sprintf("%s.tiers[%d]", key, j), pools, names)
		}
	}
}

// domain refuses a fallback that falls together with what it is for.
func (v *validator) domain(r *Route, j int, key string, pools map[string]*Pool) {
	fallback := pools[r.Tiers[j].Pool]
	if fallback == nil || fallback.Labels["domain"] == "" || mutant.On("shared-domain") {
		return
	}
	for k := range j {
		if p := pools[r.Tiers[k].Pool]; p != nil && p != fallback && p.Labels["domain"] == fallback.Labels["domain"] {
			v.fail(key+".pool", "ERR_SHARED_FAILURE_DOMAIN_DETECTED: pool %q is in failure domain %s, as pool %q is, which it is the fallback of",
				fallback.Name, p.Labels["domain"], p.Name)
		}
	}
}

func (v *validator) tier(r *Route, j int, key string, pools map[string]*Pool, names []string) {
	t := &r.Tiers[j]
	route, _, _ := strings.Cut(key, ".tiers[")
	kinds := 0
	for _, is := range []bool{t.Pool != "", t.Reduce != nil, t.Cached != nil, t.Static != nil, t.Defer} {
		if is {
			kinds++
		}
	}
	if kinds != 1 {
		if !v.badUnder(key) {
			v.fail(key, "a tier is exactly one of pool, reduce, cached, static and defer")
		}
		return
	}
	switch {
	case t.Pool != "":
		if p := pools[t.Pool]; p == nil {
			if names != nil {
				v.oneOf(key+".pool", t.Pool, names)
			}
		} else if len(r.Regions) > 0 && p.Labels["region"] != "" && !slices.Contains(r.Regions, p.Labels["region"]) {
			v.warn("%s.pool: pool %q is in region %s, which the route does not permit: the tier is never used", key, t.Pool, p.Labels["region"])
		}
		v.domain(r, j, key, pools)
		for k := range j {
			if r.Tiers[k].Pool == t.Pool {
				v.fail(key+".pool", "pool %q is an earlier tier already", t.Pool)
			}
		}
	case t.Reduce != nil:
		if j == 0 || (r.Tiers[j-1].Pool == "") {
			v.fail(key+".reduce", "asks less of the pool before it, and there is none")
		}
		if t.Reduce.MaxTokens < 0 || t.Reduce.MaxTokens == 0 && !t.Reduce.DropTools {
			v.fail(key+".reduce.max_tokens", "must be at least 1, or reduces nothing")
		}
	case t.Cached != nil:
		v.oneOf(key+".cached.scope", t.Cached.Scope, []string{"tenant", "shared"})
		ceiling := 4 * time.Hour
		if t.Cached.Scope == "shared" || v.lost(key+".cached.scope") {
			ceiling = 24 * time.Hour
		}
		if t.Cached.Staleness <= 0 || t.Cached.Staleness > ceiling {
			v.fail(key+".cached.staleness", "%s is not over 0s and at most %s (scope %s)", t.Cached.Staleness, ceiling, t.Cached.Scope)
		}
	case t.Static != nil && t.Static.File == "":
		v.fail(key+".static.file", "is required")
	case t.Static != nil:
		t.Static.File = v.c.Path(t.Static.File)
	}
	if t.Model != "" && t.Pool == "" {
		v.fail(key+".model", "belongs to a pool tier")
	}
	if t.Limit != 0 && (t.Pool == "" || t.Limit < 0 || t.Limit > r.Budget && !v.lost(route+".budget")) {
		v.fail(key+".limit", "%s: belongs to a pool tier, and is not over the route's budget of %s", t.Limit, r.Budget)
	}
	if t.Validate != nil {
		if t.Pool == "" {
			v.fail(key+".validate", "belongs to a pool tier")
		}
		if t.Validate.Prompts == "" {
			v.fail(key+".validate.prompts", "is required")
		}
		t.Validate.Prompts = v.c.Path(t.Validate.Prompts)
		if t.Validate.Every <= 0 || t.Validate.Every > 24*time.Hour {
			v.fail(key+".validate.every", "%s is not over 0s and at most 24h, after which the tier is not used", t.Validate.Every)
		}
	}
}

// degrade checks when a route leaves its first tier and how it returns.
func (v *validator) degrade(d *Degrade, key string) {
	for name, share := range map[string]Ratio{"fail_share": d.FailShare, "trial_share": d.TrialShare, "trial_success": d.TrialSuccess, "ramp_from": d.RampFrom} {
		if share <= 0 || share > 1 {
			v.fail(key+"."+name, "%s is not a share over 0%% and up to 100%%", share)
		}
	}
	for name, t := range map[string]time.Duration{"window": d.Window, "healthy_for": d.HealthyFor, "again_for": d.AgainFor, "ramp": d.Ramp, "stalled_after": d.StalledAfter} {
		if t <= 0 || t > 24*time.Hour {
			v.fail(key+"."+name, "%s is not over 0s and at most 24h", t)
		}
	}
	for name, n := range map[string]int{"min_attempts": d.MinAttempts, "trials": d.Trials} {
		if n < 1 || n > 500 { // the state machine remembers 512 attempts
			v.fail(key+"."+name, "%d is not from 1 to 500", n)
		}
	}
	if d.FirstByteP95 < 0 {
		v.fail(key+".first_byte_p95", "%s is negative", d.FirstByteP95)
	}
	if !(d.TrialRate > 0 && d.TrialRate <= 1000) {
		v.fail(key+".trial_rate", "%g is not over 0 and up to 1000 a second", d.TrialRate)
	}
}

// Abilities are what a pool's replicas may be said to do beside text.
var Abilities = []string{"tools", "images", "audio", "video"}
