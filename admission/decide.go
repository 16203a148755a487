package admission

import (
	"math"

	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/scorer"
)

// tryResult is what an attempt to place came to: tryPlaced, tryFull (it may be
// possible later), or a Reason to shed it.
type tryResult uint8

const (
	tryPlaced tryResult = 200
	tryFull   tryResult = 201
	tryLate   tryResult = 202 // not possible, and it will not be later
)

// promptSlack is how much too high an estimate of prompt tokens from bytes may
// be: only a prompt that would not fit even so is refused as too long.
const promptSlack = 0.6

// try places a ticket if some replica may take it now. Replica block, when not
// nil, is kept for an older request.
func (p *Pool) try(now float64, t *Ticket, block *replica) tryResult {
	why, trial := p.candidates(now, &t.Work, block)
	c := &p.ctx
	if trial >= 0 && (len(c.Cand) == 0 || p.trialDue(now, t, trial)) {
		p.lookup(&t.Work)
		return p.place(now, t, trial)
	}
	if len(c.Cand) == 0 {
		if why == tryFull && p.manyOut {
			p.lookup(&t.Work)
			return p.tryOut(now, t)
		}
		return why
	}
	p.lookup(&t.Work)
	p.seed++
	c.Seed = p.seed
	c.Par.ITL = p.leaves(&t.Work).itl
	if p.cfg.NoHold {
		return p.place(now, t, p.policy.Pick(c))
	}
	if p.headroomShort(&t.Work) {
		return tryFull
	}
	if t.Work.Excluded > 0 {
		if i := p.chooseApart(now, t); i >= 0 {
			return p.place(now, t, i)
		}
	}
	i, late := p.choose(now, t)
	if late && !p.crowded(int(t.Work.Class)) {
		if last := p.lastChance(now, t); last >= 0 {
			return p.place(now, t, last)
		}
	}
	if i < 0 && t.okAt == 0 && trial >= 0 && t.Work.Excluded == 0 {
		return p.place(now, t, trial) // no other takes it: a recovering replica need not wait
	}
	late = late && !p.cfg.Classes[t.Work.Class].Patient
	if (late || i < 0) && p.manyOut && p.tryOut(now, t) == tryPlaced {
		return tryPlaced
	}
	if late {
		return tryLate
	}
	if i < 0 {
		return tryFull
	}
	return p.place(now, t, i)
}

// chooseApart picks, for a request that failed elsewhere, among the candidates
// of other failure domains than those it failed in: what took one down may take
// its neighbours. -1 = none of them takes it now, or no domains are known.
func (p *Pool) chooseApart(now float64, t *Ticket) int {
	w, all := &t.Work, p.ctx.Cand
	p.apart = p.apart[:0]
	for _, i := range all {
		d := p.view.Replicas[i].Domain
		same := d == 0
		for k := range w.Excluded {
			if r := p.byID[w.Exclude[k]]; r != nil {
				same = same || p.view.Replicas[r.i].Domain == d
			}
		}
		if !same {
			p.apart = append(p.apart, i)
		}
	}
	if len(p.apart) == 0 || len(p.apart) == len(all) {
		return -1
	}
	p.ctx.Cand = p.apart
	i, _ := p.choose(now, t)
	p.ctx.Cand = all
	return i
}

// tryOut places a ticket, for which those in service have no room, on a replica
// that is ejected on soft evidence (panic mode, see candidates).
func (p *Pool) tryOut(now float64, t *Ticket) tryResult {
	c := &p.ctx
	c.Cand = c.Cand[:0]
	p.failOpen(now, &t.Work)
	if len(c.Cand) == 0 {
		return tryFull
	}
	p.seed++
	c.Seed = p.seed
	c.Par.ITL = p.leaves(&t.Work).itl
	if i, _ := p.choose(now, t); i >= 0 {
		return p.place(now, t, i)
	}
	return tryFull
}

// permits tells whether the replica has the abilities that w needs and stands in
// a region where w may go.
func permits(v *fleet.Replica, w *fleet.Work) bool {
	return w.Needs&^v.Caps == 0 && (w.Regions == 0 || w.Regions&v.Region != 0)
}

// candidates fills ctx.Cand with the replicas that may take w. When there are
// none it says why; trial is a recovering replica that may have one request,
// -1 = none.
func (p *Pool) candidates(now float64, w *fleet.Work, block *replica) (why tryResult, trial int) {
	c := &p.ctx
	c.Work = w
	p.costOf = nil
	c.Cand = c.Cand[:0]
	trial = -1
	var serves, permitted, fits, untried, doubtful, later, ramping, elsewhere bool
	soft, opens := 0, 0
	context := p.context(w)
	for i := range p.view.Replicas {
		v := &p.view.Replicas[i]
		r := p.reps[i]
		if r.gone || !v.Serves(w.Model) {
			continue
		}
		serves = true
		open := v.Health.Open()
		if !permits(v, w) {
			elsewhere = elsewhere || open
			continue
		}
		permitted = true
		if !p.holds(r, w, context) {
			continue
		}
		fits = true
		if w.Excludes(v.ID) {
			continue
		}
		untried = true
		if w.Excluded > 0 && v.Health.Doubtful(now) {
			// It failed elsewhere a moment ago, and so did others here: whatever
			// it is, it is not one replica, and another attempt now would be lost.
			doubtful = true
			continue
		}
		switch {
		case open:
			later = true
			opens++
			ramping = ramping || v.Health.State == fleet.StateRamping
			if r == block || p.capped(r, v) {
				continue
			}
			c.Cand = append(c.Cand, int32(i))
		case v.Health.OneOnly(now):
			later = true
			if r.trials == 0 && trial < 0 && !p.capped(r, v) && now-r.lastTrial >= p.cfg.TrialEvery {
				trial = i
			}
		case v.Health.State == fleet.StateBusy:
			later = true
		case v.Health.State == fleet.StateEjected && !r.drained && mayBeAlive(v.Health.Reason):
			soft++
		}
	}
	if ramping {
		p.limitRamps(w)
	}
	// More than half out (rounded up) for answers that were bad or late: more
	// likely it is the requests than the replicas, and the rest would drown. What
	// finds no room with the rest goes to them all the same.
	p.manyOut = 2*soft > opens+soft+1
	switch {
	case later || trial >= 0:
		why = tryFull
	case soft > 0:
		// Nobody is left but those ejected on soft evidence: rather try them
		// than refuse everything (fail-open).
		p.failOpen(now, w)
		why = tryFull
	case doubtful:
		why = tryResult(ReasonExhausted)
	case !serves:
		why = tryResult(ReasonNoReplica)
	case !permitted:
		why = tryResult(ReasonNotPermitted)
	case !fits:
		why = tryResult(ReasonTooLong)
	case !untried:
		why = tryResult(ReasonExhausted)
	case elsewhere:
		why = tryResult(ReasonNotPermitted)
	default:
		why = tryResult(ReasonNoReplica)
	}
	return why, trial
}

// mayBeAlive tells ejections that fail-open may disregard: the replica was
// seen to answer badly or late, not to be gone.
func mayBeAlive(e fleet.Evidence) bool {
	switch e {
	case fleet.EvidenceReset, fleet.EvidenceFirstTimeout, fleet.EvidenceStatus5xx, fleet.EvidenceProtocol,
		fleet.EvidenceProbeFailed, fleet.EvidenceSlow:
		return true
	}
	return false
}

// capped tells that the replica has as many requests as the cap allows. That
// peers have ended requests as this router did is a fair guess for balance,
// but no ground to go over a cap: until they say so, they have what they said,
// and until they say so twice, they have filled the places again meanwhile.
// And each is taken to have placed as many as this router since it was heard,
// which is the more the longer its words are lost.
func (p *Pool) capped(r *replica, v *fleet.Replica) bool {
	if p.cfg.Cap <= 0 {
		return false
	}
	n := v.Own.Requests
	for k := range r.peers {
		o := &r.peers[k]
		n += max(o.load.Requests+max(0, v.Own.Requests-o.own.Requests), o.before)
	}
	return n >= p.cfg.Cap
}

func (p *Pool) failOpen(now float64, w *fleet.Work) {
	c := &p.ctx
	context := p.context(w)
	for i := range p.view.Replicas {
		v := &p.view.Replicas[i]
		r := p.reps[i]
		if r.gone || r.drained || !v.Serves(w.Model) || !permits(v, w) ||
			w.Excludes(v.ID) || w.Excluded > 0 && v.Health.Doubtful(now) || v.Health.State != fleet.StateEjected || !mayBeAlive(v.Health.Reason) || !p.holds(r, w, context) {
			continue
		}
		if p.capped(r, v) {
			continue
		}
		c.Cand = append(c.Cand, int32(i))
	}
}

// limitRamps takes ramping replicas out that have their share already: that
// share of what the others have on average, of requests and, since its cache is
// cold and each prompt costs it more than them, of prompts being computed.
func (p *Pool) limitRamps(w *fleet.Work) {
	n, requests, prefills := 0.0, 0.0, 0.0
	for i, r := range p.reps {
		v := &p.view.Replicas[i]
		if v.Health.State == fleet.StateUp && !r.gone && v.Serves(w.Model) && permits(v, w) {
			s := p.loadedOf(i)
			n++
			requests += s.Requests
			prefills += s.Prefilling
		}
	}
	if n == 0 {
		return
	}
	keep := p.ctx.Cand[:0]
	for _, i := range p.ctx.Cand {
		v := &p.view.Replicas[i]
		if v.Health.State == fleet.StateRamping {
			l := v.Load()
			most := func(mean float64) int { return int(max(1, math.Ceil(v.Health.Share*(mean+1)))) }
			if l.Requests >= most(requests/n) || l.Prefilling >= most(2*prefills/n) {
				continue
			}
		}
		keep = append(keep, i)
	}
	p.ctx.Cand = keep
}

// holds tells whether the replica could ever hold the request, which needs such
// a context. A guessed capacity refuses nothing: the replica's own 400 is the
// better answer.
func (p *Pool) holds(r *replica, w *fleet.Work, context float64) bool {
	if m := r.maxLen(); m > 0 && context > float64(m) {
		return false
	}
	return !r.sized || promptSlack*float64(w.Prompt-w.OfMedia)+1 <= float64(r.profile.KVTokens)
}

// maxLen is the longest prompt + output that the replica takes, 0 = not known.
func (r *replica) maxLen() int {
	if m := r.profile.MaxModelLen; m > 0 {
		return m
	}
	return r.spec.MaxLen
}

// promptSure is how much too low an estimate of prompt tokens may be: a context
// that holds so much more is long enough.
const promptSure = 1.15

// context is the length, tokens, that a replica must take to be given w: all
// that it may need, the longest output that was asked for included, where some
// replica in service takes so much; else what it needs at least. The replicas'
// refusals would go to the client, though another replica can serve it.
func (p *Pool) context(w *fleet.Work) float64 {
	sure := promptSure*float64(w.Prompt) + float64(max(1, w.MaxOut))
	if p.shortest == 0 || sure <= float64(p.shortest) {
		return 0
	}
	for i, r := range p.reps {
		v := &p.view.Replicas[i]
		if m := r.maxLen(); (m == 0 || sure <= float64(m)) && !r.gone && v.Serves(w.Model) && v.Health.Open() &&
			permits(v, w) && !w.Excludes(v.ID) {
			return sure
		}
	}
	return promptSlack*float64(w.Prompt-w.OfMedia) + 1
}

// measure finds the shortest context of all replicas.
func (p *Pool) measure() {
	p.shortest = 0
	for _, r := range p.reps {
		if m := r.maxLen(); m > 0 && (p.shortest == 0 || m < p.shortest) {
			p.shortest = m
		}
	}
}

// trialDue tells whether the recovering replica is to be given this request
// though others would take it. A request marked as trial goes at once; if none
// comes, any first attempt does, or the replica would never be used again.
func (p *Pool) trialDue(now float64, t *Ticket, i int) bool {
	return t.Work.Excluded == 0 && (t.Work.Trial || now-p.view.Replicas[i].Health.Since >= 0.5)
}

// lookup fills hits with the prompt tokens that each replica should have.
func (p *Pool) lookup(w *fleet.Work) {
	p.ctx.Hits = p.hits
	size := w.Tokens
	if size <= 0 {
		size = p.cfg.BlockDefault
	}
	counts := p.counts[:p.index.words*64]
	p.index.longest(w.Blocks, counts)
	if len(p.hot.told) > 0 {
		p.takeHot(w.Blocks, counts)
	}
	most := float64(w.Prompt - 1)
	p.hot.shared = 0
	for i, r := range p.reps {
		hit := 0.0
		if n := counts[r.slot]; n > 0 {
			p.hot.shared = max(p.hot.shared, int(n))
			hit = min(most, float64(n)*size*r.learn.trust())
		}
		p.hits[i] = hit
	}
}

// limits are what a request must keep now.
type limits struct {
	ttft    float64 // whole objective, from arrival
	elapsed float64 // of it, gone by (0 for a patient class)
	patient bool    // is served late, too
	itl     float64 // +Inf = none
	before  float64 // longest time until its own prompt's turn, see Pool.room
	margin  float64 // factor on predictions of TTFT
	steps   float64 // and what is added to them, in steps of the engine
	slight  float64 // and what is taken off them before, see Pool.slight
	wanted  float64 // how much others want the room, 0..1, see Pool.pressure
	others  float64 // how much of what its prompt adds to the others' gaps counts, 0..1
}

func (p *Pool) limitsOf(now float64, t *Ticket) limits {
	w := &t.Work
	cl := &p.cfg.Classes[w.Class]
	l := limits{ttft: cl.Objective.Limit(w.Prompt), itl: math.Inf(1), margin: math.Exp(p.margin), steps: p.late}
	l.slight = p.slight(l.ttft)
	if l.patient = cl.Patient; !cl.Patient {
		l.elapsed = now - t.since
	}
	// Whoever waits wants it: else the lower of two classes would have the looser
	// measure, since more wait of it and those above it.
	l.wanted = p.pressure(len(p.cfg.Classes) - 1)
	if !t.first {
		long := l.ttft
		if cl.Patient { // it may wait for longer, and not so that it goes before a class above it
			long = max(cl.Wait, aloneSlack*long)
		}
		l.others = p.pressure(int(w.Class)) * max(0, 1-(now-t.since)/long)
	}
	r := p.leaves(w)
	if l.before = r.before; r.itl > 0 {
		l.itl = r.itl * math.Exp(-p.marginITL)
	}
	return l
}

// room is what a class leaves at a busy replica for those above it. What is
// held goes by class, and what runs does not: a lower class with looser
// objectives, or none, filled the replicas until nothing of a class above it could
// be in time, and all of that was refused.
type room struct {
	itl    float64 // tightest objective of it and those above it, seconds; 0 = none has one
	before float64 // longest time until its own prompt's turn, seconds; +Inf = its own objective is as tight
}

// roomOf is the part of a TTFT objective that may go by before a lower class's
// request has its turn, counted as for a request of the class that the objective
// is of: the rest is for what that itself takes and waits.
const roomOf = 0.7

// setRoom works out the room of each class.
func (p *Pool) setRoom() {
	p.room = make([]room, len(p.cfg.Classes))
	ttft, itl := math.Inf(1), math.Inf(1)
	for c := range p.cfg.Classes {
		o := &p.cfg.Classes[c].Objective
		r := &p.room[c]
		r.before = math.Inf(1)
		if ttft < o.TTFT {
			r.before = roomOf * ttft
		}
		ttft = min(ttft, o.TTFT)
		if o.ITL > 0 {
			itl = min(itl, o.ITL)
		}
		if !math.IsInf(itl, 1) {
			r.itl = itl
		}
	}
}

// leaves is the room that a request has to leave where it goes. What its minimum
// share owes its class has its own objective alone to keep.
func (p *Pool) leaves(w *fleet.Work) room {
	if w.Class > 0 && p.held.due(int(w.Class)) {
		return room{itl: p.cfg.Classes[w.Class].Objective.ITL, before: math.Inf(1)}
	}
	return p.room[w.Class]
}

// aloneSlack is how much later than on an idle replica a prompt may get its
// first token when the objective cannot be kept at all: it goes where it harms
// the others least, also behind its like, and does not wait for an empty
// replica, which would spread the harm over all of them.
const aloneSlack = 8

// spare is the time to the first token, seconds, that a prediction t has to
// keep the objective with: what is placed at the last moment misses it by the
// error of the prediction, which is measured (learnMargin): a factor, and some
// steps of the engine, in which all work begins and ends.
func (l *limits) spare(t float64, pr *scorer.Prediction) float64 {
	return l.margin*(t-l.slight) + l.steps*pr.ITL
}

// gap is the mean gap between tokens, seconds, that is held against the objective:
// as the profile has it while nobody else wants the room, since what it foresees
// too much is a reserve then that costs nobody anything; else as the fleet really
// is, and with what this prompt does to all the others.
func (l *limits) gap(v *fleet.Replica, pr *scorer.Prediction) float64 {
	return (pr.ITL + l.others*v.Crowd*(pr.Gap-pr.ITL)) * (1 - l.wanted*(1-v.Pace))
}

// over is by how much a prediction misses the limits, seconds of TTFT; ok
// tells whether the replica takes the request.
//
// late tells that not even the end of all prefills before it would be in time.
func (l *limits) over(v *fleet.Replica, s *scorer.Loaded, pr *scorer.Prediction) (over float64, ok, late bool) {
	alone := l.spare(pr.Alone, pr)
	// By what an idle replica could do: one that is so full that nothing is in
	// time there is no reason to fill it more.
	lost := l.margin*(pr.Idle-l.slight) > l.ttft
	if lost || l.patient && alone > l.ttft { // it is served late, too: as one that can never be in time
		over = max(0, pr.TTFT-(aloneSlack*pr.Alone-l.elapsed))
	} else {
		over = max(0, l.spare(pr.TTFT, pr)-(l.ttft-l.elapsed))
	}
	over = max(over, l.spare(s.Through(0)+pr.Queue+pr.Wait, pr)-l.before)
	switch {
	case s.Requests == 0:
		return over, true, false // an idle replica always takes one
	case v.Trust < 0.5:
		// Nothing is known of it yet: a guess must not keep traffic from it.
		return 0, s.Requests < float64(2*v.Profile.MaxSeqs), false
	}
	late = !lost && alone > l.ttft-l.elapsed
	// One that is lost anyway, taken on at once, made all others miss too.
	anyway := lost && l.wanted < 1
	return over, over == 0 && (anyway || pr.KVOver == 0 && l.gap(v, pr) <= l.itl), late
}

// choose picks among the candidates that take the request now; -1 when none
// does, or when it is worth to wait for a warmer one. late tells that it is
// too late everywhere: waiting on would only keep others from being looked at.
func (p *Pool) choose(now float64, t *Ticket) (chosen int, late bool) {
	lim := p.limitsOf(now, t)
	c := &p.ctx
	if !p.work {
		return p.chooseOther(&lim)
	}
	var pr scorer.Prediction
	best, bestCost, bestOK := -1, math.Inf(1), false
	fit, fitCost := -1, math.Inf(1)
	late = true
	n := len(c.Cand)
	bonus := p.bonus(&t.Work)
	p.noCosts(&t.Work)
	// Equal costs go round: an idle fleet's caches are all to be used.
	for k, j := 0, int(p.seed%uint64(n)); k < n; k, j = k+1, j+1 {
		if j == n {
			j = 0
		}
		i := int(c.Cand[j])
		v := &p.view.Replicas[i]
		s := p.loadedOf(i)
		s.Predict(now, &t.Work, c.Hits[i], &c.Par, &pr)
		over, ok, tooLate := lim.over(v, s, &pr)
		late = late && tooLate
		cost := pr.Cost + c.Par.WTTFT*over
		if bonus > 0 {
			cost -= p.preferred(v, &t.Work, bonus)
		}
		p.keepCost(i, &pr, cost)
		if cost < bestCost {
			best, bestCost, bestOK = i, cost, ok
		}
		if ok && cost < fitCost {
			fit, fitCost = i, cost
		}
	}
	if bestOK {
		return best, false
	}
	if fit < 0 {
		t.okAt = 0
		return -1, late
	}
	// A replica over its limit is still the cheapest: wait for it, a little, and
	// leave the other one to whom it is the cheapest.
	if t.okAt == 0 {
		t.okAt = now
	}
	t.patience = p.cfg.WarmWait
	if p.loadedOf(fit).Requests > 0 { // an idle one nobody is to have for longer
		t.patience = p.patience(int(t.Work.Class), lim.ttft)
	}
	if p.warmOnly || now-t.okAt < t.patience && p.cfg.Classes[t.Work.Class].Wait != 0 {
		return -1, false
	}
	return fit, false
}

// lastSteps is the margin of the last chance, steps of the engine.
const lastSteps = 4

// lastChance is the cheapest candidate that is predicted to keep the objective
// by a few steps, without the factor of the margin; -1 when there is none. That
// factor is learned from all prompts, most of which are short and wait for a
// step or two, which is much beside what they take themselves. A long prompt's
// prediction is nearer, and with the factor it was refused by replicas that had
// next to nothing to do. With many held it is: who is let in by a hair then takes
// the place of several that are sure (docs/policies.md, overload).
func (p *Pool) lastChance(now float64, t *Ticket) int {
	lim := p.limitsOf(now, t)
	lim.margin, lim.steps = 1, lastSteps
	c := &p.ctx
	var pr scorer.Prediction
	best, cost := -1, math.Inf(1)
	for _, i := range c.Cand {
		v := &p.view.Replicas[i]
		s := p.loadedOf(int(i))
		s.Predict(now, &t.Work, c.Hits[i], &c.Par, &pr)
		if _, ok, _ := lim.over(v, s, &pr); ok && pr.Cost < cost {
			best, cost = int(i), pr.Cost
		}
	}
	return best
}

// chooseOther lets another policy choose among the replicas that take it.
func (p *Pool) chooseOther(lim *limits) (chosen int, late bool) {
	c := &p.ctx
	var pr scorer.Prediction
	all := c.Cand
	fits := p.fits[:0]
	late = true
	for _, i := range all {
		v := &p.view.Replicas[i]
		s := p.loadedOf(int(i))
		s.Predict(c.View.Now, c.Work, c.Hits[i], &c.Par, &pr)
		_, ok, tooLate := lim.over(v, s, &pr)
		late = late && tooLate
		if ok {
			fits = append(fits, i)
		}
	}
	if len(fits) == 0 {
		return -1, late
	}
	c.Cand = fits
	i := p.policy.Pick(c)
	c.Cand = all
	return i, false
}

// bonus is the worth, in seconds, of sending a new prefix where every peer
// would send it: a share of what a hit would save, when nobody has it.
func (p *Pool) bonus(w *fleet.Work) float64 {
	if w.Prefer[0] == 0 && w.Prefer[1] == 0 {
		return 0
	}
	for _, i := range p.ctx.Cand {
		if p.hits[i] > 0 {
			return 0
		}
	}
	return p.cfg.Bonus
}

func (p *Pool) preferred(v *fleet.Replica, w *fleet.Work, share float64) float64 {
	save := v.ScalePrefill * v.Profile.PerPrefill * float64(w.Prompt)
	switch v.ID {
	case w.Prefer[0]:
		return share * save
	case w.Prefer[1]:
		return share * save / 2
	}
	return 0
}

// plainFloor is added to what replicas are compared by, seconds: a few
// milliseconds of network are no slowness.
const plainFloor = 0.02

// place charges the ticket to replica i.
func (p *Pool) place(now float64, t *Ticket, i int) tryResult {
	if i < 0 {
		return tryFull
	}
	if p.shadow != nil {
		p.stats.ShadowAll++
		if len(p.ctx.Cand) > 0 && p.shadow.Pick(&p.ctx) == i {
			p.stats.ShadowAgree++
		}
	}
	v := &p.view.Replicas[i]
	if v.Health.State == fleet.StateEjected {
		p.stats.Panics++
	}
	var pr scorer.Prediction
	p.loadedOf(i).Predict(now, &t.Work, p.hits[i], &p.ctx.Par, &pr)
	t.Decision = Decision{Verdict: Placed, Replica: v.ID, TTFT: pr.TTFT, ITL: pr.ITL, Own: pr.Own, Harm: pr.Harm, Hit: p.hits[i]}
	work := max(pr.Queue, v.Profile.Front(t.Work.Prompt)) + pr.Prefill
	t.plain = work/v.ScalePrefill + (pr.TTFT-v.Offset-work-pr.Wait)/v.ScaleDecode + plainFloor
	t.stood = p.stood
	p.charge(now, t, p.reps[i], &pr)
	return tryPlaced
}

// headroomShort tells whether a class below the top would use the room that
// the pool keeps free. What its minimum share owes it may.
func (p *Pool) headroomShort(w *fleet.Work) bool {
	return p.wouldUseHeadroom(w) && !p.held.due(int(w.Class))
}

func (p *Pool) wouldUseHeadroom(w *fleet.Work) bool {
	if w.Class == 0 || p.cfg.Headroom == 0 && !p.cfg.HeadroomN1 {
		return false
	}
	use, total, largest, open := p.usage()
	free := p.cfg.Headroom
	if p.cfg.HeadroomN1 && open > 1 { // of one replica all would have to stay free
		free = max(free, largest/total)
	}
	return total > 0 && use > (1-free)*total
}

// Free is the share of the pool's capacity, of replicas that take traffic, that
// is free now, 0..1. It changes nothing.
func (p *Pool) Free() float64 {
	use, total, _, _ := p.usage()
	if total == 0 {
		return 0
	}
	return 1 - use/total
}

// usage sums up the replicas that take traffic, open of them: their KV tokens,
// those of the largest, and what of all is in use.
func (p *Pool) usage() (use, total, largest float64, open int) {
	for i := range p.view.Replicas {
		v := &p.view.Replicas[i]
		if !v.Health.Open() || p.reps[i].gone {
			continue
		}
		size := float64(v.Profile.KVTokens)
		open++
		total += size
		largest = max(largest, size)
		use += size * p.use(i)
	}
	return use, total, largest, open
}

// use is the share of a replica's capacity in use, 0..1: of its memory, its
// slots, the TTFT objective of the top class or its ITL objective, whichever
// is nearest to its end.
func (p *Pool) use(i int) float64 {
	v := &p.view.Replicas[i]
	l := v.Load()
	if l.Requests == 0 {
		return 0 // what its cache keeps is in nobody's way
	}
	o := &p.cfg.Classes[0].Objective
	u := max(v.Memory()/float64(v.Profile.KVTokens), float64(l.Requests)/float64(v.Profile.MaxSeqs))
	if v.Trust >= 0.5 {
		step := scorer.Step(v, float64(l.Requests), l.KVTokens)
		if l.PrefillTokens > 0 {
			// As a request of the first class would be judged there: decoding goes on between the prefills.
			t := p.loadedOf(i).Through(l.PrefillTokens)
			u = max(u, (math.Exp(p.margin)*(t-p.slight(o.TTFT))+p.late*step)/o.TTFT)
		}
		if o.ITL > 0 {
			gap := step / (1 - min(0.9, v.PrefillShare))
			u = max(u, gap/(o.ITL*math.Exp(-p.marginITL)))
		}
	}
	return min(1, u)
}
