package admission

import (
	"math"

	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/scorer"
)

// replica is what the pool keeps of one replica beside its fleet.Replica.
type replica struct {
	spec    ReplicaSpec
	profile fleet.Profile // own copy: capacities are corrected by samples
	given   bool          // the profile was given, not the generic one
	sized   bool          // its KV capacity is known (given or scraped), not the generic guess
	i       int           // index in View.Replicas
	slot    int           // slot in the prefix index
	gone    bool          // left discovery; stays until its last ticket is done
	drained bool          // the operator's drain

	pend      ticketList // tickets here without a first token, oldest first
	begun     ticketList // and those with one
	steps     float64    // decode steps that the profile allowed so far
	stepsAt   float64
	busyAt    float64 // when PrefillShare was brought up to date
	own       float64 // running means of the requests here: this router's,
	known     float64 // its and its peers',
	all       float64 // and with those that came by another road
	beside    float64 // of the latter, for each of the others
	trials    int     // trial requests outstanding
	lastTrial float64
	nextWatch float64

	sign      float64 // when it last showed that it works
	good      float64 // when the latest request was placed that it began to answer
	late      span    // from placement to first token, of the last one that came far later than predicted
	counters  [3]float64
	moving    bool    // its counters have been seen to move
	page      float64 // when the latest good page of it came
	stale     bool    // what predictions need of it has changed, see loadedOf
	revoke    bool    // tickets without a first token must go elsewhere
	kept      bool    // some stay, since nobody else could have them (keeps)
	slow      bool    // it was ejected as slow: what it had stays there
	blockSize float64

	learn    learned
	otherMin float64 // extra requests that the sample before showed

	peers      []peerLoad
	said       fleet.Load // sum of the peers' snapshots
	then       fleet.Load // sum of this router's own accounts when they came
	placedThen float64    // sum of peerLoad.placed
}

// Pool decides for one set of interchangeable replicas.
type Pool struct {
	cfg    Config
	view   fleet.View
	loaded []scorer.Loaded // parallel to view.Replicas
	reps   []*replica      // parallel to view.Replicas
	byID   map[fleet.ID]*replica
	slots  []bool // prefix-index slots in use
	index  prefixIndex
	hot    hotPrefixes
	counts []int32 // scratch: hits in blocks, by slot
	hits   []float64
	costs  []Cost // of the decision made last, see Costs
	costOf *fleet.Work

	apart   []int32 // scratch of chooseApart
	manyOut bool    // of the replicas that candidates looked at last, see there
	fits    []int32
	ctx     scorer.Context
	policy  *scorer.Policy
	work    bool // policy is the default one
	shadow  *scorer.Policy

	held      heldQueue
	peersHeld []peerHeld
	elsewhere []int // requests that peers hold, of each class and those above it

	models   map[uint32]*modelStats
	outs     map[outKey]*mean
	prompt   mean // tokens of the prompts placed here, for work that is seen only as a count
	uncached mean // and of them the work, not cached, as accounts have it

	seed      uint64
	shortest  int     // context of any replica, 0 = none is known
	warmOnly  bool    // held requests go to the replica that is best for them, or wait
	dirty     bool    // something changed since the last look at the held queue
	nextLook  float64 // when it is looked at again though nothing changed
	nextTick  float64
	rates     rates
	turns     turns
	revoking  bool
	offset    float64 // learned, common to all replicas, seconds
	margin    float64 // log of the factor on predicted TTFT in admission
	late      float64 // by how many steps first tokens come after the prediction at worst
	marginITL float64 // the same of ITL
	window    float64 // how long answers take from the first token on, seconds
	crowdAt   float64 // when the replicas' crowd was brought up to date
	nextScale float64
	room      []room    // by class
	stood     float64   // how long the router itself stood still, in all, seconds
	sorted    []float64 // scratch
	stats     Stats
}

// New makes a pool; cfg must have passed Validate.
func New(cfg Config) *Pool {
	cfg.Defaults()
	if err := cfg.Validate(); err != nil {
		panic("BUG: " + err.Error())
	}
	p := &Pool{cfg: cfg, byID: map[fleet.ID]*replica{}, models: map[uint32]*modelStats{}, outs: map[outKey]*mean{}}
	p.policy = scorer.Find(cfg.Policy)
	p.work = cfg.Policy == scorer.DefaultPolicy
	if cfg.Shadow != "" {
		p.shadow = scorer.Find(cfg.Shadow)
	}
	p.held.init(&p.cfg)
	p.setRoom()
	p.elsewhere = make([]int, len(p.cfg.Classes))
	p.rates.init(len(p.cfg.Classes))
	p.turns.init(len(p.cfg.Classes))
	p.ctx.Par = cfg.Params
	p.margin, p.late, p.marginITL = 0.14, 1.2, 0.05
	p.window = fleet.PrefillWindow
	p.ctx.View = &p.view
	p.nextTick = math.Inf(-1)
	p.nextLook = math.Inf(-1)
	p.stats.Classes = make([]ClassStats, len(cfg.Classes))
	return p
}

// Config returns the configuration in force, defaults filled in.
func (p *Pool) Config() Config { return p.cfg }

// View is what decisions are made from; for reading, under the same lock.
func (p *Pool) View() *fleet.View { return &p.view }

// Join adds a replica, or changes one that is known by its ID.
func (p *Pool) Join(now float64, s ReplicaSpec) {
	p.tick(now)
	p.dirty = true
	if r := p.byID[s.ID]; r != nil {
		v := &p.view.Replicas[r.i]
		back := r.gone
		r.gone, r.spec = false, s
		if s.Profile != nil && (!r.given || *s.Profile != r.profile) {
			p.setProfile(r, v, s.Profile)
		}
		p.measure()
		v.Name, v.Models, v.Caps, v.Region, v.Domain = s.Name, s.Models, s.Caps, s.Region, s.Domain
		if back {
			v.Health.Start(now, s.Warm, &p.cfg.Health)
		}
		return
	}
	r := &replica{spec: s, i: len(p.reps), sign: now, blockSize: p.cfg.BlockDefault}
	r.slot = p.takeSlot()
	p.reps = append(p.reps, r)
	p.byID[s.ID] = r
	p.view.Replicas = append(p.view.Replicas, fleet.Replica{
		ID: s.ID, Name: s.Name, Models: s.Models, Caps: s.Caps, Region: s.Region, Domain: s.Domain,
		ScalePrefill: 1, ScaleDecode: 1, Pace: 1, Crowd: 1,
	})
	p.loaded = append(p.loaded, scorer.Loaded{})
	v := &p.view.Replicas[r.i]
	p.setProfile(r, v, s.Profile)
	v.Health.Start(now, s.Warm, &p.cfg.Health)
	p.hits = append(p.hits, 0)
	p.measure()
	p.ctx.Cand = make([]int32, 0, len(p.reps))
	p.fits = make([]int32, 0, len(p.reps))
}

func (p *Pool) setProfile(r *replica, v *fleet.Replica, given *fleet.Profile) {
	if given != nil {
		r.profile, r.given = *given, true
		r.sized = given.KVTokens > 0
		v.Trust = 1
	} else {
		r.profile, r.given, r.sized = fleet.Generic(), false, false
		v.Trust = 0
	}
	g := fleet.Generic()
	orDefault(&r.profile.KVTokens, g.KVTokens)
	orDefault(&r.profile.MaxSeqs, g.MaxSeqs)
	orDefault(&r.profile.MaxBatched, g.MaxBatched)
	orDefault(&r.profile.BlockTokens, g.BlockTokens)
	v.Profile, r.stale = &r.profile, true
	p.index.setLimit(r.slot, int(float64(r.profile.KVTokens)/r.blockSize))
}

func (p *Pool) takeSlot() int {
	for i, used := range p.slots {
		if !used {
			p.slots[i] = true
			return i
		}
	}
	p.slots = append(p.slots, true)
	p.index.setSlots(len(p.slots))
	p.counts = make([]int32, len(p.slots)+64)
	return len(p.slots) - 1
}

// Remove takes a replica out: no new work; tickets there still end with Done.
func (p *Pool) Remove(now float64, id fleet.ID) {
	p.tick(now)
	r := p.byID[id]
	if r == nil {
		return
	}
	r.gone = true
	p.dirty = true
	if r.idle() {
		p.discard(r)
		return
	}
	p.takeOut(now, r)
}

// discard forgets a removed replica whose last ticket is done.
func (p *Pool) discard(r *replica) {
	last := len(p.reps) - 1
	p.index.forget(r.slot)
	p.index.setLimit(r.slot, 0)
	p.slots[r.slot] = false
	delete(p.byID, r.spec.ID)
	p.reps[r.i] = p.reps[last]
	p.reps[r.i].i, p.reps[r.i].stale = r.i, true
	p.view.Replicas[r.i] = p.view.Replicas[last]
	p.view.Replicas[last] = fleet.Replica{}
	p.reps[last] = nil
	p.reps = p.reps[:last]
	p.measure()
	p.view.Replicas = p.view.Replicas[:last]
	p.hits, p.loaded = p.hits[:last], p.loaded[:last]
}

// Drain is the operator's: on takes no new work, off lets it ramp up again.
func (p *Pool) Drain(now float64, id fleet.ID, on bool) {
	p.tick(now)
	r := p.byID[id]
	if r == nil || r.drained == on {
		return
	}
	r.drained = on
	p.dirty = true
	v := &p.view.Replicas[r.i]
	if on {
		p.takeOut(now, r)
		v.Health.Until = math.Inf(1)
		return
	}
	v.Health.Start(now, false, &p.cfg.Health)
}

// Admit decides one request: placed (one atomic pick and reserve), held, or
// shed. The ticket must not be in the pool already.
func (p *Pool) Admit(now float64, t *Ticket) Decision {
	if t.phase != phaseIdle {
		panic("BUG: admission: Admit of a ticket that is in the pool")
	}
	p.tick(now)
	charged := t.charged && t.Work.Excluded > 0
	t.ticketState = ticketState{charged: charged}
	t.Decision = Decision{}
	p.normalise(now, t)
	if t.since = t.Work.Arrived; t.Work.Excluded > 0 && !p.crowded(int(t.Work.Class)) {
		// A replica's fault took its time. Late is better than never, while not so
		// many wait who can still be in time.
		t.since = now
	}
	p.stats.Offered++
	class := int(t.Work.Class)
	t.first = t.Work.Excluded == 0 && p.turns.back(now, t.Work.Print)
	if !p.held.before(class) || p.held.countUpTo(class) < p.cfg.LookAhead && !p.dirty || t.first && !p.held.before(class-1) {
		switch why := p.try(now, t, nil); why {
		case tryPlaced:
			return t.Decision
		case tryFull:
		case tryLate:
			return p.shedNow(now, t, ReasonCapacity)
		default:
			return p.shedNow(now, t, Reason(why))
		}
	}
	return p.hold(now, t)
}

// normalise fills in what the rest relies on.
func (p *Pool) normalise(now float64, t *Ticket) {
	w := &t.Work
	w.Prompt = max(1, w.Prompt)
	w.Seqs = max(1, w.Seqs)
	if int(w.Class) >= len(p.cfg.Classes) {
		w.Class = uint8(len(p.cfg.Classes) - 1)
	}
	if w.Arrived <= 0 || w.Arrived > now {
		w.Arrived = now
	}
	if w.Deadline == 0 {
		if d := p.cfg.Classes[w.Class].Deadline; d > 0 {
			w.Deadline = w.Arrived + d
		}
	}
	w.Out = p.expectOut(w)
}

// charge reserves the replica for the ticket.
func (p *Pool) charge(now float64, t *Ticket, r *replica, pr *scorer.Prediction) {
	v := &p.view.Replicas[r.i]
	p.placedPrompt(float64(t.Work.Prompt))
	p.uncached.add(pr.Work)
	t.phase = phasePlaced
	t.rep = r
	t.placedAt = now
	t.ttft, t.queue, t.prefill, t.itl = pr.TTFT, pr.Queue, pr.Prefill, pr.ITL
	if pr.Queue <= r.profile.Front(t.Work.Prompt) {
		t.queue = 0 // over before the engine has this one
	}
	t.due = now + pr.TTFT
	// Whole numbers: adding and taking away leaves exactly nothing.
	t.pre = math.Round(pr.Work)
	t.kv = float64(t.Work.Prompt)
	t.unique = max(1, math.Round(t.kv-p.hits[r.i]))
	t.out = math.Round(t.Work.Out * float64(t.Work.Seqs))
	p.countSteps(now, r, v)
	t.alone = v.Own.Prefilling+v.Peers.Prefilling+v.Other.Prefilling == 0
	t.scale = v.ScalePrefill
	l := &v.Own
	if l.Prefilling == 0 {
		// Its prefill starts when the front end is through: progress counts from there.
		l.LastFirst = max(l.LastFirst, now+v.Profile.Front(t.Work.Prompt))
	}
	if l.Requests == 0 {
		r.sign = now
	}
	l.Requests++
	l.Prefilling++
	l.PrefillTokens += t.pre
	l.KVTokens += t.kv
	l.Unique += t.unique
	l.OutTokens += t.out
	p.stats.Placed++
	p.correctPeers(r, v)

	r.pend.push(t)
	if v.Health.OneOnly(now) {
		t.trial = true
		r.trials++
		r.lastTrial = now
	}
	p.prefillBusy(now, r, v, pr.Prefill)
	p.enterBlocks(r, &t.Work)
	p.hot.used(t.Work.Blocks, p.hot.shared, r.spec.ID)
	p.stats.Classes[t.Work.Class].Placed++
	work := p.tokenWork(&t.Work)
	p.rates.left[t.Work.Class].add(work)
	p.rates.placed[t.Work.Class].add(work)
	if !t.charged {
		t.charged = true
		p.held.serve(int(t.Work.Class), t.Work.Tenant, work)
	}
}

// enterBlocks notes the prompt as cached at r from now on: one that is being
// computed counts, else two with one prefix would go two ways.
func (p *Pool) enterBlocks(r *replica, w *fleet.Work) {
	if len(w.Blocks) == 0 {
		return
	}
	if size := w.Tokens; size > 0 && size != r.blockSize && math.Abs(size-r.blockSize) > 0.25*r.blockSize {
		r.blockSize = size
		p.index.setLimit(r.slot, int(float64(r.profile.KVTokens)/size))
	}
	p.index.touch(r.slot, w.Blocks)
}

// started moves a ticket's account from prefill to decode.
func (p *Pool) started(now float64, t *Ticket) {
	r := t.rep
	v := &p.view.Replicas[r.i]
	p.countSteps(now, r, v)
	p.stepsLost(r, t, v)
	t.phase = phaseStarted
	t.firstAt = now
	t.steps = r.steps
	r.pend.remove(t)
	r.begun.push(t)
	v.Own.Prefilling--
	v.Own.PrefillTokens -= t.pre
	v.Own.LastFirst = r.prefillFrom(now)
	p.correctPeers(r, v)
	p.dirty = true
}

// First tells of the first content event.
func (p *Pool) First(now float64, t *Ticket) {
	if t.phase == phaseIdle || t.phase == phaseHeld || t.phase == phaseOut {
		panic("BUG: admission: First of a ticket that is not placed")
	}
	p.tick(now)
	r := t.rep
	r.sign = now
	if t.phase == phasePlaced {
		p.started(now, t)
	} else if !t.Work.Whole {
		return
	}
	v := &p.view.Replicas[r.i]
	r.good = max(r.good, t.placedAt)
	if t.placedAt > v.Health.FailAt {
		v.Health.FailAt = 0
	}
	if !t.Work.Whole {
		p.learnFirst(now, t, v)
	}
	if t.placedAt >= v.Health.Since {
		// Enough for a recovering replica; consecutive failures are forgotten
		// only by a whole answer.
		fails := v.Health.Fails
		if v.Health.State == fleet.StateTrial && v.Health.Reason == fleet.EvidenceSlow && !t.Work.Whole && p.slowAgain(now, t) {
			p.take(now, r, v, fleet.EvidenceSlow, 0) // as slow as before
		} else if v.Health.State != fleet.StateUp && v.Health.Apply(now, fleet.EvidenceOK, 0, &p.cfg.Health) {
			p.dirty = true
		}
		v.Health.Fails = fails
	} else if silence(v.Health.Reason) && !t.revoked && v.Health.Moved(now) {
		p.dirty = true // it was kept there, and the engine goes on
	}
}

// Progress tells how many output tokens came so far, all sequences together;
// call it about every 32 tokens, not for each.
func (p *Pool) Progress(now float64, t *Ticket, tokens int) {
	if t.phase != phasePlaced && t.phase != phaseStarted {
		panic("BUG: admission: Progress of a ticket that is not placed")
	}
	r := t.rep
	r.sign = max(r.sign, now)
	if tokens <= t.made {
		return
	}
	more := float64(tokens - t.made)
	t.made = tokens
	p.countSteps(now, r, &p.view.Replicas[r.i])
	l := &p.view.Replicas[r.i].Own
	l.KVTokens += more
	l.Unique += more
	t.kv += more
	t.unique += more
	less := min(more, t.out)
	l.OutTokens -= less
	t.out -= less
	p.correctPeers(r, &p.view.Replicas[r.i])
}

// Done returns a placed ticket's account, once, and takes what the answer
// taught. A second call panics.
func (p *Pool) Done(now float64, t *Ticket, e End) {
	if t.phase != phasePlaced && t.phase != phaseStarted {
		panic("BUG: admission: Done of a ticket that is not placed (or a second Done)")
	}
	p.tick(now)
	r := t.rep
	v := &p.view.Replicas[r.i]
	p.countSteps(now, r, v)
	l := &v.Own
	l.Requests--
	l.KVTokens -= t.kv
	l.Unique -= t.unique
	l.OutTokens -= t.out
	if t.phase == phasePlaced {
		l.Prefilling--
		l.PrefillTokens -= t.pre
	}
	p.correctPeers(r, v)
	if t.phase == phasePlaced {
		r.pend.remove(t)
	} else {
		r.begun.remove(t)
	}
	if t.trial {
		r.trials--
	}
	p.dirty = true
	p.ended(now, t, r, v, e)
	t.phase = phaseIdle
	t.rep = nil
	t.revoked = false
	if r.gone && r.idle() {
		p.discard(r)
	}
}

// ended counts the outcome, learns from it and takes its evidence.
func (p *Pool) ended(now float64, t *Ticket, r *replica, v *fleet.Replica, e End) {
	switch e.Outcome {
	case Finished:
		p.stats.Finished++
		r.sign = max(r.sign, now)
		p.learnEnd(now, t, r, v, e)
	case Failed:
		p.stats.Failed++
	case Cancelled:
		p.stats.Cancelled++
		return // a client that left tells nothing of the replica
	default:
		panic("BUG: admission: Done without an outcome")
	}
	switch {
	case e.Evidence == fleet.EvidenceOK && (e.Outcome != Finished || t.placedAt < v.Health.Since):
		// No evidence was given for the failure, or the answer began before
		// the state did and says nothing of it.
	case e.Evidence != fleet.EvidenceOK && t.revoked && t.placedAt < v.Health.Since:
		// The pool itself took it away.
	case e.Evidence == fleet.EvidenceFirstTimeout && v.Health.Open() && r.sign-(p.stood-t.stood) > t.placedAt && now-r.sign < stoodStill:
		// It works on others (the sign was not only moved by Stood): a queue there that nobody knew of (max_num_seqs) is
		// no fault, and to take all that runs there away from it would make one.
	default:
		p.take(now, r, v, e.Evidence, e.RetryAfter)
	}
}

// Leave takes a held ticket out: its client went away, or its deadline passed.
func (p *Pool) Leave(now float64, t *Ticket) {
	switch t.phase {
	case phaseHeld:
		p.held.remove(t)
		p.stats.Left++
	case phaseOut:
		p.held.unpend(t) // counted as shed already
	default:
		panic("BUG: admission: Leave of a ticket that is not held")
	}
	p.tick(now)
	t.phase = phaseIdle
	p.dirty = true
}

// Stats are the pool's totals since it was made, and what is held now.
func (p *Pool) Stats() Stats {
	s := p.stats
	s.Held, s.HeldBytes, s.HeldWork = p.held.count, p.held.bytes, p.held.work
	s.DrainRate = from(p.rates.left, 0)
	s.Replicas = len(p.reps)
	for c := range s.Classes {
		s.Classes[c].Held = p.held.bands[c].count
	}
	return s
}
