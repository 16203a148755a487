package proxy

import (
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/internal/mutant"
)

// pool is one admission core with its mutex, its replicas and the timer that
// moves it on. Everything the core is told or asked goes through here.
type pool struct {
	p       *Proxy
	name    string
	opt     PoolOptions           // Models, Aliases and AliasOf under Proxy.repMu
	goals   atomic.Pointer[goals] // what answers are measured against
	metrics *poolMetrics

	mu       sync.Mutex
	core     Core
	replicas map[fleet.ID]*replica
	flights  []*flight // placed or held
	held     int
	scratch  []*admission.Ticket
	timer    *time.Timer
	wakeAt   float64 // when the timer fires; +Inf = not armed
	stoodTo  float64 // until when the core knows that this process stood still
	closed   bool

	log  []DecisionRecord // ring
	logN uint64
}

// tickEvery is how often a busy pool is looked at although nothing asks for
// it: stalls and revocations are found then.
const tickEvery = 0.05

func newPool(p *Proxy, o PoolOptions) *pool {
	pl := &pool{p: p, name: o.Name, opt: o, core: o.Core, replicas: make(map[fleet.ID]*replica), wakeAt: math.Inf(1)}
	if n := p.opt.DecisionLog; n > 0 {
		pl.log = make([]DecisionRecord, n)
	}
	pl.goals.Store(goalsOf(&o))
	pl.timer = time.AfterFunc(time.Hour, pl.tick)
	pl.timer.Stop()
	pl.metrics = newPoolMetrics(p.reg, pl)
	return pl
}

// acquire asks for a place. It returns when the request is placed, shed, or
// when its flight is cancelled while held (then ok is false and nothing is
// owed). After a placement the flight owes exactly one release.
func (pl *pool) acquire(f *flight) (d admission.Decision, r *replica, ok bool) {
	d, r = pl.admit(f)
	if d.Verdict != admission.Held {
		return d, r, true
	}
	f.phase.Store(uint32(phaseHeld))
	began := pl.p.now()
	for {
		<-f.wake
		if d, r, out := pl.woken(f, began); out {
			pl.metrics.hold.Update(f.heldFor)
			return d, r, d.Verdict != admission.Held
		}
	}
}

// admit asks the core. All that holds the mutex gives it back by defer: a
// panic in the core must not take the pool with it.
func (pl *pool) admit(f *flight) (d admission.Decision, r *replica) {
	if prefer := pl.opt.Prefer; prefer != nil {
		f.ticket.Work.Prefer = prefer(f.ticket.Work.Blocks)
	}
	pl.mu.Lock()
	defer pl.mu.Unlock()
	t := &f.ticket
	t.User = f
	now := pl.clock()
	f.mu.Lock()
	f.revoke = false
	f.mu.Unlock()
	f.decided = false
	w, b := &t.Work, &f.body
	if b := pl.opt.Budget; b != nil && w.Excluded == 0 {
		if f.req.retries > 0 {
			b.Repeated(now)
		} else {
			b.Request(now)
		}
	}
	text := pl.core.EstimatePrompt(w.Model, b.ASCII, b.Other) + b.TokenIDs
	w.OfMedia = pl.core.EstimateMedia(w.Model, w.Media)
	w.Prompt = text + w.OfMedia
	w.Tokens = b.TokensPerBlock(text)
	d = pl.core.Admit(now, t)
	switch d.Verdict {
	case admission.Placed:
		f.placed = true
		pl.enter(f, now)
		r = pl.replicas[d.Replica]
	case admission.Held:
		pl.enter(f, now)
		pl.held++
	}
	pl.record(now, f, d)
	pl.rearm(now)
	return d, r
}

// woken looks why a request that is held since began was woken. out is false when for nothing; a
// verdict of Held means that it left the queue undecided, being cancelled.
func (pl *pool) woken(f *flight, began float64) (d admission.Decision, r *replica, out bool) {
	pl.mu.Lock()
	defer pl.mu.Unlock()
	now := pl.clock()
	switch {
	case f.decided:
		f.heldFor += now - began
		d = f.ticket.Decision
		pl.held--
		if d.Verdict == admission.Placed {
			f.placed = true
			r = pl.replicas[d.Replica]
		} else {
			pl.exit(f)
		}
		pl.record(now, f, d)
	case f.why() != causeNone:
		f.heldFor += now - began
		d.Verdict = admission.Held
		pl.held--
		pl.exit(f)
		pl.core.Leave(now, &f.ticket)
		pl.advance(now)
	default:
		return d, nil, false
	}
	return d, r, true
}

// told notes what the client of a refused request will be known by when it
// returns.
func (pl *pool) told(f *flight, print uint64) {
	pl.mu.Lock()
	defer pl.mu.Unlock()
	pl.core.Told(&f.ticket, print)
}

// release returns the place. It does nothing when none is owed, so that every
// way out may call it.
func (pl *pool) release(f *flight, e admission.End) {
	pl.mu.Lock()
	defer pl.mu.Unlock()
	if f.placed {
		f.placed = false
		pl.exit(f)
		now := pl.clock()
		pl.core.Done(now, &f.ticket, e)
		pl.advance(now)
	}
}

// first tells of the first content event. The decision's record takes the
// TTFT when the answer is a stream: of others nobody sees the first token.
func (pl *pool) first(f *flight, stream bool) {
	pl.mu.Lock()
	defer pl.mu.Unlock()
	now := pl.clock()
	if stream && f.logged > 0 && pl.logN-f.logged < uint64(len(pl.log)) {
		e := &pl.log[(f.logged-1)%uint64(len(pl.log))]
		e.Observed = now - e.At
	}
	pl.core.First(now, &f.ticket)
	pl.advance(now)
}

func (pl *pool) progress(f *flight, tokens int) {
	pl.mu.Lock()
	defer pl.mu.Unlock()
	f.shown.output = tokens
	pl.core.Progress(pl.clock(), &f.ticket, tokens)
}

// enter and exit keep the list of the flights that are held or placed. Under mu.
func (pl *pool) enter(f *flight, now float64) {
	f.shown = shown{at: len(pl.flights), since: now, attempt: f.attempts + 1}
	pl.flights = append(pl.flights, f)
}

func (pl *pool) exit(f *flight) {
	n := len(pl.flights) - 1
	last := pl.flights[n]
	pl.flights[f.shown.at], last.shown.at = last, f.shown.at
	pl.flights[n] = nil
	pl.flights = pl.flights[:n]
}

// shown is what is told of a request in flight beside what does not change
// while it is held or placed. Under the pool's mutex.
type shown struct {
	at      int     // in the pool's list
	since   float64 // when it was asked for this place
	attempt int
	output  int // content events told to the core
}

// FlightRecord is one request that is held or placed.
type FlightRecord struct {
	Request, Path, Model, Tenant, Phase, Pool, Replica string

	Class   int
	Attempt int
	Prompt  int     // tokens, estimated
	Output  int     // content events so far, in steps of progressEvery
	Age     float64 // since it came, seconds
	HeldFor float64 // of this attempt so far, when it is held
}

// Flights returns the requests that are held or placed.
func (p *Proxy) Flights() []FlightRecord {
	var out []FlightRecord
	for _, pl := range p.pools {
		pl.mu.Lock()
		now := p.now()
		for _, f := range pl.flights {
			// All that is read here stays as it is while the flight is in the list.
			r := FlightRecord{Request: string(f.req.id), Path: f.req.path, Model: f.body.Model, Tenant: string(f.req.tenant), Pool: pl.name,
				Phase: phaseWords[phaseHeld], Class: int(f.ticket.Work.Class), Attempt: f.shown.attempt, Prompt: f.ticket.Work.Prompt, Output: f.shown.output,
				Age: now - f.req.arrived}
			if f.placed {
				r.Phase = phaseWords[f.phase.Load()]
				if rep := pl.replicas[f.ticket.Decision.Replica]; rep != nil {
					r.Replica = rep.spec.Name
				}
			} else {
				r.HeldFor = now - f.shown.since
			}
			out = append(out, r)
		}
		pl.mu.Unlock()
	}
	return out
}

// advance re-decides what is held and cancels what was revoked. Under mu.
func (pl *pool) advance(now float64) {
	// Also with nothing held: hangs, ramps and ejections are seen by time alone.
	pl.scratch = pl.core.Advance(now, pl.scratch[:0])
	for i, t := range pl.scratch {
		f := t.User.(*flight)
		f.decided = true
		f.signal()
		pl.scratch[i] = nil
	}
	pl.scratch = pl.core.Revoked(pl.scratch[:0])
	for i, t := range pl.scratch {
		t.User.(*flight).revokeAttempt(pl.reasonOf(t.Decision.Replica))
		pl.scratch[i] = nil
	}
	pl.rearm(now)
}

// reasonOf is why a replica is in the state that it is in. Under mu.
func (pl *pool) reasonOf(id fleet.ID) fleet.Evidence {
	reps := pl.core.View().Replicas
	for i := range reps {
		if reps[i].ID == id {
			return reps[i].Health.Reason
		}
	}
	return fleet.EvidenceStalled // it left meanwhile
}

// rearm sets the timer to when the core wants to be asked next. Under mu.
func (pl *pool) rearm(now float64) {
	if pl.closed {
		return
	}
	next := math.Inf(1)
	if len(pl.flights) > 0 {
		next = now + tickEvery
	}
	if pl.held > 0 {
		next = min(next, pl.core.NextWake(now))
	}
	// A timer that fires early is harmless; one that is moved for each
	// request is not free.
	if next < pl.wakeAt {
		pl.wakeAt = next
		pl.timer.Reset(time.Duration(max(0, next-now) * float64(time.Second)))
	}
}

func (pl *pool) tick() {
	pl.mu.Lock()
	defer pl.mu.Unlock()
	if pl.closed {
		return
	}
	now := pl.clock()
	pl.wakeAt = math.Inf(1)
	pl.waiting(now)
	pl.advance(now)
}

// stoodLeast is how late the timer must be for this process to have stood
// still, seconds.
const stoodLeast = 0.03

// clock is the time for a call into the core. The core hears first when this
// process, or the whole machine, has stood still: the timer that is armed while
// anything is under way should have fired by now. What replicas sent meanwhile
// was there in time. Under mu.
func (pl *pool) clock() float64 {
	now := pl.p.now()
	if now-pl.wakeAt > stoodLeast && !mutant.On("unseen-stall") {
		pl.core.Stood(now, now-max(pl.wakeAt, pl.stoodTo))
		pl.stoodTo = now
	}
	return now
}

// waiting tells the core that replicas live which are silent only since each
// client that they answer reads nothing: the router reads on from a replica no
// faster than its client does. A client must not be able to make a replica look
// hung. One request that does not wait for its client is enough to judge the
// replica by. Under mu.
func (pl *pool) waiting(now float64) {
	if pl.p.waits.Load() == 0 {
		return
	}
	for _, f := range pl.flights {
		r := pl.replicas[f.ticket.Decision.Replica]
		switch {
		case !f.placed || r == nil:
		case f.conn.waits.Load():
			r.waits = f
		default:
			r.owes = true
		}
	}
	for _, r := range pl.replicas {
		if f := r.waits; f != nil && !r.owes {
			pl.core.Progress(now, &f.ticket, f.shown.output)
		}
		r.waits, r.owes = nil, false
	}
}

func (pl *pool) close() {
	pl.mu.Lock()
	pl.closed = true
	pl.timer.Stop()
	reps := make([]*replica, 0, len(pl.replicas))
	for _, r := range pl.replicas {
		reps = append(reps, r)
	}
	pl.mu.Unlock()
	for _, r := range reps {
		r.close()
	}
}

// DecisionRecord is one decision, for people who want to know why a request
// went where it went.
type DecisionRecord struct {
	At       float64 // process seconds
	Request  string  // its id
	Pool     string
	Verdict  string // placed, held, shed
	Replica  string
	Reason   string // of a shed
	Attempt  int
	Class    int
	Prompt   int     // tokens, estimated
	Blocks   int     // prefix fingerprints
	TTFT     float64 // predicted, seconds
	ITL      float64
	Own      float64
	Harm     float64
	Hit      float64 // prompt tokens expected in the replica's prefix cache
	HeldFor  float64 // seconds so far
	Observed float64 // TTFT that came, 0 = none yet

	// What the choice was between.
	Loads []ReplicaLoad

	id [64]byte
	n  uint8
}

// ReplicaLoad is a replica's account at the moment of a decision.
type ReplicaLoad struct {
	Replica  fleet.ID
	Name     string
	State    string
	Requests int
	Prefill  float64        // uncached prompt tokens without a first token
	KV       float64        // tokens held
	Cost     admission.Cost // what it was predicted to cost this request; NaN where that is not kept
}

// noCost stands where a replica was no candidate.
var noCost = admission.Cost{TTFT: math.NaN(), Own: math.NaN(), Harm: math.NaN(), Cost: math.NaN(), Hit: math.NaN()}

// loadsKept bounds the replicas noted per decision.
const loadsKept = 8

// record notes a decision in the ring. Under mu. It allocates only until the
// ring has been round once.
func (pl *pool) record(now float64, f *flight, d admission.Decision) {
	if len(pl.log) == 0 {
		return
	}
	e := &pl.log[pl.logN%uint64(len(pl.log))]
	pl.logN++
	loads := e.Loads[:0]
	*e = DecisionRecord{At: now, Pool: pl.name, Attempt: f.attempts + 1, Class: int(f.ticket.Work.Class), Prompt: f.ticket.Work.Prompt,
		Blocks: len(f.ticket.Work.Blocks), TTFT: d.TTFT, ITL: d.ITL, Own: d.Own, Harm: d.Harm, Hit: d.Hit, HeldFor: f.heldFor}
	e.n = uint8(copy(e.id[:], f.req.id))
	f.logged = pl.logN
	switch d.Verdict {
	case admission.Placed:
		e.Verdict = "placed"
		if r := pl.replicas[d.Replica]; r != nil {
			e.Replica = r.spec.Name
		}
	case admission.Held:
		e.Verdict = "held"
	default:
		e.Verdict = "shed"
		e.Reason = d.Reason.String()
	}
	reps := pl.core.View().Replicas
	var costs []admission.Cost
	if c, ok := pl.core.(interface {
		Costs(*fleet.Work) []admission.Cost
	}); ok {
		costs = c.Costs(&f.ticket.Work)
	}
	for i := range reps {
		if i == loadsKept {
			break
		}
		v := &reps[i]
		l := v.Load()
		rl := ReplicaLoad{Replica: v.ID, Name: v.Name, State: v.Health.State.String(), Requests: l.Requests, Prefill: l.PrefillTokens, KV: l.KVTokens, Cost: noCost}
		if costs != nil {
			rl.Cost = costs[i]
		}
		loads = append(loads, rl)
	}
	e.Loads = loads
}

// DecisionLog returns the latest decisions of all pools, newest first.
func (p *Proxy) DecisionLog() []DecisionRecord {
	var out []DecisionRecord
	for _, pl := range p.pools {
		pl.mu.Lock()
		for i := uint64(1); i <= uint64(len(pl.log)) && i <= pl.logN; i++ {
			e := pl.log[(pl.logN-i)%uint64(len(pl.log))]
			e.Request = string(e.id[:e.n])
			e.Loads = append([]ReplicaLoad(nil), e.Loads...)
			out = append(out, e)
		}
		pl.mu.Unlock()
	}
	return out
}
