package main

import (
	"strings"

	"go.uber.org/zap"

	"github.com/penstock/penstock/config"
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
	if next.TLS.CertFile != "" && now.TLS.CertFile != "" {
		if err := a.loadCertificate(next); err != nil {
			return nil, nil, a.refuse(by, err)
		}
	}
	live, restart = config.Diff(now, next)
	for i := range next.Pools {
		if s := a.static[next.Pools[i].Name]; s != nil {
			if err := s.set(next.Pools[i].Replicas.Static); err != nil {
				return nil, nil, a.refuse(by, err)
			}
		}
	}
	_ = a.level.UnmarshalText([]byte(next.Log.Level))
	merged := merge(now, next)
	a.cfg.Store(merged)
	a.hash.Store(merged.Hash())
	a.metrics.Counter(telemetry.ReloadTotal, "ok").Inc()
	a.log.Info("configuration read again", zap.String("by", by), zap.Strings("applied", live), zap.Strings("needs_restart", restart))
	if len(restart) > 0 {
		a.log.Warn("these settings need a restart to take effect: " + strings.Join(restart, ", "))
	}
	return live, restart, nil
}

func (a *app) refuse(by string, err error) error {
	a.metrics.Counter(telemetry.ReloadTotal, "refused").Inc()
	a.log.Error("configuration refused; the last good one stays in force", zap.String("by", by), zap.Error(err))
	return err
}

// merge is the configuration in force after a reload: what runs, with the
// live settings of next.
func merge(now, next *config.Config) *config.Config {
	c := *now
	c.Log.Level = next.Log.Level
	c.Pools = append([]config.Pool(nil), now.Pools...)
	for i := range c.Pools {
		for j := range next.Pools {
			if n := &next.Pools[j]; n.Name == c.Pools[i].Name {
				c.Pools[i].Replicas.Static = n.Replicas.Static
			}
		}
	}
	return &c
}
