package proxy

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// fakeReplica plays a replica byte by byte.
type fakeReplica struct {
	t      *testing.T
	ln     net.Listener
	handle func(c *fakeConn)
	wg     sync.WaitGroup

	mu     sync.Mutex
	reqs   []fakeRequest
	closed []time.Time // when a peer's end was seen
	conns  map[net.Conn]struct{}
	nConns int
	stop   bool
}

// fakeRequest is one request as it came.
type fakeRequest struct {
	line, head string
	body       []byte
	sum        [32]byte
	at         time.Time
}

func (r fakeRequest) header(name string) string {
	for _, l := range strings.Split(r.head, "\r\n") {
		k, v, ok := strings.Cut(l, ":")
		if ok && strings.EqualFold(k, name) {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// fakeConn is one request's view of its connection.
type fakeConn struct {
	net.Conn
	br  *bufio.Reader
	r   *fakeReplica
	req fakeRequest
	n   int // number of the request at this replica, from 0
}

func newFakeReplica(t *testing.T, handle func(c *fakeConn)) *fakeReplica {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &fakeReplica{t: t, ln: ln, handle: handle, conns: make(map[net.Conn]struct{})}
	r.wg.Add(1)
	go r.accept()
	t.Cleanup(r.close)
	return r
}

func (r *fakeReplica) addr() string { return r.ln.Addr().String() }

func (r *fakeReplica) close() {
	_ = r.ln.Close()
	r.mu.Lock()
	r.stop = true
	for c := range r.conns {
		_ = c.Close()
	}
	r.mu.Unlock()
	r.wg.Wait()
}

func (r *fakeReplica) accept() {
	defer r.wg.Done()
	for {
		c, err := r.ln.Accept()
		if err != nil {
			return
		}
		r.mu.Lock()
		if r.stop {
			r.mu.Unlock()
			_ = c.Close()
			continue
		}
		r.conns[c] = struct{}{}
		r.nConns++
		r.wg.Add(1)
		r.mu.Unlock()
		go r.serve(c)
	}
}

func (r *fakeReplica) serve(c net.Conn) {
	defer r.wg.Done()
	defer func() {
		_ = c.Close()
		r.mu.Lock()
		delete(r.conns, c)
		r.mu.Unlock()
		if v := recover(); v != nil && v != io.ErrClosedPipe {
			panic(v)
		}
	}()
	br := bufio.NewReader(c)
	for {
		req, err := readFakeRequest(br)
		if err != nil {
			return
		}
		r.mu.Lock()
		n := len(r.reqs)
		r.reqs = append(r.reqs, req)
		h := r.handle
		r.mu.Unlock()
		h(&fakeConn{Conn: c, br: br, r: r, req: req, n: n})
	}
}

func readFakeRequest(br *bufio.Reader) (fakeRequest, error) {
	var q fakeRequest
	var head bytes.Buffer
	for {
		l, err := br.ReadString('\n')
		if err != nil {
			return q, err
		}
		if q.line == "" {
			q.line = strings.TrimSpace(l)
			continue
		}
		if l == "\r\n" {
			break
		}
		head.WriteString(l)
	}
	q.head = head.String()
	n, _ := strconv.Atoi(q.header("Content-Length"))
	q.body = make([]byte, n)
	if _, err := io.ReadFull(br, q.body); err != nil {
		return q, err
	}
	q.sum = sha256.Sum256(q.body)
	q.at = time.Now()
	return q, nil
}

func (r *fakeReplica) requests() []fakeRequest {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]fakeRequest(nil), r.reqs...)
}

func (r *fakeReplica) set(h func(c *fakeConn)) {
	r.mu.Lock()
	r.handle = h
	r.mu.Unlock()
}

// send writes raw bytes; a gone peer ends the handler.
func (c *fakeConn) send(s string) {
	if _, err := io.WriteString(c.Conn, s); err != nil {
		panic(io.ErrClosedPipe)
	}
}

func (c *fakeConn) json(status int, body, headers string) {
	c.send(fmt.Sprintf("HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n%s", status, len(body), headers, body))
}

func (c *fakeConn) sseHead() {
	c.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n")
}

func (c *fakeConn) chunk(s string) { c.send(fmt.Sprintf("%x\r\n%s\r\n", len(s), s)) }

func (c *fakeConn) end() { c.send("0\r\n\r\n") }

// fin closes; rst closes with a reset. Both end the handler.
func (c *fakeConn) fin() {
	_ = c.Close()
	panic(io.ErrClosedPipe)
}

func (c *fakeConn) rst() {
	if tc, ok := c.Conn.(*net.TCPConn); ok {
		_ = tc.SetLinger(0)
	}
	c.fin()
}

// waitClose blocks until the peer is gone and notes when.
func (c *fakeConn) waitClose() {
	_, _ = c.br.ReadByte()
	c.r.mu.Lock()
	c.r.closed = append(c.r.closed, time.Now())
	c.r.mu.Unlock()
	panic(io.ErrClosedPipe)
}

// The frames of cases/README.md.
func frameD(i int) string {
	return fmt.Sprintf(`data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"t%d"},"finish_reason":null}]}`+"\n\n", i)
}

const (
	frameRole = `data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n"
	frameFin  = `data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\n"
	frameUse  = `data: {"id":"c","object":"chat.completion.chunk","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}` + "\n\n"
	frameDone = "data: [DONE]\n\n"
	answerOK  = `{"id":"c","object":"chat.completion","model":"m1","choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}`
	plainBody = `{"model":"m1","messages":[{"role":"user","content":"hi"}]}`
	sseBody   = `{"model":"m1","stream":true,"messages":[{"role":"user","content":"hi"}]}`
)

// ok is the healthy replica.
func ok(c *fakeConn) {
	if strings.Contains(string(c.req.body), `"stream":true`) {
		c.sseHead()
		for i := 1; i <= 3; i++ {
			c.chunk(frameD(i))
		}
		c.chunk(frameFin)
		c.chunk(frameUse)
		c.chunk(frameDone)
		c.end()
		return
	}
	c.json(200, answerOK, "")
}
