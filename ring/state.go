package ring

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/penstock/penstock/fleet"
	"github.com/zeebo/xxh3"
)

// Snapshot is what a router says of itself. Times are seconds of the owner's
// clock (Options.Now).
type Snapshot struct {
	// Replicas lists every replica that this router knows, idle ones too: the
	// names are also how the accounts of peers are given back by name.
	Replicas   []Account
	ConfigHash uint64   // of the effective configuration without secrets; 0 = not given
	Budgets    []Budget // per pool, the last 10 s; at most MaxBudgets are told
	Storms     []Storm  // at most MaxStorms are told, those with most repeats
	Hot        []Hot    // at most MaxHot are told, the first ones
	Held       []Held   // per pool; at most MaxBudgets are told, of those that hold any
}

// Bounds of what one router tells.
const (
	MaxBudgets = 16
	MaxStorms  = 32
	MaxHot     = 64
	// MaxHeldClasses is how many classes of a pool are told apart; the last one
	// stands for those below it too.
	MaxHeldClasses = 8
)

// Reset empties s and keeps its memory.
func (s *Snapshot) Reset() {
	*s = Snapshot{Replicas: s.Replicas[:0], Budgets: s.Budgets[:0], Storms: s.Storms[:0], Hot: s.Hot[:0], Held: s.Held[:0]}
}

// Account is one router's account of one replica, with what it has seen of
// the replica's health.
type Account struct {
	Name string
	Load fleet.Load
	// State and Reason are told when State is not StateUp, with the time since
	// when it holds. To a peer they are a hint to look sooner: they never
	// change a replica's state there by themselves.
	State  fleet.State
	Reason fleet.Evidence
	Since  float64
}

// Budget counts one pool's requests and attempts in the last 10 s.
type Budget struct {
	Pool               string
	Requests, Attempts int
}

// Storm counts how often one request (by its fingerprint) has come since it had
// a degraded or shed answer, that time included, within 10 s.
type Storm struct {
	Request uint64
	Repeats int
}

// Hot says that a prefix (its chained fingerprint) is warm on a replica.
type Hot struct {
	Prefix  uint64
	Replica string
}

// Held counts the requests that a pool holds, by class, the most important
// first. Peers leave places to them.
type Held struct {
	Pool  string
	Count []int
}

// replicaID is a replica's identity between routers: 40 bits of its name's
// hash. Two names of 1000 replicas share one with a chance of 5 in 10 million.
type replicaID uint64

const idBits = 40

func idOf(name string) replicaID { return replicaID(xxh3.HashString(name) >> (64 - idBits)) }

// poolID names a pool in the budgets.
func poolID(name string) uint32 { return uint32(xxh3.HashString(name)) }

// Accounts are kept and replaced by bucket, a 256th of the replica IDs each.
// Whatever way a router cuts its account into datagrams, each says all that is
// to be said of whole buckets: a replica that is not in it has no load there.
const buckets = 256

func (id replicaID) bucket() int { return int(id >> (idBits - 8)) }

// entry is an account in the precision of the wire, so that what is passed on
// is what was received. Ages are relative to when the bucket was made.
type entry struct {
	id         replicaID
	requests   uint32
	prefilling uint32
	prefill    q16
	kv         q16
	out        q16
	first      q8 // age of LastFirst, q8Never = never
	state      uint8
	reason     uint8
	since      q8
}

func (a *Account) entry(now float64) entry {
	e := entry{id: idOf(a.Name), requests: clampCount(a.Load.Requests), first: q8Never,
		kv: quant16(a.Load.KVTokens), out: quant16(a.Load.OutTokens)}
	e.prefilling = min(clampCount(a.Load.Prefilling), e.requests)
	if e.prefilling > 0 {
		e.prefill = quant16(a.Load.PrefillTokens)
	}
	if a.Load.LastFirst > 0 {
		e.first = quantAge(now - a.Load.LastFirst)
	}
	if a.State != fleet.StateUp {
		e.state, e.reason, e.since = uint8(a.State), uint8(a.Reason), quantAge(now-a.Since)
	}
	return e
}

const maxCount = 1 << 20

func clampCount(n int) uint32 { return uint32(min(max(n, 0), maxCount)) }

// idle entries are not told.
func (e *entry) idle() bool {
	return e.requests == 0 && e.kv == 0 && e.out == 0 && e.state == 0
}

// account gives e back in the owner's seconds; made is when it was made.
func (e *entry) account(name string, made float64) Account {
	a := Account{Name: name, State: fleet.State(e.state), Reason: fleet.Evidence(e.reason),
		Load: fleet.Load{Requests: int(e.requests), Prefilling: int(e.prefilling), PrefillTokens: e.prefill.float(),
			KVTokens: e.kv.float(), OutTokens: e.out.float()}}
	if e.first != q8Never {
		a.Load.LastFirst = made - e.first.seconds()
	}
	if e.state != 0 {
		a.Since = made - e.since.seconds()
	}
	return a
}

func compareEntries(a, b entry) int {
	return cmp.Or(cmp.Compare(a.id, b.id), cmp.Compare(a.requests, b.requests), cmp.Compare(a.prefilling, b.prefilling),
		cmp.Compare(a.prefill, b.prefill), cmp.Compare(a.kv, b.kv), cmp.Compare(a.out, b.out), cmp.Compare(a.first, b.first),
		cmp.Compare(a.state, b.state), cmp.Compare(a.reason, b.reason), cmp.Compare(a.since, b.since))
}

// version orders what one router said of one thing: the sequence number of the
// round it was said in, and when that was, as seen here.
type version struct {
	seq  uint64  // 0 = nothing said yet
	made float64 // owner's seconds
}

// newer merges the version o into v for a register whose contents compare as
// c (o's against v's): it tells whether o's contents are to be taken. The same
// words heard twice were made at the earlier of both estimates. Two different
// contents under one number do not come from an honest router; the order of
// contents decides then, so that the merge is commutative whatever was sent.
func (v *version) newer(o version, c func() int) bool {
	switch {
	case o.seq != v.seq:
		if o.seq < v.seq {
			return false
		}
		*v = o
		return true
	case o.seq == 0:
		return false
	}
	switch d := c(); {
	case d > 0:
		*v = o
		return true
	case d == 0:
		v.made = min(v.made, o.made)
	}
	return false
}

type bucket struct {
	version
	entries []entry // ascending by id
}

// meta is what a router says of itself as a whole.
type meta struct {
	version
	leaving bool           // the last words of a router that shuts down
	addr    netip.AddrPort // where its peers reach it
	config  uint64
	budgets []wireBudget
	storms  []Storm
}

type wireBudget struct {
	pool               uint32
	requests, attempts uint32
}

func compareMeta(a, b *meta) int {
	return cmp.Or(cmp.Compare(flag(a.leaving), flag(b.leaving)), a.addr.Compare(b.addr), cmp.Compare(a.config, b.config),
		slices.CompareFunc(a.budgets, b.budgets, func(a, b wireBudget) int {
			return cmp.Or(cmp.Compare(a.pool, b.pool), cmp.Compare(a.requests, b.requests), cmp.Compare(a.attempts, b.attempts))
		}),
		slices.CompareFunc(a.storms, b.storms, func(a, b Storm) int {
			return cmp.Or(cmp.Compare(a.Request, b.Request), cmp.Compare(a.Repeats, b.Repeats))
		}))
}

func flag(b bool) byte {
	if b {
		return 1
	}
	return 0
}

// hotSet is the prefixes that a router holds warm.
type hotSet struct {
	version
	list []wireHot
}

type wireHot struct {
	prefix  uint64
	replica replicaID
}

func compareHot(a, b []wireHot) int {
	return slices.CompareFunc(a, b, func(a, b wireHot) int {
		return cmp.Or(cmp.Compare(a.prefix, b.prefix), cmp.Compare(a.replica, b.replica))
	})
}

// heldSet is what a router holds, pools that hold nothing left out.
type heldSet struct {
	version
	list []wireHeld
}

type wireHeld struct {
	pool    uint32
	classes int // in count
	count   [MaxHeldClasses]uint32
}

// take adds what s says of one pool, unless it holds nothing.
func (h *heldSet) take(s *Held) {
	w, holds := wireHeld{pool: poolID(s.Pool), classes: min(len(s.Count), MaxHeldClasses)}, false
	for c, n := range s.Count {
		c = min(c, MaxHeldClasses-1)
		w.count[c] = min(w.count[c]+clampCount(n), maxCount)
		holds = holds || n > 0
	}
	if holds && len(h.list) < MaxBudgets {
		h.list = append(h.list, w)
	}
}

func compareHeld(a, b []wireHeld) int {
	return slices.CompareFunc(a, b, func(a, b wireHeld) int {
		return cmp.Or(cmp.Compare(a.pool, b.pool), cmp.Compare(a.classes, b.classes), slices.Compare(a.count[:], b.count[:]))
	})
}

// routerState is all that one router has said, as known here: a set of
// registers of which each keeps the newest word. A router that restarts has a
// greater epoch, which voids all that was said in earlier ones.
type routerState struct {
	name     string
	epoch    uint64  // milliseconds since 1970 of its start; 0 = nothing known
	seq      uint64  // newest heard
	made     float64 // when the newest was made, owner's seconds
	interval float64 // seconds between its sends, as it says
	buckets  [buckets]bucket
	meta     meta
	hot      hotSet
	held     heldSet
}

// merge takes over what o knows better. It tells whether anything changed.
func (r *routerState) merge(o *routerState) bool {
	if o.epoch < r.epoch || o.epoch == 0 {
		return false
	}
	changed := false
	if o.epoch > r.epoch {
		*r = routerState{name: r.name, epoch: o.epoch}
		changed = true
	}
	switch {
	case o.seq > r.seq:
		r.seq, r.made, r.interval = o.seq, o.made, o.interval
		changed = true
	case o.seq == r.seq:
		r.made, r.interval = min(r.made, o.made), max(r.interval, o.interval)
	}
	for i := range r.buckets {
		changed = r.buckets[i].merge(&o.buckets[i]) || changed
	}
	changed = r.meta.merge(&o.meta) || changed
	changed = r.hot.merge(&o.hot) || changed
	return r.held.merge(&o.held) || changed
}

func (b *bucket) merge(o *bucket) bool {
	if !b.newer(o.version, func() int { return slices.CompareFunc(o.entries, b.entries, compareEntries) }) {
		return false
	}
	b.entries = append(b.entries[:0], o.entries...)
	return true
}

func (m *meta) merge(o *meta) bool {
	if !m.newer(o.version, func() int { return compareMeta(o, m) }) {
		return false
	}
	m.leaving, m.addr, m.config = o.leaving, o.addr, o.config
	m.budgets = append(m.budgets[:0], o.budgets...)
	m.storms = append(m.storms[:0], o.storms...)
	return true
}

func (h *hotSet) merge(o *hotSet) bool {
	if !h.newer(o.version, func() int { return compareHot(o.list, h.list) }) {
		return false
	}
	h.list = append(h.list[:0], o.list...)
	return true
}

func (h *heldSet) merge(o *heldSet) bool {
	if !h.newer(o.version, func() int { return compareHeld(o.list, h.list) }) {
		return false
	}
	h.list = append(h.list[:0], o.list...)
	return true
}

// state is what is known of all routers.
type state struct {
	routers map[string]*routerState
}

func newState() *state { return &state{routers: map[string]*routerState{}} }

func (s *state) router(name string) *routerState {
	r := s.routers[name]
	if r == nil {
		r = &routerState{name: name}
		s.routers[name] = r
	}
	return r
}

// merge takes over what o knows better. It is commutative, associative and
// idempotent: the order, number and route of messages do not matter.
func (s *state) merge(o *state) {
	for name, r := range o.routers {
		if r.epoch != 0 {
			s.router(name).merge(r)
		}
	}
}

// apply merges one decoded message that was made at made (owner's seconds),
// and tells whether anything in it was news.
func (s *state) apply(m *message, made float64) bool {
	r := s.router(m.router)
	if m.epoch < r.epoch {
		return false
	}
	news := false
	if m.epoch > r.epoch {
		*r = routerState{name: r.name, epoch: m.epoch}
		news = true
	}
	v := version{seq: m.seq, made: made}
	switch {
	case m.seq > r.seq:
		r.seq, r.made, r.interval = m.seq, made, m.interval
		news = true
	case m.seq == r.seq:
		r.made, r.interval = min(r.made, made), max(r.interval, m.interval)
	}
	for i := range m.ranges {
		news = r.applyRange(&m.ranges[i], v) || news
	}
	if m.hasMeta {
		m.meta.version = v
		news = r.meta.merge(&m.meta) || news
	}
	if m.hasHot {
		m.hot.version = v
		news = r.hot.merge(&m.hot) || news
	}
	if m.hasHeld {
		m.held.version = v
		news = r.held.merge(&m.held) || news
	}
	return news
}

func (r *routerState) applyRange(g *bucketRange, v version) bool {
	news := false
	rest := g.entries
	for i := g.first; i <= g.last; i++ {
		n := 0
		for n < len(rest) && rest[n].id.bucket() == i {
			n++
		}
		news = r.buckets[i].merge(&bucket{version: v, entries: rest[:n]}) || news
		rest = rest[n:]
	}
	return news
}

// load is what r accounts for the replica id.
func (r *routerState) load(id replicaID) *entry {
	list := r.buckets[id.bucket()].entries
	if i, ok := slices.BinarySearchFunc(list, id, func(e entry, id replicaID) int { return cmp.Compare(e.id, id) }); ok {
		return &list[i]
	}
	return nil
}

// own builds the state of this router from its snapshot; what is over the
// bounds of a Snapshot is left out.
func (r *routerState) own(s *Snapshot, now float64) {
	v := version{seq: r.seq, made: now}
	r.made = now
	for i := range r.buckets {
		r.buckets[i].version = v
		r.buckets[i].entries = r.buckets[i].entries[:0]
	}
	for i := range s.Replicas {
		if e := s.Replicas[i].entry(now); !e.idle() {
			b := &r.buckets[e.id.bucket()]
			b.entries = append(b.entries, e)
		}
	}
	for i := range r.buckets {
		r.buckets[i].tidy()
	}
	r.meta.version, r.meta.config = v, s.ConfigHash
	r.meta.budgets = r.meta.budgets[:0]
	for _, b := range s.Budgets[:min(len(s.Budgets), MaxBudgets)] {
		r.meta.budgets = append(r.meta.budgets, wireBudget{poolID(b.Pool), clampCount(b.Requests), clampCount(b.Attempts)})
	}
	r.meta.storms = append(r.meta.storms[:0], s.Storms...)
	if len(r.meta.storms) > MaxStorms {
		slices.SortStableFunc(r.meta.storms, func(a, b Storm) int { return cmp.Compare(b.Repeats, a.Repeats) })
		r.meta.storms = r.meta.storms[:MaxStorms]
	}
	for i := range r.meta.storms {
		r.meta.storms[i].Repeats = int(clampCount(r.meta.storms[i].Repeats))
	}
	r.held.version, r.held.list = v, r.held.list[:0]
	for i := range s.Held {
		r.held.take(&s.Held[i])
	}
	r.hot.version = v
	r.hot.list = r.hot.list[:0]
	for _, h := range s.Hot[:min(len(s.Hot), MaxHot)] {
		r.hot.list = append(r.hot.list, wireHot{h.Prefix, idOf(h.Replica)})
	}
}

// tidy sorts the entries and adds up those of one id: two names with one hash
// are one replica to the peers, with the load of both.
func (b *bucket) tidy() {
	if len(b.entries) < 2 {
		return
	}
	slices.SortFunc(b.entries, compareEntries)
	w := 0
	for _, e := range b.entries[1:] {
		if p := &b.entries[w]; p.id == e.id {
			p.requests = min(p.requests+e.requests, maxCount)
			p.prefilling = min(p.prefilling+e.prefilling, p.requests)
			p.prefill = quant16(p.prefill.float() + e.prefill.float())
			p.kv = quant16(p.kv.float() + e.kv.float())
			p.out = quant16(p.out.float() + e.out.float())
			p.first = min(p.first, e.first)
			continue
		}
		w++
		b.entries[w] = e
	}
	b.entries = b.entries[:w+1]
}
