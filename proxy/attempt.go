package proxy

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/internal/mutant"
	"github.com/penstock/penstock/internal/ownfault"
	"github.com/penstock/penstock/wire"
)

// saved is the last answer of a replica that was not forwarded since another
// attempt might do better: a busy one goes back as it is when none did.
type saved struct {
	head answerHead
	body *scratch
	set  bool
}

// refusalLimit bounds the body of a replica's error answer that is kept.
const refusalLimit = 64 << 10

// prepare fills in what the core is told of the request, for one target. The
// estimate of its prompt is the core's own, see pool.admit.
func (f *flight) prepare(t *target) {
	w := &f.ticket.Work
	b := &f.body
	if w.Arrived == 0 {
		*w = fleet.Work{Arrived: f.req.arrived, Deadline: f.req.deadline, Class: uint8(f.req.classIndex), Tenant: f.tenantID,
			MaxOut: b.MaxOut, Seqs: sequences(b), Blocks: b.Blocks, Bytes: len(f.req.body),
			ASCII: b.ASCII, Other: b.Other, Media: b.MediaParts, Whole: !b.Stream, Needs: needs(b)}
		if !f.req.kind.Generates() {
			w.MaxOut = 1
		}
	}
	w.Print = f.stormPrint
	w.Model = t.id
	f.target = t
	f.prepareRung()
}

// maxSeqs bounds the answers that one request is counted as: vLLM refuses more,
// and what one client asks for must not drown the accounts until it has.
const maxSeqs = 16384

func sequences(b *wire.Body) int { return int(min(float64(b.N)*float64(b.Prompts), maxSeqs)) }

// release returns the place with what the attempt taught.
func (f *flight) release(r result) {
	e := admission.End{Evidence: r.evidence, RetryAfter: r.busyFor}
	switch r.kind {
	case answered:
		e.Outcome, e.Evidence = admission.Finished, fleet.EvidenceOK
	case cancelled:
		e.Outcome = admission.Cancelled
		if f.why() == causeRevoked {
			e.Outcome = admission.Failed
		}
	default:
		e.Outcome = admission.Failed
		if (r.evidence == fleet.EvidenceFirstTimeout || r.kind == failed && r.evidence == fleet.EvidenceOK) && f.late() {
			e.Outcome = admission.Cancelled
		}
	}
	if f.usage.Seen {
		e.Prompt, e.Cached, e.Completion = f.usage.Prompt, f.usage.Cached, f.usage.Completion
	}
	if mutant.On("leaked-permit") && r.kind == cancelled {
		f.placed = false
	}
	if mutant.On("ignore-retry-after") && e.Evidence == fleet.EvidenceBusy {
		e.Evidence = fleet.EvidenceOK
	}
	f.pool.release(f, e)
	if r.kind == failed && f.replica != nil {
		if n := f.obs.Content; n > 0 {
			f.p.metrics.wasted[r.evidence].Add(n)
		}
	}
}

// attempt sends the request to r and relays what comes.
func (f *flight) attempt(r *replica, d *admission.Decision) result {
	by := f.attemptDeadline(d)
	f.obs.Reset(f.req.kind)
	f.mark = wire.ViolationNone
	u := r.take()
	counted := false
	for {
		if u == nil {
			var err error
			if u, err = r.dial(f, by); err != nil {
				if f.why() != causeNone {
					return result{kind: cancelled}
				}
				if f.late() || ownfault.Is(err) {
					// Cut short by the request's own deadline, which may be a
					// millisecond, or for want of a file descriptor here: that
					// says nothing of the replica.
					return result{kind: failed, evidence: fleet.EvidenceOK}
				}
				return result{kind: failed, evidence: fleet.EvidenceRefused}
			}
		}
		if !counted { // a replay is the same attempt
			if !f.deadlineAt.IsZero() {
				f.p.metrics.deadline[min(f.attempts, 1)].Update(time.Until(f.deadlineAt).Seconds())
			}
			f.attempts++
			counted = true
		}
		res, replay := f.exchange(r, u, by)
		if !replay {
			return res
		}
		if f.unsafe(fleet.EvidenceReset) {
			return result{kind: failed, evidence: fleet.EvidenceReset}
		}
		// A kept connection was closed by the replica just then. Whether it saw
		// the request cannot be known; these paths keep no state, so once more,
		// on a fresh connection.
		u = nil
	}
}

// exchange is one attempt on one connection. replay tells that the connection
// was used before and died without a byte of an answer.
func (f *flight) exchange(r *replica, u *upConn, by time.Time) (res result, replay bool) {
	if !f.attach(u) {
		u.close()
		return result{kind: cancelled}, false
	}
	clean := false
	defer func() { // also on a panic
		f.detach()
		switch {
		case clean:
			r.put(u)
		case mutant.On("abandoned-attempt"):
			abandon(u)
		default:
			u.close()
		}
	}()
	f.deadline(by)
	f.phase.Store(uint32(phaseHeaders))
	r.metrics.attempts.Inc()
	werr := f.writeRequest(r, u)
	h := &f.head
	began, err := u.readHead(h, f.p.opt.MaxHeader, f.req.head)
	if werr != nil && err != nil && !began {
		err = werr
	}
	if err != nil {
		if f.why() != causeNone {
			return result{kind: cancelled}, false
		}
		if u.reused && !began && !isTimeout(err) {
			return result{}, true
		}
		return result{kind: failed, evidence: f.evidenceOf(err, false)}, false
	}
	res = f.take(r, u, h)
	// Also when the client has left since: its answer was read to the end.
	clean = f.str.body.clean && h.reuse && werr == nil
	return res, false
}

// writeRequest sends head and body. The alias's value is replaced on the way,
// without copying the body.
func (f *flight) writeRequest(r *replica, u *upConn) error {
	body := f.req.body
	if mutant.On("tenant-bleed") {
		body = bleed(body)
	}
	s := getScratch()
	defer putScratch(s)
	if f.target.served == "" {
		s.b = f.requestHead(s.b, r, len(body))
		if len(body) <= joinLimit {
			s.b = append(s.b, body...)
			return u.write(s.b)
		}
		return u.write(s.b, body)
	}
	v := getScratch()
	defer putScratch(v)
	before, after := body[:f.body.ModelStart], body[f.body.ModelEnd:]
	if f.body.Multipart {
		v.b = append(v.b, f.target.served...)
	} else {
		v.b = wire.Splice(v.b, nil, 0, 0, f.target.served)
	}
	s.b = f.requestHead(s.b, r, len(before)+len(v.b)+len(after))
	return u.write(s.b, before, v.b, after)
}

// joinLimit is up to where copying the body behind the head is cheaper than a
// second piece in a writev.
const joinLimit = 16 << 10

// attemptDeadline is when the attempt has to have begun answering.
func (f *flight) attemptDeadline(d *admission.Decision) time.Time {
	limit := f.p.opt.FirstToken
	if !f.body.Stream {
		limit = f.p.opt.AnswerTimeout
	} else if t := time.Duration(f.p.opt.FirstTokenFactor * d.TTFT * float64(time.Second)); t > limit {
		limit = t
	}
	now := time.Now()
	by := f.deadlineAt
	if limit > 0 && (by.IsZero() || now.Add(limit).Before(by)) {
		by = now.Add(limit)
	}
	if r := f.climb.rungBy; !r.IsZero() && (by.IsZero() || r.Before(by)) {
		by = r
	}
	return by
}

// hardLate tells whether the deadline that the client set itself has passed.
func (f *flight) hardLate() bool { return !f.hardBy.IsZero() && !time.Now().Before(f.hardBy) }

// late tells whether the request's deadline has passed.
func (f *flight) late() bool { return !f.deadlineAt.IsZero() && !time.Now().Before(f.deadlineAt) }

// take looks at the answer's head and decides what to do with the answer.
func (f *flight) take(r *replica, u *upConn, h *answerHead) result {
	f.str.body.reset(u, h)
	switch {
	case h.status == 429 || h.status == 500 || h.status >= 502 && h.status <= 504:
		return f.keep(h)
	case h.status >= 300 && h.status < 400 && h.status != 304:
		// vLLM redirects a path that it knows by another spelling to its own
		// address. Never passed on: the client must not learn of it.
		_ = f.drain()
		e := wire.NewError(wire.CodeNotFound, "no such path")
		f.fail(e)
		return result{kind: answered}
	case h.sse && h.status == 200 && !h.encoded && h.framing != framingNone:
		return f.stream(u, h)
	}
	return f.whole(h)
}

// keep reads a refusal of the replica and leaves the request free to go on.
func (f *flight) keep(h *answerHead) result {
	f.dropSaved()
	sv := &f.saved
	sv.body = getScratch()
	for {
		p, err := f.str.body.next()
		if err != nil {
			if !errors.Is(err, io.EOF) && f.why() != causeNone {
				return result{kind: cancelled}
			}
			break
		}
		if len(sv.body.b)+len(p) > refusalLimit {
			break
		}
		sv.body.b = append(sv.body.b, p...)
	}
	ev := evidenceOfClass(wire.ClassifyError(h.status, sv.body.b))
	res := result{kind: failed, evidence: ev}
	if ev == fleet.EvidenceBusy {
		res.busyFor = h.retryAfter
		sv.head, sv.set = *h, true
		sv.head.raw = append([]byte(nil), h.raw...)
	}
	return res
}

func (f *flight) dropSaved() {
	putScratch(f.saved.body)
	f.saved = saved{}
}

// drain reads a body to its end and drops it.
func (f *flight) drain() error {
	for n := 0; n < refusalLimit; {
		p, err := f.str.body.next()
		if err != nil {
			return err
		}
		n += len(p)
	}
	return nil
}

// whole relays an answer that is no event stream. It is held back until it is
// whole, as far as BufferAnswer goes: a replica that dies in it can then
// still be replaced, and an abort that looks like success be seen.
func (f *flight) whole(h *answerHead) result {
	s := &f.str
	body := s.body
	*s = streamer{head: h, body: body, mode: outLength}
	f.phase.Store(uint32(phaseFirstToken))
	acc := getScratch()
	defer putScratch(acc)
	limit := f.p.opt.BufferAnswer
	if h.framing == framingLength && h.length <= int64(limit) && h.length > int64(cap(acc.b)) {
		acc.b = make([]byte, 0, h.length)
	}
	for {
		p, err := s.body.next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			if f.why() != causeNone {
				return result{kind: cancelled}
			}
			return result{kind: failed, evidence: f.evidenceOf(err, false)}
		}
		if len(acc.b)+len(p) > limit {
			return f.pipe(h, acc.b, p)
		}
		acc.b = append(acc.b, p...)
	}
	if h.status == 200 && !h.encoded && f.req.kind.Generates() {
		if ev, ok := f.healthyAnswer(acc.b); !ok {
			return result{kind: failed, evidence: ev}
		}
	}
	mode := outLength
	length := int64(len(acc.b))
	if h.framing == framingNone {
		mode = outNone
		if f.req.head && h.length >= 0 {
			mode, length = outLength, h.length
		}
	}
	f.begun(h)
	head := getScratch()
	defer putScratch(head)
	head.b = f.appendAnswerHead(head.b, h, mode, length)
	f.sent = int64(len(acc.b))
	var err error
	if len(acc.b) <= joinLimit {
		head.b = append(head.b, acc.b...)
		err = f.conn.send(head.b)
	} else {
		err = f.sendHeld(head.b, acc.b)
	}
	if err != nil {
		return result{kind: cancelled}
	}
	if !h.encoded { // its head is not kept
		f.keepAnswer(acc.b)
	}
	return result{kind: answered}
}

// begun notes that an answer begins that is not an event stream.
func (f *flight) begun(h *answerHead) {
	f.str.committed, f.wrote = true, true
	f.firstAt = f.p.now()
	f.status = h.status
	f.judge(false)
	f.phase.Store(uint32(phaseStreaming))
	f.pool.first(f, false)
	f.mu.Lock()
	f.revoke = false
	f.mu.Unlock()
	f.dropBody()
}

// pipe relays an answer too large to hold back: begun holds what was held, p
// is what came last.
func (f *flight) pipe(h *answerHead, held, p []byte) result {
	s := &f.str
	length := int64(0)
	switch {
	case h.framing == framingLength:
		s.mode, length = outLength, h.length
	case f.req.http10:
		s.mode = outClose
	default:
		s.mode = outChunked
	}
	f.begun(h)
	s.out = getScratch()
	s.out.b = f.appendAnswerHead(s.out.b, h, s.mode, length)
	defer func() {
		putScratch(s.out)
		s.out = nil
	}()
	if len(held) > 0 {
		f.frame(held)
	}
	var err error
	for {
		if len(p) > 0 {
			f.frame(p)
			f.sent += int64(len(p))
		}
		if f.flush() != nil {
			return result{kind: cancelled}
		}
		if p, err = s.body.next(); err != nil {
			break
		}
	}
	if errors.Is(err, io.EOF) {
		if s.mode == outChunked && f.conn.send([]byte(lastChunk)) != nil {
			return result{kind: cancelled}
		}
		return result{kind: answered}
	}
	// No event can be put into such a body: its end is an abnormal one.
	f.closeConn = true
	f.errCode = wire.CodeUpstreamStreamFailed
	if f.why() == causeGone {
		return result{kind: cancelled}
	}
	return result{kind: broken, evidence: f.evidenceOf(err, true)}
}

// evidenceOf says what an I/O error of an attempt tells of the replica.
func (f *flight) evidenceOf(err error, committed bool) fleet.Evidence {
	switch {
	case errors.Is(err, errBadHead), errors.Is(err, errHeadTooLarge), errors.Is(err, errBadChunk):
		return fleet.EvidenceProtocol
	case isTimeout(err) || errors.Is(err, context.DeadlineExceeded):
		if f.hardLate() {
			return fleet.EvidenceOK // cut by the client's own deadline, whatever the replica did
		}
		if committed {
			return fleet.EvidenceStalled
		}
		return fleet.EvidenceFirstTimeout
	}
	return fleet.EvidenceReset
}
