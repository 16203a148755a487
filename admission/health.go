package admission

import (
	"math"

	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/internal/mutant"
)

// tickEvery is the grain of what moves by time alone: ramps, ejections, hangs.
const tickEvery = 0.02

// watchGrain is how often the tickets of a replica are walked.
const watchGrain = 0.1

// tick brings the view to now.
func (p *Pool) tick(now float64) {
	if now > p.view.Now {
		p.view.Now = now
	}
	if now < p.nextTick {
		return
	}
	p.nextTick = now + tickEvery
	p.rates.roll(now, p.held.count > 0)
	p.applyScales(now)
	p.countCrowd(now)
	in, next := false, -1
	for i, r := range p.reps {
		v := &p.view.Replicas[i]
		if !r.drained && !r.gone && v.Health.Tick(now, &p.cfg.Health) {
			p.dirty = true
		}
		if h := &v.Health; !r.gone && !r.drained && h.State != fleet.StateDraining {
			switch {
			case h.State != fleet.StateEjected || mayBeAlive(h.Reason):
				in = true
			case r.kept && !r.idle(): // what it keeps tells when it goes on
			case h.Early(now) && (next < 0 || h.Until < p.view.Replicas[next].Health.Until):
				next = i
			}
		}
		p.countSteps(now, r, v)
		p.prefillBusy(now, r, v, 0)
		if v.Other.Requests > 0 && now-v.Sample.At > otherLife {
			v.Other = fleet.Load{}
		}
		if !r.idle() && now >= r.nextWatch {
			r.nextWatch = now + watchGrain
			p.watch(now, r, v)
		}
	}
	if !in && next >= 0 {
		// All are out: none is left alone for as long as it would be if others
		// could serve, but it still is tried by one request at a time.
		p.view.Replicas[next].Health.Try(now)
		p.stats.Panics++
		p.dirty = true
	}
}

// watch looks at a replica with work outstanding: whole answers whose prefill
// must be over, and hangs.
func (p *Pool) watch(now float64, r *replica, v *fleet.Replica) {
	late, patience := 0, 0.0
	for t := r.pend.head; t != nil; {
		next := t.next
		switch age := now - t.placedAt; {
		case t.Work.Whole:
			if now >= t.due {
				p.started(now, t)
			}
		default:
			if age > lateAge && p.lateYet(now, t) {
				late++
			}
			patience = max(patience, t.ttft)
		}
		t = next
	}
	switch v.Health.State {
	case fleet.StateEjected:
		if r.kept || r.slow && p.slowHangs(now, r, v, patience) { // see keeps
			r.revoke, p.revoking = true, true
		}
		return
	case fleet.StateDraining:
		if r.drained || r.gone { // one that says itself that it drains may show nothing meanwhile
			p.watchLeaving(now, r, v, patience)
		}
		return
	}
	if p.hung(now, r, v, patience) {
		p.take(now, r, v, fleet.EvidenceStalled, 0)
		return
	}
	if late >= lateTogether && v.Health.Open() {
		p.ejectSlow(now, r, v)
	}
}

// hung tells whether a replica with work outstanding has shown neither an own
// byte nor a moved counter for longer than it may.
func (p *Pool) hung(now float64, r *replica, v *fleet.Replica, patience float64) bool {
	limit := p.cfg.HangAfter + 2*min(patience, 30)
	unseen := p.unseen(now, r, limit)
	switch {
	case v.Health.State == fleet.StateTrial && !newProcess(v.Health.Reason) && !unseen:
		limit = min(limit, 1+2*patience) // it was hung or worse before: little patience
	case !r.moving || unseen:
		// No counter tells whether it works; one long prefill, or an answer in
		// one piece, shows nothing for a long time.
		limit += 2 * p.cfg.HangAfter
		for t := r.begun.head; t != nil; t = t.next {
			if t.Work.Whole {
				limit += 2 * wholeTime(r, t)
				break
			}
		}
		if v.Trust < 0.5 {
			limit += 4 * p.cfg.HangAfter
		}
	}
	return now-r.sign > limit
}

// wholeTime is how long an answer in one piece may take at r, seconds: as was
// predicted or, where no stream would show that r works, until all the tokens that
// were asked for are made.
func wholeTime(r *replica, t *Ticket) float64 {
	most := t.Work.MaxOut
	switch {
	case !onlyWhole(r):
		return t.Decision.Own
	case r.gone && most == 0: // nothing at all tells of it any more: it may end there
		most = longAnswer
	}
	return max(t.Decision.Own, t.itl*float64(most))
}

// longAnswer is how many tokens an answer may have that was asked for without a
// limit, as far as patience with a replica goes that was removed.
const longAnswer = 4096

// unseen tells whether nothing would show that the replica works: it has only
// answers in one piece to make, and its pages, which would tell, did not come for
// so long. That a page is missing says nothing of the engine.
func (p *Pool) unseen(now float64, r *replica, limit float64) bool {
	if !r.moving || now-(p.view.Now-r.page)-r.sign > limit {
		return false // as far as pages came, its counters stood still for longer
	}
	return onlyWhole(r)
}

// onlyWhole tells whether there is no stream at the replica.
func onlyWhole(r *replica) bool {
	for _, l := range [2]*ticketList{&r.pend, &r.begun} {
		for t := l.head; t != nil; t = t.next {
			if !t.Work.Whole {
				return false
			}
		}
	}
	return true
}

// Evidence takes what a probe or a scrape saw. What answers tell comes with
// Done.
func (p *Pool) Evidence(now float64, id fleet.ID, e fleet.Evidence) {
	p.tick(now)
	r := p.byID[id]
	if r == nil || r.gone {
		return
	}
	v := &p.view.Replicas[r.i]
	switch e {
	case fleet.EvidenceScrapeOK:
		return
	case fleet.EvidenceScrapeFailed, fleet.EvidenceProbeFailed:
		// Silence on the side too: half the patience with a replica that has
		// work and shows nothing.
		if !r.idle() && v.Health.Open() && now-r.sign > p.cfg.HangAfter/2 && p.hung(now+p.cfg.HangAfter/2, r, v, 0) {
			p.take(now, r, v, fleet.EvidenceStalled, 0)
			return
		}
		if e == fleet.EvidenceScrapeFailed {
			return
		}
	}
	p.take(now, r, v, e, 0)
}

// take applies one piece of evidence and what follows from it.
func (p *Pool) take(now float64, r *replica, v *fleet.Replica, e fleet.Evidence, retryAfter float64) {
	if r.drained || r.gone {
		if e == fleet.EvidenceRefused || e == fleet.EvidenceProbeRefused {
			v.Health.Reason = e // what runs there has to move, see Revoked
			r.revoke, p.revoking = true, true
		}
		return
	}
	before := v.Health.State
	if !v.Health.Apply(now, e, retryAfter, &p.cfg.Health) {
		return
	}
	p.dirty = true
	after := v.Health.State
	if after == before {
		return
	}
	switch after {
	case fleet.StateEjected:
		p.stats.Ejections[e]++
		if e == fleet.EvidenceRefused || e == fleet.EvidenceProbeRefused {
			p.index.forget(r.slot) // whoever answers next starts with an empty cache
		}
		if r.slow = e == fleet.EvidenceSlow; !r.slow {
			r.revoke, p.revoking = true, true
		}
	case fleet.StateDraining:
		p.stats.Ejections[e]++
		r.revoke, p.revoking = true, true
	case fleet.StateTrial, fleet.StateRamping:
		r.revoke, r.kept = false, false
		r.sign = now
		r.learn.plain, r.learn.plainN, r.learn.lateRun, r.learn.slowRun = 0, 0, 0, 0
	}
}

// Revoked returns, appended to out, the tickets without a first token at a
// replica that is now known dead, hung or draining, each once. The caller
// cancels the attempt, calls Done(Failed), and may Admit again. A replica that is
// only silent keeps those that no other could have, see keeps.
//
// A draining replica finishes what it runs, so only what was refused there has
// to move, and that comes back by itself: its tickets are not revoked.
func (p *Pool) Revoked(out []*Ticket) []*Ticket {
	if !p.revoking {
		return out
	}
	p.revoking = false
	for i, r := range p.reps {
		if !r.revoke {
			continue
		}
		r.revoke, r.kept = false, false
		if p.view.Replicas[i].Health.Reason == fleet.EvidenceDraining {
			continue
		}
		for t := r.pend.head; t != nil; t = t.next {
			out = p.revoke(t, out)
		}
		for t := r.begun.head; t != nil; t = t.next {
			if t.Work.Whole { // nothing of it was seen by anybody yet
				out = p.revoke(t, out)
			}
		}
	}
	return out
}

func (p *Pool) revoke(t *Ticket, out []*Ticket) []*Ticket {
	if t.revoked {
		return out
	}
	if p.keeps(p.view.Now, t.rep, t) {
		t.rep.kept = true
		return out
	}
	t.revoked = true
	p.stats.Revoked++
	return append(out, t)
}

// otherLife is how long samples are believed about load that came by another
// road, seconds.
const otherLife = 2.0

// Observe takes one reading of a replica's metrics.
func (p *Pool) Observe(now float64, id fleet.ID, s fleet.Sample) {
	p.tick(now)
	r := p.byID[id]
	if r == nil {
		return
	}
	v := &p.view.Replicas[r.i]
	old := v.Sample
	v.Sample = s
	if s.Broken {
		return
	}
	p.restarted(now, r, v, &old, &s)
	p.alive(now, r, v, &old, &s)
	if kv := s.KVTokens; kv > 0 && (!r.sized || int(kv) != r.profile.KVTokens) {
		r.sized = true
		r.profile.KVTokens = int(kv)
		p.index.setLimit(r.slot, int(kv/r.blockSize))
	}
	if !r.given && s.Running > float64(r.profile.MaxSeqs) {
		r.profile.MaxSeqs = int(s.Running)
	}
	p.otherLoad(r, v, &s)
	r.stale = true
	if u := s.KVUsage; u == u && u >= 0 {
		shared := max(0, u*float64(r.profile.KVTokens)-(v.Memory()-v.Shared))
		v.Shared += 0.3 * (shared - v.Shared)
	}
	p.dirty = true
}

// stoodStill is how long nothing may have moved at a replica, seconds, for its
// moving again to count as a return: a working one moves at each scrape.
const stoodStill = 2.0

// alive sees by a good page that the replica works, and that one which had
// stood still works again.
func (p *Pool) alive(now float64, r *replica, v *fleet.Replica, old, s *fleet.Sample) {
	moved := false
	for k, c := range [3]float64{s.Steps, s.PromptTokens, s.OutputTokens} {
		if c >= 0 && c != r.counters[k] {
			moved = moved || r.counters[k] != 0 || c > 0 && old.At > 0
			r.counters[k] = c
		}
	}
	r.moving, r.page = r.moving || moved, now
	still := now-r.sign > stoodStill
	if moved {
		r.sign = now
	}
	if !still || r.drained || r.gone || old.At == 0 || mutant.On("unseen-wake") {
		return
	}
	h := &v.Health
	// Requests that all were given up move no counter of an engine that wakes;
	// but a front end that counts them itself says so at once when they are.
	emptied := old.Running > 0 && s.Running == 0 && now-h.Since > stoodStill
	if (moved || emptied) && h.Moved(now) || s.At-old.At > stoodStill && h.Returned(now) {
		r.sign, p.dirty = now, true
	}
}

// Stood takes note that the router itself has not run for so long, until now. What came late, or did not come, in such a
// time says nothing of a replica.
func (p *Pool) Stood(now, seconds float64) {
	p.stood += seconds
	for _, r := range p.reps {
		r.sign = min(now, r.sign+seconds)
	}
}

// restarted sees a new process behind the old address by counters that went
// backwards.
func (p *Pool) restarted(now float64, r *replica, v *fleet.Replica, old, s *fleet.Sample) {
	back := func(a, b float64) bool { return a > 0 && b >= 0 && b < a }
	if old.At == 0 || !(back(old.PromptTokens, s.PromptTokens) || back(old.OutputTokens, s.OutputTokens) || back(old.Steps, s.Steps)) {
		return
	}
	p.index.forget(r.slot)
	if !r.drained && !r.gone && v.Health.Restarted(now) {
		p.dirty = true
	}
}

// otherLoad estimates traffic that came by another road: what the replica says
// it has above what the accounts know. Two samples must agree, since requests
// on their way make one sample say anything.
func (p *Pool) otherLoad(r *replica, v *fleet.Replica, s *fleet.Sample) {
	v.Other = fleet.Load{}
	total := s.Running + s.Waiting
	if total != total {
		return
	}
	known := float64(v.Own.Requests + v.Peers.Requests)
	extra := total - known - max(2, 0.25*known)
	both := min(extra, r.otherMin)
	r.otherMin = extra
	if both < 1 {
		return
	}
	n := math.Floor(both)
	waiting := min(n, s.Waiting)
	mean := float64(p.cfg.OutPrior)
	// Priced as the pool's own requests are: another figure for each replica,
	// by what it happens to hold, would set replicas apart that say the same.
	prompt := unknownPrompt
	if p.prompt.n > 0 {
		prompt = p.prompt.v
	}
	v.Other = fleet.Load{Requests: int(n), Prefilling: int(waiting), PrefillTokens: waiting * prompt,
		KVTokens: n * prompt, OutTokens: n * mean / 2}
}

// unknownPrompt prices the other load while the pool has placed nothing,
// tokens a prompt.
const unknownPrompt = 500.0

// placedPrompt takes the prompt of a request that is placed, tokens. The first
// prices the other load anew, everywhere at once: with replicas priced apart
// until each one's next sample, a first burst would go to one of them.
func (p *Pool) placedPrompt(tokens float64) {
	first := p.prompt.n == 0
	p.prompt.add(tokens)
	if !first {
		return
	}
	for i := range p.view.Replicas {
		p.reps[i].stale = true
		o := &p.view.Replicas[i].Other
		o.PrefillTokens *= tokens / unknownPrompt
		o.KVTokens *= tokens / unknownPrompt
	}
}

// Proven tells whether it is known if another attempt at w would help: some
// replica that w has not been to has answered a request placed since then, or none can be
// asked without doubt, or there is no traffic that will tell soon. It changes
// nothing.
func (p *Pool) Proven(now, since float64, w *fleet.Work) bool {
	waiting, places := false, false
	for i, r := range p.reps {
		v := &p.view.Replicas[i]
		if r.gone || !v.Serves(w.Model) || w.Excludes(v.ID) || !v.Health.Open() || v.Health.Doubtful(now) {
			continue
		}
		if r.good >= since {
			return true
		}
		places = true
		waiting = waiting || r.pend.head != nil || now-r.good < 1
	}
	return !places || !waiting
}

// newProcess tells whether a replica that was out for that reason and is there
// again is another process: it was never hung, and its first answers may take
// long (vLLM compiles and warms up).
func newProcess(e fleet.Evidence) bool {
	return e == fleet.EvidenceRefused || e == fleet.EvidenceProbeRefused
}
