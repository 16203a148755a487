//go:build linux

package main

import (
	"bytes"
	_ "embed"
	"flag"
	"fmt"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The replica costs as little as a server can: one thread, epoll, no parser
// beyond the end of a request. It answers POSTs at once with fixed bytes of
// vLLM's size, or with a paced stream when the body asks for one.

//go:embed testdata/metrics_idle.txt
var metricsPage string // a real page, so that a scraper pays what it really pays; its KV cache is enlarged to hold all streams

const model = "tiny"

const answerJSON = `{"id":"chatcmpl-b3a4ac7a7e485292","object":"chat.completion","created":1796022519,"model":"tiny","choices":[{"index":0,"message":{"role":"assistant","content":"config Ch This LE","refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":"vllm-0.32.0-4b6a389b","usage":{"prompt_tokens":14,"total_tokens":19,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":0,"multimodal_tokens":null},"completion_tokens_details":null},"prompt_logprobs":null,"kv_transfer_params":null}`

const streamHead = "HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 04:11:57 GMT\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\nvary: Origin\r\ntransfer-encoding: chunked\r\n\r\n"

func chunked(s string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(s), s) }

var (
	fullAnswer = httpAnswer("application/json", answerJSON)
	roleChunk  = chunked(`data: {"id":"chatcmpl-90e49a0f2f28c586","object":"chat.completion.chunk","created":1796011917,"model":"tiny","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null}` + "\n\n")
	tokenChunk = chunked(`data: {"id":"chatcmpl-90e49a0f2f28c586","object":"chat.completion.chunk","created":1796011917,"model":"tiny","choices":[{"index":0,"delta":{"content":" below"},"logprobs":null,"finish_reason":null,"token_ids":null}]}` + "\n\n")
	lastChunks = chunked(`data: {"id":"chatcmpl-90e49a0f2f28c586","object":"chat.completion.chunk","created":1796011917,"model":"tiny","choices":[{"index":0,"delta":{"content":"user"},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}]}`+"\n\n") +
		chunked("data: [DONE]\n\n") + "0\r\n\r\n"
)

func httpAnswer(ctype, body string) string {
	return "HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 04:11:57 GMT\r\nserver: uvicorn\r\ncontent-length: " + strconv.Itoa(len(body)) + "\r\ncontent-type: " + ctype + "\r\nvary: Origin\r\n\r\n" + body
}

// rconn is one connection of a proxy.
type rconn struct {
	fd   int
	in   []byte // what came of a request that is not whole yet
	out  []byte // what the socket did not take
	left int    // events still to come of a running stream
	next time.Duration
	gone bool
}

type replicaServer struct {
	*loop
	gap     time.Duration
	start   time.Time
	conns   map[int]*rconn
	listens map[int]bool
	queue   []*rconn // running streams in the order of their next event: the gap is the same for all
	scratch [256 << 10]byte
}

func replicaCommand(args []string) error {
	fs := flag.NewFlagSet("replica", flag.ExitOnError)
	ports := fs.String("ports", "7101,7102,7103", "ports to listen on, each one replica")
	gap := fs.Duration("gap", 20*time.Millisecond, "time between two events of a stream")
	_ = fs.Parse(args) // exits by itself
	quietRuntime()
	l, err := newLoop()
	if err != nil {
		return err
	}
	s := &replicaServer{loop: l, gap: *gap, start: time.Now(), conns: map[int]*rconn{}, listens: map[int]bool{}}
	for _, p := range strings.Split(*ports, ",") {
		port, err := strconv.Atoi(p)
		if err != nil {
			return fmt.Errorf("-ports %q: %w", *ports, err)
		}
		fd, err := listen(port)
		if err != nil {
			return err
		}
		s.listens[fd] = true
		if err := s.add(fd, unix.EPOLLIN); err != nil {
			return fmt.Errorf("epoll add: %w", err)
		}
	}
	fmt.Println("ready")
	for {
		if err := s.turn(); err != nil {
			return err
		}
	}
}

func (s *replicaServer) turn() error {
	limit := time.Duration(-1)
	if len(s.queue) > 0 {
		limit = max(0, s.queue[0].next-time.Since(s.start))
	}
	events, err := s.wait(limit)
	if err != nil {
		return err
	}
	for i := range events {
		fd := int(events[i].Fd)
		if s.listens[fd] {
			s.accept(fd)
			continue
		}
		c := s.conns[fd]
		if c == nil {
			continue
		}
		if events[i].Events&unix.EPOLLOUT != 0 {
			s.write(c, "")
		}
		if events[i].Events&(unix.EPOLLIN|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
			s.read(c)
		}
	}
	s.pace()
	return nil
}

func (s *replicaServer) accept(fd int) {
	for {
		k, _, err := unix.Accept4(fd, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		if err != nil {
			return
		}
		_ = unix.SetsockoptInt(k, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
		s.conns[k] = &rconn{fd: k}
		if s.add(k, unix.EPOLLIN) != nil {
			s.close(s.conns[k])
		}
	}
}

func (s *replicaServer) close(c *rconn) {
	if !c.gone {
		c.gone = true
		delete(s.conns, c.fd)
		_ = unix.Close(c.fd)
	}
}

func (s *replicaServer) read(c *rconn) {
	n, err := unix.Read(c.fd, s.scratch[:])
	if err == unix.EAGAIN || err == unix.EINTR {
		return
	}
	if n <= 0 {
		s.close(c)
		return
	}
	data := s.scratch[:n]
	if len(c.in) > 0 {
		c.in = append(c.in, data...)
		data = c.in
	}
	used := 0
	for !c.gone {
		size := requestSize(data[used:])
		if size == 0 {
			break
		}
		s.answer(c, data[used:used+size])
		used += size
	}
	c.in = append(c.in[:0], data[used:]...)
}

// requestSize returns the length of the first request in b, 0 = not whole.
func requestSize(b []byte) int {
	i := bytes.Index(b, []byte("\r\n\r\n"))
	if i < 0 {
		return 0
	}
	head := b[:i+2]
	if v, ok := headerValue(head, "content-length"); ok {
		n, _ := strconv.Atoi(v)
		if len(b) < i+4+n {
			return 0
		}
		return i + 4 + n
	}
	if _, ok := headerValue(head, "transfer-encoding"); ok {
		j := bytes.Index(b[i+2:], []byte("\r\n0\r\n\r\n"))
		if j < 0 {
			return 0
		}
		return i + 2 + j + 7
	}
	return i + 4
}

// headerValue finds a header by its lower-case name.
func headerValue(head []byte, name string) (string, bool) {
	for len(head) > 0 {
		line := head
		if i := bytes.IndexByte(head, '\n'); i >= 0 {
			line, head = head[:i], head[i+1:]
		} else {
			head = nil
		}
		if len(line) > len(name) && line[len(name)] == ':' && strings.EqualFold(string(line[:len(name)]), name) {
			return strings.TrimSpace(string(line[len(name)+1:])), true
		}
	}
	return "", false
}

func (s *replicaServer) answer(c *rconn, req []byte) {
	if req[0] == 'G' || req[0] == 'H' {
		s.write(c, controlAnswer(req))
		return
	}
	// Searched all over, as a peer writes the body anew in an order of its own.
	i := bytes.Index(req, []byte(`"max_tokens":`))
	if i < 0 || !bytes.Contains(req, []byte(`"stream":true`)) {
		s.write(c, fullAnswer)
		return
	}
	c.left = 0
	for _, d := range req[i+13:] {
		if d < '0' || d > '9' {
			break
		}
		c.left = c.left*10 + int(d-'0')
	}
	c.next = time.Since(s.start) + s.gap
	s.queue = append(s.queue, c)
	s.write(c, streamHead+roleChunk)
}

func controlAnswer(req []byte) string {
	switch {
	case bytes.HasPrefix(req, []byte("GET /metrics")):
		return httpAnswer("text/plain; version=0.0.4; charset=utf-8", metricsPage)
	case bytes.HasPrefix(req, []byte("GET /v1/models")):
		return httpAnswer("application/json", `{"object":"list","data":[{"id":"`+model+`","object":"model","created":1,"owned_by":"vllm","root":"`+model+`","parent":null,"max_model_len":131072}]}`)
	}
	return httpAnswer("application/json", `{"status":"ok","model_path":"`+model+`"}`)
}

// pace sends the events that are due.
func (s *replicaServer) pace() {
	now := time.Since(s.start)
	n := 0
	for n < len(s.queue) && s.queue[n].next <= now {
		c := s.queue[n]
		n++
		if c.gone {
			continue
		}
		c.left--
		if c.left <= 0 {
			s.write(c, lastChunks)
			continue
		}
		s.write(c, tokenChunk)
		c.next += s.gap
		s.queue = append(s.queue, c)
	}
	s.queue = s.queue[n:]
}

func (s *replicaServer) write(c *rconn, b string) {
	if c.gone {
		return
	}
	if len(c.out) > 0 {
		c.out = append(c.out, b...)
		n, err := unix.Write(c.fd, c.out)
		if n > 0 {
			c.out = c.out[n:]
		} else if err != unix.EAGAIN {
			s.close(c)
			return
		}
		if len(c.out) == 0 {
			s.mod(c.fd, unix.EPOLLIN)
		}
		return
	}
	if b == "" {
		return
	}
	n, err := unix.Write(c.fd, unsafeBytes(b))
	if err != nil && err != unix.EAGAIN {
		s.close(c)
		return
	}
	if n = max(n, 0); n < len(b) {
		c.out = append(c.out[:0], b[n:]...)
		s.mod(c.fd, unix.EPOLLIN|unix.EPOLLOUT)
	}
}
