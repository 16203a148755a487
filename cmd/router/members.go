package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/penstock/penstock/config"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/proxy"
	"github.com/penstock/penstock/scraper"
)

// warmFor is how long after the start a replica that is found counts as one
// that was there before: it may take its full share at once. A router's
// restart must not throttle a fleet that serves.
const warmFor = 10 * time.Second

// member is a replica that is in a pool now.
type member struct {
	id     fleet.ID
	pool   string
	target scraper.Target
	models []proxy.ModelInfo // what it was found to serve; nil = not asked yet
	joined bool              // is in the proxy's pool
	serves []string          // model names that the proxy was told last

	leaving time.Time // since when no source names it any more; it serves until another has joined, see leave
}

// askFor is how long, after the start, a pool whose models are asked from its
// replicas waits for all of them to be asked once before the first joins.
// /readyz says 503 so long: a router that calls itself ready with one replica
// of eight would send it everything.
const askFor = 2 * time.Second

// discover watches each pool's sources from now on.
func (a *app) discover() error {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	a.closers = append(a.closers, func() { cancel(); wg.Wait() })
	c := a.config()
	for i := range c.Pools {
		p := &c.Pools[i]
		sources, err := a.sources(c, p)
		if err != nil {
			return err
		}
		wg.Go(func() {
			scraper.Watch(ctx, sources, func(added, removed []scraper.Target) { a.change(p.Name, added, removed) })
		})
	}
	wg.Go(func() { a.openWhenAsked(ctx) })
	wg.Go(func() { a.reportWaiting(ctx) })
	wg.Go(func() { a.reportStates(ctx) })
	return nil
}

// sources are where a pool's replicas come from.
func (a *app) sources(c *config.Config, p *config.Pool) ([]scraper.Source, error) {
	o := scraper.SourceOptions{Log: a.log.With(zap.String("pool", p.Name))}
	static := &staticSource{o: o, changed: make(chan []string, 1)}
	if err := static.set(p.Replicas.Static); err != nil {
		return nil, err
	}
	a.static[p.Name] = static
	list := []scraper.Source{static}
	if f := p.Replicas.File; f != "" {
		list = append(list, scraper.File(c.Path(f), o))
	}
	if u := p.Replicas.HTTP; u != "" {
		list = append(list, scraper.HTTP(u, o))
	}
	if d := p.Replicas.DNS; d != nil {
		s, err := scraper.DNS(d.Name, d.Type, d.Port, o)
		if err != nil {
			return nil, err
		}
		list = append(list, s)
	}
	return list, nil
}

// staticSource is the configuration's list of replicas, which a reload may
// change.
type staticSource struct {
	o       scraper.SourceOptions
	urls    []string
	changed chan []string
}

// set gives the list; a later one takes the place of one not yet seen.
func (s *staticSource) set(urls []string) error {
	if slices.Equal(urls, s.urls) && s.urls != nil {
		return nil
	}
	if _, err := scraper.Static(urls, s.o); err != nil {
		return err
	}
	s.urls = append([]string{}, urls...)
	select {
	case <-s.changed:
	default:
	}
	s.changed <- s.urls
	return nil
}

// Run implements scraper.Source.
func (s *staticSource) Run(ctx context.Context, found func([]scraper.Target)) {
	stop := func() {}
	for {
		select {
		case <-ctx.Done():
			stop()
			return
		case urls := <-s.changed:
			stop()
			src, err := scraper.Static(urls, s.o)
			if err != nil {
				continue // set has checked it
			}
			inner, cancel := context.WithCancel(ctx)
			var wg sync.WaitGroup
			wg.Go(func() { src.Run(inner, found) })
			stop = func() { cancel(); wg.Wait() }
		}
	}
}

// pool is a pool's configuration as it is in force. Pools do not come and go
// while the process runs.
func (a *app) pool(name string) *config.Pool {
	c := a.config()
	for i := range c.Pools {
		if c.Pools[i].Name == name {
			return &c.Pools[i]
		}
	}
	panic("BUG: there is no pool " + name)
}

// scraped is a member as the scraper needs it.
func scraped(p *config.Pool, m *member) scraper.Replica {
	t := &m.target
	return scraper.Replica{ID: m.id, Name: t.Name, Addr: t.Addr, Host: t.Host, TLS: t.TLS, BasePath: t.BasePath, APIKey: p.APIKey.Value()}
}

// refresh brings the members of a pool up to its changed configuration: names,
// labels and key. One that has joined keeps its account, its learned scales and
// its health, and what runs there goes on.
func (a *app) refresh(was, is *config.Pool) {
	key := was.APIKey.Value() != is.APIKey.Value()
	if !key && slices.Equal(was.Models, is.Models) && maps.Equal(was.Labels, is.Labels) {
		return
	}
	a.fleetMu.Lock()
	defer a.fleetMu.Unlock()
	for id := fleet.ID(1); id <= a.lastID; id++ {
		m := a.byID[id]
		if m == nil || m.pool != is.Name {
			continue
		}
		if m.joined || len(is.Models) > 0 {
			a.join(m)
		}
		if key {
			a.scraper.Remove(m.id)
			a.scraper.Add(scraped(is, m))
		}
	}
}

// join lets a replica take work. Where the pool's models are asked from the
// replicas, one joins when it has said what it serves: before that nobody
// could tell a request for a model that does not exist.
func (a *app) join(m *member) {
	m.joined = true
	if err := a.proxy.AddReplica(m.pool, a.replicaSpec(a.pool(m.pool), m)); err != nil {
		a.log.Error("replica refused", zap.String("pool", m.pool), zap.String("replica", m.target.Name), zap.Error(err))
	}
}

func (a *app) replicaSpec(p *config.Pool, m *member) proxy.ReplicaSpec {
	t := &m.target
	label := func(name string) string {
		if v, ok := t.Labels[name]; ok {
			return v
		}
		return p.Labels[name]
	}
	switch {
	case m.models != nil:
		m.serves = nil
		for i := range m.models {
			m.serves = append(m.serves, m.models[i].ID)
		}
	case len(p.Models) > 0:
		m.serves = p.Models
	}
	s := proxy.ReplicaSpec{ID: m.id, Name: t.Name, Addr: t.Addr, Host: t.Host, BasePath: t.BasePath, APIKey: p.APIKey.Value(),
		Models: m.serves, Region: a.labels.region(label("region")), Domain: a.labels.domain(label("domain")), Caps: capsOf(p.Abilities),
		Profile: profileOf(p.Profile), Warm: time.Since(a.began) < warmFor}
	if t.TLS {
		host, _, err := net.SplitHostPort(t.Host)
		if err != nil {
			host = t.Host
		}
		s.TLS = &tls.Config{MinVersion: tls.VersionTLS12, ServerName: host, NextProtos: []string{"http/1.1"}}
	}
	return s
}

// learned passes on what the scraper found a replica to serve.
func (a *app) learned(id fleet.ID, i scraper.Info) {
	models := make([]proxy.ModelInfo, 0, len(i.Models))
	for _, m := range i.Models {
		models = append(models, proxy.ModelInfo{ID: m.ID, Created: m.Created, OwnedBy: m.OwnedBy, Parent: m.Parent, MaxModelLen: m.MaxModelLen})
	}
	a.fleetMu.Lock()
	defer a.fleetMu.Unlock()
	m := a.byID[id]
	if m == nil {
		return
	}
	m.models = models
	if !m.joined && a.open {
		a.join(m)
	}
	if m.joined {
		a.proxy.SetModels(id, models)
		a.leave(m.pool, false)
	}
}

// openWhenAsked lets the replicas that have said what they serve join, once
// each that was found has been asked or askFor is over; later ones join as they
// come.
func (a *app) openWhenAsked(ctx context.Context) {
	deadline := time.Now().Add(askFor)
	t := time.NewTicker(20 * time.Millisecond)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if a.allAsked() || time.Now().After(deadline) {
			break
		}
	}
	a.fleetMu.Lock()
	defer a.fleetMu.Unlock()
	a.open = true
	for id := fleet.ID(1); id <= a.lastID; id++ {
		if m := a.byID[id]; m != nil && !m.joined && m.models != nil {
			a.join(m)
			a.proxy.SetModels(id, m.models)
			a.leave(m.pool, false)
		}
	}
}

// allAsked tells whether there are replicas, and each has been asked once
// what it serves, with whatever result.
func (a *app) allAsked() bool {
	a.fleetMu.Lock()
	defer a.fleetMu.Unlock()
	for id := range a.byID {
		if st, ok := a.scraper.Status(id); ok && st.Models == "" {
			return false
		}
	}
	return len(a.byID) > 0
}

// ejected tells the scraper to probe a replica eagerly.
func (a *app) ejected(id fleet.ID) (yes bool) {
	a.fleetMu.Lock()
	m := a.byID[id]
	a.fleetMu.Unlock()
	if m == nil {
		return false
	}
	if a.hinted(id) {
		return true
	}
	a.proxy.WithCore(m.pool, func(c proxy.Core, _ float64) {
		for i := range c.View().Replicas {
			if r := &c.View().Replicas[i]; r.ID == id {
				yes = r.Health.State == fleet.StateEjected
			}
		}
	})
	return yes
}

// reportWaiting says, while pools have no replica that can be reached, that it
// waits for them, and says when all have one.
func (a *app) reportWaiting(ctx context.Context) {
	t := time.NewTimer(2 * time.Second)
	defer t.Stop()
	wait, was := 2*time.Second, true
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		ok, body := a.proxy.Ready()
		ok = ok || !bytes.Contains(body, []byte(`"ready":false`)) // the router drains; its pools are well
		switch {
		case !ok && ctx.Err() == nil:
			a.log.Warn("waiting: a pool has no replica that can be reached", zap.Any("pools", json.RawMessage(body)))
			wait = min(2*wait, time.Minute)
		case !was:
			a.log.Info("all pools have replicas")
			wait = 2 * time.Second
		}
		was = ok
		next := wait
		if ok {
			next = 2 * time.Second
		}
		t.Reset(next)
	}
}

// reportStates says in the log when a replica is ejected or drained, and when
// it takes traffic again.
func (a *app) reportStates(ctx context.Context) {
	t := time.NewTicker(200 * time.Millisecond)
	defer t.Stop()
	type key struct {
		pool string
		id   fleet.ID
	}
	type seen struct {
		state fleet.State
		out   bool // it was said that it takes no traffic
	}
	last := map[key]seen{}
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		now := map[key]seen{}
		var say []func() // outside the pool's mutex
		for _, p := range a.config().Pools {
			a.proxy.WithCore(p.Name, func(core proxy.Core, _ float64) {
				for _, r := range core.View().Replicas {
					k, h := key{p.Name, r.ID}, r.Health
					s := last[k]
					if _, known := last[k]; !known {
						s.state = h.State
					}
					fields := []zap.Field{zap.String("pool", p.Name), zap.String("replica", r.Name), zap.Stringer("reason", h.Reason)}
					switch {
					case h.State == s.state:
					case h.State == fleet.StateEjected:
						s.out = true
						say = append(say, func() { a.log.Warn("replica ejected", fields...) })
					case h.State == fleet.StateDraining:
						s.out = true
						say = append(say, func() { a.log.Info("replica drains: nothing new goes there", fields[:2]...) })
					case s.out && h.State != fleet.StateTrial:
						s.out = false
						say = append(say, func() { a.log.Info("replica takes traffic again", fields[:2]...) })
					}
					s.state = h.State
					now[k] = s
				}
			})
		}
		last = now
		for _, f := range say {
			f()
		}
	}
}
