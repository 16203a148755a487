package proxy

import (
	"fmt"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
)

// AddReplica adds a replica to a pool, or changes one that is known by its ID
// (what it serves, its key ...). The address of a known one does not change:
// another address is another replica.
func (p *Proxy) AddReplica(poolName string, spec ReplicaSpec) error {
	pl := p.poolNamed(poolName)
	if pl == nil {
		return fmt.Errorf("replica %s: there is no pool %q", spec.Addr, poolName)
	}
	if spec.ID == 0 || spec.Addr == "" {
		return fmt.Errorf("replica %q of pool %q needs an ID and an address", spec.Name, poolName)
	}
	p.repMu.Lock()
	defer p.repMu.Unlock()
	if other := p.byID[spec.ID]; other != nil && (other.pool != pl || other.spec.Addr != spec.Addr) {
		return fmt.Errorf("replica %s: its ID %d is that of %s in pool %q", spec.Addr, spec.ID, other.spec.Addr, other.pool.name)
	}
	r := newReplica(p, pl, spec)
	old := p.byID[spec.ID]
	p.byID[spec.ID] = r
	if old != nil {
		r.models = old.models
	}
	pl.mu.Lock()
	pl.replicas[spec.ID] = r
	pl.join(r)
	pl.mu.Unlock()
	if old != nil {
		old.close()
	}
	r.metrics.register(pl, r)
	p.reroute()
	return nil
}

// join tells the core of a replica as it is now. Under the pool's mutex.
func (pl *pool) join(r *replica) {
	s := &r.spec
	ids := make([]uint32, 0, len(s.Models))
	for _, m := range s.Models {
		ids = append(ids, pl.p.models.id(m))
	}
	now := pl.clock()
	if s.Caps == 0 {
		s.Caps = fleet.AbilityAll
	}
	pl.core.Join(now, admission.ReplicaSpec{ID: s.ID, Name: s.Name, Models: ids, Caps: s.Caps, Region: s.Region, Domain: s.Domain, Profile: s.Profile, MaxLen: longest(r.models), Warm: s.Warm})
	pl.advance(now)
}

// SetModels tells what a replica was found to serve; it replaces what was
// known. It also feeds GET /v1/models.
func (p *Proxy) SetModels(id fleet.ID, models []ModelInfo) {
	p.repMu.Lock()
	defer p.repMu.Unlock()
	r := p.byID[id]
	if r == nil {
		return
	}
	pl := r.pool
	names := make([]string, 0, len(models))
	for _, m := range models {
		names = append(names, m.ID)
	}
	same := equalStrings(r.spec.Models, names) && longest(r.models) == longest(models)
	r.models = append([]ModelInfo(nil), models...)
	pl.mu.Lock()
	r.spec.Models = names
	if !same {
		pl.join(r)
	}
	pl.mu.Unlock()
	p.reroute()
}

// longest is the longest context among what a replica serves (an adapter has its
// model's), 0 = not known.
func longest(models []ModelInfo) (n int) {
	for _, m := range models {
		n = max(n, m.MaxModelLen)
	}
	return n
}

func equalStrings(a, b []string) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

// RemoveReplica takes a replica out: it gets nothing new; what runs there ends.
func (p *Proxy) RemoveReplica(id fleet.ID) {
	p.repMu.Lock()
	defer p.repMu.Unlock()
	r := p.byID[id]
	if r == nil {
		return
	}
	delete(p.byID, id)
	pl := r.pool
	pl.mu.Lock()
	delete(pl.replicas, id)
	now := pl.clock()
	pl.core.Remove(now, id)
	pl.advance(now)
	pl.mu.Unlock()
	r.close()
	p.dropSeries(r)
	p.reroute()
}

// dropSeries takes the series of a replica that has left away, unless another
// pool has it too: then they are those of that one. Under repMu.
func (p *Proxy) dropSeries(r *replica) {
	var newest *replica
	for id, o := range p.byID {
		if o.spec.Name == r.spec.Name && (newest == nil || id > newest.spec.ID) {
			newest = o
		}
	}
	if newest == nil {
		r.metrics.drop(p.reg)
		return
	}
	newest.metrics.register(newest.pool, newest)
}

// DrainReplica is the operator's drain: on takes no new work, off ends it.
func (p *Proxy) DrainReplica(id fleet.ID, on bool) bool {
	return p.withCore(id, func(c Core, now float64) { c.Drain(now, id, on) })
}

// Observe passes a sample of a replica's metrics to the core.
func (p *Proxy) Observe(id fleet.ID, s fleet.Sample) {
	p.withCore(id, func(c Core, now float64) { c.Observe(now, id, s) })
}

// Evidence passes what a probe or scrape saw to the core.
func (p *Proxy) Evidence(id fleet.ID, e fleet.Evidence) {
	p.withCore(id, func(c Core, now float64) { c.Evidence(now, id, e) })
}

func (p *Proxy) withCore(id fleet.ID, f func(c Core, now float64)) bool {
	p.repMu.Lock()
	r := p.byID[id]
	p.repMu.Unlock()
	if r == nil {
		return false
	}
	r.pool.mu.Lock()
	defer r.pool.mu.Unlock()
	now := r.pool.clock()
	f(r.pool.core, now)
	r.pool.advance(now)
	r.pool.metrics.count()
	return true
}

// WithCore runs f on a pool's core under its mutex: for the ring (peers'
// accounts) and the console. f must not block.
func (p *Proxy) WithCore(poolName string, f func(c Core, now float64)) bool {
	pl := p.poolNamed(poolName)
	if pl == nil {
		return false
	}
	pl.mu.Lock()
	defer pl.mu.Unlock()
	now := pl.clock()
	f(pl.core, now)
	pl.advance(now)
	return true
}

func (p *Proxy) poolNamed(name string) *pool {
	for _, pl := range p.pools {
		if pl.name == name {
			return pl
		}
	}
	return nil
}
