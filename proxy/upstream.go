package proxy

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"
)

// upConn is one connection to a replica. One goroutine uses it; only
// interrupt may come from elsewhere, under the flight's mutex.
type upConn struct {
	c net.Conn
	sock
	peek    func(fd uintptr)
	isQuiet bool

	// What pump needs.
	each    func() bool
	pumpFn  func(fd uintptr) bool
	pumping atomic.Bool
	hup     atomic.Bool // the peer has closed its side; set by the watcher
	hupSeen bool

	r      *replica
	id     uint64
	reused bool
	idleAt time.Time // when it was put into the pool
}

func newUpConn(c net.Conn, r *replica) *upConn {
	u := &upConn{c: c, r: r, id: r.pool.p.connID.Add(1)}
	if sc, ok := c.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			u.raw = raw
			r.pool.p.watch.add(raw, u)
		}
	}
	u.bind()
	u.pumpFn = u.pumpStep
	u.peek = func(fd uintptr) { u.isQuiet = quiet(fd) }
	return u
}

// interrupt makes the I/O under way, and all later, fail.
func (u *upConn) interrupt() { _ = u.c.SetDeadline(past) }

// fill reads at least one byte into an empty window. A buffer is borrowed
// only when bytes are there, so a stream that waits holds none.
func (u *upConn) fill() error {
	if u.in != nil {
		if u.in.r < u.in.w {
			return nil
		}
		putBuffer(u.in)
		u.in = nil
	}
	if u.raw == nil {
		b := getBuffer(u.large)
		n, err := u.c.Read(b.b)
		if n <= 0 {
			putBuffer(b)
			if err == nil {
				err = io.ErrNoProgress
			}
			return err
		}
		b.w = n
		u.in = b
		u.large = n == len(b.b)
		return nil
	}
	if err := u.read(); err != nil {
		return err
	}
	u.large = u.readN == len(u.in.b)
	return nil
}

// more reads on behind what is unread, for a head that came in pieces. The
// window grows up to limit bytes.
func (u *upConn) more(limit int) error {
	have := u.in
	if have == nil || have.r == have.w {
		return u.fill()
	}
	if have.w-have.r >= limit {
		return errHeadTooLarge
	}
	u.in = nil
	if err := u.fill(); err != nil {
		u.in = have
		return err
	}
	got := u.in
	if len(have.b)-have.w < got.w {
		// Join both in a large buffer, or one as large as needed.
		n := (have.w - have.r) + got.w
		var b *buffer
		if n <= largeBuffer {
			b = getBuffer(true)
		} else {
			b = &buffer{b: make([]byte, n)}
		}
		b.w = copy(b.b, have.unread())
		putBuffer(have)
		have = b
	}
	have.w += copy(have.b[have.w:], got.unread())
	putBuffer(got)
	u.in = have
	return nil
}

// close gives the connection up, unread bytes and all.
func (u *upConn) close() {
	putBuffer(u.in)
	u.in = nil
	u.r.pool.p.watch.remove(u)
	_ = u.c.Close()
}

var errHeadTooLarge = errors.New("the head of the answer is too large")

// write sends a request: the head, and the body in up to three pieces.
func (u *upConn) write(head []byte, pieces ...[]byte) error {
	if u.raw == nil {
		_, err := u.c.Write(head)
		for _, p := range pieces {
			if err == nil && len(p) > 0 {
				_, err = u.c.Write(p)
			}
		}
		return err
	}
	u.out.Set(head)
	for _, p := range pieces {
		u.out.Add(p)
	}
	return u.flush()
}

// dial connects to the replica. It ends at by, or when the flight is cancelled.
func (r *replica) dial(f *flight, by time.Time) (*upConn, error) {
	t := time.Now().Add(f.p.opt.ConnectTimeout)
	if t.After(by) {
		t = by
	}
	ctx, stop := context.WithDeadline(context.Background(), t)
	defer stop()
	if !f.dialling(stop) {
		return nil, context.Canceled
	}
	c, err := r.dialer.DialContext(ctx, "tcp", r.spec.Addr)
	f.dialling(nil)
	if err != nil {
		return nil, err
	}
	if r.spec.TLS != nil {
		tc := tls.Client(c, r.spec.TLS)
		if err := tc.HandshakeContext(ctx); err != nil {
			_ = c.Close()
			return nil, fmt.Errorf("TLS: %w", err)
		}
		c = tc
	}
	return newUpConn(c, r), nil
}

// requestHead renders the head of the request for replica r.
func (f *flight) requestHead(dst []byte, r *replica, bodyLen int) []byte {
	q := &f.req
	dst = append(append(dst, q.method...), ' ')
	dst = append(append(dst, r.spec.BasePath...), q.uri...)
	dst = append(append(append(dst, " HTTP/1.1\r\nHost: "...), r.host...), "\r\n"...)
	dst = append(dst, q.headers...)
	switch {
	case r.spec.APIKey != "":
		dst = append(append(append(dst, "Authorization: Bearer "...), r.spec.APIKey...), "\r\n"...)
	case f.p.opt.PassAuth && f.p.opt.Auth == nil:
		if len(q.authorization) > 0 {
			dst = append(append(append(dst, "Authorization: "...), q.authorization...), "\r\n"...)
		}
		if len(q.apiKey) > 0 {
			dst = append(append(append(dst, "X-Api-Key: "...), q.apiKey...), "\r\n"...)
		}
	}
	if bodyLen > 0 || q.method == "POST" {
		dst = append(dst, "Content-Length: "...)
		dst = strconv.AppendInt(dst, int64(bodyLen), 10)
		dst = append(dst, "\r\n"...)
	}
	return append(dst, "\r\n"...)
}

// framing is how the end of an answer's body is known.
type framing uint8

const (
	framingNone framing = iota // no body
	framingLength
	framingChunked
	framingClose
)

// answerHead is the head of a replica's answer. raw is the header block
// without status line and last empty line, copied out of the read buffer.
type answerHead struct {
	status    int
	http11    bool
	raw       []byte // header lines, each with CRLF; owned
	framing   framing
	length    int64
	reuse     bool // the connection may be used again after the body
	sse       bool
	json      bool
	encoded   bool // Content-Encoding is set: the observer cannot look into it
	ctypeSeen bool
	connNames []byte // value of Connection, part of raw

	retryAfter float64 // seconds, 0 = none
}

var (
	errBadHead = errors.New("the answer's head is not HTTP/1.1")
	headEnd    = []byte("\r\n\r\n")
)

// readHead reads the head of the answer, skipping 1xx. began tells whether
// any byte of an answer came.
func (u *upConn) readHead(h *answerHead, limit int, headRequest bool) (began bool, err error) {
	for {
		if u.in == nil || u.in.r == u.in.w {
			if err := u.fill(); err != nil {
				return began, err
			}
		}
		w := u.in.unread()
		began = true
		if len(w) >= 5 && !bytes.HasPrefix(w, []byte("HTTP/")) {
			return true, errBadHead
		}
		i := bytes.Index(w, headEnd)
		if i < 0 {
			if len(w) >= limit {
				return true, errHeadTooLarge
			}
			if err := u.more(limit); err != nil {
				return true, err
			}
			continue
		}
		if i+4 > limit {
			return true, errHeadTooLarge
		}
		if err := h.parse(w[:i+2], headRequest); err != nil {
			return true, err
		}
		u.in.r += i + 4
		if h.status >= 200 {
			return true, nil
		}
		if h.status == 101 {
			return true, errBadHead
		}
	}
}

// parse reads head: status line and header lines, each with its CRLF.
func (h *answerHead) parse(head []byte, headRequest bool) error {
	*h = answerHead{raw: h.raw[:0], length: -1}
	line, rest, ok := nextLine(head)
	// "HTTP/1.1 200" and, mostly, a reason behind it.
	if !ok || len(line) < 12 || line[8] != ' ' || string(line[:7]) != "HTTP/1." || len(line) > 12 && line[12] != ' ' {
		return errBadHead
	}
	h.http11 = line[7] == '1'
	st, ok := parseDigits(line[9:12])
	if !ok || st < 100 || st > 599 || line[7] != '1' && line[7] != '0' {
		return errBadHead
	}
	h.status = int(st)
	h.raw = append(h.raw, rest...)
	return h.scan(headRequest)
}

// scan walks the header lines for framing and what the attempt wants to know.
func (h *answerHead) scan(headRequest bool) error {
	h.reuse = h.http11
	chunked := false
	for rest := h.raw; len(rest) > 0; {
		line, next, ok := nextLine(rest)
		if !ok {
			return errBadHead
		}
		rest = next
		i := bytes.IndexByte(line, ':')
		if i <= 0 || !isToken(line[:i]) {
			return errBadHead
		}
		value := trimOWS(line[i+1:])
		if bytes.IndexByte(value, 0) >= 0 {
			return errBadHead
		}
		switch classify(line[:i]) {
		case hContentLength:
			n, ok := parseDigits(value)
			if !ok || h.length >= 0 && h.length != n {
				return errBadHead
			}
			h.length = n
		case hTransferEncoding:
			if !equalFold(value, "chunked") || chunked || !h.http11 {
				return errBadHead
			}
			chunked = true
		case hConnection:
			h.connNames = value
			if hasToken(value, "close") {
				h.reuse = false
			} else if !h.http11 && hasToken(value, "keep-alive") {
				h.reuse = true
			}
		case hContentType:
			h.ctypeSeen = true
			h.sse = hasPrefixFold(value, "text/event-stream")
			h.json = hasPrefixFold(value, "application/json")
		case hRetryAfter:
			if s, err := strconv.ParseFloat(string(value), 64); err == nil && s > 0 && s < 1e6 {
				h.retryAfter = s
			}
		case hOther:
			if equalFold(line[:i], "content-encoding") && !equalFold(value, "identity") {
				h.encoded = true
			}
		}
	}
	switch {
	case chunked && h.length >= 0:
		return errBadHead // two framings: one of them lies
	case headRequest || h.status == 204 || h.status == 304 || h.status < 200:
		h.framing = framingNone
	case chunked:
		h.framing = framingChunked
	case h.length >= 0:
		h.framing = framingLength
	default:
		h.framing = framingClose
		h.reuse = false
	}
	return nil
}

func hasPrefixFold(b []byte, low string) bool {
	return len(b) >= len(low) && equalFold(b[:len(low)], low)
}

// Kinds of I/O errors, for evidence.

func isTimeout(err error) bool {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return true
	}
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}
