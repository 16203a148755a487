package proxy

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/wire"
)

// cause is why a flight, or its present attempt, is to end early.
type cause uint8

const (
	causeNone     cause = iota
	causeRevoked        // its replica was found dead, hung or draining: this attempt only
	causeShutdown       // the router ends
	causeGone           // the client left
)

// phase is how far a request has come; a metric's label when the client leaves.
type phase uint8

const (
	phaseHeld phase = iota
	phaseHeaders
	phaseFirstToken
	phaseStreaming
	phaseCount
)

var phaseWords = [phaseCount]string{"held", "headers", "first_token", "streaming"}

// past is a deadline that ends any I/O at once.
var past = time.Unix(1, 0)

// flight is one request under way. Its connection's goroutine owns all of it
// but what stands under mu, which the watcher, a revocation and a shutdown
// may touch. There is one per client connection, used again for each request.
type flight struct {
	p    *Proxy
	conn *clientConn
	wake chan struct{} // one slot: a held request's decision came, or it is cancelled

	mu     sync.Mutex
	active bool
	cause  cause          // greatest of those given, revocation apart
	revoke bool           // of the present attempt
	taken  fleet.Evidence // why the last attempt was revoked
	up     *upConn        // what a cancel has to interrupt
	// stopDial ends a connecting under way.
	stopDial context.CancelFunc

	req        request
	body       wire.Body
	obs        wire.Observer
	ticket     admission.Ticket
	pool       *pool
	climb      climb
	stormPrint uint64 // what the storm guard knows the request by; 0 = it watches nobody
	limited    bool   // this flight owes the tenant's limiter a Return
	targets    []target
	target     *target
	head       answerHead
	str        streamer
	saved      saved
	want       [2]string              // the model that has to answer, see wanted
	watchFn    func(data []byte) bool // watch, bound once
	eachFn     func() bool            // each, bound once
	phase      atomic.Uint32
	decided    bool   // under the pool's mutex: a held ticket has its decision
	logged     uint64 // under the pool's mutex: one more than where its latest decision stands in the log
	placed     bool   // this flight owes the pool a Done
	allowance  *pool  // whose attempt budget allowed an attempt that no replica has taken yet
	shown      shown

	// What the record of the request needs.
	attempts  int
	replica   *replica // of the present or last attempt
	status    int      // what the client was told
	outcome   outcome
	predicted float64 // TTFT of the attempt that answered, seconds
	firstAt   float64 // when the first content event came
	heldFor   float64
	sent      int64 // body bytes to the client
	wrote     bool  // a byte of the answer may have left
	spent     bool  // the body's buffer was given up
	closeConn bool  // the connection cannot be used again
	lastEv    fleet.Evidence
	reason    admission.Reason
	errCode   string
	usage     wire.Usage
	mark      wire.Violation // of the answer

	tenantID   uint32
	deadlineAt time.Time // the request's deadline; zero = none
	hardBy     time.Time // when even an answer that has begun is cut; zero = never
}

// begin makes the flight ready for a new request.
func (f *flight) begin() {
	f.mu.Lock()
	f.active, f.cause, f.revoke, f.up = true, causeNone, false, nil
	f.mu.Unlock()
	// The flight is stored; now look whether the client had left before.
	if f.conn.gone.Load() {
		f.cancel(causeGone)
	}
	if f.p.stopping.Load() {
		f.cancel(causeShutdown)
	}
	select {
	case <-f.wake:
	default:
	}
	f.phase.Store(uint32(phaseHeld))
	f.attempts, f.replica, f.status, f.outcome = 0, nil, 0, outcomeNone
	f.predicted, f.firstAt, f.heldFor, f.sent = 0, 0, 0, 0
	f.wrote, f.closeConn, f.placed, f.decided = false, false, false, false
	f.logged = 0
	f.lastEv, f.reason, f.errCode = fleet.EvidenceOK, admission.ReasonNone, ""
	f.usage, f.mark = wire.Usage{}, wire.ViolationNone
	f.climb = climb{}
	f.limited = false
	f.stormPrint = 0
	f.targets, f.target, f.pool, f.allowance = nil, nil, nil, nil
	f.tenantID, f.deadlineAt, f.hardBy = 0, time.Time{}, time.Time{}
	f.ticket.Work.Arrived, f.ticket.Work.Excluded = 0, 0
}

// finish ends the flight; a cancel that comes later finds nothing.
func (f *flight) finish() {
	f.mu.Lock()
	f.active, f.up = false, nil
	f.mu.Unlock()
}

// cancel asks the flight to end: whatever I/O it is in fails at once, and a
// held one is woken. The stronger cause stays. May be called by anyone.
func (f *flight) cancel(c cause) {
	f.mu.Lock()
	if f.active {
		if c > f.cause {
			f.cause = c
		}
		f.interrupt()
	}
	f.mu.Unlock()
	f.signal()
}

// revokeAttempt ends the present attempt only. Called under the pool's mutex,
// which is what makes sure that the attempt is still the one meant.
func (f *flight) revokeAttempt(why fleet.Evidence) {
	f.mu.Lock()
	f.revoke, f.taken = true, why
	f.interrupt()
	f.mu.Unlock()
}

// interrupt is called with mu held.
func (f *flight) interrupt() {
	if f.up != nil {
		f.up.interrupt()
	}
	if f.stopDial != nil {
		f.stopDial()
	}
}

func (f *flight) signal() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// why is the cause to end, revocations included.
func (f *flight) why() cause {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.cause != causeNone {
		return f.cause
	}
	if f.revoke {
		return causeRevoked
	}
	return causeNone
}

// attach makes u what a cancel interrupts. It tells whether the attempt may
// go on.
func (f *flight) attach(u *upConn) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.cause != causeNone || f.revoke {
		return false
	}
	f.up = u
	return true
}

// detach is attach's end. After it only the caller touches the connection.
func (f *flight) detach() {
	f.mu.Lock()
	f.up = nil
	f.mu.Unlock()
}

// deadline sets the deadline of the attached connection's I/O, unless the
// flight is cancelled: a cancel's past deadline must not be undone.
func (f *flight) deadline(t time.Time) {
	f.mu.Lock()
	if f.up != nil && f.cause == causeNone && !f.revoke {
		_ = f.up.c.SetDeadline(t)
	}
	f.mu.Unlock()
}
