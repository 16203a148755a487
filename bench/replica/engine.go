package replica

import (
	"time"

	"github.com/penstock/penstock/bench/model"
)

// job is one inference request in the replica: n sequences per prompt.
type job struct {
	req     *request
	conn    *conn
	done    chan struct{} // closed when the answer is written
	id      string
	created int64
	choices []*choice
	left    int // choices not ended
	begun   bool
	over    bool
	silent  bool // Stall: nothing more will be sent
	fault   *Fault
	content int // content events sent
	seqNo   int // /v1/responses sequence_number
	itemID  string
	timer   *time.Timer // Delay
}

// choice is one sequence of a job.
type choice struct {
	job    *job
	index  int
	prompt *prompt
	seq    model.Seq
	echo   echo
	pieces []string // a tool call's argument pieces
	callID string
	sent   int
	text   []byte // the answer so far
	last   float64
	reason string // finish_reason when ended
	role   bool   // its first chunk went out
}

// submitLocked makes a job and hands its sequences to the engine.
func (s *Server) submitLocked(k *conn, r *request) *job {
	f, apiErr := s.faultFor(r)
	if apiErr == nil {
		apiErr = s.refusal(r, f)
	}
	if apiErr != nil {
		s.n.Refused++
		k.replyError(r.info, apiErr)
		return nil
	}
	j := &job{req: r, conn: k, done: make(chan struct{}), created: time.Now().Unix(), fault: f}
	j.id = idPrefix(r.kind) + r.info.own
	if r.info.own == "" {
		j.id = idPrefix(r.kind) + randomHex(16)
	}
	if f != nil && f.Mode == WrongModel {
		r.model = "another-model"
	}
	s.jobs[j] = struct{}{}
	switch {
	case f != nil && f.Mode == Hang:
		return j
	case f != nil && f.Mode == Reset:
		s.endLocked(j)
		k.reset()
		return j
	case f != nil && f.Mode == Delay:
		j.timer = time.AfterFunc(f.Delay, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			if !j.over {
				s.begin(j)
			}
		})
		return j
	}
	s.begin(j)
	return j
}

// refusal is what a server says instead of taking a request.
func (s *Server) refusal(r *request, f *Fault) *apiError {
	const engineDead = "EngineCore encountered an issue. See stack trace (above) for the root cause."
	switch {
	case s.dying:
		return &apiError{status: 500, kind: "InternalServerError", message: engineDead}
	case s.draining && r.texts:
		return &apiError{status: 500, kind: "InternalServerError", message: "cannot schedule new futures after shutdown"}
	case f != nil && f.Mode == Status:
		e := statusError(f.Status)
		if f.RetryAfter > 0 {
			e.extra = "retry-after: " + itoa(f.RetryAfter) + "\r\n"
		}
		return e
	case s.opt.MaxQueued > 0:
		if _, waiting := s.eng.Load(); waiting >= s.opt.MaxQueued {
			s.rejected++
			return statusError(503)
		}
	}
	return nil
}

// begin writes the headers of a stream (before any work, as vLLM does) and
// queues the sequences.
func (s *Server) begin(j *job) {
	r := j.req
	now := s.now()
	if r.stream {
		j.conn.head(r.info, 200, "text/event-stream; charset=utf-8", -1, "")
		j.begun = true
		s.preamble(j)
		j.conn.flush()
	}
	if j.fault != nil && j.fault.Mode == OnlyDone || s.draining {
		s.abortAnswer(j)
		return
	}
	block := s.opt.Profile.BlockTokens
	for pi := range r.prompts {
		p := &r.prompts[pi]
		segs := segments(p.canon, hashString(hashString(0, r.model), r.salt), block)
		for i := 0; i < r.n; i++ {
			c := &choice{job: j, index: pi*r.n + i, prompt: p, echo: newEcho(p.echo, i)}
			c.seq = model.Seq{Prompt: p.tokens, Out: s.outLength(r, p, c), Segs: segs, User: c}
			j.choices = append(j.choices, c)
		}
	}
	j.left = len(j.choices)
	for _, c := range j.choices {
		s.eng.Add(now, &c.seq)
	}
	s.wake()
}

// outLength is how many tokens a choice will have.
func (s *Server) outLength(r *request, p *prompt, c *choice) int {
	if r.kind >= kindEmbeddings {
		return 1
	}
	room := s.opt.MaxModelLen - p.tokens
	if r.tool != nil {
		args := toolArguments(r.tool.schema, newEcho(p.echo, 0))
		for i := 0; i < len(args); i += bytesPerToken {
			c.pieces = append(c.pieces, args[i:min(i+bytesPerToken, len(args))])
		}
		c.callID = "chatcmpl-tool-" + randomHex(16)
		return min(len(c.pieces)+2, room)
	}
	if r.maxOut > 0 {
		return min(r.maxOut, room)
	}
	return min(s.opt.DefaultOut, room)
}

// event is one thing that the engine did.
func (s *Server) event(e model.Event) {
	c := e.Seq.User.(*choice)
	j := c.job
	switch e.Kind {
	case model.First:
		s.observeFirst(c)
		s.token(c)
	case model.Token:
		s.page.hist["inter_token_latency_seconds"].observe(s.wall(e.At - c.last))
		s.token(c)
	case model.Finish:
		s.observeEnd(c)
		j.left--
		if !j.over && !j.silent && j.left == 0 {
			s.complete(j)
		}
	}
	c.last = e.At
	if !j.over {
		s.touch(j.conn)
	}
}

func (s *Server) touch(k *conn) {
	if !k.dirty {
		k.dirty = true
		s.touched = append(s.touched, k)
	}
}

// token makes the next output token of c and streams it.
func (s *Server) token(c *choice) {
	j := c.job
	if j.over || j.silent {
		return
	}
	if f := j.fault; f != nil && s.breaks(j, f) {
		return
	}
	c.sent++
	last := c.sent == c.seq.Out
	piece := ""
	if j.req.tool == nil {
		space, w := c.echo.next()
		if space {
			c.text = append(c.text, ' ')
			piece = " " + w
		} else {
			piece = w
		}
		c.text = append(c.text, w...)
	}
	if last {
		c.reason = s.finishReason(j.req)
	}
	j.content++
	if j.req.stream {
		s.streamToken(c, piece, last)
	}
}

func (s *Server) finishReason(r *request) string {
	switch {
	case r.tool != nil && r.tool.named:
		return "stop"
	case r.tool != nil:
		return "tool_calls"
	case r.maxOut > 0:
		return "length"
	}
	return "stop"
}

// breaks acts out a fault in the middle of an answer; true = nothing more.
func (s *Server) breaks(j *job, f *Fault) bool {
	if j.content < f.After {
		return false
	}
	switch f.Mode {
	case Cut, CutReset:
		if !j.req.stream && f.After > 0 { // a body that is shorter than it said
			j.conn.head(j.req.info, 200, jsonType, 5000, "")
			j.conn.writeString(`{"id":"` + j.id + `","object":"chat.completion","choices":[{"index":0,"message":{"role":"assi`)
		}
		j.conn.flush()
		s.endLocked(j)
		if f.Mode == CutReset {
			j.conn.reset()
		} else {
			j.conn.finish()
		}
	case Stall:
		j.silent = true
		for _, c := range j.choices {
			s.eng.Abort(s.now(), &c.seq)
		}
		j.conn.flush()
		return true
	case Garble:
		if !j.req.stream {
			j.conn.head(j.req.info, 200, jsonType, 60, "")
			j.conn.writeString("{\"id\":\"chatcmpl-\x00\x01\xff\xfe, \"choices\":[{\"mess")
			j.conn.flush()
			s.endLocked(j)
			j.conn.finish()
			return true
		}
		j.conn.writeChunk([]byte("\x00\x01\xff\xfegarbage {\"not\": json\n\ndata: {\"id\":\"x\",\"choi\n\n"))
		f.Mode = NoDone // once is enough; the rest goes on
		return false
	case AbortOne:
		s.abortAnswer(j)
	case ErrorEvent:
		s.errorAnswer(j)
	default:
		return false
	}
	return true
}

// endLocked forgets j; its sequences are aborted, its connection is free for
// the next request.
func (s *Server) endLocked(j *job) {
	if j.over {
		return
	}
	j.over = true
	if j.timer != nil {
		j.timer.Stop()
	}
	now := s.now()
	for _, c := range j.choices {
		if c.seq.Ended == 0 {
			s.eng.Abort(now, &c.seq)
		}
	}
	delete(s.jobs, j)
	_ = j.conn.c.SetReadDeadline(time.Now().Add(s.opt.IdleClose))
	close(j.done)
	s.wake()
}

// clientLeft is called when the connection of a job broke.
func (s *Server) clientLeft(j *job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !j.over {
		s.n.Aborted++
		s.endLocked(j)
	}
}

// flushEnd sends the rest of an answer that is whole.
func (s *Server) flushEnd(j *job) {
	if j.begun {
		j.conn.writeString("0\r\n\r\n")
	}
	j.conn.flush()
	last := j.conn.lastUse // before the reader goroutine may take the next request
	s.endLocked(j)
	if last {
		j.conn.finish()
	}
}
