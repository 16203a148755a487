package sim

import (
	"math"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/bench/model"
	"github.com/penstock/penstock/bench/workload"
	"github.com/penstock/penstock/fleet"
)

// arrive makes a flight of a request and offers it to a router.
func (s *simulation) arrive(q *workload.Request) {
	var f *flight
	if n := len(s.free); n > 0 {
		f, s.free = s.free[n-1], s.free[:n-1]
	} else {
		f = &flight{}
	}
	*f = flight{serial: f.serial + 1, blocks: f.blocks[:0], segs: f.segs[:0], seq: f.seq, told: f.told[:0]}
	s.flights++
	f.print = s.flights
	f.res = Result{Request: q, Replica: -1}
	f.router = s.routers[0]
	if s.Routers > 1 {
		f.router = s.routers[s.rng.IntN(s.Routers)]
	}
	f.res.Router = f.router.i
	for _, g := range q.Segs {
		f.segs = append(f.segs, model.Seg{Hash: g.Hash, Tokens: g.Tokens})
	}
	if !s.NoBlocks {
		f.blocks = fingerprints(f.blocks, q.Segs, s.BlockTokens)
	}
	s.open++
	if s.Client.Patience > 0 {
		s.push(s.now+s.Client.Patience, occPatience, int(f.serial), 0, f)
	}
	s.offer(f)
}

// fingerprints are what a router computes from the prompt's bytes: one per
// size tokens, chained.
func fingerprints(out []uint64, segs []workload.Seg, size int) []uint64 {
	prev, start, edge := uint64(0), 0, size
	for _, g := range segs {
		end := start + g.Tokens
		for ; edge < end; edge += size {
			out = append(out, workload.Chain(prev^uint64(edge-start), g.ID))
		}
		if edge == end { // the run ends here: the chained hash says it all
			out = append(out, g.Hash)
			edge += size
		}
		prev, start = g.Hash, end
	}
	return out
}

// offer asks the router.
func (s *simulation) offer(f *flight) {
	q, w := f.res.Request, &f.ticket.Work
	f.ticket = admission.Ticket{User: f}
	*w = fleet.Work{Tenant: q.Tenant, Class: q.Class, Prompt: q.Prompt, Seqs: 1, Arrived: s.now, Tokens: float64(s.BlockTokens), Bytes: 4 * q.Prompt, Print: f.print}
	if !s.NoBlocks {
		w.Blocks = f.blocks
	}
	if s.KnownOut {
		w.MaxOut = q.Out
	}
	if s.Routers > 1 && !s.NoPrefer && len(f.blocks) > 0 {
		w.Prefer = s.prefer(f.blocks)
	}
	f.res.Offers++
	f.heldAt, f.offered = s.now, s.now
	s.admit(f)
}

// prefer is the rendezvous choice of a prefix: the first and second replica.
func (s *simulation) prefer(blocks []uint64) (out [2]fleet.ID) {
	key, _ := admission.PrefixKey(blocks)
	var best, second uint64
	for _, n := range s.nodes {
		if !n.here {
			continue
		}
		h := workload.Chain(key, uint64(n.id))
		switch {
		case h > best:
			second, out[1] = best, out[0]
			best, out[0] = h, n.id
		case h > second:
			second, out[1] = h, n.id
		}
	}
	return out
}

func (s *simulation) admit(f *flight) {
	d := f.router.pool.Admit(s.now, &f.ticket)
	s.decided(f, d)
	s.settle(f.router)
}

// decided acts on a decision.
func (s *simulation) decided(f *flight, d admission.Decision) {
	if f.phase == held {
		s.unheld()
	}
	switch d.Verdict {
	case admission.Placed:
		f.res.Held += s.now - f.heldAt
		s.kept(f, true)
		s.place(f, d)
	case admission.Held:
		f.phase = held
		if s.held++; s.held == 1 {
			s.since = s.now
			s.quiet.end(s.now)
		}
	default:
		f.phase = idle
		f.res.Held += s.now - f.heldAt
		f.res.Reason, f.res.Retry = d.Reason, d.RetryAfter
		s.refused(f, d)
	}
}

// unheld takes one out of the count of held ones.
func (s *simulation) unheld() {
	if s.held--; s.held == 0 {
		s.quiet.begin(s.now)
		for _, n := range s.nodes {
			s.conserve(n, s.now)
		}
	}
}

// conserve notes for how long requests were held while n had nothing to do.
func (s *simulation) conserve(n *node, until float64) {
	if n.here && !n.dead && !n.frozen && !math.IsNaN(n.idle) {
		s.rep.IdleHeld = max(s.rep.IdleHeld, until-max(n.idle, s.since))
	}
}

// refused: the client tries again or gives up.
func (s *simulation) refused(f *flight, d admission.Decision) {
	s.rep.sheds[d.Reason]++
	if f.res.Offers > 1 {
		s.rep.again++
	}
	if f.res.Attempts > 0 && (d.Reason == admission.ReasonExhausted || d.Reason == admission.ReasonNoReplica) {
		s.end(f, Failed)
		return
	}
	if f.res.Offers > s.Client.Retries || s.Client.Retry == NoRetry {
		s.end(f, Shed)
		return
	}
	wait := 0.25 + 0.5*s.rng.Float64()
	if s.Client.Retry == Obey {
		wait = max(d.RetryAfter, 0.001)
		f.told = append(f.told, promise{s.now, wait})
		f.router.pool.Told(&f.ticket, f.print)
	}
	f.phase = waiting
	s.push(s.now+wait, occAgain, int(f.serial), 0, f)
}

// place hands the sequence to the replica.
func (s *simulation) place(f *flight, d admission.Decision) {
	n := s.nodes[int(d.Replica)-1]
	f.res.Replica, f.res.Predict = n.i, d.TTFT
	f.res.Attempts++
	f.phase = placed
	n.requests++
	if n.dead {
		f.phase = failing
		s.push(s.now+s.Net, occFailed, int(f.serial), int(fleet.EvidenceRefused), f)
		return
	}
	q := f.res.Request
	n.tokens += float64(q.Prompt + q.Out)
	if s.held > 0 {
		s.conserve(n, s.now)
	}
	n.idle = math.NaN()
	if f.seq == nil {
		f.seq = &model.Seq{}
	}
	f.seq.Prompt, f.seq.Out, f.seq.Segs, f.seq.OutHash, f.seq.User = q.Prompt, q.Out, f.segs, q.OutHash, f
	n.Add(s.now, f.seq)
	s.schedule(n)
}

// schedule makes sure that the replica is stepped when it has to be.
func (s *simulation) schedule(n *node) {
	if t := n.Next(); t < n.next {
		n.next = t
		s.push(t, occReplica, n.i, 0, nil)
	}
}

func (s *simulation) step(n *node) {
	if s.now < n.next { // a later one was scheduled before an earlier one
		return
	}
	n.next = math.Inf(1)
	_, evs := n.Step(s.now)
	for i := range evs {
		f := evs[i].Seq.User.(*flight)
		switch evs[i].Kind {
		case model.First:
			if f.phase == placed {
				f.first, f.phase = s.now, running
				f.router.pool.First(s.now, &f.ticket)
			}
		case model.Finish:
			if evs[i].Seq.Ended == model.Length && f.phase == running {
				s.answered(f)
			}
		}
	}
	for i := range evs {
		if r := evs[i].Seq.User.(*flight).router; r != nil && evs[i].Kind != model.Preempted {
			s.settle(r)
		}
	}
	if n.Queued() == 0 {
		if math.IsNaN(n.idle) {
			n.idle = s.now
		}
	}
	s.schedule(n)
}

// answered: a whole answer.
func (s *simulation) answered(f *flight) {
	q := f.res.Request
	f.res.Cached = f.seq.Cached
	f.res.Admitted = f.first - f.offered + s.Net
	f.res.TTFT, f.res.E2E = f.first-q.At+s.Net, s.now-q.At+s.Net
	if q.Out > 1 {
		f.res.TPOT = (s.now - f.first) / float64(q.Out-1)
	}
	f.router.pool.Done(s.now, &f.ticket, admission.End{Outcome: admission.Finished, Prompt: q.Prompt, Cached: f.seq.Cached, Completion: q.Out})
	s.end(f, OK)
}

// end counts the flight and frees it.
func (s *simulation) end(f *flight, o Outcome) {
	s.kept(f, false)
	f.res.Outcome, f.res.Ended = o, s.now
	f.res.Good = o == OK && s.Goal.met(&f.res)
	s.rep.add(&f.res)
	if s.OnResult != nil {
		s.OnResult(&f.res)
	}
	f.phase = idle
	s.open--
	s.free = append(s.free, f)
}

func (g *Objective) met(r *Result) bool {
	if g.TTFT > 0 && r.TTFT > g.TTFT+g.TTFTPer1k*float64(r.Request.Prompt)/1000 {
		return false
	}
	return g.TPOT <= 0 || r.TPOT <= g.TPOT
}
