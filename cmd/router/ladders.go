package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/penstock/penstock/config"
	"github.com/penstock/penstock/ladder"
	"github.com/penstock/penstock/proxy"
	"github.com/penstock/penstock/telemetry"
	"github.com/penstock/penstock/tenant"
)

// beside fills in the options of what stands beside plain routing: ladders,
// services, tenants' limits and tracing.
func (a *app) beside(cfg *config.Config, o *proxy.Options) error {
	v := &validations{file: ladder.RecordFile(cfg.StateDir), log: a.log, list: downgrades(cfg), used: map[string]bool{}, late: map[string]bool{}}
	for _, d := range v.list {
		a.metrics.Gauge(telemetry.TierValidated, func() float64 { return oneIf(v.good(d.Validation)) }, d.Route, d.Pool, d.Model)
	}
	if len(v.list) > 0 {
		v.good(v.list[0].Validation) // the log tells now what is out of use, not when it is needed
	}
	for i := range cfg.Routes {
		r, err := routeOptions(cfg, &cfg.Routes[i], a.labels)
		if err != nil {
			return err
		}
		r.Validated = v.good
		o.Routes = append(o.Routes, r)
	}
	for _, s := range cfg.Services {
		o.Services = append(o.Services, proxy.ServiceOptions{Name: s.Name, Prefix: s.Prefix, URL: s.URL, Connections: s.Connections, Timeout: s.Timeout})
	}
	o.Limits = tenant.Limits{Rate: float64(cfg.Tenants.Limits.Rate), Burst: float64(cfg.Tenants.Limits.Burst), Parallel: cfg.Tenants.Limits.Parallel}
	if cfg.Tracing.OTLP == "" {
		return nil
	}
	t, err := telemetry.NewTracer(cfg.Tracing.OTLP, versionText(), a.metrics.Counter(telemetry.SpansDropped).Add)
	if err != nil {
		return err
	}
	o.Tracer = t
	a.closers = append(a.closers, func() { closeTracer(t) })
	return nil
}

// servedBy is the model that a pool tier of a route asks for; "" = not known
// before the replicas were asked.
func servedBy(cfg *config.Config, r *config.Route, t *config.Tier) string {
	if t.Model != "" {
		return t.Model
	}
	for i := range cfg.Pools {
		p := &cfg.Pools[i]
		if p.Name != t.Pool {
			continue
		}
		switch {
		case slices.Contains(p.Models, r.Model):
			return r.Model
		case len(p.Models) > 0:
			return p.Models[0]
		}
	}
	return ""
}

// equivalent tells whether pool tier j serves the same model as the route's
// first one: tier 0. Where that is not known, it is taken as a smaller model.
func equivalent(cfg *config.Config, r *config.Route, j int) bool {
	if j == 0 {
		return true
	}
	if r.Tiers[0].Pool == "" {
		return false
	}
	first := servedBy(cfg, r, &r.Tiers[0])
	return first != "" && first == servedBy(cfg, r, &r.Tiers[j])
}

// routeOptions makes a route's ladder of its configuration.
func routeOptions(cfg *config.Config, r *config.Route, l *labels) (proxy.RouteOptions, error) {
	o := proxy.RouteOptions{Route: ladder.Route{Model: r.Model, Budget: r.Budget}, Rules: ladder.Rules{
		FailShare: float64(r.Degrade.FailShare), Window: r.Degrade.Window.Seconds(), FirstByteP95: r.Degrade.FirstByteP95.Seconds(),
		HealthyFor: r.Degrade.HealthyFor.Seconds(), AgainFor: r.Degrade.AgainFor.Seconds(), TrialShare: float64(r.Degrade.TrialShare),
		MinAttempts: r.Degrade.MinAttempts, TrialMin: r.Degrade.TrialRate, Trials: r.Degrade.Trials, TrialSuccess: float64(r.Degrade.TrialSuccess),
		RampFrom: float64(r.Degrade.RampFrom), Ramp: r.Degrade.Ramp.Seconds(), Stalled: r.Degrade.StalledAfter.Seconds()}}
	for _, region := range r.Regions {
		o.Regions |= l.region(region)
	}
	for j := range r.Tiers {
		t, err := tierOptions(cfg, r, j)
		if err != nil {
			return o, fmt.Errorf("route of %s: tier %d: %w", r.Model, j, err)
		}
		o.Tiers = append(o.Tiers, t)
	}
	return o, nil
}

func tierOptions(cfg *config.Config, r *config.Route, j int) (ladder.Tier, error) {
	c := &r.Tiers[j]
	switch {
	case c.Pool != "":
		t := ladder.Tier{Kind: ladder.KindPool, Number: 2, Pool: c.Pool, Model: c.Model, Limit: c.Limit}
		if equivalent(cfg, r, j) {
			t.Number = 0
			return t, nil
		}
		t.Validate = validationOf(cfg, r, j)
		return t, nil
	case c.Reduce != nil:
		return ladder.Tier{Kind: ladder.KindReduce, Number: 1, MaxTokens: c.Reduce.MaxTokens, DropTools: c.Reduce.DropTools}, nil
	case c.Cached != nil:
		return ladder.Tier{Kind: ladder.KindCached, Number: 2, Shared: c.Cached.Scope == "shared", Staleness: c.Cached.Staleness}, nil
	case c.Static != nil:
		b, err := os.ReadFile(c.Static.File)
		if err != nil {
			return ladder.Tier{}, fmt.Errorf("static.file: %w", err)
		}
		s, err := ladder.NewStatic(c.Static.File, b)
		return ladder.Tier{Kind: ladder.KindStatic, Number: 2, Static: s}, err
	}
	return ladder.Tier{}, errors.New("of no known kind")
}

// validationOf is what a smaller model's tier has to pass; one that declares
// nothing never counts as validated.
func validationOf(cfg *config.Config, r *config.Route, j int) *ladder.Validation {
	c := &r.Tiers[j]
	v := &ladder.Validation{Route: r.Model, Pool: c.Pool, Model: servedBy(cfg, r, c)}
	if c.Validate != nil {
		v.Prompts, v.Pass, v.Every = c.Validate.Prompts, float64(c.Validate.Pass), c.Validate.Every
	}
	return v
}

// downgrade is a tier that needs a validation.
type downgrade struct {
	*ladder.Validation
	key string // in the configuration
}

// downgrades lists the tiers of a configuration that need a validation.
func downgrades(cfg *config.Config) (out []downgrade) {
	for i := range cfg.Routes {
		r := &cfg.Routes[i]
		for j := range r.Tiers {
			if r.Tiers[j].Pool != "" && !equivalent(cfg, r, j) {
				out = append(out, downgrade{validationOf(cfg, r, j), fmt.Sprintf("routes[%d].tiers[%d]", i, j)})
			}
		}
	}
	return out
}

// untested names the tiers whose last validation failed, is too old or missing,
// and warns of those that may be used and are to be validated again.
func untested(cfg *config.Config, now time.Time) (problems config.Errors, warnings []string) {
	list := downgrades(cfg)
	if len(list) == 0 {
		return nil, nil
	}
	if cfg.StateDir == "" {
		return config.Errors{cfg.Problem("state_dir", fmt.Errorf("is required, since %s is a smaller model: it holds when each was last validated", list[0].key))}, nil
	}
	rec, err := ladder.LoadRecord(ladder.RecordFile(cfg.StateDir))
	if err != nil {
		return config.Errors{cfg.Problem("state_dir", err)}, nil
	}
	for _, v := range list {
		if v.Prompts != "" {
			if err := ladder.CheckPrompts(v.Prompts); err != nil {
				problems = append(problems, cfg.Problem(v.key+".validate.prompts", err))
			}
		}
		switch why := rec.Why(v.Validation, now); {
		case why != "":
			problems = append(problems, cfg.Problem(v.key, fmt.Errorf("ERR_UNTESTED_COMPENSATION_REJECTED: route %s: pool %s (model %s) %s; run penstock validate-fallbacks", v.Route, v.Pool, v.Model, why)))
		case rec.Due(v.Validation, now):
			warnings = append(warnings, fmt.Sprintf("%s.validate.every: the last pass is %s old, over %s; run penstock validate-fallbacks", v.key, now.Sub(rec[v.Key()].At).Round(time.Minute), v.Every))
		}
	}
	return problems, warnings
}

// validations is the record as the daemon sees it, read again when it is
// older than 5 s.
type validations struct {
	file string
	log  *zap.Logger
	list []downgrade

	mu   sync.Mutex
	read time.Time
	rec  ladder.Record
	used map[string]bool // tiers that may be used, as was told last; by key
	late map[string]bool // the same of those that are to be validated again
}

func (v *validations) good(t *ladder.Validation) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	now := time.Now()
	if now.Sub(v.read) > 5*time.Second {
		v.read = now
		rec, err := ladder.LoadRecord(v.file)
		if err != nil {
			v.log.Warn("validation record cannot be read; the last one stays", zap.Error(err))
		} else {
			v.rec = rec
		}
		v.tell(now)
	}
	return v.rec.Good(t, now)
}

// tell logs which tiers may be used now and may not, where that has changed.
func (v *validations) tell(now time.Time) {
	for _, d := range v.list {
		why := v.rec.Why(d.Validation, now)
		f := []zap.Field{zap.String("route", d.Route), zap.String("pool", d.Pool), zap.String("model", d.Model)}
		late := why == "" && v.rec.Due(d.Validation, now)
		if late && !v.late[d.Key()] {
			v.log.Warn("a fallback tier's last pass is older than validate.every: run penstock validate-fallbacks before it is 24h old and the tier out of use",
				append(f, zap.Time("passed", v.rec[d.Key()].At), zap.Duration("every", d.Every))...)
		}
		v.late[d.Key()] = late
		used, told := v.used[d.Key()]
		if told && used == (why == "") {
			continue
		}
		v.used[d.Key()] = why == ""
		if why != "" {
			v.log.Warn("a fallback tier is not used until it passes penstock validate-fallbacks", append(f, zap.String("reason", "it "+why))...)
		} else if told {
			v.log.Info("a fallback tier may be used again: it passed its validation", f...)
		}
	}
}

func oneIf(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func closeTracer(t *telemetry.Tracer) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	t.Close(ctx)
}
