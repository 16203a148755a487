package model

import (
	"math"
	"slices"
)

// Replica is one engine. All methods take the time in seconds, which must not
// go back. It is not safe for concurrent use.
type Replica struct {
	Profile Profile
	// Tokens asks for a Token event per output token, and so for single steps:
	// for a caller that streams. Without it, decode-only stretches are bulk.
	Tokens bool
	// OnStep, when set, is told of each step made: sequences and tokens in it,
	// and its duration in seconds. Not called for bulk stretches.
	OnStep func(seqs, tokens int, seconds float64)

	cache   *cache
	pending seqHeap // in the front end, by the time they reach the queue
	waiting seqList
	running seqList // prefilling and decoding, in order of admission
	prefill []*Seq  // of running, those without all their tokens computed
	decode  seqHeap // of running, those decoding, by finish step
	aborts  []*Seq
	kv      float64 // KV tokens read by one step of the decoding ones
	phases  []int32 // decoding sequences by the step (mod block) that needs a block
	step    int64   // decode steps made
	order   uint64
	blocked bool // the head of waiting cannot be admitted until something ends
	skip    bool // a preemption happened in this scheduling: admit nothing

	// The stretch in progress: steps steps from start to end, n decoding.
	busy       bool
	start, end float64
	steps      int64
	bulk       bool
	stepFixed  float64 // s per step without KV growth
	stepGrow   float64 // s more for each further step of the stretch
	chunks     []chunk
	stepTokens int
	path       []int32 // scratch of admitHead

	slow     float64
	frozenAt float64 // NaN = running
	floor    float64 // no step starts before: the end of the last freeze
	stats    Stats
	events   []Event
}

type chunk struct {
	seq    *Seq
	tokens int
}

// New returns an idle replica with an empty cache.
func New(p Profile) *Replica {
	r := &Replica{Profile: p, cache: newCache(p.Blocks()), slow: 1, frozenAt: math.NaN()}
	r.phases = make([]int32, p.BlockTokens)
	return r
}

// Add hands over a sequence at now; it reaches the engine's queue after the
// front end's latency. A prompt that can never fit must be refused before.
func (r *Replica) Add(now float64, s *Seq) {
	r.order++
	s.order, s.state = r.order, seqPending
	s.Arrived, s.Queued = now, now+r.Profile.FrontEnd(s.Prompt)
	s.computed, s.made, s.gone = 0, 0, false
	s.Started, s.FirstAt, s.EndAt, s.Cached, s.Preempts, s.Ended = 0, 0, 0, 0, 0, 0
	r.pending.push(s, s.Queued)
	if !r.blocked {
		r.truncate(s.Queued)
	}
}

// Abort drops s. It tells whether s ended at once; else its Finish event comes
// at the end of the running step, as in vLLM.
func (r *Replica) Abort(now float64, s *Seq) bool {
	switch s.state {
	case seqPending:
		r.pending.remove(s.heapIndex)
	case seqWaiting:
		r.waiting.remove(s)
		r.blocked = false
		r.truncate(now)
	case seqPrefill, seqDecode:
		if !s.gone {
			s.gone = true
			r.aborts = append(r.aborts, s)
			r.truncate(now)
		}
		return false
	default:
		return true
	}
	s.state, s.Ended, s.EndAt = seqEnded, Aborted, now
	r.stats.Aborted++
	return true
}

// SetSlow multiplies the time of every later step by f (1 = as the profile says).
func (r *Replica) SetSlow(now, f float64) {
	r.truncate(now)
	r.slow = f
}

// SetFrozen stops or resumes the engine: a stopped one keeps its requests, its
// gauges and its port, and does nothing.
func (r *Replica) SetFrozen(now float64, on bool) {
	frozen := !math.IsNaN(r.frozenAt)
	switch {
	case on && !frozen:
		r.frozenAt = now
	case !on && frozen:
		gap := now - r.frozenAt
		r.start, r.end = r.start+gap, r.end+gap
		r.frozenAt, r.floor = math.NaN(), now
	}
}

// Kill ends everything at once and returns the sequences that were there, in
// order of arrival class (running, waiting, front end). The cache is empty
// after it; counters go on.
func (r *Replica) Kill(now float64) []*Seq {
	var lost []*Seq
	for s := r.running.head; s != nil; s = s.next {
		s.made = r.Made(s)
		lost = append(lost, s)
	}
	for s := r.waiting.head; s != nil; s = s.next {
		lost = append(lost, s)
	}
	lost = append(lost, r.pending...)
	for _, s := range lost {
		s.state, s.Ended, s.EndAt = seqEnded, Killed, now
		s.prev, s.next, s.held = nil, nil, s.held[:0]
	}
	fresh := New(r.Profile)
	fresh.Tokens, fresh.OnStep, fresh.slow, fresh.frozenAt, fresh.stats, fresh.order = r.Tokens, r.OnStep, r.slow, r.frozenAt, r.stats, r.order
	*r = *fresh
	return lost
}

// DropCache empties the prefix cache of what no sequence uses.
func (r *Replica) DropCache() {
	n := r.cache.available()
	r.cache.take(n)
	r.cache.give(n)
}

// Made is how many output tokens s has at the last step boundary.
func (r *Replica) Made(s *Seq) int {
	if s.state == seqDecode {
		return s.made + int(r.step-s.base)
	}
	return s.made
}

// Next is when Step has something to do; +Inf when never.
func (r *Replica) Next() float64 {
	if !math.IsNaN(r.frozenAt) {
		return math.Inf(1)
	}
	if r.busy {
		return r.end
	}
	if len(r.pending) > 0 {
		return max(r.pending[0].Queued, r.floor)
	}
	return math.Inf(1)
}

// Step does all that is due at now and returns when it has to be called next,
// and what happened, in order. The events are valid until the next call.
func (r *Replica) Step(now float64) (float64, []Event) {
	r.events = r.events[:0]
	for {
		t := r.Next()
		if t > now {
			return t, r.events
		}
		if r.busy {
			r.finishStretch()
		}
		r.schedule(t)
	}
}

// at is the time after j steps of the stretch in progress.
func (r *Replica) at(j int64) float64 {
	f := float64(j)
	return r.start + r.slow*(f*r.stepFixed+r.stepGrow*f*(f-1)/2)
}

// stepsBy is how many whole steps of the bulk stretch are made at t.
func (r *Replica) stepsBy(t float64) int64 {
	x := (t - r.start) / r.slow
	if x <= 0 {
		return 0
	}
	var j float64
	if b := r.stepFixed - r.stepGrow/2; r.stepGrow > 0 {
		j = (-b + math.Sqrt(b*b+2*r.stepGrow*x)) / r.stepGrow
	} else {
		j = x / r.stepFixed
	}
	k := min(int64(j), r.steps)
	for k > 0 && r.at(k) > t {
		k--
	}
	for k < r.steps && r.at(k+1) <= t {
		k++
	}
	return k
}

// truncate ends the bulk stretch at its first step boundary at or after t.
func (r *Replica) truncate(t float64) {
	if !r.busy || !r.bulk || t >= r.end {
		return
	}
	k := r.stepsBy(t)
	if r.at(k) < t || k == 0 {
		k++
	}
	if k < r.steps {
		r.steps, r.end = k, r.at(k)
	}
}

// finishStretch applies the stretch in progress at its end.
func (r *Replica) finishStretch() {
	r.busy = false
	now, n, k := r.end, len(r.decode), r.steps
	dur := now - r.start
	r.stats.Steps += float64(k)
	if r.OnStep != nil && !r.bulk {
		r.OnStep(n+len(r.chunks), r.stepTokens, dur)
	}
	if n > 0 {
		r.stats.OutputTokens += float64(n) * float64(k)
		r.stats.ITLCount += float64(n) * float64(k)
		r.stats.ITLSum += float64(n) * dur
		r.grow(k)
		r.step += k
		r.kv += float64(n) * float64(k)
		if r.Tokens {
			for s := r.running.head; s != nil; s = s.next {
				if s.state == seqDecode {
					r.events = append(r.events, Event{Token, now, s})
				}
			}
		}
		for len(r.decode) > 0 && r.decode[0].finish <= r.step {
			r.endSeq(now, r.decode[0], Length)
		}
	}
	for _, c := range r.chunks {
		if s := c.seq; s.computed == s.target {
			r.prefilled(now, s)
		}
	}
	r.chunks = r.chunks[:0]
}

// grow takes the blocks that k decode steps fill.
func (r *Replica) grow(k int64) {
	b := int64(len(r.phases))
	need := int64(len(r.decode)) * (k / b)
	for j := k - k%b; j < k; j++ {
		need += int64(r.phases[(r.step+j)%b])
	}
	r.cache.take(int(need))
}

// prefilled: the prompt is computed and the step made one token.
func (r *Replica) prefilled(now float64, s *Seq) {
	for i, p := range r.prefill {
		if p == s {
			r.prefill = append(r.prefill[:i], r.prefill[i+1:]...)
			break
		}
	}
	s.made++
	r.stats.OutputTokens++
	kind := Token
	if s.FirstAt == 0 {
		kind = First
		s.FirstAt = now
		r.stats.PromptTokens += float64(s.Prompt)
		r.stats.TTFTSum += now - s.Arrived
		r.stats.TTFTCount++
		r.stats.PrefillSum += now - s.Started
		r.stats.PrefillCount++
	}
	if kind == First || r.Tokens {
		r.events = append(r.events, Event{kind, now, s})
	}
	s.state = seqDecode
	s.base, s.finish = r.step, r.step+int64(s.Out-s.made)
	b := int64(len(r.phases))
	s.phase = int32(((r.step-int64(s.target))%b + b) % b)
	r.phases[s.phase]++
	r.kv += float64(s.target)
	r.decode.push(s, float64(s.finish))
	if s.made >= s.Out {
		r.endSeq(now, s, Length)
	}
}

// leaveDecode takes s out of the decoding set and fixes what it made.
func (r *Replica) leaveDecode(s *Seq) {
	k := int(r.step - s.base)
	s.made += k
	r.phases[s.phase]--
	r.kv -= float64(s.target + k)
	b := len(r.phases)
	s.priv += (s.target+k+b-1)/b - (s.target+b-1)/b
	s.computed = s.target + k
	r.decode.remove(s.heapIndex)
	if len(r.decode) == 0 {
		r.kv = 0 // keeps rounding from adding up
	}
}

// release returns every block of s.
func (r *Replica) release(s *Seq) {
	r.cache.give(s.priv)
	s.priv = 0
	for i := len(s.held) - 1; i >= 0; i-- { // tail first: it is evicted first
		r.cache.unref(s.held[i])
	}
	s.held = s.held[:0]
	r.blocked = false
}

// leaveStep takes a running sequence out of what the steps work on.
func (r *Replica) leaveStep(s *Seq) {
	switch s.state {
	case seqDecode:
		r.leaveDecode(s)
	case seqPrefill:
		if i := slices.Index(r.prefill, s); i >= 0 {
			r.prefill = append(r.prefill[:i], r.prefill[i+1:]...)
		}
	}
}

// endSeq ends a running sequence.
func (r *Replica) endSeq(now float64, s *Seq, why Reason) {
	decoded := s.state == seqDecode
	r.leaveStep(s)
	if decoded && why == Length {
		r.publishOutput(s)
	}
	r.running.remove(s)
	r.release(s)
	s.state, s.Ended, s.EndAt = seqEnded, why, now
	if why == Length {
		r.stats.Finished++
	} else {
		r.stats.Aborted++
	}
	r.events = append(r.events, Event{Finish, now, s})
}

// publishOutput leaves the generated blocks in the prefix cache.
func (r *Replica) publishOutput(s *Seq) {
	if s.OutHash == 0 || s.segAt < len(s.Segs) || s.segTok != s.Prompt {
		return
	}
	b := r.Profile.BlockTokens
	if done := s.computed/b - s.Prompt/b; done > 0 {
		r.publish(s, s.OutHash, done, (s.Prompt+s.Out)/b-s.Prompt/b)
	}
}

// publish makes done blocks of the run `hash` shared: private blocks of s move
// into its node, unless somebody else already put them there.
func (r *Replica) publish(s *Seq, hash uint64, done, full int) {
	i, made := r.cache.insert(hash, full)
	mine := made || (len(s.held) > 0 && s.held[len(s.held)-1] == i)
	have := int(r.cache.nodes[i].have)
	if have >= done && !made {
		return
	}
	if !mine { // its head was cached by somebody else: drop the duplicates
		r.cache.ref(i)
		r.cache.give(have)
		s.priv -= have
	}
	if made || !mine {
		s.held = append(s.held, i)
	}
	r.cache.nodes[i].have = int32(done)
	s.priv -= done - have
	if s.priv < 0 {
		panic("BUG: model: more blocks published than owned")
	}
}

// publishPrompt shares the prompt blocks that are computed.
func (r *Replica) publishPrompt(s *Seq) {
	b := r.Profile.BlockTokens
	for s.segAt < len(s.Segs) {
		g := s.Segs[s.segAt]
		end := s.segTok + g.Tokens
		if end > s.Prompt {
			return
		}
		full := end/b - s.segTok/b
		if done := min(s.computed, end)/b - s.segTok/b; done > 0 && full > 0 {
			r.publish(s, g.Hash, done, full)
		}
		if s.computed < end {
			return
		}
		s.segTok = end
		s.segAt++
	}
}
