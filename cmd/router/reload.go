package main

import (
	"fmt"
	"strings"

	"go.uber.org/zap"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/config"
	"github.com/penstock/penstock/proxy"
	"github.com/penstock/penstock/telemetry"
)

// reload reads the configuration again. A bad one changes nothing: the last
// good one stays in force. From a good one the live settings are applied; the
// others are named, and wait for a restart.
func (a *app) reload(by string) (live, restart []string, err error) {
	a.reloadMu.Lock()
	defer a.reloadMu.Unlock()
	next, err := load(a.src)
	if err != nil {
		return nil, nil, a.refuse(by, err)
	}
	now := a.config()
	live, restart = config.Diff(now, next)
	merged := config.Merge(now, next)
	for i := range merged.Pools {
		p := &merged.Pools[i]
		ac := poolConfig(merged, p)
		ac.Defaults()
		if err := ac.Validate(); err != nil {
			return nil, nil, a.refuse(by, fmt.Errorf("pools[%s]: %w", p.Name, err))
		}
	}
	if merged.TLS.CertFile != "" {
		if err := a.loadCertificate(merged); err != nil {
			return nil, nil, a.refuse(by, err)
		}
	}
	a.apply(now, merged)
	a.refused.Store(nil)
	a.metrics.Counter(telemetry.ReloadTotal, "ok").Inc()
	a.log.Info("configuration read again", zap.String("by", by), zap.Strings("applied", live), zap.Strings("needs_restart", restart))
	if len(restart) > 0 {
		a.log.Warn("these settings need a restart to take effect: " + strings.Join(restart, ", "))
	}
	return live, restart, nil
}

// apply puts the live settings of a configuration that was checked in force.
// The others are read where they are needed, from a.config (drain times, names
// of the admin listener); the certificate has been taken.
func (a *app) apply(was, is *config.Config) {
	a.cfg.Store(is)
	a.hash.Store(is.Hash())
	_ = a.level.UnmarshalText([]byte(is.Log.Level)) // was checked
	a.proxy.SetMaxInFlight(is.Limits.MaxInFlight)
	fail := func(err error) {
		if err != nil {
			a.log.Error("BUG: a setting that was checked could not be applied", zap.Error(err))
		}
	}
	fail(a.proxy.SetClasses(classOptions(is)))
	for i := range is.Pools {
		p := &is.Pools[i]
		fail(a.proxy.SetPool(poolOptions(p)))
		a.proxy.WithCore(p.Name, func(core proxy.Core, _ float64) {
			if c, ok := core.(interface{ Reconfigure(admission.Config) error }); ok {
				fail(c.Reconfigure(poolConfig(is, p)))
			}
		})
		a.refresh(&was.Pools[i], p)
		fail(a.static[p.Name].set(p.Replicas.Static))
	}
}

func (a *app) refuse(by string, err error) error {
	a.metrics.Counter(telemetry.ReloadTotal, "refused").Inc()
	why := err.Error()
	a.refused.Store(&why)
	a.log.Error("configuration refused; the last good one stays in force", zap.String("by", by), zap.Error(err))
	return err
}
