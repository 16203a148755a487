package sim

import (
	"slices"
	"strconv"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
)

// words is one account of a router on its way to the others.
type words struct {
	from int
	made float64
	left int // receivers that have not had it
	own  []fleet.Load
	hot  []admission.HotPrefix
	held []int
}

// peerWords is what a router knows of another one.
type peerWords struct {
	heard float64 // when its newest account was made; negative = never
	own   []fleet.Load
}

// As ring has them: an account expires after so many of its intervals, counts
// as it was for a while longer, and is brought forward when it is older than that.
const (
	expireAfter  = 3.5
	graceSilent  = 2.0
	forwardOver  = 0.02
	hotEvery     = 5 // rounds
	neverHeardAt = -1e9
)

// ownLoads are a router's own accounts by node. Replicas come and go here by
// node, which does not change.
func (s *simulation) ownLoads(r *router, into []fleet.Load) []fleet.Load {
	into = append(into[:0], make([]fleet.Load, len(s.nodes))...)
	v := r.pool.View()
	for i := range v.Replicas {
		l := v.Replicas[i].Own
		l.Unique = 0 // is not told
		into[int(v.Replicas[i].ID)-1] = l
	}
	return into
}

// tell sends a router's accounts to all others, and looks who went silent.
func (s *simulation) tell(r *router) {
	s.push(s.now+s.GossipEvery*(0.9+0.2*s.rng.Float64()), occGossip, r.i, 0, nil)
	s.remember(r)
	w := &words{from: r.i, made: s.now, left: len(s.routers) - 1, own: slices.Clone(r.own), held: r.pool.Held(nil)}
	if r.rounds++; r.rounds%hotEvery == 0 && !s.NoHot {
		w.hot = r.pool.Hot(nil)
	}
	s.onWay = append(s.onWay, w)
	key := s.onWayBase + len(s.onWay) - 1
	for _, o := range s.routers {
		if o == r {
			continue
		}
		if s.GossipLoss > 0 && s.now > s.GossipLossFrom && s.rng.Float64() < s.GossipLoss {
			w.left--
			continue
		}
		s.push(s.now+s.GossipAge*(0.9+0.2*s.rng.Float64()), occAccounts, o.i, key, nil)
	}
	for i := range r.peers {
		if age := s.now - s.GossipAge - r.peers[i].heard; i != r.i && r.peers[i].heard >= 0 && age > expireAfter*s.GossipEvery {
			s.silent(r, i, age-expireAfter*s.GossipEvery)
		}
	}
	s.settle(r)
}

// remember notes a router's account as it is now.
func (s *simulation) remember(r *router) {
	r.own = s.ownLoads(r, r.own)
	r.past.Add(s.now, len(r.own), func(i int) fleet.Load { return r.own[i] })
}

// hear takes words that arrive: a router counts them as of now, so what is
// older is first brought forward.
func (s *simulation) hear(r *router, key int) {
	w := s.onWay[key-s.onWayBase]
	r.pool.PeerHot(w.hot)
	if w.left--; w.made > r.peers[w.from].heard {
		if r.peers[w.from].heard, r.peers[w.from].own = w.made, w.own; s.now-w.made > forwardOver {
			s.remember(r)
		}
		s.loads(r, w.from, func(i int) fleet.Load {
			if s.now-w.made > forwardOver && !s.NoForward {
				return fleet.Forward(w.own[i], r.past.Since(i, w.made))
			}
			return w.own[i]
		})
		r.pool.PeerHeld(routerName(w.from), w.held)
		s.settle(r)
	}
	for len(s.onWay) > 0 && s.onWay[0].left == 0 {
		s.onWay, s.onWayBase = s.onWay[1:], s.onWayBase+1
	}
}

// silent supposes that a router that is not heard any more has as much as this
// one, for a while at least what it had.
func (s *simulation) silent(r *router, peer int, since float64) {
	had := r.peers[peer].own
	r.pool.PeerHeld(routerName(peer), nil)
	s.loads(r, peer, func(i int) fleet.Load {
		l := r.own[i]
		if since < graceSilent {
			h := fleet.Forward(had[i], r.past.Since(i, r.peers[peer].heard))
			l.Requests, l.Prefilling = max(l.Requests, h.Requests), max(l.Prefilling, h.Prefilling)
			l.PrefillTokens, l.KVTokens, l.OutTokens = max(l.PrefillTokens, h.PrefillTokens), max(l.KVTokens, h.KVTokens), max(l.OutTokens, h.OutTokens)
			l.LastFirst = max(l.LastFirst, h.LastFirst)
		}
		return l
	})
}

// loads gives a router a peer's accounts.
func (s *simulation) loads(r *router, peer int, of func(i int) fleet.Load) {
	m := make(map[fleet.ID]fleet.Load, len(s.nodes))
	for i, n := range s.nodes {
		m[n.id] = of(i)
	}
	r.pool.Peers(s.now, routerName(peer), m)
}

func routerName(i int) string { return "router" + strconv.Itoa(i) }
