package admission

import (
	"math"
	"slices"

	"github.com/penstock/penstock/fleet"
)

// learned is what one replica's answers taught beside its two scales.
type learned struct {
	n       int     // first tokens learned from
	logTTFT float64 // running mean of log(observed/predicted)
	logITL  float64
	plain   float64 // running mean of log(observed / predicted with nothing learned), for comparing replicas
	plainN  int
	lateRun int     // first tokens in a row that came far later than the fleet's and prove it (see proves)
	slowRun int     // of those, the last ones in a row that came far later than predicted too
	lateAt  float64 // when the last of them came
	obs     float64 // running means, seconds
	pred    float64
	obsITL  float64
	predITL float64
	prefill logScale
	decode  logScale
	hit     float64 // running means of expected and true prefix hits, tokens
	hitTrue float64
	cached  bool    // the replica reports cached tokens
	steps   float64 // running means over answers: decode steps that the profile allowed
	made    float64 // and tokens that were made in them
}

func (l *learned) ratio() float64    { return math.Exp(l.logTTFT) }
func (l *learned) ratioITL() float64 { return math.Exp(l.logITL) }

// trust is the share of expected prefix hits that came true, 0..1.
func (l *learned) trust() float64 {
	if l.hit < 1 {
		return 1
	}
	return max(0, min(1, (l.hitTrue+0.05*l.hit)/(1.05*l.hit)))
}

const (
	ratioClamp = 5.0 // one observation counts as at most 5x off, either way
	calibrated = 20  // first tokens after which a generic profile may be believed
	meanGain   = 0.05
)

func clampRatio(x float64) float64 { return max(1/ratioClamp, min(ratioClamp, x)) }

func gain(n int) float64 { return max(meanGain, 1/float64(n+1)) }

// learnFirst calibrates by a first token.
func (p *Pool) learnFirst(now float64, t *Ticket, v *fleet.Replica) {
	l := &t.rep.learn
	observed := now - t.placedAt
	if observed <= 0 || t.ttft <= 0 {
		return
	}
	g := gain(l.n)
	ratio := clampRatio(observed / t.ttft)
	l.logTTFT += g * (math.Log(ratio) - l.logTTFT)
	l.obs += g * (observed - l.obs)
	l.pred += g * (t.ttft - l.pred)
	l.n++
	p.learnMargin(observed, t)
	p.learnSlow(now, t, v)
	if !t.rep.given {
		v.Trust = min(1, float64(l.n)/(2*calibrated))
	}
	if p.cfg.NoLearn || t.Work.Whole {
		// An answer in one piece comes when all of it is made: its time is no
		// first token's, and learned as one it would be taken for an offset by
		// which replicas differ.
		return
	}
	// What is not the prompt's own work (network, front end, tokeniser) is an
	// offset: a scale learned from it would price long prompts wrongly.
	work := t.prefill + t.queue
	rest := max(0, t.ttft-work)
	if work > rest {
		// Behind others it is their work too, and what of that is over already can
		// only be guessed.
		weight := 1.0
		if !t.alone {
			weight = behindWeight
		}
		p.learnScale(now, t.rep, &l.prefill, math.Log(ratio*t.scale), weight)
	} else if t.alone {
		// A median, common to all: one step for each first token that had
		// nothing before it. Means are pulled up by every queue.
		if observed > t.ttft {
			p.offset = min(maxOffset, p.offset+offsetStep)
		} else {
			p.offset = max(0, p.offset-offsetStep)
		}
	}
}

// learnMargin follows the quantile of observed / predicted over the whole pool
// that admission keeps as its margin, and the steps that are added to it so that
// nothing is placed too late. Both are common to all replicas, so they move no
// choice, only how much is let in.
func (p *Pool) learnMargin(observed float64, t *Ticket) {
	cl := &p.cfg.Classes[t.Work.Class]
	limit, held := cl.Objective.Limit(t.Work.Prompt), t.placedAt-t.since
	expected := max(leastTTFT, t.ttft-p.slight(limit))
	p.margin = follow(p.margin, math.Log(observed/expected), marginQuantile, marginStep, marginMin, marginMax)
	if at := held + expected; at < nearTTFT*limit || at > limit || cl.Patient || t.itl <= 0 || math.Abs(t.rep.learn.logTTFT) > trueTTFT {
		return // no close decision, one that was lost, or the scales have to learn first
	}
	early := limit - held - observed
	p.late = follow(p.late, p.late+lateSpare-early/t.itl, lateQuantile, lateStep, lateMin, lateMax)
}

// slight is the part of the learned offset, seconds, that admission leaves to
// its margin: all of it while it is small beside the objective. Told apart from
// it, the same reserve lets in more of the dear prompts and sheds earlier, which
// under overload was worse than an offset that nobody knows (docs/policies.md).
func (p *Pool) slight(limit float64) float64 {
	if p.cfg.NoLearn {
		return 0
	}
	return p.offset * (1 - max(0, min(1, (p.offset/limit-slightFrom)/(slightFull-slightFrom))))
}

// An offset counts from slightFrom of the objective, and fully from slightFull.
const (
	slightFrom = 0.05
	slightFull = 0.1
	leastTTFT  = 0.001 // seconds
)

// follow moves a running quantile by one observation.
func follow(q, x, quantile, step, least, most float64) float64 {
	if x > q {
		q += step * quantile
	} else {
		q -= step * (1 - quantile)
	}
	return max(least, min(most, q))
}

const (
	marginQuantile = 0.95
	marginStep     = 0.005
	marginMin      = 0.05 // logarithms: 1.05
	marginMax      = 0.7  // 2

	lateQuantile = 0.998
	lateStep     = 0.05
	lateSpare    = 1.0 // steps before the objective from which a first token is too near to it
	lateMin      = 0.5 // steps
	lateMax      = 4.0

	marginQuantileITL = 0.997
	marginStepITL     = 0.005
	marginMaxITL      = 0.3 // 1.35

	// paceMost bounds how much faster than its profile the fleet is taken to
	// decode where scales do not act; it counts less from paceFrom on of what
	// the margin for ITL has grown to, and no more from paceNone.
	paceMost = 0.15
	paceFrom = 0.07
	paceNone = 0.15
)

// nearTTFT is the share of the TTFT objective from which a placement was a close
// decision; trueTTFT is how far the mean of log(observed / predicted) of a
// replica may be off for its errors to be those of the steps.
const (
	nearTTFT = 0.6
	trueTTFT = 0.25
)

// nearITL is the share of the ITL that is let in now from which a prediction
// teaches the margin.
const nearITL = 0.9

// offsetStep is how far one first token moves the learned offset, seconds.
const offsetStep = 0.0005

// learnScale moves a scale towards one observation x. A profile that was given
// moves with the gain Learn while it is far off, and ten times slower near the
// truth: observations of decoding are seconds old, and a quick gain on a late
// signal makes load and scale chase each other. A guess moves as a running
// mean until it is calibrated.
//
// weight is of an observation near the truth; far off all count alike.
func (p *Pool) learnScale(now float64, r *replica, s *logScale, x, weight float64) {
	if !r.given {
		// What was learned long ago (a cold engine's first answers, a busy
		// hour) counts for less than what is seen now.
		s.n = int(float64(s.n) * s.fresh(now))
	}
	s.at = now
	off := math.Abs(x-s.v) / farOff
	g := p.cfg.Learn * max(0.1*weight, min(1, off*off*off))
	if !r.given {
		g = max(g, 1/float64(s.n+1))
	}
	s.add(g, x)
}

// behindWeight is how much the first token of a prompt counts that had others
// before it, against one that had none.
const behindWeight = 0.1

// farOff is how far a scale is off (as a logarithm) when it moves fully.
const farOff = 0.7

// logScale is a running mean of log(observed / what the profile says).
type logScale struct {
	v  float64
	n  int
	at float64 // of the last observation
}

// A replica's own deviation is believed for staleFrom seconds without a new
// observation; then it fades with the half-life staleHalf. Without that a
// replica that once looked slow gets no traffic, and so is never corrected.
const (
	staleFrom = 5.0
	staleHalf = 4.0
)

// fresh is how much of what was learned still counts, 0..1.
func (s *logScale) fresh(now float64) float64 {
	return math.Exp2(-max(0, now-s.at-staleFrom) / staleHalf)
}

func (s *logScale) add(gain, x float64) {
	s.v += gain * (x - s.v)
	s.n++
}

// minScale is how many observations a replica's scale needs before it counts.
const minScale = 5

// scaleEvery is how often what was learned is put into the view, seconds.
const scaleEvery = 0.1

// A replica's own deviation from the fleet acts from devFrom (as a logarithm)
// and fully from devFull: smaller ones are noise of its momentary load, and
// acting on them moves load about with a delay, which near saturation is worse
// than knowing nothing.
const (
	devFrom = 0.2
	devFull = 0.5
)

// applyScales puts the fleet's common scale and each replica's deviation into
// the view.
func (p *Pool) applyScales(now float64) {
	if p.cfg.NoLearn || now < p.nextScale {
		return
	}
	p.nextScale = now + scaleEvery
	common := p.commonScale(now, func(l *learned) *logScale { return &l.prefill })
	commonD := p.commonScale(now, func(l *learned) *logScale { return &l.decode })
	for i, r := range p.reps {
		v := &p.view.Replicas[i]
		v.ScalePrefill = r.actScale(now, common, &r.learn.prefill)
		v.ScaleDecode = r.actScale(now, commonD, &r.learn.decode)
		v.Pace = r.pace(commonD, p.marginITL)
		v.Offset, r.stale = p.offset, true
	}
}

// commonScale is the median of the replicas' scales: of the fresh ones, where
// there are any.
func (p *Pool) commonScale(now float64, of func(*learned) *logScale) float64 {
	x := p.sorted[:0]
	for _, least := range [...]float64{0.5, 0} {
		for _, r := range p.reps {
			if s := of(&r.learn); s.n >= minScale && s.fresh(now) >= least {
				x = append(x, s.v)
			}
		}
		if len(x) > 0 {
			break
		}
	}
	p.sorted = x
	if len(x) == 0 {
		return 0
	}
	slices.Sort(x)
	return (x[len(x)/2] + x[(len(x)-1)/2]) / 2
}

// A profile that was given is believed while the fleet's scale is within
// commonFrom of it (as a logarithm), and no more at all from commonFull: what it
// is off by less is as likely the learning's error, which leans with the load,
// as its own.
const (
	commonFrom = 0.3
	commonFull = 0.6
)

// shrunk is x, taken back to nothing where it is no evidence.
func shrunk(x, from, full float64) float64 {
	return x * max(0, min(1, (math.Abs(x)-from)/(full-from)))
}

// actScale is the factor that is used for a replica: the fleet's common scale
// and the replica's own deviation from it.
func (r *replica) actScale(now, common float64, s *logScale) float64 {
	dev := 0.0
	if s.n >= minScale {
		dev = shrunk(s.v-common, devFrom, devFull) * s.fresh(now)
	}
	if r.given {
		common = shrunk(common, commonFrom, commonFull)
	}
	return clampScale(math.Exp(common + dev))
}

// pace is the part of a faster fleet's common decode scale that is too small to
// act in the choice. It acts in what is let in: prompts hide in the steps of a
// full batch, so that a linear profile foresees longer gaps than there are, and
// requests were held that could have gone. That the fleet is slower than its
// profile shows in the margin; and where that has grown, gaps vary so much (short
// answers in bursts) that their mean says little of the next one.
func (r *replica) pace(common, margin float64) float64 {
	if !r.given {
		return 1 // it acts in full
	}
	counts := max(0, min(1, (paceNone-margin)/(paceNone-paceFrom)))
	return math.Exp(counts * max(-paceMost, min(0, common-shrunk(common, commonFrom, commonFull))))
}

// maxOffset bounds the learned offset, seconds.
const maxOffset = 1.0

func clampScale(x float64) float64 { return max(1.0/50, min(50, x)) }

// learnEnd calibrates by a whole answer.
func (p *Pool) learnEnd(now float64, t *Ticket, r *replica, v *fleet.Replica, e End) {
	w := &t.Work
	made := e.Completion
	if made == 0 {
		made = t.made
	}
	if made > 0 {
		p.learnOut(w, float64(made)/float64(w.Seqs))
	}
	if e.Prompt > 0 {
		p.learnPrompt(w, e.Prompt)
	}
	p.learnHit(t, r, e)
	if w.Whole || t.phase != phaseStarted || made < 8 || t.itl <= 0 || w.Seqs != 1 {
		return
	}
	itl := (now - t.firstAt) / float64(made-1)
	if itl <= 0 {
		return
	}
	p.learnWindow(now - t.firstAt)
	l := &r.learn
	g := gain(l.decode.n)
	ratio := clampRatio(itl / t.itl)
	l.logITL += g * (math.Log(ratio) - l.logITL)
	l.obsITL += g * (itl - l.obsITL)
	l.predITL += g * (t.itl - l.predITL)
	if expected, limit := t.itl*v.Pace, p.cfg.Classes[w.Class].Objective.ITL; limit > 0 && expected > nearITL*limit*math.Exp(-p.marginITL) {
		// Only where it was a close decision: while load rises from less, every
		// answer is slower than was predicted when it began, and none too slow.
		p.marginITL = follow(p.marginITL, math.Log(itl/expected), marginQuantileITL, marginStepITL, marginMin, marginMaxITL)
	}
	// Against the steps that the account says were possible meanwhile: what
	// was predicted at placement is wrong as soon as the load changes. Of several
	// answers together: prompts are counted off when their step ends, so that one
	// short answer may seem to have had no step, or twice as many.
	l.steps += meanGain * (r.steps - t.steps - l.steps)
	l.made += meanGain * (float64(made-1) - l.made)
	if l.steps > 0 {
		p.learnScale(now, r, &l.decode, math.Log(clampRatio(l.steps/l.made/v.ScaleDecode)*v.ScaleDecode), 1)
	}
}

// stepOf is the time of one decode step by the profile, nothing learned, at
// what the replica has now.
func stepOf(v *fleet.Replica) float64 {
	n := float64(v.Own.Requests - v.Own.Prefilling + v.Peers.Requests - v.Peers.Prefilling + v.Other.Requests - v.Other.Prefilling)
	f := v.Profile
	return f.Base + f.PerSeq*max(0, n) + f.PerKV*(v.Own.KVTokens+v.Peers.KVTokens+v.Other.KVTokens)
}

// countSteps brings up to date how many decode steps the replica can have made
// by its profile, nothing learned, had it computed no prompts; stepsLost takes
// off what a prompt took.
func (p *Pool) countSteps(now float64, r *replica, v *fleet.Replica) {
	dt := now - r.stepsAt
	r.stepsAt = now
	if dt > 0 {
		r.steps += dt / stepOf(v)
	}
}

// stepsLost takes off the decode steps that the prompt of t took the time of:
// when it is computed, and as much as it took. A mean of what the replica
// spends on prompts lags, and while load rises it would be learned as a slow
// replica.
func (p *Pool) stepsLost(r *replica, t *Ticket, v *fleet.Replica) {
	r.steps -= (1 + r.beside) * t.pre * v.ScalePrefill * v.Profile.PerPrefill / stepOf(v)
}

// learnHit compares the prefix hit that was expected with the one that usage
// reports. Replicas that never report cached tokens are left as they are.
func (p *Pool) learnHit(t *Ticket, r *replica, e End) {
	l := &r.learn
	if e.Cached > 0 {
		l.cached = true
	}
	if !l.cached || e.Prompt == 0 || t.Decision.Hit <= 0 {
		return
	}
	expected := t.Decision.Hit / l.trust()
	l.hit += meanGain * (expected - l.hit)
	l.hitTrue += meanGain * (min(float64(e.Cached), expected) - l.hitTrue)
}

type outKey struct {
	model, tenant uint32
	class         uint8
}

// mean is a running mean that forgets.
type mean struct {
	v float64
	n int
}

func (m *mean) add(x float64) {
	m.n++
	m.v += max(0.02, 1/float64(m.n)) * (x - m.v)
}

// modelStats is what is learned of one model: output length and how many
// tokens a byte is.
type modelStats struct {
	out          mean
	ascii, other float64 // tokens per byte
	media        mean    // tokens per image, sound or film
}

// Tokens per byte before anything is learned: about 4 ASCII bytes to a token;
// other scripts take about one token for 2.5 bytes of UTF-8.
const (
	priorASCII = 0.25
	priorOther = 0.4
	mostMedia  = 100_000
	maxOuts    = 8192 // bound of the table of output lengths
)

func (p *Pool) model(id uint32) *modelStats {
	m := p.models[id]
	if m == nil {
		m = &modelStats{ascii: priorASCII, other: priorOther}
		p.models[id] = m
	}
	return m
}

// expectOut is the expected output per sequence: the mean of (model, tenant,
// class), else of the model, else the prior; never over max_tokens.
func (p *Pool) expectOut(w *fleet.Work) float64 {
	if p.cfg.KnownOut && w.MaxOut > 0 {
		return float64(w.MaxOut)
	}
	out := p.cfg.OutPrior
	if m := p.outs[outKey{w.Model, w.Tenant, w.Class}]; m != nil && m.n >= 3 {
		out = m.v
	} else if m := p.models[w.Model]; m != nil && m.out.n > 0 {
		out = m.out.v
	}
	if w.MaxOut > 0 {
		out = min(out, float64(w.MaxOut))
	}
	return max(1, out)
}

func (p *Pool) learnOut(w *fleet.Work, made float64) {
	p.model(w.Model).out.add(made)
	k := outKey{w.Model, w.Tenant, w.Class}
	m := p.outs[k]
	if m == nil {
		if len(p.outs) >= maxOuts {
			return // the model's mean serves
		}
		m = &mean{}
		p.outs[k] = m
	}
	m.add(made)
}

// learnPrompt moves the tokens per byte by what usage says (normalised least
// mean squares over the two kinds of bytes).
func (p *Pool) learnPrompt(w *fleet.Work, tokens int) {
	a, o := float64(w.ASCII), float64(w.Other)
	if a+o < 64 && w.Media == 0 {
		return // a short prompt is mostly its chat template
	}
	m := p.model(w.Model)
	miss := float64(tokens) - (m.ascii*a + m.other*o)
	if w.Media > 0 {
		// What the text does not explain is theirs: taken for the text's, a few
		// images made a text's estimate eight times as large.
		m.media.add(max(0, min(mostMedia, miss/float64(w.Media))))
		return
	}
	norm := a*a + o*o
	m.ascii = max(0.02, min(2, m.ascii+0.1*miss*a/norm))
	m.other = max(0.02, min(2, m.other+0.1*miss*o/norm))
}

// EstimatePrompt is the expected number of tokens of a prompt of so many ASCII
// and other bytes.
func (p *Pool) EstimatePrompt(model uint32, ascii, other int) int {
	a, o := priorASCII, priorOther
	if m := p.models[model]; m != nil {
		a, o = m.ascii, m.other
	}
	return max(1, int(a*float64(ascii)+o*float64(other)+0.5))
}

// EstimateMedia is the expected number of tokens of so many images, sounds and
// films, by those that the model had; none while it had none. How many an image is
// depends on its size, so the estimate is no bound.
func (p *Pool) EstimateMedia(model uint32, parts int) int {
	if parts <= 0 {
		return 0
	}
	m := p.models[model]
	if m == nil {
		return 0
	}
	return int(m.media.v*min(float64(parts), 10_000) + 0.5)
}
