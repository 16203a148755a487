package replica

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"
)

// Fault injects f. Faults add up; Heal removes them all.
func (s *Server) Fault(f Fault) error {
	if err := f.check(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("fault: the replica is closed")
	}
	a := &activeFault{Fault: f, left: -1}
	if f.Count > 0 {
		a.left = f.Count
	}
	if f.For > 0 {
		a.until = time.Now().Add(f.For)
		time.AfterFunc(f.For, func() { _ = s.remove(a) })
	}
	s.faults = append(s.faults, a)
	s.apply(f)
	return nil
}

// Heal removes every fault and, where the port was closed, opens it again.
func (s *Server) Heal() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = nil
	return s.settle()
}

func (s *Server) remove(a *activeFault) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, f := range s.faults {
		if f == a {
			s.faults = append(s.faults[:i], s.faults[i+1:]...)
			return s.settle()
		}
	}
	return nil
}

func (s *Server) hasFault(m Mode) bool {
	for _, f := range s.faults {
		if f.Mode == m {
			return true
		}
	}
	return false
}

// settle makes the state agree with the faults that are left.
func (s *Server) settle() error {
	slow := 1.0
	for _, f := range s.faults {
		if f.Mode == Slow {
			slow = f.Factor
		}
	}
	now := s.now()
	s.eng.SetSlow(now, slow)
	s.eng.SetFrozen(now, s.hasFault(Freeze))
	if !s.hasFault(FreezeMetrics) && !s.hasFault(Freeze) {
		s.frozen = nil
	}
	s.draining, s.dying = s.hasFault(Drain) || s.hasFault(Abort), s.hasFault(EngineDead)
	s.wake()
	if s.hasFault(Refuse) || s.hasFault(Kill) || s.hasFault(EngineDead) || s.hasFault(Abort) {
		return nil
	}
	return s.listenLocked()
}

// apply starts a fault of the whole replica.
func (s *Server) apply(f Fault) {
	switch f.Mode {
	case Freeze, FreezeMetrics:
		s.frozen = s.page.render(false)
	}
	_ = s.settle()
	switch f.Mode {
	case Refuse:
		s.unlisten()
		for k := range s.conns {
			if !s.busy(k) {
				k.finish()
			}
		}
	case Kill:
		s.killLocked(true)
	case Abort:
		s.eng.Kill(s.now())
		for j := range s.jobs {
			if len(j.choices) > 0 {
				s.abortAnswer(j)
			}
		}
		s.later(2*time.Second, Abort)
	case EngineDead:
		s.eng.Kill(s.now())
		for j := range s.jobs {
			s.errorAnswer(j)
		}
		s.later(2*time.Second, EngineDead)
	}
}

// later closes the port after d when the fault still holds: the API server
// outlives the engine by that.
func (s *Server) later(d time.Duration, m Mode) {
	time.AfterFunc(d, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.hasFault(m) {
			s.killLocked(false)
		}
	})
}

func (s *Server) busy(k *conn) bool {
	for j := range s.jobs {
		if j.conn == k {
			return true
		}
	}
	return false
}

func (s *Server) unlisten() {
	if s.ln != nil {
		_ = s.ln.Close()
		s.ln = nil
	}
}

// killLocked breaks every connection and closes the port; the cache is lost.
func (s *Server) killLocked(rst bool) {
	s.unlisten()
	s.eng.Kill(s.now())
	for j := range s.jobs {
		s.endLocked(j)
	}
	for k := range s.conns {
		if rst && !k.admin {
			k.reset()
		} else {
			k.finish()
		}
	}
}

// faultFor picks the fault that hits a request: its own (X-Fault, x_fault),
// else the oldest injected one for single requests.
func (s *Server) faultFor(r *request) (*Fault, *apiError) {
	if r.fault != "" {
		f, err := ParseFault(r.fault)
		if err == nil && globalModes[f.Mode] {
			err = fmt.Errorf("fault %q is one of the whole replica: POST it to /fault", f.Mode)
		}
		if err != nil {
			return nil, invalid("x_fault", "%s", err.Error())
		}
		return &f, nil
	}
	for i, a := range s.faults {
		if !requestModes[a.Mode] {
			continue
		}
		f := a.Fault
		if a.left > 0 {
			if a.left--; a.left == 0 {
				s.faults = append(s.faults[:i], s.faults[i+1:]...)
			}
		}
		return &f, nil
	}
	return nil, nil
}

// faultPath is the admin call: POST injects, DELETE heals, GET lists.
func (s *Server) faultPath(k *conn, info *reqInfo, body []byte) {
	switch info.method {
	case http.MethodPost:
		var f Fault
		err := json.Unmarshal(body, &f)
		if err != nil {
			k.replyError(info, invalid("", "%s", err.Error()))
			return
		}
		if requestModes[f.Mode] { // in force before the answer says so
			_ = s.Fault(f)
			k.replyJSON(info, 200, `{"ok":true}`)
			return
		}
		s.mu.Lock()
		k.admin = true // no RST: the answer has to arrive
		s.mu.Unlock()
		k.replyJSON(info, 200, `{"ok":true}`) // first: the fault may close this very connection
		_ = s.Fault(f)
	case http.MethodDelete:
		_ = s.Heal()
		k.replyJSON(info, 200, `{"ok":true}`)
	default:
		s.mu.Lock()
		list := []map[string]any{}
		for _, f := range s.faults {
			list = append(list, map[string]any{"mode": f.Mode, "left": f.left})
		}
		s.mu.Unlock()
		b, _ := json.Marshal(map[string]any{"faults": list})
		k.replyJSON(info, 200, string(b))
	}
}

// postPath answers the small POST paths.
func (s *Server) postPath(k *conn, info *reqInfo, req *http.Request, body []byte) {
	f := fields{}
	_ = json.Unmarshal(body, &f.m)
	s.mu.Lock()
	draining := s.draining
	s.mu.Unlock()
	switch info.path {
	case "/tokenize", "/detokenize":
		if draining {
			k.replyError(info, &apiError{status: 500, kind: "InternalServerError", message: "cannot schedule new futures after shutdown"})
			return
		}
		if name := f.str("model"); name != "" && !s.serves(name) {
			k.replyError(info, s.notFound(name))
			return
		}
		if info.path == "/tokenize" {
			s.tokenize(k, info, &f)
		} else {
			s.detokenize(k, info, &f)
		}
	case "/sleep":
		level, _ := strconv.Atoi(req.URL.Query().Get("level"))
		s.mu.Lock()
		s.sleeping = true
		s.mu.Unlock()
		k.replyJSON(info, 200, fmt.Sprintf(`{"status":"sleeping","level":%d}`, max(level, 1)))
	case "/wake_up":
		s.mu.Lock()
		s.sleeping = false
		s.mu.Unlock()
		k.replyJSON(info, 200, `{"status":"awake","tags":null}`)
	case "/reset_prefix_cache":
		s.mu.Lock()
		s.eng.DropCache()
		s.mu.Unlock()
		k.replyJSON(info, 200, `{"success":true}`)
	default:
		k.replyJSON(info, 404, `{"detail":"Not Found"}`)
	}
}

func (s *Server) tokenize(k *conn, info *reqInfo, f *fields) {
	r := &request{kind: kindCompletion, n: 1}
	field := "prompt"
	if f.has("messages") {
		r.kind, field = kindChat, "messages"
	}
	err := s.promptOf(r, f)
	if err == nil && f.err != nil {
		err = f.err
	}
	if err != nil || len(r.prompts) == 0 {
		if err == nil {
			err = missing(field, len(f.m))
		}
		k.replyError(info, err)
		return
	}
	p := r.prompts[0]
	b := fmt.Appendf(nil, `{"count":%d,"max_model_len":%d,"tokens":[`, p.tokens, s.opt.MaxModelLen)
	for i := 0; i < p.tokens; i++ {
		var tok [4]byte
		copy(tok[:], p.canon[min(4*i, len(p.canon)):])
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, uint64(binary.LittleEndian.Uint32(tok[:])), 10)
	}
	k.reply(info, 200, jsonType, append(b, `],"token_strs":null}`...), "")
}

func (s *Server) detokenize(k *conn, info *reqInfo, f *fields) {
	var ids []uint32
	if !f.has("tokens") {
		k.replyError(info, missing("tokens", len(f.m)))
		return
	}
	if json.Unmarshal(f.m["tokens"], &ids) != nil {
		f.fail("tokens", "list_type", "Input should be a valid list")
		k.replyError(info, f.err)
		return
	}
	var b []byte
	for _, id := range ids {
		b = binary.LittleEndian.AppendUint32(b, id)
	}
	for len(b) > 0 && b[len(b)-1] == 0 {
		b = b[:len(b)-1]
	}
	k.replyJSON(info, 200, `{"prompt":`+quote(string(b))+`}`)
}
