package admission

import (
	"math"

	"github.com/penstock/penstock/fleet"
)

// peerLoad is one peer's account of a replica, and this router's own at the
// moment that it came.
type peerLoad struct {
	peer string
	load fleet.Load
	own  fleet.Load

	placed uint64 // requests that this router had placed until then

	before int // requests in the account before this one
}

// Peers takes another router's accounts, absolute values by replica; nil or an
// empty map forgets that peer. Replicas that loads does not name have none of
// its requests.
func (p *Pool) Peers(now float64, peer string, loads map[fleet.ID]fleet.Load) {
	p.tick(now)
	p.dirty = true
	if len(loads) == 0 {
		p.forgetHeld(peer)
	}
	for i, r := range p.reps {
		v := &p.view.Replicas[i]
		at := -1
		for k := range r.peers {
			if r.peers[k].peer == peer {
				at = k
			}
		}
		switch {
		case len(loads) == 0 && at >= 0:
			r.peers = append(r.peers[:at], r.peers[at+1:]...)
		case len(loads) == 0:
		case at >= 0:
			r.peers[at] = peerLoad{peer, shareUnique(loads[r.spec.ID], v.Own), v.Own, p.stats.Placed, r.peers[at].load.Requests}
		default:
			r.peers = append(r.peers, peerLoad{peer, shareUnique(loads[r.spec.ID], v.Own), v.Own, p.stats.Placed, 0})
		}
		r.said, r.then, r.placedThen = fleet.Load{}, fleet.Load{}, 0
		for k := range r.peers {
			r.said = r.said.Add(r.peers[k].load)
			r.then = r.then.Add(r.peers[k].own)
			r.placedThen += float64(r.peers[k].placed)
		}
		p.correctPeers(r, v)
	}
}

// shareUnique fills in how much of a peer's KV tokens is shared, when it did
// not say: as much as of this router's own.
func shareUnique(l, own fleet.Load) fleet.Load {
	if l.Unique == 0 && l.KVTokens > 0 {
		l.Unique = l.KVTokens
		if own.KVTokens > 0 {
			l.Unique *= own.Unique / own.KVTokens
		}
	}
	return l
}

// oneOfMany is after how many placements of this router since a peer's snapshot
// half of what it did is taken for what the peer did, too. With 4 the replicas
// of eight routers that share no prefixes came near 1.3 x the mean (TestStaleGossipDoesNotHerd).
const oneOfMany = 1

// correctPeers brings the peers' sum up to date: peers are supposed to have
// done since their snapshot what this router did since then, else all routers
// see the same stale gap and fill it together. What was one request here was
// not one at each of seven peers, though: a router that has placed few since
// then knows little by it, and would send the next prompt of a prefix away from
// where it is warm.
func (p *Pool) correctPeers(r *replica, v *fleet.Replica) {
	r.stale = true
	if len(r.peers) == 0 {
		if v.Peers != (fleet.Load{}) {
			v.Peers = fleet.Load{}
		}
		return
	}
	n := float64(len(r.peers))
	placed := float64(p.stats.Placed) - r.placedThen/n
	sure := placed / (placed + oneOfMany)
	if p.cfg.StalePeers {
		sure = 0
	}
	like := func(said, then, now float64) float64 { return max(0, said+sure*(n*now-then)) }
	count := func(said, then, now int) int {
		return int(math.Round(like(float64(said), float64(then), float64(now))))
	}
	s, t, o := &r.said, &r.then, &v.Own
	v.Peers = fleet.Load{
		Requests:      count(s.Requests, t.Requests, o.Requests),
		Prefilling:    count(s.Prefilling, t.Prefilling, o.Prefilling),
		PrefillTokens: like(s.PrefillTokens, t.PrefillTokens, o.PrefillTokens),
		KVTokens:      like(s.KVTokens, t.KVTokens, o.KVTokens),
		OutTokens:     like(s.OutTokens, t.OutTokens, o.OutTokens),
		Unique:        like(s.Unique, t.Unique, o.Unique),
		LastFirst:     s.LastFirst,
	}
}
