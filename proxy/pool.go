package proxy

import (
	"context"
	"net"
	"sync"
	"time"
)

// replica is a replica as the data path sees it: its address, its idle
// connections, its metrics.
type replica struct {
	spec    ReplicaSpec
	pool    *pool
	host    string
	dialer  net.Dialer
	metrics *replicaMetrics
	models  []ModelInfo // as discovered; under Proxy.repMu

	// Scratch of pool.waiting, under the pool's mutex.
	waits *flight // a request here whose client does not read
	owes  bool    // there is one that waits for the replica

	mu     sync.Mutex
	idle   []*upConn // the last one put is the first one taken
	closed bool
	max    int
	limit  time.Duration
}

func newReplica(p *Proxy, pl *pool, spec ReplicaSpec) *replica {
	if spec.Name == "" {
		spec.Name = spec.Addr
	}
	r := &replica{spec: spec, pool: pl, host: spec.Host, max: p.opt.UpstreamIdleMax, limit: p.opt.UpstreamIdle}
	if r.host == "" {
		r.host = spec.Addr
	}
	r.metrics = newReplicaMetrics(p.reg, spec.Name)
	return r
}

// take returns an idle connection that is fit for use, or nil.
func (r *replica) take() *upConn {
	for {
		r.mu.Lock()
		n := len(r.idle)
		if n == 0 {
			r.mu.Unlock()
			return nil
		}
		u := r.idle[n-1]
		r.idle[n-1] = nil
		r.idle = r.idle[:n-1]
		r.mu.Unlock()
		if time.Since(u.idleAt) < r.limit && u.fit() {
			u.reused = true
			return u
		}
		u.close()
	}
}

// fit tells whether an idle connection is still silent and open.
func (u *upConn) fit() bool {
	if u.raw == nil {
		return true // TLS: no peeking; the replay covers a lost race
	}
	if err := u.raw.Control(u.peek); err != nil {
		return false
	}
	return u.isQuiet
}

// put keeps a clean connection for the next request.
func (r *replica) put(u *upConn) {
	if u.in != nil {
		if u.in.r < u.in.w {
			u.close() // bytes behind the answer: not clean
			return
		}
		putBuffer(u.in)
		u.in = nil
	}
	u.large = false
	u.idleAt = time.Now()
	r.mu.Lock()
	if r.closed || len(r.idle) >= r.max {
		r.mu.Unlock()
		u.close()
		return
	}
	r.idle = append(r.idle, u)
	r.mu.Unlock()
}

// sweep closes connections that were idle for too long: the oldest are in front.
func (r *replica) sweep(now time.Time) {
	r.mu.Lock()
	n := 0
	for n < len(r.idle) && now.Sub(r.idle[n].idleAt) >= r.limit {
		n++
	}
	old := append([]*upConn(nil), r.idle[:n]...)
	if n > 0 {
		m := copy(r.idle, r.idle[n:])
		clear(r.idle[m:])
		r.idle = r.idle[:m]
	}
	r.mu.Unlock()
	for _, u := range old {
		u.close()
	}
}

// close ends all idle connections, and those that are put later.
func (r *replica) close() {
	r.mu.Lock()
	old := r.idle
	r.idle, r.closed = nil, true
	r.mu.Unlock()
	for _, u := range old {
		u.close()
	}
}

// dialling notes how to stop a dial; with nil the dial is over. It tells
// whether to go on.
func (f *flight) dialling(stop context.CancelFunc) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stopDial = stop
	return f.cause == causeNone && !f.revoke
}
