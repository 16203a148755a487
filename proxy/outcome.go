package proxy

import (
	"math/rand/v2"
	"time"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/internal/mutant"
	"github.com/penstock/penstock/wire"
)

// statusClientClosed is what a request counts as when its client left first.
// It is never sent.
const statusClientClosed = 499

// cancelledWhile ends a request that has a cause to end, or whose client could
// not be written to.
func (f *flight) cancelledWhile(ph phase) {
	f.closeConn = true
	f.outcome = outcomeCancelled
	switch {
	case f.why() == causeShutdown && !f.wrote:
		e := wire.NewError(wire.CodeNotReady, "the router is shutting down")
		f.fail(e)
		return
	case f.why() == causeShutdown:
		// Cut in the middle, and the client takes not even the error event.
		f.outcome, f.errCode = outcomeFailed, wire.CodeUpstreamStreamFailed
	default:
		f.status = statusClientClosed
		f.p.metrics.cancels[ph].Inc()
	}
}

// expire answers a request whose deadline has passed.
func (f *flight) expire() {
	f.outcome = outcomeCancelled
	f.fail(wire.NewError(wire.CodeDeadlineExceeded, "the deadline of the request passed before an answer began"))
}

// refuse answers a request that found no place: at once, or on the way to
// another attempt.
func (f *flight) refuse(d admission.Decision, last result) {
	f.p.metrics.sheds[d.Reason].Inc()
	if f.attempts > 0 || last.kind == failed {
		// Not for want of room here, but because an attempt failed and no
		// other replica could take over.
		f.giveUp(last)
		return
	}
	f.outcome = outcomeShed
	var e *wire.Error
	switch d.Reason {
	case admission.ReasonDeadline:
		f.expire()
		return
	case admission.ReasonTooLong:
		f.outcome = outcomeRefused
		e = wire.NewError(wire.CodeContextLength, "the prompt and the least output are longer than any replica of this model can hold")
	case admission.ReasonNotPermitted:
		e = wire.NewError(wire.CodeNoPermittedReplica, "no live replica may serve this request")
	case admission.ReasonNoReplica:
		if f.climb.lr != nil && f.climb.lr.opt.Regions != 0 {
			e = wire.NewError(wire.CodeNoPermittedReplica, "no replica lives in a region that this route permits")
			break
		}
		e = wire.NewError(wire.CodeCapacityExhausted, "no replica of this model is available now")
	default:
		e = wire.NewError(wire.CodeCapacityExhausted, "all replicas of this model are busy")
	}
	if e.Status == 503 {
		print := f.print()
		f.noteStorm(print, d.RetryAfter)
		if f.pool != nil {
			f.pool.told(f, print)
		}
		if d.RetryAfter > 0 {
			e.RetryAfter = d.RetryAfter
		}
	}
	f.fail(e)
}

// giveUp answers after the last attempt. A busy replica's own words go back;
// everything else is one 502.
func (f *flight) giveUp(last result) {
	f.outcome = outcomeFailed
	f.lastEv = last.evidence
	if last.evidence == fleet.EvidenceBusy && f.saved.set {
		f.outcome = outcomeShed
		f.answerSaved()
		return
	}
	e := wire.NewError(wire.CodeUpstreamError, "%s", upstreamFailure(last.evidence))
	if !f.unsafe(last.evidence) {
		f.allowRepeat(e)
	}
	f.fail(e)
}

// attemptsSpent tells that the request has had its attempts: the router's own, and each
// repeat of the client's SDK as one.
func (f *flight) attemptsSpent() bool {
	return f.attempts+int(f.req.retries) >= f.p.opt.Attempts
}

// allowRepeat tells the client when to come again if the request has an attempt
// left that the router does not make itself: no good replica is there now, or
// what fails together would be more than the attempt budget.
func (f *flight) allowRepeat(e *wire.Error) {
	if f.attemptsSpent() {
		return
	}
	wait := 1.0
	if b := f.pool.opt.Budget; b != nil {
		f.pool.mu.Lock()
		w, ok := b.Later(f.p.now())
		f.pool.mu.Unlock()
		if !ok {
			return
		}
		wait = w
	}
	e.Retry, e.RetryAfter = true, wait*(1+0.4*rand.Float64())
	if mutant.On("in-step") {
		e.RetryAfter = 1
	}
}

func upstreamFailure(ev fleet.Evidence) string {
	switch ev {
	case fleet.EvidenceRefused:
		return "no replica could be reached"
	case fleet.EvidenceFirstTimeout, fleet.EvidenceStalled:
		return "no replica began to answer in time"
	case fleet.EvidenceProtocol:
		return "the replica's answer could not be understood"
	}
	return "the replicas failed to answer"
}

// answerSaved sends a replica's refusal as it came.
func (f *flight) answerSaved() {
	f.failClosed()
	s := getScratch()
	defer putScratch(s)
	f.status, f.wrote = f.saved.head.status, true
	s.b = f.appendAnswerHead(s.b, &f.saved.head, outLength, int64(len(f.saved.body.b)))
	s.b = append(s.b, f.saved.body.b...)
	f.sent = int64(len(f.saved.body.b))
	if f.conn.send(s.b) != nil {
		f.closeConn = true
	}
}

// account counts a request that has ended and writes its line in the log.
func (f *flight) account() {
	p := f.p
	m := p.metrics
	status := f.status
	if f.outcome == outcomeFailed && status < 500 {
		status = 502 // a stream that broke after its 200
	}
	m.request(f.req.kind, status)
	if f.outcome != outcomeNone {
		m.outcomes[f.outcome].Inc()
	}
	now := p.now()
	if f.outcome == outcomeFinished && f.replica != nil && f.status < 400 {
		f.forgetStorm()
		f.accountAnswer(now)
	} else if t := f.tokens(); t.known && f.replica != nil {
		f.accountCut(t)
	}
	if p.opt.Tracer != nil && f.req.kind != wire.KindNone {
		f.span(status)
	}
	if f.req.kind != wire.KindNone {
		f.logLine(status, now)
	}
}

// accountAnswer counts tokens and times of an answer that came whole.
func (f *flight) accountAnswer(now float64) {
	p, rm := f.p, f.replica.metrics
	rm.e2e.Update(now - f.req.arrived)
	if !f.req.kind.Generates() {
		return
	}
	out := f.obs.Content
	if f.usage.Seen {
		out = f.usage.Completion
		rm.in.Add(f.usage.Prompt)
		rm.cached.Add(f.usage.Cached)
	} else {
		p.metrics.estimated.Inc()
		rm.in.Add(f.ticket.Work.Prompt)
	}
	rm.out.Add(out)
	itl := 0.0
	if n := f.obs.Content; n > 1 {
		itl = (now - f.firstAt) / float64(n-1)
		rm.itl.Update(itl)
	}
	g := f.pool.goals.Load()
	ttft := f.firstAt - f.req.arrived
	if !f.body.Stream {
		ttft = 0 // an answer in one piece has no first token to be judged by
	}
	if ttft <= g.ttft+g.ttftPer1K*float64(f.ticket.Work.Prompt)/1000 && itl <= g.itl {
		p.metrics.sloMet.Inc()
	} else {
		p.metrics.sloMissed.Inc()
	}
}

// accountCut counts the tokens of an answer that began and did not come whole:
// what the client got was paid for.
func (f *flight) accountCut(t tokens) {
	rm := f.replica.metrics
	rm.in.Add(t.prompt)
	if t.outputKnown {
		rm.out.Add(t.output)
	}
	if t.estimated {
		f.p.metrics.estimated.Inc()
	}
}

// setDeadlines works out when the request has to have been answered.
func (f *flight) setDeadlines() {
	q := &f.req
	class := (*f.p.deadlines.Load())[q.classIndex]
	d := q.timeout
	switch {
	case d > 0: // X-Request-Timeout-Ms: the client's own word
	case d < 0: // the SDK's read timeout
		d = -d
	default:
		d = class
	}
	now := time.Now()
	q.deadline = q.arrived + d.Seconds()
	f.deadlineAt = now.Add(d)
	f.hardBy = f.deadlineAt
	if q.timeout < 0 && class > d {
		// A read timeout bounds each wait for bytes, so an answer that has begun
		// may run on: to the class's deadline.
		f.hardBy = now.Add(class)
	}
}
