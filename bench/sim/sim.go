package sim

import (
	"math"
	"math/rand/v2"
	"strconv"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/bench/model"
	"github.com/penstock/penstock/fleet"
)

// occKind is what a scheduled occurrence is.
type occKind uint8

const (
	occReplica  occKind = iota // a replica's step ends
	occRouter                  // a router looks at its held queue
	occScrape                  // a router reads a replica's metrics
	occSample                  // and knows them
	occProbe                   // a router probes a replica
	occGossip                  // a router tells its accounts
	occAccounts                // and a peer knows them
	occEvent                   // Config.Events
	occAgain                   // a client's retry
	occPatience                // a client's patience ends
	occFailed                  // a router learns that an attempt failed
)

// occurrence is one entry of the event heap.
type occurrence struct {
	at   float64
	seq  uint64
	kind occKind
	a, b int32
	f    *flight
}

// flight is one client's request on its way, through all its attempts.
type flight struct {
	res     Result
	ticket  admission.Ticket
	seq     *model.Seq // at a replica; the engine may keep an aborted one for a while
	router  *router
	serial  uint32 // changes with each use: late occurrences for an older one are dropped
	first   float64
	phase   flightPhase
	blocks  []uint64
	segs    []model.Seg
	heldAt  float64
	offered float64   // when it was offered last
	print   uint64    // by which routers know the client again
	told    []promise // what it was told when it was refused
}

type flightPhase uint8

const (
	idle    flightPhase = iota
	held                // in a router's queue
	placed              // at a replica, no first token
	running             // first token came
	waiting             // for its own retry
	failing             // its attempt broke; the router will know soon
)

// router is one router with its own Pool.
type router struct {
	i       int
	pool    *admission.Pool
	wake    float64
	out     []*admission.Ticket
	could   map[heldOne]float64 // held ones that a replica would take, since when
	samples []fleet.Sample      // on their way, by replica
	peers   []peerWords         // by router
	own     []fleet.Load        // scratch: by node
	past    fleet.History
	rounds  int // of gossip
}

// heldOne is one stay in a queue.
type heldOne struct {
	f       *flight
	serial  uint32
	attempt int
}

// node is one replica with its place in the simulation.
type node struct {
	*model.Replica
	i      int
	id     fleet.ID
	spec   ReplicaSpec
	next   float64 // earliest scheduled occReplica
	dead   bool
	here   bool // discovery knows it
	frozen bool
	idle   float64 // since when it has had nothing; NaN = it has

	requests, tokens float64 // work sent there, for shares
}

// simulation is one run.
type simulation struct {
	Config
	now     float64
	heap    []occurrence
	seqNo   uint64
	nodes   []*node
	routers []*router
	rng     *rand.Rand
	free    []*flight
	rep     *Report
	open    int     // flights not ended
	held    int     // of them, held at a router
	since   float64 // when held last rose from 0
	quiet   quiet
	last    float64 // when the last request comes for the first time
	flights uint64  // made

	onWay     []*words // accounts on their way; the first one is number onWayBase
	onWayBase int
}

// Run simulates and reports.
func Run(c Config) (*Report, error) {
	if err := c.defaults(); err != nil {
		return nil, err
	}
	s := &simulation{Config: c, rng: rand.New(rand.NewPCG(c.Seed, 0x51a))}
	s.rep = newReport(&s.Config)
	s.build()
	s.loop()
	s.finish()
	return s.rep, nil
}

func (s *simulation) build() {
	for i, spec := range s.Replicas {
		if spec.Slow == 0 {
			spec.Slow = 1
		}
		n := &node{Replica: model.New(spec.Profile), i: i, id: fleet.ID(i + 1), spec: spec, next: math.Inf(1), here: !spec.Absent, dead: spec.Absent}
		n.SetSlow(0, spec.Slow)
		s.nodes = append(s.nodes, n)
	}
	for i := range s.Routers {
		r := &router{i: i, pool: admission.New(s.Pool), wake: math.Inf(1), samples: make([]fleet.Sample, len(s.nodes)), peers: make([]peerWords, s.Routers)}
		for k := range r.peers {
			r.peers[k].heard = neverHeardAt
		}
		s.routers = append(s.routers, r)
		for _, n := range s.nodes {
			if n.here {
				r.pool.Join(0, n.joinSpec(true))
			}
			if s.ScrapeEvery > 0 {
				s.push(s.rng.Float64()*s.ScrapeEvery, occScrape, i, n.i, nil)
			}
			if s.ProbeEvery > 0 {
				s.push(s.rng.Float64()*s.ProbeEvery, occProbe, i, n.i, nil)
			}
		}
		if s.Routers > 1 && s.GossipEvery > 0 {
			s.push(s.rng.Float64()*s.GossipEvery, occGossip, i, 0, nil)
		}
	}
	for i, e := range s.Events {
		s.push(e.At, occEvent, i, 0, nil)
	}
}

func (n *node) joinSpec(warm bool) admission.ReplicaSpec {
	p := n.spec.Prior
	if p == nil && !n.spec.Unknown {
		p = ToFleet(n.spec.Profile)
	}
	return admission.ReplicaSpec{ID: n.id, Name: "r" + strconv.Itoa(n.i), Profile: p, Warm: warm}
}

// push schedules an occurrence.
func (s *simulation) push(at float64, k occKind, a, b int, f *flight) {
	s.seqNo++
	s.heap = append(s.heap, occurrence{at, s.seqNo, k, int32(a), int32(b), f})
	h := s.heap
	i := len(h) - 1
	for i > 0 {
		p := (i - 1) / 2
		if !before(&h[i], &h[p]) {
			break
		}
		h[i], h[p] = h[p], h[i]
		i = p
	}
}

func before(a, b *occurrence) bool { return a.at < b.at || a.at == b.at && a.seq < b.seq }

func (s *simulation) pop() occurrence {
	h := s.heap
	top, last := h[0], len(h)-1
	h[0] = h[last]
	h[last].f = nil
	h = h[:last]
	for i := 0; ; {
		l := 2*i + 1
		if l >= last {
			break
		}
		if r := l + 1; r < last && before(&h[r], &h[l]) {
			l = r
		}
		if !before(&h[l], &h[i]) {
			break
		}
		h[i], h[l] = h[l], h[i]
		i = l
	}
	s.heap = h
	return top
}

// loop merges the arrivals with the scheduled occurrences until all requests
// ended or the cool-down is over.
func (s *simulation) loop() {
	next := 0
	end := s.Cooldown
	if n := len(s.Requests); n > 0 {
		s.last = s.Requests[n-1].At
		end += s.last
	}
	for {
		arrival := math.Inf(1)
		if next < len(s.Requests) {
			arrival = s.Requests[next].At
		}
		if next == len(s.Requests) && s.open == 0 {
			return
		}
		if len(s.heap) > 0 && s.heap[0].at <= arrival {
			if s.heap[0].at > end {
				return
			}
			o := s.pop()
			s.now = o.at
			s.occur(&o)
			s.checkHeld()
			continue
		}
		if math.IsInf(arrival, 1) {
			return
		}
		s.now = arrival
		s.arrive(&s.Requests[next])
		s.checkHeld()
		next++
	}
}

func (s *simulation) occur(o *occurrence) {
	switch o.kind {
	case occReplica:
		s.step(s.nodes[o.a])
	case occRouter:
		r := s.routers[o.a]
		if o.at >= r.wake {
			r.wake = math.Inf(1)
			s.advance(r)
		}
	case occScrape:
		s.scrape(s.routers[o.a], s.nodes[o.b])
	case occSample:
		r, n := s.routers[o.a], s.nodes[o.b]
		r.pool.Observe(s.now, n.id, r.samples[n.i])
		s.settle(r)
	case occProbe:
		s.probe(s.routers[o.a], s.nodes[o.b])
	case occGossip:
		s.tell(s.routers[o.a])
	case occAccounts:
		s.hear(s.routers[o.a], int(o.b))
	case occEvent:
		s.event(&s.Events[o.a])
	case occAgain:
		if o.f.serial == uint32(o.a) && o.f.phase == waiting {
			s.rep.reoffer(s.now)
			s.offer(o.f)
		}
	case occPatience:
		if o.f.serial == uint32(o.a) && (o.f.phase == held || o.f.phase == placed || o.f.phase == waiting) {
			s.leave(o.f)
		}
	case occFailed:
		if o.f.serial == uint32(o.a) && o.f.phase == failing {
			s.failed(o.f, fleet.Evidence(o.b))
		}
	}
}

// settle lets the router do what it wants to do now, and schedules the rest.
func (s *simulation) settle(r *router) {
	if r.pool.NextWake(s.now) <= s.now {
		s.advance(r)
		return
	}
	s.arm(r)
}

func (s *simulation) arm(r *router) {
	t := r.pool.NextWake(s.now)
	if t <= s.now {
		t = s.now + 1e-5 // asked for at once though it was just done: time has to move on
	}
	if t < r.wake {
		r.wake = t
		s.push(t, occRouter, r.i, 0, nil)
	}
}

// advance re-decides what the router holds and acts on revocations.
func (s *simulation) advance(r *router) {
	for range 8 {
		r.out = r.pool.Advance(s.now, r.out[:0])
		for _, t := range r.out {
			s.decided(t.User.(*flight), t.Decision)
		}
		more := len(r.out) > 0
		r.out = r.pool.Revoked(r.out[:0])
		for _, t := range r.out {
			s.revoke(t.User.(*flight))
			more = true
		}
		if !more || r.pool.NextWake(s.now) > s.now {
			break
		}
	}
	s.arm(r)
}

// checkHeld notes which held requests a replica would take now, and for how
// long that has been so.
func (s *simulation) checkHeld() {
	if !s.CheckHeld {
		return
	}
	for _, r := range s.routers {
		r.out = r.pool.Takeable(s.now, r.out[:0])
		could := make(map[heldOne]float64, len(r.out))
		for _, t := range r.out {
			f := t.User.(*flight)
			k := heldOne{f, f.serial, f.res.Attempts}
			since, known := r.could[k]
			if !known {
				since = s.now
			}
			since = max(since, t.LostAt())
			could[k] = since
			s.rep.Withheld = max(s.rep.Withheld, s.now-since)
		}
		r.could = could
	}
}
