package proxy

import (
	"errors"
	"io"
	"strconv"
	"time"

	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/internal/mutant"
	"github.com/penstock/penstock/wire"
)

// bodyReader reads the body of an answer by its framing.
type bodyReader struct {
	u       *upConn
	framing framing
	left    int64
	dc      dechunker
	clean   bool // the body ended where its framing says
}

func (b *bodyReader) reset(u *upConn, h *answerHead) {
	*b = bodyReader{u: u, framing: h.framing, left: h.length}
}

// next returns the next stretch of payload, valid until the next call.
// io.EOF is the clean end; io.ErrUnexpectedEOF is an end before it.
func (b *bodyReader) next() ([]byte, error) {
	for {
		switch {
		case b.framing == framingNone, b.framing == framingLength && b.left == 0, b.framing == framingChunked && b.dc.ended():
			b.clean = true
			return nil, io.EOF
		}
		if err := b.u.fill(); err != nil {
			if err == io.EOF {
				if b.framing == framingClose {
					b.clean = true
					return nil, io.EOF
				}
				return nil, io.ErrUnexpectedEOF
			}
			return nil, err
		}
		w := b.u.in.unread()
		switch b.framing {
		case framingLength:
			if int64(len(w)) > b.left {
				w = w[:b.left]
			}
			b.left -= int64(len(w))
			b.u.in.r += len(w)
			return w, nil
		case framingClose:
			b.u.in.r += len(w)
			return w, nil
		}
		data, n, err := b.dc.next(w)
		b.u.in.r += n
		if err != nil {
			return nil, err
		}
		if len(data) > 0 {
			return data, nil
		}
	}
}

// result is how an attempt ended.
type result struct {
	kind     resultKind
	evidence fleet.Evidence
	busyFor  float64 // what a busy replica asked for, seconds
	taken    bool    // the router itself took the attempt back: flight.taken says why
}

type resultKind uint8

const (
	answered  resultKind = iota + 1 // the client has its whole answer
	broken                          // the answer had begun and could not be ended; the client was told
	failed                          // nothing was forwarded: another attempt may be made
	cancelled                       // the flight has a cause to end (see why), or its deadline passed
)

// Words the pieces of chunked framing.
const (
	crlf      = "\r\n"
	lastChunk = "0\r\n\r\n"
)

func appendChunk(dst, data []byte) []byte {
	dst = strconv.AppendUint(dst, uint64(len(data)), 16)
	dst = append(append(dst, crlf...), data...)
	return append(dst, crlf...)
}

// streamer relays one event stream. It is part of the flight, so that a
// stream costs no allocation.
type streamer struct {
	body      bodyReader
	u         *upConn // of each
	err       error   // of each
	head      *answerHead
	mode      outMode
	committed bool
	stop      bool     // the observer says: do not send this, end here
	out       *scratch // framed bytes that wait: the head and what came before the first content event
	evidence  fleet.Evidence
	counted   bool          // its violation was counted
	endErr    *wire.Error   // how a committed stream is to be ended
	good      []byte        // when stopped: the part of the last payload that may still go
	tail      uint32        // the last four payload bytes forwarded
	told      int           // tokens told to the core
	stallBy   time.Duration // by sinceStart
}

// precommitLimit bounds what is held back before the first content event. A
// replica that sends so much without any is taken to have begun.
const precommitLimit = 256 << 10

// stream relays a server-sent event stream whose head is h. Nothing is
// forwarded before the first event with content: until then the attempt may
// still fail over.
func (f *flight) stream(u *upConn, h *answerHead) result {
	s := &f.str
	*s = streamer{head: h, mode: outChunked, tail: '\n'<<8 | '\n', evidence: fleet.EvidenceOK}
	s.body.reset(u, h)
	if f.req.http10 {
		s.mode = outClose
	}
	f.watchModel()
	f.phase.Store(uint32(phaseFirstToken))
	defer func() {
		putScratch(s.out)
		s.out = nil
	}()
	err := f.relay(u)
	switch {
	case s.stop:
		return f.breakOff(s.evidence)
	case err == io.EOF:
		return f.endStream()
	case err == errClient:
		return result{kind: cancelled}
	case f.why() != causeNone:
		return f.cutShort()
	}
	f.obs.Cut()
	f.countViolation()
	ev := f.evidenceOf(err, s.committed)
	if ev == fleet.EvidenceOK {
		s.endErr = wire.NewError(wire.CodeDeadlineExceeded, "the deadline of the request passed before the answer was whole")
	}
	return f.breakOff(ev)
}

// relay passes on what comes until the stream ends (io.EOF), is to be stopped
// (nil), or fails.
func (f *flight) relay(u *upConn) error {
	s := &f.str
	if s.body.framing == framingChunked && u.raw != nil && edgeHup {
		s.u, s.err = u, nil
		if err := u.pump(f, f.eachFn); err != nil {
			return cutEOF(err)
		}
		return s.err
	}
	for {
		var err error
		if s.body.framing != framingChunked {
			err = f.stepPlain()
		} else if err = cutEOF(u.fill()); err == nil {
			err = f.step(u)
		}
		if err != nil || s.stop {
			return err
		}
	}
}

// each is pump's call.
func (f *flight) each() bool {
	s := &f.str
	s.err = f.step(s.u)
	return s.err == nil && !s.stop
}

// cutEOF: the end of the connection inside chunked framing is a cut.
func cutEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// errClient says that the client could not be written to.
var errClient = errors.New("client gone")

// step passes on the window of a chunked body, in one write. It returns
// io.EOF at the end that the framing says.
func (f *flight) step(u *upConn) error {
	s := &f.str
	b := &s.body
	w := u.in.unread()
	n, ok := b.dc.whole(w, f.watchFn)
	u.in.r += n
	run := w[:n]
	// What is left is a piece of a chunk, an extension, or the end: taken
	// apart and framed anew, so that an own error event always finds the
	// framing between two chunks.
	if s.committed && ok && n == len(w) && s.mode == outChunked && s.out == nil {
		return f.flushRun(run)
	}
	if err := f.appendRun(run); err != nil {
		return err
	}
	if !ok {
		f.frameGood()
	}
	for rest := w[n:]; ok && len(rest) > 0 && !b.dc.ended(); {
		data, k, err := b.dc.next(rest)
		rest = rest[k:]
		u.in.r += k
		if err != nil {
			s.evidence = fleet.EvidenceProtocol
			s.stop = true
			break
		}
		if len(data) > 0 {
			if !f.watch(data) {
				f.frameGood()
				break
			}
			f.frame(data)
		}
	}
	if b.dc.ended() && !s.stop {
		b.clean = true
		return io.EOF // endStream sends what waits together with the last chunk
	}
	return f.flush()
}

// stepPlain is step for bodies that are not chunked.
func (f *flight) stepPlain() error {
	data, err := f.str.body.next()
	if err != nil {
		return err
	}
	if f.watch(data) {
		f.frame(data)
	} else {
		f.frameGood()
	}
	return f.flush()
}

// frame appends payload to what waits, framed for the client.
func (f *flight) frame(data []byte) {
	s := &f.str
	if s.out == nil {
		s.out = getScratch()
	}
	if s.mode == outChunked {
		s.out.b = appendChunk(s.out.b, data)
	} else {
		s.out.b = append(s.out.b, data...)
	}
}

// frameGood frames what is good of the payload at which the stream is stopped.
func (f *flight) frameGood() {
	if len(f.str.good) > 0 {
		f.frame(f.str.good)
	}
	f.str.good = nil
}

// appendRun appends whole chunks with their framing to what waits.
func (f *flight) appendRun(run []byte) error {
	s := &f.str
	if len(run) == 0 {
		return nil
	}
	if s.mode != outChunked {
		var d dechunker
		for len(run) > 0 {
			data, n, err := d.next(run)
			if err != nil {
				return err
			}
			run = run[n:]
			f.frame(data)
		}
		return nil
	}
	if s.out == nil {
		s.out = getScratch()
	}
	s.out.b = append(s.out.b, run...)
	return nil
}

// flushRun writes whole chunks straight from the read buffer.
func (f *flight) flushRun(run []byte) error {
	if f.conn.send(run) != nil {
		return errClient
	}
	f.moved()
	return nil
}

// flush sends what waits, once the answer has begun.
func (f *flight) flush() error {
	s := &f.str
	if !s.committed {
		if !f.obs.Committed && (s.out == nil || len(s.out.b) < precommitLimit) || s.stop {
			return nil
		}
		return f.commit(nil)
	}
	if s.out != nil {
		err := f.conn.send(s.out.b)
		putScratch(s.out)
		s.out = nil
		if err != nil {
			return errClient
		}
	}
	f.moved()
	return nil
}

// commit begins the answer: the head, all that came so far and tail leave in
// one write. From here on there is no failing over.
func (f *flight) commit(tail []byte) error {
	s := &f.str
	s.committed, f.wrote = true, true
	f.firstAt = f.p.now()
	f.judge(false)
	f.phase.Store(uint32(phaseStreaming))
	f.status = s.head.status
	head := getScratch()
	head.b = f.appendAnswerHead(head.b, s.head, s.mode, 0)
	if s.out != nil {
		head.b = append(head.b, s.out.b...)
		putScratch(s.out)
		s.out = nil
	}
	head.b = append(head.b, tail...)
	err := f.conn.send(head.b)
	putScratch(head)
	f.pool.first(f, true)
	f.replica.metrics.ttft.Update(f.firstAt - f.req.arrived)
	f.mu.Lock()
	f.revoke = false // a revocation that crossed the first event is void: the answer has begun
	f.mu.Unlock()
	f.dropBody()
	if err != nil {
		return errClient
	}
	f.moved()
	return nil
}

// moved notes that the stream lives: the stall deadline moves on (seldom, as
// a timer costs), and the core hears of tokens now and then.
func (f *flight) moved() {
	s := &f.str
	now := sinceStart()
	stall := f.p.opt.StallTimeout
	if s.stallBy-now < stall/2 {
		s.stallBy = now + stall
		by := time.Now().Add(stall)
		if f.hardBy.After(past) && f.hardBy.Before(by) {
			by = f.hardBy
		}
		f.deadline(by)
	}
	if f.obs.Content-s.told >= progressEvery {
		s.told = f.obs.Content
		f.pool.progress(f, s.told)
	}
}

// progressEvery is how many content events pass between two words to the core.
const progressEvery = 32

// endStream ends a stream whose framing ended cleanly, if its events did, too.
func (f *flight) endStream() result {
	s := &f.str
	f.obs.Close()
	f.countViolation()
	if ev, ok := f.healthyEnd(); !ok {
		return f.breakOff(ev)
	}
	tail := ""
	if s.mode == outChunked {
		tail = lastChunk
	}
	var err error
	if !s.committed {
		err = f.commit([]byte(tail))
	} else {
		if s.out == nil {
			s.out = getScratch()
		}
		s.out.b = append(s.out.b, tail...)
		if len(s.out.b) > 0 && f.conn.send(s.out.b) != nil {
			err = errClient
		}
	}
	if err != nil {
		return result{kind: cancelled}
	}
	return result{kind: answered}
}

// breakOff ends a stream that failed. Before the answer began it leaves room
// for another attempt; after it the client gets one error event, no end mark,
// no last chunk, and the connection is closed.
func (f *flight) breakOff(ev fleet.Evidence) result {
	s := &f.str
	if !s.committed {
		return result{kind: failed, evidence: ev}
	}
	e := s.endErr
	if e == nil {
		e = wire.NewError(wire.CodeUpstreamStreamFailed, "%s", streamFailure(ev))
	}
	f.errCode = e.Code
	f.endWithError(e)
	return result{kind: broken, evidence: ev}
}

func streamFailure(ev fleet.Evidence) string {
	switch ev {
	case fleet.EvidenceAbort:
		return "the replica stopped before the answer was whole"
	case fleet.EvidenceStalled:
		return "the replica stopped sending"
	case fleet.EvidenceEngineDead:
		return "the replica's engine failed"
	case fleet.EvidenceProtocol:
		return "the replica broke the protocol of the stream"
	}
	return "the connection to the replica was lost"
}

// endWithError sends what waits and the error event, and closes.
func (f *flight) endWithError(e *wire.Error) {
	s := &f.str
	f.closeConn = true
	if mutant.On("silent-cut") {
		return
	}
	if s.out == nil {
		s.out = getScratch()
	}
	ev := getScratch()
	if s.tail&0xffff != '\n'<<8|'\n' && s.tail != '\r'<<24|'\n'<<16|'\r'<<8|'\n' {
		ev.b = append(ev.b, "\n\n"...) // end the event that was cut
	}
	ev.b = e.AppendEvent(ev.b, f.req.kind)
	f.frame(ev.b)
	putScratch(ev)
	_ = f.conn.send(s.out.b) // nothing more can be done for a client that left now
}

// cutShort ends a stream that the router itself ends: the client left, or the
// router stops, or the deadline passed.
func (f *flight) cutShort() result {
	s := &f.str
	if f.why() != causeGone && s.committed {
		s.endErr = wire.NewError(wire.CodeUpstreamStreamFailed, "the router is shutting down")
		f.errCode = s.endErr.Code
		f.endWithError(s.endErr)
		return result{kind: broken, evidence: fleet.EvidenceOK}
	}
	return result{kind: cancelled}
}
