package proxy

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/penstock/penstock/internal/fdio"
	"github.com/penstock/penstock/internal/ownfault"
	"github.com/penstock/penstock/wire"
)

// clientConn is one client's connection as fasthttp sees it.
//
// fasthttp only ever reads requests from it. What it writes is dropped: every
// answer goes out by send, from the handler, so that heads and chunks leave
// when and as the relay wants them. The handler has written a whole answer by
// the time fasthttp flushes its own (empty) one.
type clientConn struct {
	net.Conn // the TCP connection, or TLS over it
	p        *Proxy
	id       uint64
	sock     // in: bytes read ahead for fasthttp; out: what send still has to write

	gone   atomic.Bool // sticky: the client has left, or will send no more
	flight flight      // the request being served; reused for the next

	direct    func(fd uintptr) bool
	into      []byte      // what direct reads into
	got       bool        // a byte was ever read
	bareLF    bool        // the request line ended without CR
	ip        string      // peer's address without port
	headRead  bool        // the flight has the head of the request whose body is coming
	headErr   *wire.Error // what is wrong with it
	noRoom    bool        // its body is not taken, see headerReceived
	receiving atomic.Int64

	linger bool // drain what still comes before closing, so that the answer arrives

	waits atomic.Bool // a write waits for the client to read

	writeBy time.Duration // write deadline armed, by sinceStart
	closed  atomic.Bool
}

// proxyListener wraps what it accepts.
type proxyListener struct {
	net.Listener
	p *Proxy
}

func (l *proxyListener) Accept() (net.Conn, error) {
	wait := time.Duration(0)
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			if !passing(err) {
				return nil, err
			}
			// fasthttp would end the server. What is out comes back when other
			// connections end.
			wait = min(max(2*wait, 5*time.Millisecond), time.Second)
			l.p.log.Error("cannot accept connections now", zap.Error(err), zap.Int64("connections", l.p.open.Load()))
			select {
			case <-l.p.stop:
				return nil, err
			case <-time.After(wait):
			}
			continue
		}
		wait = 0
		if n := l.p.open.Add(1); n > int64(l.p.opt.MaxConnections) {
			l.p.open.Add(-1)
			l.p.refuseConnection(c)
			continue
		}
		return l.p.wrap(c), nil
	}
}

// passing tells whether accepting may work again later.
func passing(err error) bool {
	return ownfault.Is(err) || errors.Is(err, syscall.ECONNABORTED) || errors.Is(err, syscall.EINTR) || errors.Is(err, syscall.EPROTO)
}

// wrap registers c with the watcher and puts TLS on it when configured.
func (p *Proxy) wrap(c net.Conn) *clientConn {
	cc := &clientConn{Conn: c, p: p, id: p.connID.Add(1)}
	f := &cc.flight
	f.conn, f.p, f.wake = cc, p, make(chan struct{}, 1)
	f.watchFn, f.eachFn = f.watch, f.each
	f.body.Resolve = p.resolveFn
	p.connMu.Lock()
	p.conns[cc] = struct{}{}
	p.connMu.Unlock()
	if sc, ok := c.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			p.watch.add(raw, cc)
			if p.opt.TLS == nil {
				cc.raw = raw
			}
		}
	}
	if p.opt.TLS != nil {
		cc.Conn = tls.Server(c, p.opt.TLS)
	}
	cc.bind()
	cc.full = cc.wait
	cc.direct = func(fd uintptr) bool {
		cc.readN, cc.readErr = fdio.Read(fd, cc.into)
		return cc.readErr != fdio.ErrAgain
	}
	return cc
}

// leaver is what the watcher watches.
type leaver interface {
	watchID() uint64
	left()
}

func (c *clientConn) watchID() uint64 { return c.id }

// left is called by the watcher. Order matters: gone first, then the flight;
// the handler begins its flight first and looks at gone then.
func (c *clientConn) left() {
	c.gone.Store(true)
	c.flight.cancel(causeGone)
}

// Read is fasthttp's. A read of one byte is its wait for the next request:
// that wait holds no buffer (see Server.ReduceMemoryUsage), and what came is
// kept for the reads that follow.
func (c *clientConn) Read(p []byte) (int, error) {
	if c.in == nil {
		if len(p) != 1 || c.raw == nil {
			n, err := c.readInto(p)
			if n > 0 {
				c.got = true
			}
			return n, err
		}
		if err := c.read(); err != nil {
			return 0, err
		}
		c.got = true
		c.checkFirstLine(c.in.unread())
	}
	n := copy(p, c.in.unread())
	if c.in.r += n; c.in.r == c.in.w {
		putBuffer(c.in)
		c.in = nil
	}
	return n, nil
}

// readInto reads into p without a buffer between: the rest of a large body.
func (c *clientConn) readInto(p []byte) (int, error) {
	if c.raw == nil || len(p) == 0 {
		return c.Conn.Read(p)
	}
	c.into = p[:min(len(p), fdio.Most)]
	err := c.raw.Read(c.direct)
	c.into = nil
	switch {
	case err != nil:
		return 0, err
	case c.readErr == nil && c.readN == 0:
		return 0, io.EOF
	}
	return c.readN, c.readErr
}

// checkFirstLine looks for a request line that ends in a bare LF, which
// fasthttp lets through and does not show later.
func (c *clientConn) checkFirstLine(p []byte) {
	for i, b := range p {
		if b == '\n' {
			c.bareLF = i == 0 || p[i-1] != '\r'
			// Empty lines before a request are allowed; look at the next line.
			if i > 1 || c.bareLF {
				return
			}
		}
	}
}

// Write is fasthttp's, and is dropped; see clientConn.
func (c *clientConn) Write(p []byte) (int, error) { return len(p), nil }

// send writes p to the client, each write bounded by WriteTimeout. The
// deadline is only moved when half of it has passed: moving a timer for every
// chunk costs more than the write's own bookkeeping.
func (c *clientConn) send(p []byte) error {
	c.armWrite()
	if c.raw == nil {
		c.wait()
		_, err := c.Conn.Write(p)
		c.waited()
		return err
	}
	c.out.Set(p)
	return c.flushOut()
}

// sendv is send for two pieces, in one writev where possible.
func (c *clientConn) sendv(head, body []byte) error {
	c.armWrite()
	if c.raw == nil {
		c.wait()
		_, err := c.Conn.Write(head)
		if err == nil {
			_, err = c.Conn.Write(body)
		}
		c.waited()
		return err
	}
	c.out.Set(head, body)
	return c.flushOut()
}

func (c *clientConn) flushOut() error {
	err := c.flush()
	c.waited()
	return err
}

// wait notes that a write waits for the client, waited that it does no more.
// While all of a replica's requests wait so, its silence proves nothing, see
// pool.waiting.
func (c *clientConn) wait() {
	if !c.waits.Swap(true) {
		c.p.waits.Add(1)
	}
}

func (c *clientConn) waited() {
	if c.waits.Load() {
		c.waits.Store(false)
		c.p.waits.Add(-1)
	}
}

func (c *clientConn) armWrite() {
	now := sinceStart()
	if d := c.p.opt.WriteTimeout; c.writeBy-now < d/2 {
		c.writeBy = now + d
		_ = c.Conn.SetWriteDeadline(time.Now().Add(d)) // an error shows in the write
	}
}

// sinceStart is for what asks for the time with every chunk: less than half of what
// time.Now costs, which reads two clocks.
func sinceStart() time.Duration { return time.Since(started) }

var started = time.Now()

// Close closes once. With linger, what the client still sends is read and
// dropped for a moment: closing with unread bytes would reset the connection
// and could destroy the answer on its way.
func (c *clientConn) Close() error {
	if !c.closed.CompareAndSwap(false, true) {
		return net.ErrClosed
	}
	c.p.open.Add(-1)
	c.received()
	c.p.connMu.Lock()
	delete(c.p.conns, c)
	c.p.connMu.Unlock()
	c.p.watch.remove(c)
	if c.linger && !c.gone.Load() {
		if cw, ok := c.Conn.(interface{ CloseWrite() error }); ok && cw.CloseWrite() == nil {
			_ = c.Conn.SetReadDeadline(time.Now().Add(lingerTime))
			_, _ = io.CopyN(io.Discard, c.Conn, lingerBytes)
		}
	}
	return c.Conn.Close() // c.in stays: Shutdown closes from another goroutine than the reader's
}

// Bounds of a lingering close.
const (
	lingerTime  = time.Second
	lingerBytes = 64 << 20
)

// remoteIP is the peer's address without port, made once per connection.
func (c *clientConn) remoteIP() string {
	if c.ip == "" {
		switch a := c.Conn.RemoteAddr().(type) {
		case *net.TCPAddr:
			c.ip = a.IP.String()
		default:
			s := a.String()
			if h, _, err := net.SplitHostPort(s); err == nil {
				s = h
			}
			c.ip = strings.TrimSpace(s)
		}
	}
	return c.ip
}
