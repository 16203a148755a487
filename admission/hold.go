package admission

import (
	"math"
	"sort"

	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/scorer"
)

// heldQueue is what waits at the router: a band for each class; in a band a
// queue for each tenant, the tenant that had the least work first; in a tenant
// by latest useful start.
type heldQueue struct {
	cfg   *Config
	bands []band
	count int
	bytes int
	work  float64
	seq   uint64

	expiry []*Ticket // min-heap by expire
	out    []*Ticket // shed, not yet returned by Advance
	scan   []*Ticket // scratch of look
	used   []*tenantQueue
}

type band struct {
	count   int
	work    float64
	first   *Ticket // by arrival
	last    *Ticket
	tenants map[uint32]*tenantQueue
	active  []*tenantQueue // min-heap by virtual time, those with held tickets
	virtual float64        // the least virtual time that is served now
	credit  float64        // token-work owed by its minimum share
	bias    float64        // log of true wait / forecast, learned
	weights map[uint32]float64
}

type tenantQueue struct {
	id     uint32
	served float64   // virtual time: token-work had / weight
	tent   float64   // the same while a look goes on
	q      []*Ticket // sorted by order; q[head:] is live
	head   int
	cursor int // while a look goes on
	heap   int // place in band.active, -1 = not in it
}

func (h *heldQueue) init(cfg *Config) {
	h.cfg = cfg
	h.bands = make([]band, len(cfg.Classes))
	for i := range h.bands {
		h.bands[i].tenants = map[uint32]*tenantQueue{}
		h.bands[i].weights = cfg.Classes[i].Weights
	}
}

// before tells whether anything of this importance or more is held.
func (h *heldQueue) before(class int) bool { return h.count > 0 && h.countUpTo(class) > 0 }

func (h *heldQueue) countUpTo(class int) int {
	n := 0
	for i := 0; i <= class; i++ {
		n += h.bands[i].count
	}
	return n
}

// maxTenants bounds a band's memory of tenants that hold nothing now.
const maxTenants = 8192

// tenant finds or makes a tenant's queue. One that comes back starts no
// earlier than those served now: having been away is no credit.
func (b *band) tenant(id uint32) *tenantQueue {
	q := b.tenants[id]
	if q == nil {
		if len(b.tenants) >= maxTenants {
			for k, o := range b.tenants { // all that match go: the order does not matter
				if o.heap < 0 && o.served <= b.virtual {
					delete(b.tenants, k)
				}
			}
		}
		q = &tenantQueue{id: id, heap: -1, served: b.virtual}
		b.tenants[id] = q
	}
	if q.heap < 0 {
		q.served = max(q.served, b.virtual)
	}
	return q
}

// serve counts work given to a tenant, and what the bands' minimum shares are
// owed for it.
func (h *heldQueue) serve(class int, tenant uint32, work float64) {
	b := &h.bands[class]
	q := b.tenant(tenant)
	weight := 1.0
	if w := b.weights[tenant]; w > 0 {
		weight = w
	}
	q.served += work / weight
	if q.heap >= 0 {
		b.fix(q.heap)
		b.virtual = max(b.virtual, b.active[0].served)
	} else if len(b.active) == 0 {
		b.virtual = max(b.virtual, q.served-work/weight)
	}
	for i := range h.bands {
		if s := h.cfg.Classes[i].MinShare; s > 0 && h.bands[i].count > 0 {
			h.bands[i].credit += s * work
		}
	}
	if h.cfg.Classes[class].MinShare > 0 {
		b.credit = max(0, b.credit-work)
	}
}

// due tells whether a class may have its turn by its minimum share.
func (h *heldQueue) due(class int) bool {
	b := &h.bands[class]
	return b.count > 0 && b.credit >= b.first.work
}

// insert puts a ticket in its place.
func (h *heldQueue) insert(t *Ticket) {
	b := &h.bands[t.Work.Class]
	q := b.tenant(t.Work.Tenant)
	h.seq++
	t.seq, t.tq = h.seq, q
	if q.head > 64 && q.head > len(q.q)/2 {
		n := copy(q.q, q.q[q.head:])
		clear(q.q[n:])
		q.q, q.head = q.q[:n], 0
	}
	live := q.q[q.head:]
	at := q.head + sort.Search(len(live), func(i int) bool { return live[i].order > t.order })
	q.q = append(q.q, nil)
	copy(q.q[at+1:], q.q[at:])
	q.q[at] = t
	if q.heap < 0 {
		q.heap = len(b.active)
		b.active = append(b.active, q)
		b.up(q.heap)
	}
	t.bandPrev, t.bandNext = b.last, nil
	if b.last != nil {
		b.last.bandNext = t
	} else {
		b.first = t
	}
	b.last = t
	b.count++
	b.work += t.work
	h.count++
	h.bytes += t.Work.Bytes
	h.work += t.work
	t.heap = len(h.expiry)
	h.expiry = append(h.expiry, t)
	h.expUp(t.heap)
}

// remove takes a held ticket out of every structure.
func (h *heldQueue) remove(t *Ticket) {
	b := &h.bands[t.Work.Class]
	q := t.tq
	i := q.head + sort.Search(len(q.q)-q.head, func(i int) bool {
		o := q.q[q.head+i]
		return o.order > t.order || o.order == t.order && o.seq >= t.seq
	})
	if i >= len(q.q) || q.q[i] != t {
		panic("BUG: admission: held ticket is not in its queue")
	}
	if i == q.head {
		q.q[i] = nil
		q.head++
	} else {
		copy(q.q[i:], q.q[i+1:])
		q.q[len(q.q)-1] = nil
		q.q = q.q[:len(q.q)-1]
	}
	if q.head == len(q.q) {
		q.q, q.head = q.q[:0], 0
		b.leave(q)
	}
	if t.bandPrev != nil {
		t.bandPrev.bandNext = t.bandNext
	} else {
		b.first = t.bandNext
	}
	if t.bandNext != nil {
		t.bandNext.bandPrev = t.bandPrev
	} else {
		b.last = t.bandPrev
	}
	t.bandPrev, t.bandNext, t.tq = nil, nil, nil
	b.count--
	b.work -= t.work
	if b.count == 0 {
		b.work, b.credit = 0, 0
	}
	h.count--
	h.bytes -= t.Work.Bytes
	h.work -= t.work
	if h.count == 0 {
		h.work = 0
	}
	h.expRemove(t)
}

func (h *heldQueue) unpend(t *Ticket) {
	for i, o := range h.out {
		if o == t {
			h.out = append(h.out[:i], h.out[i+1:]...)
			return
		}
	}
	panic("BUG: admission: shed ticket is not pending")
}

// look lists up to n held tickets of a band in the order in which they would
// be served: the tenant with the least work first, counted on as if each were
// placed. The queue is left as it was.
func (h *heldQueue) look(class, n int) []*Ticket {
	b := &h.bands[class]
	h.scan, h.used = h.scan[:0], h.used[:0]
	if b.count == 0 {
		return h.scan
	}
	for len(h.scan) < n && len(b.active) > 0 {
		q := b.active[0]
		if q.cursor == 0 {
			h.used = append(h.used, q)
			q.tent = q.served
		}
		t := q.q[q.head+q.cursor]
		h.scan = append(h.scan, t)
		q.cursor++
		weight := 1.0
		if w := b.weights[q.id]; w > 0 {
			weight = w
		}
		q.served += t.work / weight
		if q.head+q.cursor == len(q.q) {
			b.leave(q) // nothing more of it in this look
		} else {
			b.fix(0)
		}
	}
	for _, q := range h.used {
		q.served, q.cursor = q.tent, 0
		if q.heap < 0 {
			q.heap = len(b.active)
			b.active = append(b.active, q)
		}
		b.fix(q.heap)
	}
	return h.scan
}

// hold puts a request in the queue, or sheds it when it may not wait or the
// queue is full of more important ones.
func (p *Pool) hold(now float64, t *Ticket) Decision {
	w := &t.Work
	cl := &p.cfg.Classes[w.Class]
	if cl.Wait == 0 {
		return p.shedNow(now, t, ReasonCapacity)
	}
	lim := p.limitsOf(now, t)
	alone := max(0, p.bestAlone(w)-lim.slight)
	whole := lim.ttft
	if alone > whole {
		whole = aloneSlack * alone
	}
	t.latest = t.since + whole - alone
	t.order = t.latest
	if t.first {
		t.order -= turnFirst
	}
	t.expire = math.Inf(1)
	if cl.Wait > 0 {
		t.expire = t.since + cl.Wait
	}
	if !cl.Patient {
		t.expire = min(t.expire, t.latest)
	}
	if w.Deadline > 0 {
		t.expire = min(t.expire, w.Deadline)
	}
	if t.expire <= now {
		if w.Deadline > 0 && now >= w.Deadline {
			return p.shedNow(now, t, ReasonDeadline)
		}
		return p.shedNow(now, t, ReasonCapacity)
	}
	t.work = p.tokenWork(w)
	if !p.makeRoom(now, t) {
		return p.shedNow(now, t, ReasonQueueFull)
	}
	t.phase = phaseHeld
	t.Decision = Decision{Verdict: Held}
	p.rates.wait(now)
	p.held.insert(t)
	p.stats.EverHeld++
	return t.Decision
}

// turnFirst puts those whose turn it is before all others of their tenant,
// seconds.
const turnFirst = 1e9

// bestAlone is the time to the first token on the best replica, were it idle
// and the longest known prefix still there.
func (p *Pool) bestAlone(w *fleet.Work) float64 {
	best := math.Inf(1)
	p.lookup(w)
	for i := range p.view.Replicas {
		v := &p.view.Replicas[i]
		if !v.Health.Open() || !v.Serves(w.Model) {
			continue
		}
		f := v.Profile
		u := max(1, float64(w.Prompt)-p.hits[i])
		t := v.Offset + f.Front(w.Prompt) + v.ScaleDecode*f.Base + v.ScalePrefill*(f.PerPrefill*u+f.PerAttn*u*(p.hits[i]+u/2))
		if v.Trust < 0.5 {
			t = 0 // nothing is known: no reason to give up early
		}
		best = min(best, t)
	}
	if math.IsInf(best, 1) {
		return 0
	}
	return best
}

// tokenWork is a request's work as fairness, bounds and the forecast count it:
// prompt tokens and, since one costs more, twice the output tokens.
func (p *Pool) tokenWork(w *fleet.Work) float64 {
	return math.Round(float64(w.Prompt) + 2*w.Out*float64(w.Seqs))
}

func (p *Pool) full(t *Ticket) bool {
	h := &p.held
	return h.count+1 > p.cfg.MaxHeld || h.bytes+t.Work.Bytes > p.cfg.MaxHeldBytes ||
		p.cfg.MaxHeldWork > 0 && h.work+t.work > p.cfg.MaxHeldWork
}

// makeRoom sheds the least important, newest first, until t fits; false when t
// itself is the one to go.
func (p *Pool) makeRoom(now float64, t *Ticket) bool {
	for p.full(t) {
		victim := p.victim(t)
		if victim == nil {
			return false
		}
		p.shedHeld(now, victim, ReasonQueueFull)
	}
	return true
}

// victim is whom the newcomer t may push out: the newest of the least
// important band below its own; in its own band, the newest of a tenant that
// holds more than its own tenant does, so that one tenant cannot fill the
// queue against the others.
func (p *Pool) victim(t *Ticket) *Ticket {
	for c := len(p.held.bands) - 1; c > int(t.Work.Class); c-- {
		if b := &p.held.bands[c]; b.count > 0 {
			return b.last
		}
	}
	b := &p.held.bands[t.Work.Class]
	if b.count == 0 {
		return nil
	}
	mine := 1
	if q := b.tenants[t.Work.Tenant]; q != nil {
		mine += len(q.q) - q.head
	}
	if q := b.last.tq; len(q.q)-q.head > mine {
		return b.last
	}
	// The newest one is not of a greedy tenant: ask the tenant that is served last.
	if n := len(b.active); n > 0 {
		if q := b.active[n-1]; len(q.q)-q.head > mine {
			return q.q[len(q.q)-1]
		}
	}
	return nil
}

// shedNow refuses a ticket that is not in the queue.
func (p *Pool) shedNow(now float64, t *Ticket, why Reason) Decision {
	t.phase = phaseIdle
	t.Decision = Decision{Verdict: Shed, Reason: why, RetryAfter: p.retryAfter(now, t, why)}
	p.stats.Shed[why]++
	p.stats.Classes[t.Work.Class].Shed++
	return t.Decision
}

// shedHeld takes a held ticket out; the next Advance returns it.
func (p *Pool) shedHeld(now float64, t *Ticket, why Reason) {
	p.held.remove(t)
	p.rates.left[t.Work.Class].add(t.work) // it leaves the queue too
	p.shedNow(now, t, why)
	t.phase = phaseOut
	p.held.out = append(p.held.out, t)
}

// Advance looks at the held requests again and returns, appended to out, those
// whose Decision has become Placed or Shed.
func (p *Pool) Advance(now float64, out []*Ticket) []*Ticket {
	p.tick(now)
	h := &p.held
	for len(h.expiry) > 0 && h.expiry[0].expire <= now {
		t := h.expiry[0]
		why := ReasonCapacity
		if d := t.Work.Deadline; d > 0 && d <= now {
			why = ReasonDeadline
		}
		// One last look: an idle replica takes it even now.
		if why == ReasonCapacity && p.tryOne(now, t, nil) == tryPlaced {
			out = append(out, t)
			continue
		}
		p.shedHeld(now, t, why)
	}
	if h.count > 0 && (p.dirty || now >= p.nextLook) {
		p.dirty = false
		p.nextLook = now + lookEvery
		out = p.serveHeld(now, out)
	} else if h.count == 0 {
		p.dirty = false
	}
	for _, t := range h.out {
		t.phase = phaseIdle
		out = append(out, t)
	}
	clear(h.out)
	h.out = h.out[:0]
	return out
}

// lookEvery is how often the queue is looked at though nothing was reported:
// predictions move by time alone (a running prefill gets on).
const lookEvery = 0.003

// serveHeld places what can be placed, band by band; a band that its minimum
// share owes something goes first.
func (p *Pool) serveHeld(now float64, out []*Ticket) []*Ticket {
	for c := range p.held.bands {
		if c > 0 && p.held.due(c) {
			out = p.serveBand(now, c, 1, out)
		}
	}
	for c := range p.held.bands {
		out = p.serveBand(now, c, math.MaxInt, out)
	}
	return out
}

// starved is how many younger requests may be placed past one before a replica
// is kept for it.
const starved = 64

// serveBand places what can be placed of one band. First each of those looked
// at may only go where it costs least: a replica that comes free is to go to a
// request that is warm there, not to the first that it would do for. What is
// free after that is given to those that waited for a warmer one long enough,
// but not before a look further down the queue for others that are warm there:
// a prompt that is computed once more costs as much as several that are not.
func (p *Pool) serveBand(now float64, class, most int, out []*Ticket) []*Ticket {
	l := look{p: p, now: now, out: out}
	for most > 0 {
		l.most, l.placed, l.shed, l.failed, l.due = most, 0, 0, 0, false
		list := p.held.look(class, p.cfg.LookAhead)
		n := len(list)
		l.pass(list)
		if l.due {
			if n == p.cfg.LookAhead {
				failed := l.failed
				more := p.held.look(class, deeper*n)
				l.pass(more[min(n, len(more)):])
				l.failed = failed
			}
			l.cold(p.held.look(class, n))
		}
		most -= l.placed
		if l.placed+l.shed == 0 || l.failed >= p.cfg.LookAhead/2 || n < p.cfg.LookAhead {
			break
		}
	}
	return l.out
}

// deeper is how many times LookAhead is looked at before a replica is given to
// a request that is cold there.
const deeper = 4

// look is one look at the held requests of a band.
type look struct {
	p                    *Pool
	now                  float64
	most                 int // placements left
	placed, shed, failed int
	due                  bool     // some may go to a replica that is not the best for it
	block                *replica // kept for starving
	starving             *Ticket
	out                  []*Ticket
}

// pass tries the tickets of list in order; each may only go where it costs
// least, but for one that is starving.
func (l *look) pass(list []*Ticket) {
	for _, t := range list {
		if l.placed >= l.most {
			break
		}
		l.p.warmOnly = t.passed < starved || !l.p.worthKeeping(l.now, t)
		l.try(list, t)
	}
	l.p.warmOnly = false
}

// cold gives what is left to those that have waited long enough for a warmer
// replica.
func (l *look) cold(list []*Ticket) {
	for _, t := range list {
		if l.placed < l.most && t.waited(l.now) {
			l.try(list, t)
		}
	}
}

// waited tells that a held ticket has waited long enough for a warmer replica
// than the one that would take it.
func (t *Ticket) waited(now float64) bool {
	return t.phase == phaseHeld && t.okAt != 0 && now-t.okAt >= t.patience
}

func (l *look) try(list []*Ticket, t *Ticket) {
	p := l.p
	block := l.block
	if t == l.starving {
		block = nil
	}
	switch why := p.tryOne(l.now, t, block); why {
	case tryPlaced:
		l.placed++
		l.out = append(l.out, t)
		passBy(list, t)
	case tryFull:
		if l.failed++; l.placed > 0 && t.okAt == 0 {
			t.lostAt = l.now
		}
		if l.failed == 1 && t.passed >= starved && l.block == nil && p.worthKeeping(l.now, t) {
			l.block, l.starving = p.keepFor(l.now, t), t
		}
		switch {
		case t.waited(l.now):
			l.due = true
		case t.okAt != 0:
			p.nextLook = min(p.nextLook, t.okAt+t.patience)
		}
	case tryLate:
		p.shedHeld(l.now, t, ReasonCapacity)
		l.shed++
	default:
		p.shedHeld(l.now, t, Reason(why))
		l.shed++
	}
}

// passBy counts t's placement for those that were looked at before it in vain.
func passBy(list []*Ticket, t *Ticket) {
	for _, o := range list {
		if o == t {
			return
		}
		if o.phase == phaseHeld {
			o.passed++
		}
	}
}

// tryOne places a held ticket if it can; it leaves the queue then.
func (p *Pool) tryOne(now float64, t *Ticket, block *replica) tryResult {
	why := p.try(now, t, block)
	if why == tryPlaced {
		phase, rep := t.phase, t.rep
		p.held.remove(t)
		t.phase, t.rep = phase, rep
		p.learnWait(now, t)
	}
	return why
}

// Takeable appends to out the held tickets, of those that are looked at, which
// some replica would take now. Work is conserved when none is there for longer
// than a short wait for a warm replica. For tests and simulations: it costs as
// much as a look at the queue.
//
// A placement may make a replica free for another request that it was not free
// for just before: see Ticket.LostAt.
func (p *Pool) Takeable(now float64, out []*Ticket) []*Ticket {
	var pr scorer.Prediction
	for c := range p.held.bands {
		var block *replica
		failed := 0
		for k, t := range p.held.look(c, p.cfg.LookAhead) {
			_, trial := p.candidates(now, &t.Work, block)
			if p.wouldUseHeadroom(&t.Work) && (k > 0 || !p.held.due(c)) {
				continue // its minimum share is owed to the first of them
			}
			p.lookup(&t.Work)
			p.ctx.Par.ITL = p.leaves(&t.Work).itl
			lim, takes := p.limitsOf(now, t), trial >= 0
			for _, i := range p.ctx.Cand {
				v := &p.view.Replicas[i]
				s := p.loadedOf(int(i))
				s.Predict(now, &t.Work, p.hits[i], &p.ctx.Par, &pr)
				_, ok, _ := lim.over(v, s, &pr)
				takes = takes || ok
			}
			if takes {
				out = append(out, t)
				continue
			}
			if failed++; failed == 1 && t.passed >= starved && p.worthKeeping(now, t) {
				block = p.keepFor(now, t) // no other may have it
			}
		}
	}
	return out
}

// worthKeeping tells whether a starving request has enough time left to be
// worth a replica's capacity. One that is nearly lost is not: under overload
// that is what the head of the queue is.
func (p *Pool) worthKeeping(now float64, t *Ticket) bool {
	return p.cfg.Classes[t.Work.Class].Patient || now < (t.since+t.latest)/2
}

// keepFor is the replica that a starving request could have soonest.
func (p *Pool) keepFor(now float64, t *Ticket) *replica {
	p.candidates(now, &t.Work, nil)
	if len(p.ctx.Cand) < 2 {
		return nil // keeping the only one would stop everybody
	}
	least, best := math.Inf(1), -1
	for _, i := range p.ctx.Cand {
		v := &p.view.Replicas[i]
		if l := v.Own.PrefillTokens + v.Peers.PrefillTokens + 0.1*v.Own.KVTokens; l < least {
			least, best = l, int(i)
		}
	}
	if best < 0 {
		return nil
	}
	return p.reps[best]
}

// NextWake is when Advance has to be called at the latest; +Inf = never, a
// time not after now = at once.
func (p *Pool) NextWake(now float64) float64 {
	if len(p.held.out) > 0 {
		return now
	}
	wake := math.Inf(1)
	if len(p.held.expiry) > 0 {
		if p.dirty {
			return now
		}
		wake = min(p.held.expiry[0].expire, max(now, p.nextLook))
	}
	for i := range p.reps {
		if !p.reps[i].idle() {
			return min(wake, now+watchEvery) // hangs are seen by time alone
		}
	}
	return wake
}

// watchEvery is how often Advance has to run while anything is in flight.
const watchEvery = 0.25
