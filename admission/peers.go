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

	placed uint64  // requests that this router had placed until then
	at     float64 // when it came

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
		at, since := -1, now
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
			since = r.peers[at].at
			r.peers[at] = peerLoad{peer, shareUnique(loads[r.spec.ID], v.Own), v.Own, p.stats.Placed, now, r.peers[at].load.Requests}
		default:
			r.peers = append(r.peers, peerLoad{peer, shareUnique(loads[r.spec.ID], v.Own), v.Own, p.stats.Placed, now, 0})
		}
		r.said, r.then, r.placedThen = fleet.Load{}, fleet.Load{}, 0
		for k := range r.peers {
			r.said = r.said.Add(r.peers[k].load)
			r.then = r.then.Add(r.peers[k].own)
			r.placedThen += float64(r.peers[k].placed)
		}
		p.correctPeers(r, v)
		if w := loads[r.spec.ID].PrefillTokens; w > 0 {
			p.heardPrompts(now, r, v, w, now-since)
		}
	}
}

// heardPrompts counts, in the share of time that goes to prompts and in the
// steps that they take the time of, what a peer sends: words that come every
// while seconds find a prompt waiting that is there for through seconds
// while / through times on average, so w tokens of it stand for as many such
// parts. Taken instead as a multiple of what this router sends, one prompt of
// 10,000 tokens was eight of them with eight routers, and none when a peer had
// sent it.
func (p *Pool) heardPrompts(now float64, r *replica, v *fleet.Replica, w, while float64) {
	through := p.loadedOf(r.i).Through(v.Own.PrefillTokens + r.said.PrefillTokens + v.Other.PrefillTokens)
	seconds := w * v.ScalePrefill * v.Profile.PerPrefill * heardPart * min(while, heardMost) / through
	p.prefillBusy(now, r, v, seconds)
	p.countSteps(now, r, v)
	r.steps -= (1 + r.beside) * seconds / stepOf(v)
}

// heardPart is how much of it counts. All of it is right on average, but such a
// router keeps back more cold prompts than one alone does: with 3,000
// prefix families eight routers did 0.844, with 0.85 of it 0.858 (seeds 1 and 2);
// with 0.7 of it too much is let in beside prompts to 30,000 tokens (0.816 for
// 0.879).
const heardPart = 0.85

// heardMost is the longest time, seconds, for which one account stands.
const heardMost = 2

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
// where it is warm. And what was a long prompt here was a prompt like others
// there: seven more of 10,000 tokens closed that replica to all.
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
	prefill := s.PrefillTokens
	if more := sure * (n*float64(o.Prefilling) - float64(t.Prefilling)); more > 0 {
		prefill += more * p.uncached.v
	} else if s.Prefilling > 0 {
		prefill *= max(0, 1+more/float64(s.Prefilling))
	}
	v.Peers = fleet.Load{
		Requests:      count(s.Requests, t.Requests, o.Requests),
		Prefilling:    count(s.Prefilling, t.Prefilling, o.Prefilling),
		PrefillTokens: prefill,
		KVTokens:      like(s.KVTokens, t.KVTokens, o.KVTokens),
		OutTokens:     like(s.OutTokens, t.OutTokens, o.OutTokens),
		Unique:        like(s.Unique, t.Unique, o.Unique),
		LastFirst:     s.LastFirst,
	}
}
