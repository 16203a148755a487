package main

import (
	"encoding/json"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/config"
	"github.com/penstock/penstock/console"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/proxy"
)

// adminHandler is the admin listener: the console, and what only cmd can do.
func (a *app) adminHandler() http.Handler {
	return console.New(console.Options{Router: consoleRouter{a}, Reg: a.metrics, Log: a.log, Version: versionText(), Hosts: func() []string { return adminHosts(a.config()) },
		Also: map[string]http.HandlerFunc{"POST /admin/v1/reload": a.reloadAPI, "GET /admin/v1/peers": a.peersAPI}})
}

// adminHosts are the names by which the admin listener may be asked.
func adminHosts(c *config.Config) []string {
	hosts := slices.Clone(c.AdminHosts)
	if h, _, err := net.SplitHostPort(c.Admin); err == nil && h != "" {
		hosts = append(hosts, h)
	}
	if h, err := os.Hostname(); err == nil {
		hosts = append(hosts, h)
	}
	return hosts
}

func (a *app) reloadAPI(w http.ResponseWriter, _ *http.Request) {
	live, restart, err := a.reload("admin API")
	w.Header().Set("Content-Type", "application/json")
	out := struct {
		OK      bool     `json:"ok"`
		Applied []string `json:"applied"`
		Restart []string `json:"needs_restart"`
		Error   string   `json:"error,omitempty"`
	}{err == nil, append([]string{}, live...), append([]string{}, restart...), ""}
	if err != nil {
		out.Error = err.Error()
		w.WriteHeader(http.StatusUnprocessableEntity)
	}
	_ = json.NewEncoder(w).Encode(out)
}

// consoleRouter shows the app to the console.
type consoleRouter struct{ a *app }

func (c consoleRouter) Now() float64          { return c.a.now() }
func (c consoleRouter) Ready() (bool, []byte) { return c.a.proxy.Ready() }
func (c consoleRouter) Config() any           { return c.a.config() }
func (c consoleRouter) ConfigError() string {
	if why := c.a.refused.Load(); why != nil {
		return *why
	}
	return ""
}
func (c consoleRouter) InFlight() int                   { return c.a.proxy.InFlight() }
func (c consoleRouter) Drain(id fleet.ID, on bool) bool { return c.a.proxy.DrainReplica(id, on) }

// Requests are those that are held or at a replica.
func (c consoleRouter) Requests() []console.Request {
	cfg := c.a.config()
	flights := c.a.proxy.Flights()
	out := make([]console.Request, 0, len(flights))
	for i := range flights {
		f := &flights[i]
		r := console.Request{ID: f.Request, Path: f.Path, Model: f.Model, Tenant: f.Tenant, Phase: f.Phase, Pool: f.Pool, Replica: f.Replica,
			Attempt: f.Attempt, Prompt: f.Prompt, Output: f.Output, Age: f.Age, HeldFor: f.HeldFor}
		if f.Class < len(cfg.Classes) {
			r.Class = cfg.Classes[f.Class].Name
		}
		out = append(out, r)
	}
	return out
}

// Pools copies what each pool's core knows, under its mutex.
func (c consoleRouter) Pools() []console.Pool {
	cfg := c.a.config()
	out := make([]console.Pool, 0, len(cfg.Pools))
	for i := range cfg.Pools {
		p := &cfg.Pools[i]
		cp := console.Pool{Name: p.Name, Models: slices.Clone(p.Models)}
		for _, al := range p.Aliases {
			cp.Aliases = append(cp.Aliases, al.Name)
		}
		c.a.proxy.WithCore(p.Name, func(core proxy.Core, _ float64) {
			pool, _ := core.(*admission.Pool)
			if pool != nil {
				cp.Stats = pool.Stats()
				cp.Stats.Classes = nil // shared with the pool
			}
			for _, r := range core.View().Replicas {
				rep := console.Replica{Replica: r}
				rep.Models = slices.Clone(r.Models)
				if r.Profile != nil { // the pool learns the KV cache's size into it
					f := *r.Profile
					rep.Profile = &f
				}
				if pool != nil {
					rep.Info, rep.Learned = pool.Info(r.ID)
				}
				cp.Replicas = append(cp.Replicas, rep)
			}
		})
		cp.Waiting = c.waiting(p.Name)
		for j := range cp.Replicas {
			c.scraped(&cp, &cp.Replicas[j], len(p.Models) == 0)
		}
		out = append(out, cp)
	}
	return out
}

// waiting are the pool's replicas that have not joined it, since nobody knows
// what they serve.
func (c consoleRouter) waiting(pool string) (out []console.Waiting) {
	c.a.fleetMu.Lock()
	defer c.a.fleetMu.Unlock()
	for _, m := range c.a.members {
		if m.pool == pool && !m.joined && m.leaving.IsZero() {
			st, _ := c.a.scraper.Status(m.id)
			out = append(out, console.Waiting{Name: m.target.Name, Error: st.Error})
		}
	}
	slices.SortFunc(out, func(a, b console.Waiting) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// scraped adds what the scraper knows. learn: the pool's models are those
// that its replicas serve.
func (c consoleRouter) scraped(p *console.Pool, r *console.Replica, learn bool) {
	if st, ok := c.a.scraper.Status(r.ID); ok {
		r.Scrape = console.Scrape{Metrics: st.Scrape, Probe: st.Probe, Models: st.Models, Error: st.Error, Age: st.Age, Seen: st.Seen}
	}
	info, _ := c.a.scraper.Info(r.ID)
	for _, m := range info.Models {
		r.Served = append(r.Served, m.ID)
		if learn && !slices.Contains(p.Models, m.ID) {
			p.Models = append(p.Models, m.ID)
		}
	}
}

// Decisions are the latest of all pools.
func (c consoleRouter) Decisions() []console.Decision {
	cfg := c.a.config()
	records := c.a.proxy.DecisionLog()
	out := make([]console.Decision, 0, len(records))
	for i := range records {
		d := &records[i]
		cd := console.Decision{At: d.At, Request: d.Request, Pool: d.Pool, Verdict: d.Verdict, Replica: d.Replica, Reason: d.Reason, Attempt: d.Attempt,
			Prompt: d.Prompt, TTFT: d.TTFT, ITL: d.ITL, Own: d.Own, Harm: d.Harm, Hit: d.Hit, HeldFor: d.HeldFor, Observed: d.Observed}
		if d.Class < len(cfg.Classes) {
			cd.Class = cfg.Classes[d.Class].Name
		}
		for _, l := range d.Loads {
			cd.Candidates = append(cd.Candidates, console.Candidate{Replica: l.Name, State: l.State, Requests: l.Requests, Prefill: l.Prefill, KV: l.KV,
				TTFT: l.Cost.TTFT, Own: l.Cost.Own, Harm: l.Cost.Harm, Cost: l.Cost.Cost, Hit: l.Cost.Hit})
		}
		out = append(out, cd)
	}
	return out
}
