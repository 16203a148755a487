package proxy

import (
	"math"
	"sync"
	"sync/atomic"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/wire"
)

// storms refuses requests that are repeated over and over after a degraded or
// shed answer. While nobody was answered so lately it costs one load.
type storms struct {
	mu    sync.Mutex
	guard *admission.StormGuard
	until atomic.Uint64 // bits of when the last entry is too old to matter
}

// stormWindow is the guard's window, seconds (contract.md).
const stormWindow = 10

// print names the request: one tenant, one address, one credential, the very
// same body.
func (f *flight) print() uint64 {
	who := f.tenantName() + "\x00" + f.conn.remoteIP() + "\x00" + string(f.req.authorization) + "\x00" + string(f.req.apiKey)
	return wire.BodyHash(f.req.kind, who, f.req.body)
}

// checkStorm refuses a request that is repeated too often.
func (f *flight) checkStorm() *wire.Error {
	st := &f.p.storms
	now := f.p.now()
	if math.Float64frombits(st.until.Load()) < now {
		return nil
	}
	p := f.print()
	f.stormPrint = p
	tries := 0
	if f.p.opt.PeerTries != nil {
		tries = f.p.opt.PeerTries(p)
	}
	st.mu.Lock()
	ok, wait := st.guard.RepeatAmong(now, p, tries)
	st.mu.Unlock()
	if ok {
		return nil
	}
	f.p.metrics.storms.Inc()
	e := wire.NewError(wire.CodeRetryStorm, "the same request came more than twice within %d s of an answer that said when to return", stormWindow)
	e.RetryAfter = max(wait, 1)
	return e
}

// noteStorm notes that the request of that print was shed, or answered below
// its first tier, and told to come again in so many seconds.
func (f *flight) noteStorm(p uint64, again float64) {
	st := &f.p.storms
	now := f.p.now()
	st.mu.Lock()
	st.guard.Answered(now, p)
	st.mu.Unlock()
	st.watch(now + max(stormWindow, admission.TurnKept(again)))
}

// watch has requests looked at until then, at least.
func (st *storms) watch(until float64) {
	bits := math.Float64bits(until)
	for {
		old := st.until.Load()
		if math.Float64frombits(old) >= until || st.until.CompareAndSwap(old, bits) {
			return
		}
	}
}

// forgetStorm ends the watch on a request that was answered in full by its
// first tier: what comes after is no storm.
func (f *flight) forgetStorm() {
	if f.stormPrint == 0 || f.climb.tier != 0 {
		return
	}
	st := &f.p.storms
	st.mu.Lock()
	st.guard.Forget(f.stormPrint)
	st.mu.Unlock()
}

// EachStorm calls f for each request that was shed or answered below its first
// tier in the last seconds, with how often it has come since, that time
// included: what other routers are told.
func (p *Proxy) EachStorm(f func(print uint64, tries int)) {
	st := &p.storms
	now := p.now()
	if math.Float64frombits(st.until.Load()) < now {
		return
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	st.guard.Each(now, f)
}

// PeersStorm tells that other routers have such requests now.
func (p *Proxy) PeersStorm() { p.storms.watch(p.now() + peerStorm) }

// peerStorm is how long PeersStorm holds, seconds: longer than a peer's
// account counts when it goes silent.
const peerStorm = 5
