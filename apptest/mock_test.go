package apptest

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/freeport"
)

// call is one inference request as it came to a replica.
type call struct {
	N    int    // ordinal at this replica, from 1
	Head string // request line and headers, as sent
	Body []byte // without transfer framing
	At   time.Time
}

// header returns the first value of a header of the request, "" when absent.
func (c *call) header(name string) string { return headerOf(c.Head, name) }

// headerOf finds a header in raw head text.
func headerOf(head, name string) string {
	for _, line := range strings.Split(head, "\r\n")[1:] {
		k, v, ok := strings.Cut(line, ":")
		if ok && strings.EqualFold(k, name) {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// peerClose is what waitClose saw.
type peerClose struct {
	N      int
	Closed bool // false = still open when the wait was over
	After  time.Duration
	At     time.Time
}

// mockOpts describes a replica. Nil functions mean: healthy, an empty metrics
// page, the one model m1.
type mockOpts struct {
	Handle    func(*conn)
	Addr      string // default: a loopback port that is kept until the test ends
	Models    []string
	Metrics   func() string
	Health    func() int
	Blackhole string // a path that is read and never answered
}

// mock is one replica, played byte by byte.
type mock struct {
	mockOpts
	Addr string
	ln   net.Listener

	mu     sync.Mutex
	calls  []call
	closes []peerClose
	conns  map[net.Conn]struct{}
	live   int // inference requests being handled
	most   int
	paths  map[string][]time.Time // when the control paths (/metrics, /health ...) were asked
	over   bool                   // stopped
}

// newMock starts a replica; it ends with the test.
func newMock(t testing.TB, o mockOpts) *mock {
	t.Helper()
	if o.Addr == "" {
		o.Addr = freeport.Addr(t) // the test's own: while it is stopped nobody else answers there, and it can come back
	}
	ln, err := net.Listen("tcp", o.Addr)
	if err != nil {
		t.Fatalf("mock replica: %v", err)
	}
	m := &mock{mockOpts: o, Addr: ln.Addr().String(), ln: ln, conns: map[net.Conn]struct{}{}, paths: map[string][]time.Time{}}
	go m.accept()
	t.Cleanup(m.stop)
	return m
}

// replica is newMock for the usual case.
func replica(t testing.TB, handle func(*conn)) *mock { return newMock(t, mockOpts{Handle: handle}) }

func (m *mock) url() string { return "http://" + m.Addr }

// stop refuses new connections and closes all that there are.
func (m *mock) stop() {
	m.ln.Close()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.over = true
	for k := range m.conns {
		k.Close()
	}
}

func (m *mock) accept() {
	for {
		k, err := m.ln.Accept()
		if err != nil {
			return
		}
		m.mu.Lock()
		if m.over { // accepted just before the listener closed
			k.Close()
		} else {
			m.conns[k] = struct{}{}
			go m.serve(k)
		}
		m.mu.Unlock()
	}
}

func (m *mock) serve(k net.Conn) {
	c := &conn{m: m, k: k, r: bufio.NewReaderSize(k, 64<<10)}
	defer func() {
		k.Close()
		m.mu.Lock()
		delete(m.conns, k)
		m.mu.Unlock()
	}()
	for !c.dead {
		if c.read() != nil {
			return
		}
		_, target, _ := strings.Cut(c.Head, " ")
		target, _, _ = strings.Cut(target, " ")
		p, _, _ := strings.Cut(target, "?")
		if m.control(c, p) {
			continue
		}
		m.inference(c)
	}
}

// control answers the paths that every replica has.
func (m *mock) control(c *conn, p string) bool {
	switch p {
	case "/health", "/metrics", "/v1/models", "/ping", "/version":
	default:
		return false
	}
	m.mu.Lock()
	m.paths[p] = append(m.paths[p], time.Now())
	m.mu.Unlock()
	if p == m.Blackhole {
		c.waitClose(time.Hour)
		c.dead = true
		return true
	}
	switch p {
	case "/health":
		st := 200
		if m.Health != nil {
			st = m.Health()
		}
		c.json(st, "{}", "")
	case "/metrics":
		page := ""
		if m.Metrics != nil {
			page = m.Metrics()
		}
		if page == "500" {
			c.json(500, `{"error":"no page"}`, "")
			break
		}
		c.send("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: " + strconv.Itoa(len(page)) + "\r\n\r\n" + page)
	case "/v1/models":
		ids := m.Models
		if ids == nil {
			ids = []string{"m1"}
		}
		var list []map[string]any
		for _, id := range ids {
			list = append(list, map[string]any{"id": id, "object": "model", "owned_by": "vllm", "max_model_len": 1 << 20})
		}
		b, _ := json.Marshal(map[string]any{"object": "list", "data": list})
		c.json(200, string(b), "")
	default:
		c.json(200, "{}", "")
	}
	return true
}

func (m *mock) inference(c *conn) {
	m.mu.Lock()
	c.N = len(m.calls) + 1
	m.calls = append(m.calls, call{N: c.N, Head: c.Head, Body: c.Body, At: time.Now()})
	m.live++
	m.most = max(m.most, m.live)
	m.mu.Unlock()
	m.Handle(c)
	m.mu.Lock()
	m.live--
	m.mu.Unlock()
}

// reqs returns the inference requests so far.
func (m *mock) reqs() []call {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]call(nil), m.calls...)
}

func (m *mock) count() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.calls)
}

// asked returns when a control path was asked for.
func (m *mock) asked(path string) []time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]time.Time(nil), m.paths[path]...)
}

// peerCloses returns what waitClose has seen so far.
func (m *mock) peerCloses() []peerClose {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]peerClose(nil), m.closes...)
}

// conn is one connection of the router to a replica. After close or rst, or
// once a write failed, every further call does nothing.
type conn struct {
	m    *mock
	k    net.Conn
	r    *bufio.Reader
	dead bool

	N    int
	Head string
	Body []byte
}

func (c *conn) read() error {
	var head strings.Builder
	for {
		line, err := c.r.ReadString('\n')
		if err != nil {
			return err
		}
		if line == "\r\n" {
			break
		}
		head.WriteString(line)
	}
	c.Head = strings.TrimSuffix(head.String(), "\r\n")
	c.Body = nil
	if strings.Contains(strings.ToLower(c.header("Expect")), "100-continue") {
		c.send("HTTP/1.1 100 Continue\r\n\r\n")
	}
	if strings.Contains(strings.ToLower(c.header("Transfer-Encoding")), "chunked") {
		return c.readChunks()
	}
	n, _ := strconv.Atoi(c.header("Content-Length"))
	c.Body = make([]byte, n)
	_, err := io.ReadFull(c.r, c.Body)
	return err
}

func (c *conn) readChunks() error {
	for {
		line, err := c.r.ReadString('\n')
		if err != nil {
			return err
		}
		size, _, _ := strings.Cut(strings.TrimSpace(line), ";")
		n, err := strconv.ParseInt(size, 16, 32)
		if err != nil {
			return err
		}
		b := make([]byte, n+2)
		if _, err := io.ReadFull(c.r, b); err != nil {
			return err
		}
		c.Body = append(c.Body, b[:n]...)
		if n == 0 {
			return nil
		}
	}
}

func (c *conn) header(name string) string { return headerOf(c.Head, name) }

func (c *conn) streaming() bool {
	return strings.Contains(strings.ReplaceAll(string(c.Body), " ", ""), `"stream":true`)
}

func (c *conn) send(s string) {
	if c.dead {
		return
	}
	if _, err := io.WriteString(c.k, s); err != nil {
		c.dead = true
	}
}

func (c *conn) chunk(s string) { c.send(fmt.Sprintf("%x\r\n%s\r\n", len(s), s)) }
func (c *conn) end()           { c.send("0\r\n\r\n") }

// json answers with a length; extra are more header lines, each with its CRLF.
func (c *conn) json(status int, body, extra string) {
	c.send(fmt.Sprintf("HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n%s", status, len(body), extra, body))
}

func (c *conn) sseHead() {
	c.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
}

// stream answers as a healthy replica does.
func (c *conn) stream() {
	c.sseHead()
	for i := 1; i <= 3; i++ {
		c.chunk(frame(i))
	}
	c.chunk(frameFin)
	c.chunk(frameUse)
	c.chunk(frameDone)
	c.end()
}

// ok answers the request in the shape that it asks for.
func (c *conn) ok() {
	text := strings.Contains(c.Head, "/v1/completions")
	switch {
	case text && c.streaming():
		c.sseHead()
		for i := 1; i <= 3; i++ {
			c.chunk(fmt.Sprintf(`data: {"id":"c","object":"text_completion","choices":[{"index":0,"text":"t%d","finish_reason":null}]}`+"\n\n", i))
		}
		c.chunk(`data: {"id":"c","object":"text_completion","choices":[{"index":0,"text":"","finish_reason":"stop"}]}` + "\n\n")
		c.chunk(frameDone)
		c.end()
		return
	case text:
		c.json(200, `{"id":"c","object":"text_completion","created":1,"model":"m1","choices":[{"index":0,"text":"t1t2t3","finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}`, "")
		return
	}
	if c.streaming() {
		c.stream()
		return
	}
	c.json(200, bodyOK, "")
}

// waitClose waits for the peer to close, and logs when it did.
func (c *conn) waitClose(limit time.Duration) {
	if c.dead {
		return
	}
	t0 := time.Now()
	c.k.SetReadDeadline(t0.Add(limit))
	_, err := io.Copy(io.Discard, c.r)
	c.k.SetReadDeadline(time.Time{})
	ne, ok := err.(net.Error)
	closed := !(ok && ne.Timeout())
	now := time.Now()
	c.m.mu.Lock()
	c.m.closes = append(c.m.closes, peerClose{N: c.N, Closed: closed, After: now.Sub(t0), At: now})
	c.m.mu.Unlock()
	c.dead = closed
}

func (c *conn) close() { c.dead = true; c.k.Close() }

// rst closes so that the peer sees a reset.
func (c *conn) rst() {
	if t, ok := c.k.(*net.TCPConn); ok {
		t.SetLinger(0)
	}
	c.close()
}

// The frames that the cases are written in.
func frame(i int) string {
	return fmt.Sprintf(`data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"t%d"},"finish_reason":null}]}`+"\n\n", i)
}

const (
	frameFin  = `data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\n"
	frameUse  = `data: {"id":"c","object":"chat.completion.chunk","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}` + "\n\n"
	frameDone = "data: [DONE]\n\n"
	bodyOK    = `{"id":"c","object":"chat.completion","created":1,"model":"m1","choices":[{"index":0,"message":{"role":"assistant","content":"t1t2t3"},"finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}`
	chat      = "/v1/chat/completions"
	reqBody   = `{"model":"m1","messages":[{"role":"user","content":"hi"}]}`
	reqStream = `{"model":"m1","messages":[{"role":"user","content":"hi"}],"stream":true}`
)
