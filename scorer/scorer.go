// Package scorer predicts what a request would cost on each replica, in
// seconds of somebody's waiting, and ranks the replicas by it. It carries the
// other routers' policies too, as plain functions of the same view, so that
// they can be compared.
//
// It is pure: no I/O, no clock, no random source, no allocation per decision.
package scorer

import (
	"math"

	"github.com/penstock/penstock/fleet"
)

// Params are the weights of the cost, and what the pool wants to keep.
type Params struct {
	WTTFT float64 // how much a second before the first token counts against one after it; 5 to 20
	WHarm float64 // how much a second of the others' waiting counts
	WMiss float64 // seconds that an answer counts which is made to miss its ITL objective
	ITL   float64 // that objective, seconds; 0 = none
}

// DefaultParams is the setting that was most robust over the scenario suite
// (docs/policies.md).
var DefaultParams = Params{WTTFT: 20, WHarm: 3, WMiss: 3}

// Prediction is what a request would meet on one replica. Seconds, but for
// Work and Memory.
type Prediction struct {
	TTFT    float64 // until its first token
	Queue   float64 // the part of TTFT that the prefills before it take
	Prefill float64 // the part of TTFT that its own prompt takes
	Alone   float64 // TTFT without those before it
	Idle    float64 // TTFT were there nothing else at all
	Wait    float64 // the part of TTFT spent waiting for KV memory or a sequence slot
	Step    float64 // one decode step with this request in it
	ITL     float64 // the mean gap between its tokens: steps, and the prefills between them
	Gap     float64 // the same for all there once its own prompt counts too; set with Params.ITL
	Own     float64 // its whole answer
	Harm    float64 // delay put on all the others together
	Cost    float64 // weighted sum; least wins
	Work    float64 // prefill work in tokens, attention included (what the account is charged)
	KVOver  float64 // KV tokens over capacity if it ran there now; 0 = it fits
}

// Step is the predicted time of one decode step with n sequences and kv KV
// tokens read, seconds.
func Step(r *fleet.Replica, n, kv float64) float64 {
	p := r.Profile
	return r.ScaleDecode * (p.Base + p.PerSeq*n + p.PerKV*kv)
}

// shortAlone is the time to the first token, on a replica of its own, of a
// prompt whose waiting counts as Params.WTTFT says, seconds; others count in
// inverse proportion, within bounds.
const (
	shortAlone = 0.2
	shortLeast = 0.5
	shortMost  = 4
)

// Loaded is what a prediction needs of one replica, whatever the request: it
// stays the same until the replica's account, its scales or its profile change,
// and most replicas of a large fleet do not change between two decisions.
type Loaded struct {
	Requests, Prefilling          float64 // there, and of them without a first token
	queued, last, n, waiting      float64
	decode, wait                  float64
	perPrefill, full, batch       float64 // s per prompt token, the same in full batches, tokens of one
	perSeq, perKV                 float64
	attn                          float64 // work of a token pair, in tokens of prefill
	front, offset, idle           float64
	memory, capacity, slots, left float64
	share, free, window           float64 // of its time that goes to prefills, what is left of it, and over how long
}

// Of takes a replica's state.
func (s *Loaded) Of(r *fleet.Replica) {
	p := r.Profile
	s.Requests = float64(r.Own.Requests + r.Peers.Requests + r.Other.Requests)
	s.Prefilling = float64(r.Own.Prefilling + r.Peers.Prefilling + r.Other.Prefilling)
	s.queued = r.Own.PrefillTokens + r.Peers.PrefillTokens + r.Other.PrefillTokens
	toCome := r.Own.OutTokens + r.Peers.OutTokens + r.Other.OutTokens
	s.last = max(r.Own.LastFirst, r.Peers.LastFirst)
	s.slots = float64(p.MaxSeqs)
	s.n, s.waiting = s.Requests-s.Prefilling, 0
	if s.slots > 0 && s.n > s.slots {
		s.n, s.waiting = s.slots, s.n-s.slots
	}
	s.decode = Step(r, s.n, r.Own.KVTokens+r.Peers.KVTokens+r.Other.KVTokens)
	s.perPrefill = r.ScalePrefill * p.PerPrefill
	s.perSeq, s.perKV = r.ScaleDecode*p.PerSeq, r.ScaleDecode*p.PerKV
	s.attn = 0
	if p.PerPrefill > 0 {
		s.attn = p.PerAttn / p.PerPrefill
	}
	s.batch = float64(p.MaxBatched) - s.n
	s.full = s.perPrefill
	if p.MaxBatched > 0 {
		s.full += s.decode / max(s.batch, 1)
	} else {
		s.batch = math.Inf(1)
	}
	s.share, s.window = r.PrefillShare, r.Window
	if s.window == 0 {
		s.window = fleet.PrefillWindow
	}
	s.free = 1 - min(0.9, s.share)
	switch {
	case s.n > 0:
		// Half of the step that runs, with the prefills in it, and its own.
		s.wait = s.decode + 0.5*s.decode/s.free
	case s.Prefilling > 0:
		// They will decode beside this one: priced lower, a burst goes to the one
		// replica whose requests have not begun.
		s.wait = 1.5 * s.decode
	default:
		s.wait = 0.5 * s.decode
	}
	s.front, s.offset = p.Front(1), r.Offset
	s.idle = s.offset + Step(r, 0, 0)
	s.memory, s.capacity = r.Memory(), float64(p.KVTokens)
	s.left = max(1, toCome/max(1, s.Requests)) // output tokens that one request still has to make
}

// Predict fills out for request w on replica r, of whose prompt hit tokens are
// expected to be cached there.
func Predict(now float64, r *fleet.Replica, w *fleet.Work, hit float64, par *Params, out *Prediction) {
	var s Loaded
	s.Of(r)
	s.Predict(now, w, hit, par, out)
}

// Through is how long a prompt is on its way to its first token, seconds, that
// has so many tokens of prompts before it, its own among them; memory aside.
func (s *Loaded) Through(tokens float64) float64 {
	perToken := s.perPrefill
	if tokens > s.batch {
		perToken = s.full
	}
	return max(leastThrough, s.offset+s.wait+tokens*perToken)
}

// leastThrough bounds it, seconds: some step has to end.
const leastThrough = 0.001

// Predict is the same for a state that was taken before.
func (s *Loaded) Predict(now float64, w *fleet.Work, hit float64, par *Params, out *Prediction) {
	seqs := float64(max(1, w.Seqs))
	prompt := float64(w.Prompt)
	answer := w.Out * seqs
	u := max(1, prompt-hit)
	work := u + s.attn*u*(hit+u/2)

	// Time since the last first token is progress inside the prefill that runs
	// now: no more than that one request's share. (Work comes off the account in
	// whole steps; uncounted progress would be learned as a faster replica.)
	queued, perToken := s.queued, s.perPrefill
	if queued+work > s.batch {
		perToken = s.full
	}
	if queued > 0 && perToken > 0 {
		queued -= min(queued/max(1, s.Prefilling), max(0, now-s.last)/perToken)
	}
	out.Queue = queued * perToken
	out.Prefill = work * perToken
	front := s.front * prompt

	// Memory and sequence slots come free as decodes end.
	out.KVOver = max(0, s.memory+u+answer-s.capacity)
	out.Wait = 0
	if s.Requests > 0 {
		if out.KVOver > 0 && s.memory > 0 {
			out.Wait = out.KVOver / s.memory * s.left * s.decode
		}
		if s.slots > 0 && s.Requests+seqs > s.slots {
			out.Wait = max(out.Wait, (s.waiting+s.Prefilling+seqs)/s.slots*s.left*s.decode)
		}
	}
	out.Alone = s.offset + s.wait + front + out.Prefill
	out.Idle = s.idle + front + work*s.perPrefill
	// While the front end works on it, the queue before it shrinks.
	out.TTFT = s.offset + s.wait + max(front, out.Queue) + out.Prefill + out.Wait
	out.Step = s.decode + s.perSeq*(s.Prefilling+seqs) + s.perKV*(prompt+w.Out/2)*seqs
	out.ITL = out.Step / s.free
	decoding := w.Out * (s.decode + s.perSeq*seqs + s.perKV*prompt*seqs)
	out.Own = out.TTFT + decoding
	others := s.n + s.Prefilling
	out.Harm = work*s.perPrefill*others + answer*(s.perSeq+s.perKV*(prompt+w.Out/2))*others
	out.Work = work
	// A wait counts against what the prompt takes by itself: half a second more
	// is much for a short one and little for one of 30,000 tokens.
	short := max(shortLeast, min(shortMost, shortAlone/out.Alone))
	out.Cost = par.WTTFT*short*out.TTFT + decoding + par.WHarm*out.Harm
	if par.ITL > 0 {
		busy := s.perPrefill * work / s.window
		before := missing(s.decode / (s.free * par.ITL))
		out.Gap = out.Step / (1 - min(0.9, s.share+busy))
		after := missing(out.Gap / par.ITL)
		// Its own miss, and those of the others that were not missing before: a
		// replica that is over its objective already is the place for long prompts.
		out.Cost += par.WMiss * (after + others*max(0, after-before))
	}
}

// missFrom and missAll bound the share of an objective for ITL, as predicted
// now, over which answers begin to miss it, and all do: load moves on while
// they run.
const (
	missFrom = 0.7
	missAll  = 1.1
)

// missing is the expected share of answers that miss their ITL objective when
// the gap is x times the objective.
func missing(x float64) float64 { return max(0, min(1, (x-missFrom)*(1/(missAll-missFrom)))) }

// Context is what a policy decides from. The caller owns and reuses it.
type Context struct {
	View *fleet.View
	Work *fleet.Work
	Cand []int32   // indices in View.Replicas that may take the request; policies choose among these only
	Hits []float64 // by View index: prompt tokens expected in its prefix cache
	Seed uint64    // a counter or hash, the only randomness a policy has
	Par  Params
}

// load sums a replica's accounts without copying the rest of it.
func load(r *fleet.Replica) (requests, prefill, kv float64) {
	return float64(r.Own.Requests + r.Peers.Requests + r.Other.Requests),
		r.Own.PrefillTokens + r.Peers.PrefillTokens + r.Other.PrefillTokens,
		r.Own.KVTokens + r.Peers.KVTokens + r.Other.KVTokens
}

// PickWork is the default policy without admission: the least cost.
func PickWork(c *Context) int {
	best, cost := -1, math.Inf(1)
	var pr Prediction
	for _, i := range c.Cand {
		Predict(c.View.Now, &c.View.Replicas[i], c.Work, c.Hits[i], &c.Par, &pr)
		if pr.Cost < cost {
			best, cost = int(i), pr.Cost
		}
	}
	return best
}
