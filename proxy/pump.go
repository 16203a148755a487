package proxy

import (
	"io"
	"time"

	"github.com/penstock/penstock/internal/fdio"
)

// pump reads a stream with one system call per arrival, where fill needs two
// (the second finds that nothing more is there). It stays inside one RawRead
// of the connection: between two reads it waits for the poller's next edge,
// which a read that did not fill its buffer makes safe for data. The end of
// the connection may share its edge with the last data, so that no further
// edge comes for it; the watcher's own registration tells of that (peerLeft).
//
// each is called with a fresh window and has to use it up; it returns false
// to stop. pump returns nil then, else the error that ended the reading.
func (u *upConn) pump(f *flight, each func() bool) error {
	if u.in != nil && u.in.r < u.in.w && !each() {
		return nil
	}
	u.each = each
	u.pumping.Store(true)
	defer func() {
		u.pumping.Store(false)
		u.each = nil
	}()
	for {
		u.readErr = nil
		err := u.raw.Read(u.pumpFn)
		if err == nil {
			return u.readErr
		}
		// The watcher breaks the wait by a deadline when the peer has left:
		// read on, up to the end that must be there.
		if !u.hup.Load() || u.hupSeen || !isTimeout(err) {
			return err
		}
		u.hupSeen = true
		f.deadline(time.Now().Add(hupGrace))
	}
}

// hupGrace bounds the reading of what a peer that has left had still sent.
const hupGrace = 5 * time.Second

// pumpStep is pump's work at each edge; false waits for the next.
func (u *upConn) pumpStep(fd uintptr) bool {
	for {
		b := getBuffer(u.large)
		n, err := fdio.Read(fd, b.b)
		if n <= 0 {
			putBuffer(b)
			if err == fdio.ErrAgain {
				return false
			}
			if u.readErr = err; err == nil {
				u.readErr = io.EOF
			}
			return true
		}
		putBuffer(u.in)
		b.w = n
		u.in = b
		u.large = n == len(b.b)
		if !u.each() {
			return true
		}
		if u.in.r == u.in.w {
			putBuffer(u.in)
			u.in = nil
		}
		if !u.large && !u.hup.Load() {
			return false
		}
	}
}

// left is called by the watcher when the replica has closed its side.
func (u *upConn) left() {
	u.hup.Store(true)
	if u.pumping.Load() {
		_ = u.c.SetReadDeadline(past)
		return
	}
	u.r.forget(u)
}

func (u *upConn) watchID() uint64 { return u.id }

// forget closes u when it is idle: its peer has left.
func (r *replica) forget(u *upConn) {
	r.mu.Lock()
	found := false
	for i, x := range r.idle {
		if x == u {
			r.idle = append(r.idle[:i], r.idle[i+1:]...)
			found = true
			break
		}
	}
	r.mu.Unlock()
	if found {
		u.close()
	}
}
