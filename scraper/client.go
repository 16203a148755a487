package scraper

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
	"time"

	"github.com/penstock/penstock/internal/fdio"
	"github.com/penstock/penstock/internal/ownfault"
)

// Dialer opens a connection; net.Dialer.DialContext is one.
type Dialer func(ctx context.Context, network, addr string) (net.Conn, error)

var (
	errHead     = errors.New("malformed head of an HTTP answer")
	errChunk    = errors.New("malformed chunk in an HTTP answer")
	errTooLarge = errors.New("answer is larger than allowed")
)

// dialError is a failure before anything was written: refused or unreachable.
type dialError struct{ err error }

func (e *dialError) Error() string { return e.err.Error() }
func (e *dialError) Unwrap() error { return e.err }

// lostError is a connection that ended before the first byte of the answer.
type lostError struct{ err error }

func (e *lostError) Error() string { return "connection lost before the answer: " + e.err.Error() }
func (e *lostError) Unwrap() error { return e.err }

// maxHead bounds status line and headers of an answer, bytes.
const maxHead = 16 << 10

// client sends one kind of GET to one replica, again and again, over one
// kept connection, into one reused buffer. It is not safe for concurrent use.
// net/http would do, at some 60 allocations and two more goroutines for each
// replica; four scrapes a second of a hundred replicas make that worth little
// code. What it reads is bounded, and every get ends by its time-out.
type client struct {
	dial    Dialer
	addr    string // ip:port
	tls     *tls.Config
	request []byte
	max     int  // most bytes of a body
	keep    bool // keep the connection for the next get

	conn net.Conn
	buf  []byte
	n    int // bytes of buf that are filled
}

func newClient(o *Options, r Replica, path string, limit int, keep bool) *client {
	c := &client{dial: o.Dial, addr: r.Addr, max: limit, keep: keep}
	if r.TLS {
		c.tls = o.TLS.Clone()
		if c.tls.ServerName == "" {
			host, _, err := net.SplitHostPort(r.Host)
			if err != nil {
				host = r.Host
			}
			c.tls.ServerName = host
		}
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "GET %s%s HTTP/1.1\r\nHost: %s\r\nUser-Agent: penstock\r\nAccept: */*\r\n", r.BasePath, path, r.Host)
	if r.APIKey != "" {
		fmt.Fprintf(&b, "Authorization: Bearer %s\r\n", r.APIKey)
	}
	if !keep {
		b.WriteString("Connection: close\r\n")
	}
	b.WriteString("\r\n")
	c.request = b.Bytes()
	return c
}

// get returns the status and body of the answer. The body is valid until the
// next get. An idle connection that the replica closed meanwhile is replaced
// once.
func (c *client) get(ctx context.Context, timeout time.Duration) (status int, body []byte, err error) {
	deadline := time.Now().Add(timeout)
	reused := c.conn != nil
	status, body, err = c.once(ctx, deadline)
	var lost *lostError
	if reused && errors.As(err, &lost) && ctx.Err() == nil && !isTimeout(err) {
		status, body, err = c.once(ctx, deadline)
	}
	if err != nil && isTimeout(err) {
		err = ownfault.Timeout(err, deadline)
	}
	return status, body, err
}

// close ends the kept connection.
func (c *client) close() {
	if c.conn != nil {
		_ = c.conn.Close()
		c.conn = nil
	}
}

func (c *client) once(ctx context.Context, deadline time.Time) (status int, body []byte, err error) {
	if c.conn == nil {
		if err := c.open(ctx, deadline); err != nil {
			return 0, nil, err
		}
	}
	conn := c.conn
	clean := false
	defer func() {
		if !clean || !c.keep {
			c.close()
		}
	}()
	if err := conn.SetDeadline(deadline); err != nil {
		return 0, nil, &lostError{err}
	}
	// A removed replica must not hold its goroutine until the time-out.
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := conn.Write(c.request); err != nil {
		return 0, nil, &lostError{err}
	}
	status, body, clean, err = c.answer()
	return status, body, err
}

func (c *client) open(ctx context.Context, deadline time.Time) error {
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	conn, err := c.dial(ctx, "tcp", c.addr)
	if err != nil {
		return &dialError{err}
	}
	if c.tls != nil {
		t := tls.Client(conn, c.tls)
		if err := t.HandshakeContext(ctx); err != nil {
			_ = conn.Close()
			return &dialError{err}
		}
		conn = t
	}
	c.conn, c.n = fdio.Wrap(conn), 0
	return nil
}

// head is what the status line and headers of an answer say.
type head struct {
	status  int
	length  int64 // -1 = not given
	chunked bool
	close   bool
}

// answer reads one answer. reusable tells whether the connection is at the
// start of a next one.
func (c *client) answer() (status int, body []byte, reusable bool, err error) {
	c.n = 0
	var h head
	at := 0
	for {
		if h, at, err = c.head(at); err != nil {
			return 0, nil, false, err
		}
		if h.status < 100 || h.status >= 200 {
			break
		}
	}
	switch {
	case h.status == 204 || h.status == 304:
		body = c.buf[at:at]
	case h.chunked:
		body, err = c.chunks(at)
	case h.length >= 0:
		if h.length > int64(c.max) {
			return h.status, nil, false, errTooLarge
		}
		end := at + int(h.length)
		if err = c.fill(end); err == nil {
			body = c.buf[at:end]
		}
		reusable = c.n == end
	default:
		h.close = true
		for err == nil {
			if c.n-at > c.max {
				return h.status, nil, false, errTooLarge
			}
			err = c.more()
		}
		if errors.Is(err, io.EOF) {
			err = nil
		}
		body = c.buf[at:c.n]
	}
	if h.chunked && err == nil {
		reusable = true
	}
	if err != nil {
		return h.status, nil, false, fmt.Errorf("answer cut: %w", err)
	}
	return h.status, body, reusable && !h.close, nil
}

// head reads one head that begins at offset at and returns where it ends.
func (c *client) head(at int) (h head, end int, err error) {
	for {
		if i := bytes.Index(c.buf[at:c.n], []byte("\r\n\r\n")); i >= 0 {
			end = at + i + 4
			h, err = parseHead(c.buf[at:end])
			return h, end, err
		}
		if c.n-at > maxHead {
			return h, 0, errHead
		}
		if err := c.more(); err != nil {
			if c.n == 0 {
				return h, 0, &lostError{err}
			}
			return h, 0, fmt.Errorf("answer cut in its head: %w", err)
		}
	}
}

func parseHead(b []byte) (head, error) {
	h := head{length: -1}
	line, b, _ := bytes.Cut(b, []byte("\r\n"))
	if len(line) < len("HTTP/1.1 200") || !bytes.HasPrefix(line, []byte("HTTP/1.")) || line[8] != ' ' {
		return h, errHead
	}
	h.close = line[7] == '0'
	status, err := strconv.Atoi(string(line[9:12]))
	if err != nil || status < 100 || len(line) > 12 && line[12] != ' ' {
		return h, errHead
	}
	h.status = status
	for len(b) > 2 {
		line, b, _ = bytes.Cut(b, []byte("\r\n"))
		name, value, ok := bytes.Cut(line, []byte(":"))
		if !ok {
			return h, errHead
		}
		value = bytes.TrimSpace(value)
		switch {
		case bytes.EqualFold(name, []byte("Content-Length")):
			if h.length, err = strconv.ParseInt(string(value), 10, 64); err != nil || h.length < 0 {
				return h, errHead
			}
		case bytes.EqualFold(name, []byte("Transfer-Encoding")):
			if !bytes.EqualFold(value, []byte("chunked")) {
				return h, errHead
			}
			h.chunked = true
		case bytes.EqualFold(name, []byte("Connection")):
			h.close = h.close || bytes.EqualFold(value, []byte("close"))
		}
	}
	return h, nil
}

// chunks reads a chunked body that begins at offset at and closes the gaps
// between its chunks in place.
func (c *client) chunks(at int) ([]byte, error) {
	out, in := at, at
	for {
		for bytes.IndexByte(c.buf[in:c.n], '\n') < 0 {
			if c.n-in > maxHead {
				return nil, errChunk
			}
			if err := c.more(); err != nil {
				return nil, err
			}
		}
		eol := in + bytes.IndexByte(c.buf[in:c.n], '\n')
		size, _, _ := bytes.Cut(bytes.TrimSpace(c.buf[in:eol]), []byte(";"))
		n, err := strconv.ParseUint(string(bytes.TrimSpace(size)), 16, 31)
		if err != nil {
			return nil, errChunk
		}
		in = eol + 1
		if n == 0 {
			// No trailers are asked for; the usual end is an empty line.
			if err := c.fill(in + 2); err != nil {
				return nil, err
			}
			if string(c.buf[in:in+2]) != "\r\n" || c.n != in+2 {
				return nil, errChunk
			}
			return c.buf[at:out], nil
		}
		if out-at+int(n) > c.max {
			return nil, errTooLarge
		}
		if err := c.fill(in + int(n) + 2); err != nil {
			return nil, err
		}
		if string(c.buf[in+int(n):in+int(n)+2]) != "\r\n" {
			return nil, errChunk
		}
		out += copy(c.buf[out:], c.buf[in:in+int(n)])
		in += int(n) + 2
	}
}

// fill reads until n bytes of the buffer are filled.
func (c *client) fill(n int) error {
	if n > len(c.buf) {
		c.grow(n)
	}
	for c.n < n {
		if err := c.more(); err != nil {
			return err
		}
	}
	return nil
}

func (c *client) more() error {
	if c.n == len(c.buf) {
		c.grow(max(2*len(c.buf), 4<<10))
	}
	m, err := c.conn.Read(c.buf[c.n:])
	c.n += m
	if m > 0 {
		return nil
	}
	if err == nil {
		err = io.ErrNoProgress
	}
	return err
}

func (c *client) grow(n int) {
	b := make([]byte, n)
	copy(b, c.buf[:c.n])
	c.buf = b
}

// isTimeout tells an ended patience from an answer that told something.
func isTimeout(err error) bool {
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) {
		return true
	}
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}
