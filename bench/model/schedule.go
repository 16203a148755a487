package model

import "math"

// schedule starts the next step (or bulk stretch) at t, a step boundary.
func (r *Replica) schedule(t float64) {
	for len(r.pending) > 0 && r.pending[0].Queued <= t {
		s := r.pending[0]
		r.pending.remove(0)
		s.state = seqWaiting
		r.waiting.pushBack(s)
	}
	for _, s := range r.aborts {
		if s.state == seqWaiting { // preempted since
			r.waiting.remove(s)
			s.state, s.Ended, s.EndAt = seqEnded, Aborted, t
			r.stats.Aborted++
			r.events = append(r.events, Event{Finish, t, s})
		} else if s.state != seqEnded {
			r.endSeq(t, s, Aborted)
		}
	}
	r.aborts = r.aborts[:0]
	r.skip = false
	most := r.decodeBlocks(t)
	attn, tokens := r.admit(t)
	n := r.running.len
	if n == 0 {
		return
	}
	p := &r.Profile
	dec := len(r.decode)
	seqs := dec + len(r.chunks)
	r.busy, r.start, r.stepTokens = true, t, dec+tokens
	r.stepFixed = p.StepTime(seqs, dec+tokens, r.kv, attn)
	r.stepGrow = p.D * float64(dec)
	r.steps, r.bulk = 1, false
	if len(r.chunks) == 0 && !r.Tokens {
		r.bulk = true
		r.steps = min(int64(r.decode[0].key)-r.step, most)
		if r.skip {
			r.steps = 1 // the preempted one is looked at again after one step
		}
		r.end = r.at(r.steps)
		if len(r.pending) > 0 && !r.blocked {
			r.truncate(r.pending[0].Queued)
		}
		return
	}
	r.end = r.at(1)
}

// decodeBlocks preempts until one decode step has its blocks, and returns for
// how many steps the cache suffices.
func (r *Replica) decodeBlocks(t float64) int64 {
	b := int64(len(r.phases))
	for len(r.decode) > 0 {
		avail, n := int64(r.cache.available()), int64(len(r.decode))
		if need := int64(r.phases[r.step%b]); need > avail {
			r.preempt(t)
			continue
		}
		k := avail / n * b
		avail %= n
		for j := int64(0); j < b; j++ {
			need := int64(r.phases[(r.step+j)%b])
			if need > avail {
				break
			}
			avail -= need
			k++
		}
		return k
	}
	return math.MaxInt64
}

// preempt takes the blocks of the sequence admitted last; it goes to the front
// of the queue, keeps its tokens and its first emission's time, and is
// recomputed.
func (r *Replica) preempt(t float64) {
	s := r.running.tail
	r.leaveStep(s)
	r.running.remove(s)
	r.release(s)
	s.state, s.computed = seqWaiting, 0
	s.Preempts++
	r.stats.Preemptions++
	r.waiting.pushFront(s)
	r.skip = true
	r.events = append(r.events, Event{Preempted, t, s})
}

// admit fills r.chunks with the prefill work of this step: running prompts
// first, then waiting ones in order.
func (r *Replica) admit(t float64) (attn float64, tokens int) {
	budget := r.Profile.MaxBatched - len(r.decode)
	take := func(s *Seq) {
		c := min(s.target-s.computed, budget)
		if c <= 0 {
			return
		}
		attn += float64(c) * (float64(s.computed) + float64(c)/2)
		s.computed += c
		budget -= c
		tokens += c
		r.chunks = append(r.chunks, chunk{s, c})
		r.publishPrompt(s)
	}
	for _, s := range r.prefill {
		take(s)
	}
	r.blocked = false
	for budget > 0 && r.waiting.head != nil && !r.skip {
		if s := r.waiting.head; r.running.len >= r.Profile.MaxSeqs || !r.admitHead(t, s) {
			r.blocked = true
			break
		} else {
			take(s)
		}
	}
	return attn, tokens
}

// admitHead admits the head of the waiting queue when the cache can hold all of
// its tokens.
func (r *Replica) admitHead(t float64, s *Seq) bool {
	b := r.Profile.BlockTokens
	target := s.Prompt + s.made
	hit, path := r.cache.match(s.Segs, b, (target-1)/b, r.path[:0])
	r.path = path
	fresh := (target+b-1)/b - hit
	idle := 0
	for _, i := range path {
		if i != 0 && r.cache.nodes[i].refs == 0 {
			idle += int(r.cache.nodes[i].have)
		}
	}
	// The decodes of this step have had their blocks promised already.
	promised := 0
	if len(r.decode) > 0 {
		promised = int(r.phases[r.step%int64(b)])
	}
	if fresh > r.cache.available()-idle-promised {
		return false
	}
	r.waiting.remove(s)
	s.segAt, s.segTok = 0, 0
	for k, i := range path {
		if i != 0 {
			r.cache.ref(i)
			s.held = append(s.held, i)
		}
		if k < len(path)-1 {
			s.segTok += s.Segs[k].Tokens
			s.segAt++
		}
	}
	r.cache.take(fresh)
	s.priv, s.target, s.computed = fresh, target, hit*b
	s.state = seqPrefill
	r.running.pushBack(s)
	r.prefill = append(r.prefill, s)
	r.stats.PrefixQueries += float64(s.Prompt)
	r.stats.PrefixHits += float64(hit * b)
	if s.Preempts == 0 || s.Started == 0 {
		s.Started, s.Cached = t, hit*b
		r.stats.QueueSum += t - s.Queued
		r.stats.QueueCount++
	}
	return true
}

// Stats is what the engine's metrics page says: gauges at a moment and
// counters since it started.
type Stats struct {
	Running, Waiting int
	KVUsage          float64 // 0..1

	Steps, PromptTokens, OutputTokens float64
	PrefixQueries, PrefixHits         float64 // tokens
	Preemptions, Finished, Aborted    float64
	TTFTSum, TTFTCount                float64
	ITLSum, ITLCount                  float64
	QueueSum, QueueCount              float64
	PrefillSum, PrefillCount          float64
}

// Stats reads the engine at now. Inside a bulk stretch the steps made so far
// count.
func (r *Replica) Stats(now float64) Stats {
	s := r.stats
	s.Running, s.Waiting = r.running.len, r.waiting.len
	if !math.IsNaN(r.frozenAt) {
		now = r.frozenAt
	}
	for _, q := range r.pending {
		if q.Queued <= now {
			s.Waiting++
		}
	}
	used := r.cache.used()
	if r.busy && r.bulk {
		k, n := float64(r.stepsBy(now)), float64(len(r.decode))
		s.Steps += k
		s.OutputTokens += n * k
		s.ITLCount += n * k
		s.ITLSum += n * (r.at(int64(k)) - r.start)
		used += int(n * k / float64(len(r.phases)))
	}
	s.KVUsage = min(1, float64(used)/float64(r.cache.total))
	return s
}

// EachDecoding calls f for every decoding sequence with its output tokens at now.
func (r *Replica) EachDecoding(now float64, f func(s *Seq, made int)) {
	more := 0
	if r.busy && r.bulk {
		if !math.IsNaN(r.frozenAt) {
			now = r.frozenAt
		}
		more = int(r.stepsBy(now))
	}
	for s := r.running.head; s != nil; s = s.next {
		if s.state == seqDecode {
			f(s, r.Made(s)+more)
		}
	}
}

// Queued is how many sequences are in the replica, front end included.
func (r *Replica) Queued() int { return len(r.pending) + r.waiting.len + r.running.len }

// Load counts what is running and what waits, front end included in waiting.
func (r *Replica) Load() (running, waiting int) {
	return r.running.len, r.waiting.len + len(r.pending)
}
