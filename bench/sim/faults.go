package sim

import (
	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/bench/model"
	"github.com/penstock/penstock/fleet"
)

// event acts out one of Config.Events.
func (s *simulation) event(e *Event) {
	n := s.nodes[e.Replica]
	switch e.Kind {
	case Kill:
		n.dead = true
		for _, q := range n.Kill(s.now) {
			f := q.User.(*flight)
			switch f.phase {
			case placed, running:
				f.phase = failing
				s.push(s.now+s.Net, occFailed, int(f.serial), int(fleet.EvidenceReset), f)
			}
		}
	case Revive:
		n.dead, n.idle = false, s.now
	case Slow:
		n.SetSlow(s.now, e.Factor)
		s.schedule(n)
	case Freeze, Thaw:
		n.frozen = e.Kind == Freeze
		if n.Queued() == 0 {
			n.idle = s.now
		}
		n.SetFrozen(s.now, n.frozen)
		s.schedule(n)
	case Join:
		n.dead, n.here = false, true
		if n.Queued() == 0 {
			n.idle = s.now
		}
		for _, r := range s.routers {
			r.pool.Join(s.now, n.joinSpec(false))
			s.settle(r)
		}
	case Leave:
		n.here = false
		for _, r := range s.routers {
			r.pool.Remove(s.now, n.id)
			s.settle(r)
		}
	}
}

// failed: a router learns that an attempt broke. Before the first token it
// tries elsewhere; after it the client gets a broken stream.
func (s *simulation) failed(f *flight, e fleet.Evidence) {
	begun := f.first > 0
	f.router.pool.Done(s.now, &f.ticket, admission.End{Outcome: admission.Failed, Evidence: e})
	if begun {
		s.end(f, Broken)
		s.settle(f.router)
		return
	}
	s.again(f)
}

// again makes another attempt on another replica.
func (s *simulation) again(f *flight) {
	w := &f.ticket.Work
	if f.res.Attempts >= s.Attempts || w.Excluded >= len(w.Exclude) {
		s.end(f, Failed)
		s.settle(f.router)
		return
	}
	w.Exclude[w.Excluded] = fleet.ID(f.res.Replica + 1)
	w.Excluded++
	w.Out = 0
	f.heldAt = s.now
	s.admit(f)
}

// revoke takes a request without a first token away from a replica that the
// pool gave up.
func (s *simulation) revoke(f *flight) {
	if f.phase != placed && f.phase != failing {
		return
	}
	s.drop(f, s.nodes[f.res.Replica])
	f.phase = idle
	f.router.pool.Done(s.now, &f.ticket, admission.End{Outcome: admission.Failed, Evidence: fleet.EvidenceReset})
	s.again(f)
}

// drop aborts a flight's sequence. The engine holds on to it until its step
// ends, so the flight lets it go.
func (s *simulation) drop(f *flight, n *node) {
	if n.dead || f.seq == nil {
		return
	}
	q := f.seq
	f.seq = nil
	q.User = orphan
	q.Segs = append([]model.Seg(nil), q.Segs...)
	n.Abort(s.now, q)
	s.schedule(n)
}

// orphan is whose the events of dropped sequences are.
var orphan = &flight{}

// leave: the client's patience is over.
func (s *simulation) leave(f *flight) {
	r := f.router
	switch f.phase {
	case held:
		s.unheld()
		r.pool.Leave(s.now, &f.ticket)
	case placed:
		s.drop(f, s.nodes[f.res.Replica])
		r.pool.Done(s.now, &f.ticket, admission.End{Outcome: admission.Cancelled})
	}
	s.end(f, Left)
	s.settle(r)
}

// scrape reads a replica's page for a router.
func (s *simulation) scrape(r *router, n *node) {
	s.push(s.now+s.ScrapeEvery*(0.8+0.4*s.rng.Float64()), occScrape, r.i, n.i, nil)
	if !n.here {
		return
	}
	if n.dead {
		r.pool.Evidence(s.now, n.id, fleet.EvidenceScrapeFailed)
		s.settle(r)
		return
	}
	n.EachDecoding(s.now, func(q *model.Seq, made int) {
		if f := q.User.(*flight); f.router == r && f.phase == running {
			r.pool.Progress(s.now, &f.ticket, made)
		}
	})
	st := n.Stats(s.now)
	r.samples[n.i] = fleet.Sample{At: s.now, Engines: 1, Waiting: float64(st.Waiting), Running: float64(st.Running), KVUsage: st.KVUsage,
		KVTokens: float64(n.Profile.Blocks() * n.Profile.BlockTokens), BlockTokens: float64(n.Profile.BlockTokens),
		PrefixQueries: st.PrefixQueries, PrefixHits: st.PrefixHits, Preemptions: st.Preemptions, PromptTokens: st.PromptTokens, OutputTokens: st.OutputTokens,
		TTFTSum: st.TTFTSum, TTFTCount: st.TTFTCount, ITLSum: st.ITLSum, ITLCount: st.ITLCount, QueueSum: st.QueueSum, QueueCount: st.QueueCount,
		PrefillSum: st.PrefillSum, PrefillCount: st.PrefillCount, Steps: st.Steps}
	s.push(s.now+s.ScrapeAge, occSample, r.i, n.i, nil)
}

// probe asks /health.
func (s *simulation) probe(r *router, n *node) {
	s.push(s.now+s.ProbeEvery*(0.8+0.4*s.rng.Float64()), occProbe, r.i, n.i, nil)
	if !n.here {
		return
	}
	e := fleet.EvidenceProbeOK // of a frozen engine too
	if n.dead {
		e = fleet.EvidenceProbeRefused
	}
	r.pool.Evidence(s.now, n.id, e)
	s.settle(r)
}

// finish counts what has not ended, and checks the books.
func (s *simulation) finish() {
	for _, r := range s.routers {
		st := r.pool.Stats()
		s.rep.pool(st)
		if s.open == 0 {
			s.rep.checkBooks(r.pool, st)
		}
	}
	s.rep.finish(s)
}
