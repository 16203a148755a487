package ring

import (
	"cmp"
	"slices"

	"github.com/penstock/penstock/fleet"
)

// PeerView is what is known of one other router: what an Options.OnPeers
// callback gets, for each router of which something changed. Its slices are
// valid during the call only.
type PeerView struct {
	Router string
	// Gone: there is no account of this router any more; Loads is empty.
	Gone bool
	// Assumed: the router has gone silent without leaving and may still be
	// sending work (a partition). Loads is this router's own account (for the
	// first 2 s at least what the router had), so that who sums both takes no
	// more than its fair share of each replica.
	Assumed bool
	Age     float64 // seconds since the router made its newest account
	// Loads has every replica that this router knows (Snapshot.Replicas), idle
	// ones with a zero Load, LastFirst in this router's seconds. An account that
	// was long under way is brought forward to now by what this router has done
	// since it was made; from the delivery on the receiver does so. What the peer
	// has seen of a replica's health is a hint: never eject for it alone.
	Loads []Account
	Hot   []Hot // prefixes warm at replicas that this router knows

	held []wireHeld
}

// Held appends how many requests of a pool the router holds, by class; none
// when it holds nothing or its account does not count.
func (v *PeerView) Held(dst []int, pool string) []int {
	id := poolID(pool)
	for i := range v.held {
		if w := &v.held[i]; w.pool == id {
			for _, n := range w.count[:w.classes] {
				dst = append(dst, int(n))
			}
			break
		}
	}
	return dst
}

type peerState uint8

const (
	peerNew    peerState = iota // a member, not heard yet
	peerFresh                   // its account counts
	peerSilent                  // its account expired; it may still be sending work
	peerLost                    // its process is known to be gone, or it was silent for too long
	peerLeft                    // it said that it leaves
)

var peerWords = [...]string{"new", "fresh", "silent", "lost", "left"}

// missed is how many intervals without a word end an account; half a one more
// is for the jitter of the sends.
const missed = 3

// peer is what this router makes of another one's words.
type peer struct {
	name, addr string
	known      bool // has been a member; strangers' words are kept but do not count
	state      peerState
	heard      float64 // arrival of its newest word; of a relayed or very late one, when it was made
	since      float64 // of state
	delay      float64 // one way, from round trips; 0 = not known
	offset     float64 // least (our clock - its clock) seen
	offsetAt   float64
	offsetOf   uint64 // epoch that offset is for; 0 = none
	dirty      bool   // changed since the last delivery
}

// staleAfter is how much longer than the fastest one (s) a datagram may be
// under way and still show that its router is there now. Slow gossip is late,
// not lost; but what comes out of a queue after a partition is history.
const staleAfter = 2.0

// table is all routers as one of them sees them. It is pure: it has no clock
// and does no I/O.
type table struct {
	self      routerState
	state     *state
	peers     map[string]*peer
	names     map[replicaID]string
	order     []string  // names of own replicas, as in the snapshot
	loads     []Account // own, for assumed peers
	past      fleet.History
	holdShare float64 // s that a silent router's share is left to it
	leaving   bool    // all that is published from now on is empty and says so
}

func newTable(self string, epoch uint64, holdShare float64) *table {
	return &table{self: routerState{name: self, epoch: epoch}, state: newState(), peers: map[string]*peer{},
		names: map[replicaID]string{}, holdShare: holdShare}
}

// publish takes this router's snapshot as its next round.
func (t *table) publish(s *Snapshot, now, interval float64) {
	t.self.seq++
	t.self.interval = interval
	if t.leaving {
		s = &Snapshot{}
	}
	t.self.own(s, now)
	t.self.meta.leaving = t.leaving
	same := len(t.order) == len(s.Replicas)
	for i := 0; same && i < len(t.order); i++ {
		same = t.order[i] == s.Replicas[i].Name
	}
	if !same {
		t.past.Reset()
		t.order = t.order[:0]
		clear(t.names)
		for i := range s.Replicas {
			t.order = append(t.order, s.Replicas[i].Name)
			t.names[idOf(s.Replicas[i].Name)] = s.Replicas[i].Name
		}
	}
	t.look(s, now)
	for _, p := range t.peers {
		if p.state == peerSilent || !same && p.state == peerFresh {
			p.dirty = true
		}
	}
}

// look takes this router's own account as it is now, without publishing it.
// A snapshot of other replicas than those published waits for the next round.
func (t *table) look(s *Snapshot, now float64) {
	if len(s.Replicas) != len(t.order) {
		return
	}
	for i := range s.Replicas {
		if s.Replicas[i].Name != t.order[i] {
			return
		}
	}
	t.loads = append(t.loads[:0], s.Replicas...)
	t.past.Add(now, len(s.Replicas), func(i int) fleet.Load { return s.Replicas[i].Load })
}

// late tells whether something to be delivered is so old that it has to be
// brought forward, for which look has to be called first.
func (t *table) late(now float64) bool {
	for name, p := range t.peers {
		if p.dirty && p.state == peerFresh && now-t.state.routers[name].made > forwardOver {
			return true
		}
	}
	return false
}

// graceSilent is how long (s) a silent router is taken to have at least what it
// had: a few datagrams lost in a row are no reason to think that a busy router
// has become idle. Then it is taken to have as much as this one.
const graceSilent = 2.0

func atLeast(a, b fleet.Load) fleet.Load {
	return fleet.Load{Requests: max(a.Requests, b.Requests), Prefilling: max(a.Prefilling, b.Prefilling),
		PrefillTokens: max(a.PrefillTokens, b.PrefillTokens), KVTokens: max(a.KVTokens, b.KVTokens), OutTokens: max(a.OutTokens, b.OutTokens),
		LastFirst: max(a.LastFirst, b.LastFirst)}
}

// forwardOver is the age (s) over which a peer's account is brought forward.
// Who sums accounts does that from its delivery on; less than this before it
// makes no difference.
const forwardOver = 0.02

func (t *table) peer(name string) *peer {
	p := t.peers[name]
	if p == nil {
		p = &peer{name: name, heard: -1}
		t.peers[name] = p
	}
	return p
}

// join tells that membership has a router (again).
func (t *table) join(name, addr string, now float64) {
	p := t.peer(name)
	p.addr, p.known = addr, true
	if p.state == peerLeft || p.state == peerLost {
		p.become(peerNew, now)
	}
	t.judge(p, now)
}

// refused tells that nothing listens at a silent router's address: its process
// is gone and its load with it, so that nobody has to leave it a share.
func (t *table) refused(name string, now float64) {
	if p := t.peers[name]; p != nil && p.state == peerSilent {
		p.become(peerLost, now)
	}
}

func (p *peer) become(s peerState, now float64) {
	if p.state != s {
		p.state, p.since, p.dirty = s, now, true
	}
}

// hear takes one decoded datagram (or a part of a push/pull), and tells
// whether it was news. bumped tells that another router speaks under this
// one's name with a later epoch, or this one's clock went back over a restart:
// its own epoch is then raised above it.
func (t *table) hear(m *message, now float64) (news, bumped bool) {
	if m.router == t.self.name {
		if m.epoch > t.self.epoch {
			t.self.epoch, t.self.seq = m.epoch+1, 0
			return false, true
		}
		return false, false
	}
	p := t.peer(m.router)
	age, held := m.age, m.age
	if m.stamp != 0 {
		late := p.heldUp(m, now)
		age = max(late, p.delay) // both are bounds from below
		if held = 0; late > staleAfter {
			held = late
		}
	}
	if !t.state.apply(m, now-age) {
		return false, false
	}
	if m.seq == t.state.routers[m.router].seq { // what is missing of an earlier round is no sign of life
		p.heard = max(p.heard, now-held)
	}
	p.dirty = true
	t.judge(p, now)
	return true, false
}

// heldUp is how much longer than the fastest one a datagram was under way: its
// sending and arrival are on two clocks, whose least difference is that of the
// fastest. The least one is let grow by 1e-4 so that it follows their drift.
func (p *peer) heldUp(m *message, now float64) float64 {
	d := now - float64(m.stamp)/1000
	switch {
	case p.offsetOf > m.epoch:
		return 0 // of an earlier life: does not count anyway
	case p.offsetOf < m.epoch:
		p.offset, p.offsetOf = d, m.epoch
	default:
		p.offset = min(d, p.offset+1e-4*(now-p.offsetAt))
	}
	p.offsetAt = now
	return d - p.offset
}

// roundTrip takes a measured round trip to a router, in seconds.
func (t *table) roundTrip(name string, rtt float64) {
	if p := t.peers[name]; p != nil && rtt > 0 && (p.delay == 0 || rtt/2 < p.delay) {
		p.delay = rtt / 2
	}
}

// judge sets the state that follows from what was heard and when.
func (t *table) judge(p *peer, now float64) {
	r := t.state.routers[p.name]
	if r == nil || !p.known {
		return
	}
	fresh := p.heard >= 0 && now-p.heard <= (missed+0.5)*r.interval
	switch {
	case r.meta.leaving:
		p.become(peerLeft, now)
	case fresh:
		p.become(peerFresh, now)
	case p.state == peerFresh:
		p.become(peerSilent, now)
	case p.state == peerSilent && now-p.since > t.holdShare:
		p.become(peerLost, now)
	}
}

// tick judges all by the time alone; it appends to silent the names of those
// that have just become so.
func (t *table) tick(now float64, silent []string) []string {
	for _, p := range t.peers {
		was := p.state
		t.judge(p, now)
		if p.state == peerSilent && was != peerSilent {
			silent = append(silent, p.name)
		}
	}
	slices.Sort(silent)
	return silent
}

// next is when tick has to be called at the latest for an account to end in time.
func (t *table) next(now float64) float64 {
	at := now + t.holdShare
	for _, p := range t.peers {
		switch r := t.state.routers[p.name]; {
		case r == nil:
		case p.state == peerFresh:
			at = min(at, p.heard+(missed+0.5)*r.interval)
		case p.state == peerSilent:
			at = min(at, p.since+t.holdShare)
		}
	}
	return at
}

// forget drops what is known of routers that have been away for longer than
// after (s), and the longest silent ones over most. Until then the epoch and
// sequence that were heard last keep a replay of their words from counting.
func (t *table) forget(now, after float64, most int) {
	type old struct {
		name string
		at   float64
	}
	var away []old
	for name, p := range t.peers {
		if p.state != peerFresh && p.state != peerSilent {
			away = append(away, old{name, max(p.heard, p.since)})
		}
	}
	slices.SortFunc(away, func(a, b old) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.name, b.name)) })
	for i, o := range away {
		if now-o.at > after || len(away)-i > most {
			delete(t.peers, o.name)
			delete(t.state.routers, o.name)
		}
	}
}

// views appends to dst a view of each router that changed since the last call,
// by name; the memory in dst[:cap] is used again.
func (t *table) views(dst []PeerView, now float64) []PeerView {
	for _, name := range t.sorted() {
		p := t.peers[name]
		if !p.dirty || !p.known {
			continue
		}
		p.dirty = false
		if len(dst) < cap(dst) {
			dst = dst[:len(dst)+1]
		} else {
			dst = append(dst, PeerView{})
		}
		v := &dst[len(dst)-1]
		*v = PeerView{Router: name, Loads: v.Loads[:0], Hot: v.Hot[:0], held: v.held[:0]}
		r := t.state.routers[name]
		switch p.state {
		case peerFresh:
			v.Age = now - r.made
			t.fill(v, r, now)
			v.held = append(v.held, r.held.list...)
		case peerSilent:
			v.Age = now - r.made
			v.Assumed = true
			if now-p.since <= graceSilent {
				t.fill(v, r, now)
			} else {
				for _, a := range t.loads {
					v.Loads = append(v.Loads, Account{Name: a.Name})
				}
			}
			for i := range t.loads {
				v.Loads[i].Load = atLeast(v.Loads[i].Load, t.loads[i].Load)
			}
		default:
			v.Gone = true
		}
	}
	return dst
}

func (t *table) fill(v *PeerView, r *routerState, now float64) {
	for i, name := range t.order {
		id := idOf(name)
		made := r.buckets[id.bucket()].made
		a := Account{Name: name}
		if e := r.load(id); e != nil {
			a = e.account(name, made)
		}
		if now-made > forwardOver {
			a.Load = fleet.Forward(a.Load, t.past.Since(i, made))
		}
		v.Loads = append(v.Loads, a)
	}
	for _, h := range r.hot.list {
		if name, ok := t.names[h.replica]; ok {
			v.Hot = append(v.Hot, Hot{h.prefix, name})
		}
	}
}

func (t *table) sorted() []string {
	names := make([]string, 0, len(t.peers))
	for n := range t.peers {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// strangers are the addresses of routers that are heard and that membership
// does not know: gossip of a join does not reach everyone for sure.
func (t *table) strangers(now float64) []string {
	var out []string
	for _, name := range t.sorted() {
		p, r := t.peers[name], t.state.routers[name]
		if !p.known && r != nil && !r.meta.leaving && r.meta.addr.IsValid() && now-p.heard <= (missed+0.5)*r.interval {
			out = append(out, r.meta.addr.String())
		}
	}
	return out
}

// budget sums what fresh peers tell of a pool's last 10 s.
func (t *table) budget(pool string) (requests, attempts int) {
	id := poolID(pool)
	for name, p := range t.peers {
		if p.state != peerFresh {
			continue
		}
		for _, b := range t.state.routers[name].meta.budgets {
			if b.pool == id {
				requests += int(b.requests)
				attempts += int(b.attempts)
			}
		}
	}
	return requests, attempts
}

// stormy tells whether a fresh peer has repeats to tell of.
func (t *table) stormy() bool {
	for name, p := range t.peers {
		if p.state == peerFresh && len(t.state.routers[name].meta.storms) > 0 {
			return true
		}
	}
	return false
}

// repeats sums what fresh peers have counted of one request.
func (t *table) repeats(request uint64) int {
	n := 0
	for name, p := range t.peers {
		if p.state != peerFresh {
			continue
		}
		for _, s := range t.state.routers[name].meta.storms {
			if s.Request == request {
				n += s.Repeats
			}
		}
	}
	return n
}
