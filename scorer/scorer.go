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
	Wait    float64 // the part of TTFT spent waiting for KV memory or a sequence slot
	Step    float64 // one decode step with this request in it
	ITL     float64 // the mean gap between its tokens: steps, and the prefills between them
	Own     float64 // its whole answer
	Harm    float64 // delay put on all the others together
	Cost    float64 // weighted sum; least wins
	Work    float64 // prefill work in tokens, attention included (what the account is charged)
	KVOver  float64 // KV tokens over capacity if it ran there now; 0 = it fits
}

// PrefillWork is the work of computing u prompt tokens behind hit cached ones,
// in tokens of plain prefill: attention over a long context costs more than
// its tokens.
func PrefillWork(p *fleet.Profile, u, hit float64) float64 {
	if p.PerPrefill <= 0 {
		return u
	}
	return u + p.PerAttn*u*(hit+u/2)/p.PerPrefill
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

// Predict fills out for request w on replica r, of whose prompt hit tokens are
// expected to be cached there.
func Predict(now float64, r *fleet.Replica, w *fleet.Work, hit float64, par *Params, out *Prediction) {
	p := r.Profile
	requests := float64(r.Own.Requests + r.Peers.Requests + r.Other.Requests)
	prefilling := float64(r.Own.Prefilling + r.Peers.Prefilling + r.Other.Prefilling)
	queued := r.Own.PrefillTokens + r.Peers.PrefillTokens + r.Other.PrefillTokens
	kv := r.Own.KVTokens + r.Peers.KVTokens + r.Other.KVTokens
	toCome := r.Own.OutTokens + r.Peers.OutTokens + r.Other.OutTokens
	last := max(r.Own.LastFirst, r.Peers.LastFirst)

	seqs := float64(max(1, w.Seqs))
	prompt := float64(w.Prompt)
	answer := w.Out * seqs
	u := max(1, prompt-hit)
	work := PrefillWork(p, u, hit)

	slots := float64(p.MaxSeqs)
	n := requests - prefilling
	waiting := 0.0
	if slots > 0 && n > slots {
		n, waiting = slots, n-slots
	}
	decode := Step(r, n, kv)
	perPrefill := r.ScalePrefill * p.PerPrefill

	// Time since the last first token is progress inside the prefill that runs
	// now: no more than that one request's share, and not its last batch, since
	// work comes off in whole steps.
	perToken := perPrefill
	batch := float64(p.MaxBatched) - n
	if p.MaxBatched > 0 && queued+work > batch {
		batch = max(batch, 1)
		perToken = perPrefill + decode/batch
	}
	if queued > 0 {
		share := queued / max(1, prefilling)
		if perToken > 0 {
			queued -= min(max(0, share-batch), max(0, now-last)/perToken)
		}
	}
	out.Queue = queued * perToken
	front := p.Front(w.Prompt)
	out.Prefill = work * perToken
	wait := 0.5 * decode
	if n > 0 {
		// Half of the step that runs, with the prefills in it, and its own.
		wait = decode + 0.5*decode/(1-min(0.9, r.PrefillShare))
	} else if prefilling > 0 {
		// They will decode beside this one: priced lower, a burst goes to the one
		// replica whose requests have not begun.
		wait = 1.5 * decode
	}

	// Memory and sequence slots come free as decodes end.
	memory := r.Memory()
	out.KVOver = max(0, memory+u+answer-float64(p.KVTokens))
	out.Wait = 0
	if requests > 0 {
		left := max(1, toCome/requests) // output tokens that one request still has to make
		if out.KVOver > 0 && memory > 0 {
			out.Wait = out.KVOver / memory * left * decode
		}
		if slots > 0 && requests+seqs > slots {
			out.Wait = max(out.Wait, (waiting+prefilling+seqs)/slots*left*decode)
		}
	}
	out.Alone = r.Offset + wait + front + out.Prefill
	// While the front end works on it, the queue before it shrinks.
	out.TTFT = r.Offset + wait + max(front, out.Queue) + out.Prefill + out.Wait
	perSeq := r.ScaleDecode * p.PerSeq
	perKV := r.ScaleDecode * p.PerKV
	out.Step = decode + perSeq*(prefilling+seqs) + perKV*(prompt+w.Out/2)*seqs
	out.ITL = out.Step / (1 - min(0.9, r.PrefillShare))
	decoding := w.Out * (decode + perSeq*seqs + perKV*prompt*seqs)
	out.Own = out.TTFT + decoding
	others := n + prefilling
	out.Harm = work*perPrefill*others + answer*(perSeq+perKV*(prompt+w.Out/2))*others
	out.Work = work
	// A wait counts against what the prompt takes by itself: half a second more
	// is much for a short one and little for one of 30,000 tokens.
	short := max(shortLeast, min(shortMost, shortAlone/out.Alone))
	out.Cost = par.WTTFT*short*out.TTFT + decoding + par.WHarm*out.Harm
	if par.ITL > 0 {
		busy := perPrefill * work / fleet.PrefillWindow
		before := missing(decode / (1 - min(0.9, r.PrefillShare)) / par.ITL)
		after := missing(out.Step / (1 - min(0.9, r.PrefillShare+busy)) / par.ITL)
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
func missing(x float64) float64 { return max(0, min(1, (x-missFrom)/(missAll-missFrom))) }

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
