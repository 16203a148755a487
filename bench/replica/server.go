package replica

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/penstock/penstock/bench/model"
)

// Server is one running emulated replica.
type Server struct {
	opt   Options
	addr  string
	start time.Time
	kick  chan struct{}
	stop  chan struct{}
	wg    sync.WaitGroup

	mu       sync.Mutex // guards all below; taken before any conn.mu
	ln       net.Listener
	conns    map[*conn]struct{}
	jobs     map[*job]struct{}
	eng      *model.Replica
	page     *page
	frozen   []byte // metrics page while FreezeMetrics or Freeze
	faults   []*activeFault
	touched  []*conn
	ended    float64 // requests that ended, by reason, for the page
	stopped  float64
	rejected float64
	draining bool
	dying    bool // engine dead: health 503
	sleeping bool
	closed   bool
	n        Counts
}

// Start listens and serves until Close.
func Start(o Options) (*Server, error) {
	if err := o.fill(); err != nil {
		return nil, err
	}
	s := &Server{opt: o, start: time.Now(), kick: make(chan struct{}, 1), stop: make(chan struct{}),
		conns: map[*conn]struct{}{}, jobs: map[*job]struct{}{}}
	p := *o.Profile
	p.MaxModelLen = o.MaxModelLen
	s.eng = model.New(p)
	s.eng.Tokens = true
	s.buildPage()
	s.addr = o.Listen
	s.mu.Lock()
	err := s.listenLocked()
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	s.wg.Add(1)
	go s.loop()
	return s, nil
}

// URL is http://host:port of the replica.
func (s *Server) URL() string { return "http://" + s.Addr() }

// Addr is host:port; it stays the same over Refuse, Kill and Heal.
func (s *Server) Addr() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.addr
}

// Counts is what it has seen so far.
func (s *Server) Counts() Counts {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.n
	c.Running = len(s.jobs)
	return c
}

// Stats reads the engine itself, whatever the metrics page says.
func (s *Server) Stats() model.Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.eng.Stats(s.now())
}

// Close ends everything: connections break as with Kill. It waits for all
// goroutines of the replica.
func (s *Server) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	s.faults = nil
	s.killLocked(false)
	s.mu.Unlock()
	close(s.stop)
	s.wg.Wait()
	return nil
}

// now is the engine's time, s: real time since the start times Speed.
func (s *Server) now() float64 { return time.Since(s.start).Seconds() * s.opt.Speed }

// wall turns an engine duration into real seconds.
func (s *Server) wall(engine float64) float64 { return engine / s.opt.Speed }

// listenLocked opens the port again (or for the first time).
func (s *Server) listenLocked() error {
	if s.ln != nil || s.closed {
		return nil
	}
	var err error
	for try := 0; try < 20; try++ {
		var ln net.Listener
		if ln, err = net.Listen("tcp", s.addr); err == nil {
			s.ln, s.addr = ln, ln.Addr().String()
			s.wg.Add(1)
			go s.accept(ln)
			return nil
		}
		if try > 0 && s.addr == s.opt.Listen {
			time.Sleep(5 * time.Millisecond) // the old listener's port may need a moment
		}
	}
	return fmt.Errorf("replica: listen %s: %w", s.addr, err)
}

func (s *Server) accept(ln net.Listener) {
	defer s.wg.Done()
	for {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		k := newConn(s, c.(*net.TCPConn))
		s.mu.Lock()
		if s.ln != ln {
			s.mu.Unlock()
			k.reset()
			continue
		}
		s.n.Connections++
		s.conns[k] = struct{}{}
		s.wg.Add(1)
		s.mu.Unlock()
		go func() {
			defer s.wg.Done()
			k.serve()
		}()
	}
}

func (s *Server) gone(k *conn) {
	s.mu.Lock()
	delete(s.conns, k)
	s.mu.Unlock()
}

// loop is the scheduler: one goroutine and one timer for all sequences.
func (s *Server) loop() {
	defer s.wg.Done()
	t := time.NewTimer(time.Hour)
	defer t.Stop()
	for {
		s.mu.Lock()
		next, evs := s.eng.Step(s.now())
		for _, e := range evs {
			s.event(e)
		}
		touched := s.touched
		s.touched = nil
		for _, k := range touched {
			k.dirty = false
		}
		wait := time.Duration((next - s.now()) / s.opt.Speed * float64(time.Second))
		s.mu.Unlock()
		for i, k := range touched {
			k.flush()
			touched[i] = nil
		}
		s.mu.Lock()
		if s.touched == nil {
			s.touched = touched[:0]
		}
		s.mu.Unlock()
		if next > 1e15 {
			wait = time.Hour
		}
		t.Reset(max(wait, 0))
		select {
		case <-t.C:
		case <-s.kick:
		case <-s.stop:
			return
		}
	}
}

// wake makes the scheduler look again.
func (s *Server) wake() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// handle answers a request, or makes a job of it that the scheduler answers.
func (s *Server) handle(k *conn, req *http.Request, body []byte) *job {
	info := &reqInfo{method: req.Method, path: req.URL.Path, host: req.Host, own: req.Header.Get("X-Request-Id"), fault: req.Header.Get("X-Fault")}
	info.id = info.own
	if info.id == "" {
		info.id = randomHex(32)
	}
	kd, ok := inferencePaths[info.path]
	if !ok && s.opt.Pooling {
		kd, ok = poolingPaths[info.path]
	}
	if !ok {
		s.other(k, info, req, body)
		return nil
	}
	if req.Method != http.MethodPost {
		k.reply(info, 405, jsonType, []byte(`{"detail":"Method Not Allowed"}`), "allow: POST\r\n")
		return nil
	}
	if !s.authorized(k, info, req) {
		return nil
	}
	if s.opt.OnRequest != nil {
		s.opt.OnRequest(info.path, req.Header, body)
	}
	r, apiErr := s.parse(info, kd, req.Header, body)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n.Requests++
	if s.ln == nil && !s.draining { // Refuse, Kill: an old connection has nothing to say
		k.reset()
		return nil
	}
	if apiErr != nil {
		s.n.Refused++
		k.replyError(info, apiErr)
		return nil
	}
	return s.submitLocked(k, r)
}

func (s *Server) authorized(k *conn, info *reqInfo, req *http.Request) bool {
	if s.opt.APIKey == "" || !strings.HasPrefix(info.path, "/v1") || req.Header.Get("Authorization") == "Bearer "+s.opt.APIKey {
		return true
	}
	k.replyJSON(info, 401, `{"error":"Unauthorized"}`)
	return false
}

// getPaths is what answers GET only.
var getPaths = map[string]bool{"/health": true, "/ping": true, "/version": true, "/load": true, "/metrics": true,
	"/v1/models": true, "/is_sleeping": true, "/counts": true}

// postPaths is what answers POST only, besides inference.
var postPaths = map[string]bool{"/tokenize": true, "/detokenize": true, "/sleep": true, "/wake_up": true, "/reset_prefix_cache": true,
	"/v1/load_lora_adapter": true, "/v1/unload_lora_adapter": true}

// other answers all paths that are not inference.
func (s *Server) other(k *conn, info *reqInfo, req *http.Request, body []byte) {
	path := info.path
	if path == "/fault" {
		s.faultPath(k, info, body)
		return
	}
	if p := strings.TrimSuffix(path, "/"); p != path && p != "" {
		if _, ok := inferencePaths[p]; ok || getPaths[p] || postPaths[p] {
			k.reply(info, 307, "", nil, "location: http://"+info.host+p+"\r\n")
			return
		}
	}
	dev := path == "/sleep" || path == "/wake_up" || path == "/reset_prefix_cache" || path == "/is_sleeping"
	known := getPaths[path] || postPaths[path]
	if !known || dev && !s.opt.Dev {
		k.replyJSON(info, 404, `{"detail":"Not Found"}`)
		return
	}
	want := http.MethodGet
	if postPaths[path] {
		want = http.MethodPost
	}
	if info.method != want && (path != "/ping" || info.method != http.MethodPost) {
		k.reply(info, 405, jsonType, []byte(`{"detail":"Method Not Allowed"}`), "allow: "+want+"\r\n")
		return
	}
	if !s.authorized(k, info, req) {
		return
	}
	if want == http.MethodPost {
		s.postPath(k, info, req, body)
		return
	}
	s.getPath(k, info)
}

func (s *Server) getPath(k *conn, info *reqInfo) {
	s.mu.Lock()
	hang := info.path == "/health" && s.hasFault(HangHealth) || info.path == "/metrics" && s.hasFault(HangMetrics)
	dying, load, sleeping := s.dying, len(s.jobs), s.sleeping
	counts := s.n
	counts.Running = load
	s.mu.Unlock()
	if hang { // read and never answered; the client's leaving ends the connection
		_ = k.c.SetReadDeadline(time.Time{})
		_, _ = k.br.Peek(1)
		k.finish()
		return
	}
	switch info.path {
	case "/health", "/ping":
		if dying {
			k.reply(info, 503, "", nil, "")
			return
		}
		k.reply(info, 200, "", nil, "")
	case "/version":
		k.replyJSON(info, 200, `{"version":`+quote(s.opt.Version)+`}`)
	case "/load":
		k.replyJSON(info, 200, fmt.Sprintf(`{"server_load":%d}`, load))
	case "/is_sleeping":
		k.replyJSON(info, 200, fmt.Sprintf(`{"is_sleeping":%t}`, sleeping))
	case "/counts":
		k.replyJSON(info, 200, fmt.Sprintf(`{"connections":%d,"requests":%d,"finished":%d,"aborted":%d,"refused":%d,"running":%d}`,
			counts.Connections, counts.Requests, counts.Finished, counts.Aborted, counts.Refused, counts.Running))
	case "/v1/models":
		k.reply(info, 200, jsonType, s.models(), "")
	case "/metrics":
		s.metrics(k, info)
	}
}

func (s *Server) models() []byte {
	b := []byte(`{"object":"list","data":[`)
	for i, name := range append([]string{s.opt.Model}, s.opt.Aliases...) {
		parent := "null"
		maxLen := strconv.Itoa(s.opt.MaxModelLen)
		if i > 0 {
			b = append(b, ',')
			parent, maxLen = quote(s.opt.Model), "null"
		}
		now := time.Now().Unix()
		b = fmt.Appendf(b, `{"id":%s,"object":"model","created":%d,"owned_by":"vllm","root":%s,"parent":%s,"max_model_len":%s,"permission":[{"id":"modelperm-%s","object":"model_permission","created":%d,"allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,"allow_search_indices":false,"allow_view":true,"allow_fine_tuning":false,"organization":"*","group":null,"is_blocking":false}]}`,
			quote(name), now, quote(name), parent, maxLen, randomHex(16), now)
	}
	return append(b, "]}"...)
}

func randomHex(n int) string {
	b := make([]byte, n)
	for i := 0; i < n; i += 16 {
		x := rand.Uint64()
		for j := i; j < min(i+16, n); j++ {
			b[j] = hexDigits[x&15]
			x >>= 4
		}
	}
	return string(b)
}
