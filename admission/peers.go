package admission

import "github.com/penstock/penstock/fleet"

// peerLoad is one peer's account of a replica, and this router's own at the
// moment that it came.
type peerLoad struct {
	peer string
	load fleet.Load
	own  fleet.Load

	before int // requests in the account before this one
}

// Peers takes another router's accounts, absolute values by replica; nil or an
// empty map forgets that peer. Replicas that loads does not name have none of
// its requests.
func (p *Pool) Peers(now float64, peer string, loads map[fleet.ID]fleet.Load) {
	p.tick(now)
	p.dirty = true
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
			r.peers[at] = peerLoad{peer, shareUnique(loads[r.spec.ID], v.Own), v.Own, r.peers[at].load.Requests}
		default:
			r.peers = append(r.peers, peerLoad{peer, shareUnique(loads[r.spec.ID], v.Own), v.Own, 0})
		}
		r.base = fleet.Load{}
		for k := range r.peers {
			r.base = add(r.base, r.peers[k].load, 1)
			r.base = add(r.base, r.peers[k].own, -1)
			r.base.LastFirst = max(r.base.LastFirst, r.peers[k].load.LastFirst)
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

func add(a, b fleet.Load, sign float64) fleet.Load {
	a.Requests += int(sign) * b.Requests
	a.Prefilling += int(sign) * b.Prefilling
	a.PrefillTokens += sign * b.PrefillTokens
	a.KVTokens += sign * b.KVTokens
	a.OutTokens += sign * b.OutTokens
	a.Unique += sign * b.Unique
	return a
}

// correctPeers brings the peers' sum up to date: peers are supposed to have
// done since their snapshot what this router did since then, else all routers
// see the same stale gap and fill it together.
func (p *Pool) correctPeers(r *replica, v *fleet.Replica) {
	r.stale = true
	if len(r.peers) == 0 {
		if v.Peers != (fleet.Load{}) {
			v.Peers = fleet.Load{}
		}
		return
	}
	l := add(r.base, v.Own, float64(len(r.peers)))
	l.Requests, l.Prefilling = max(0, l.Requests), max(0, l.Prefilling)
	l.PrefillTokens, l.KVTokens, l.OutTokens = max(0, l.PrefillTokens), max(0, l.KVTokens), max(0, l.OutTokens)
	l.Unique = max(0, l.Unique)
	v.Peers = l
}
