package replica

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// maxBody bounds a request body, bytes.
const maxBody = 64 << 20

// conn is one client connection. Its reader goroutine parses requests and then
// sits in a read, which is how a client's leaving is noticed at once; answers
// are written by whoever makes them, without waiting: what the socket does not
// take at once goes to a drain goroutine that exists only for that time.
type conn struct {
	srv *Server
	c   *net.TCPConn
	raw syscall.RawConn
	br  *bufio.Reader

	mu       sync.Mutex
	out      []byte
	draining bool
	closing  bool // close when out is written
	closed   atomic.Bool

	writeN   int // of the raw write in progress
	writeErr error
	writeFn  func(fd uintptr) bool
	lastUse  bool // the request asked for Connection: close
	admin    bool // it brought a fault; guarded by Server.mu
	dirty    bool // listed in Server.touched; guarded by Server.mu
}

func newConn(s *Server, c *net.TCPConn) *conn {
	k := &conn{srv: s, c: c, br: bufio.NewReaderSize(c, 8<<10)}
	k.raw, _ = c.SyscallConn()
	k.writeFn = func(fd uintptr) bool {
		k.writeN, k.writeErr = syscall.Write(int(fd), k.out)
		return true
	}
	return k
}

// serve is the reader goroutine.
func (k *conn) serve() {
	defer k.shut()
	for !k.closed.Load() {
		req, err := http.ReadRequest(k.br)
		if err != nil {
			var ne net.Error
			if !errors.Is(err, io.EOF) && !errors.As(err, &ne) && !k.closed.Load() {
				k.writeString("HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n\r\nInvalid HTTP request received.")
				k.flush()
			}
			return
		}
		_ = k.c.SetReadDeadline(time.Time{})
		if req.Header.Get("Expect") == "100-continue" {
			k.writeString("HTTP/1.1 100 Continue\r\n\r\n")
			k.flush()
		}
		body, err := io.ReadAll(io.LimitReader(req.Body, maxBody))
		if err != nil {
			return
		}
		k.lastUse = req.Close
		job := k.srv.handle(k, req, body)
		if job != nil {
			if _, err := k.br.Peek(1); err != nil {
				k.srv.clientLeft(job)
				return
			}
			<-job.done // a pipelined request waits its turn
			_ = k.c.SetReadDeadline(time.Time{})
		}
		if k.lastUse {
			k.finish()
			return
		}
		if job == nil {
			_ = k.c.SetReadDeadline(time.Now().Add(k.srv.opt.IdleClose))
		}
	}
}

// shut closes the connection unless a drain goroutine still owes bytes.
func (k *conn) shut() {
	k.mu.Lock()
	pending := k.draining && k.closing
	k.mu.Unlock()
	if !pending {
		k.closed.Store(true)
		_ = k.c.Close()
	}
	k.srv.gone(k)
}

// finish closes once all is written.
func (k *conn) finish() {
	k.mu.Lock()
	k.closing = true
	pending := k.draining
	k.mu.Unlock()
	if !pending {
		k.closed.Store(true)
		_ = k.c.Close()
	}
}

// reset closes with RST, as a killed process with unread data does.
func (k *conn) reset() {
	k.closed.Store(true)
	_ = k.c.SetLinger(0)
	_ = k.c.Close()
}

func (k *conn) writeString(s string) {
	k.mu.Lock()
	k.out = append(k.out, s...)
	k.mu.Unlock()
}

func (k *conn) write(p []byte) {
	k.mu.Lock()
	k.out = append(k.out, p...)
	k.mu.Unlock()
}

// writeChunk appends p as one HTTP chunk.
func (k *conn) writeChunk(p []byte) {
	k.mu.Lock()
	k.out = strconv.AppendInt(k.out, int64(len(p)), 16)
	k.out = append(k.out, "\r\n"...)
	k.out = append(k.out, p...)
	k.out = append(k.out, "\r\n"...)
	k.mu.Unlock()
}

// flush sends what the socket takes now.
func (k *conn) flush() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.draining || len(k.out) == 0 || k.closed.Load() {
		return
	}
	if err := k.raw.Write(k.writeFn); err != nil {
		k.out = k.out[:0]
		return
	}
	if k.writeErr != nil && !errors.Is(k.writeErr, syscall.EAGAIN) && !errors.Is(k.writeErr, syscall.EINTR) {
		k.out = k.out[:0]
		return
	}
	if n := max(k.writeN, 0); n < len(k.out) {
		k.out = append(k.out[:0], k.out[n:]...)
		k.draining = true
		go k.drain()
		return
	}
	k.out = k.out[:0]
}

// drain writes with blocking until nothing is left.
func (k *conn) drain() {
	for {
		k.mu.Lock()
		if len(k.out) == 0 || k.closed.Load() {
			k.draining = false
			closing := k.closing
			k.mu.Unlock()
			if closing {
				k.closed.Store(true)
				_ = k.c.Close()
			}
			return
		}
		p := k.out
		k.out = nil
		k.mu.Unlock()
		if _, err := k.c.Write(p); err != nil {
			k.mu.Lock()
			k.out, k.draining = nil, false
			k.mu.Unlock()
			_ = k.c.Close()
			return
		}
	}
}

// head writes a response's head. length < 0 means chunked.
func (k *conn) head(req *reqInfo, status int, ctype string, length int, extra string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	b := k.out
	b = append(b, "HTTP/1.1 "...)
	b = strconv.AppendInt(b, int64(status), 10)
	b = append(b, ' ')
	b = append(b, http.StatusText(status)...)
	b = append(b, "\r\ndate: "...)
	b = time.Now().UTC().AppendFormat(b, http.TimeFormat)
	b = append(b, "\r\nserver: uvicorn\r\n"...)
	b = append(b, extra...)
	if length >= 0 {
		b = append(b, "content-length: "...)
		b = strconv.AppendInt(b, int64(length), 10)
		b = append(b, "\r\n"...)
	}
	if ctype != "" {
		b = append(b, "content-type: "...)
		b = append(b, ctype...)
		b = append(b, "\r\n"...)
	}
	b = append(b, "vary: Origin\r\nx-request-id: "...)
	b = append(b, req.id...)
	b = append(b, "\r\n"...)
	if k.lastUse {
		b = append(b, "connection: close\r\n"...)
	}
	if length < 0 {
		b = append(b, "transfer-encoding: chunked\r\n"...)
	}
	b = append(b, "\r\n"...)
	k.out = b
}

// reply sends a whole answer.
func (k *conn) reply(req *reqInfo, status int, ctype string, body []byte, extra string) {
	k.head(req, status, ctype, len(body), extra)
	if req.method != http.MethodHead {
		k.write(body)
	}
	k.flush()
}

const jsonType = "application/json"

func (k *conn) replyJSON(req *reqInfo, status int, body string) {
	k.reply(req, status, jsonType, []byte(body), "")
}

// replyError sends vLLM's error shape.
func (k *conn) replyError(req *reqInfo, e *apiError) {
	k.reply(req, e.status, jsonType, e.body(), e.extra)
}

// apiError is a refusal in vLLM's shape.
type apiError struct {
	status  int
	kind    string
	param   string // "" = null
	message string
	extra   string // header lines
}

func (e *apiError) body() []byte {
	param := "null"
	if e.param != "" {
		param = quote(e.param)
	}
	return fmt.Appendf(nil, `{"error":{"message":%s,"type":%s,"param":%s,"code":%d}}`, quote(e.message), quote(e.kind), param, e.status)
}
