//go:build linux

package proxy

import (
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// edgeHup: the watcher tells of a peer's end at once, which pump relies on.
const edgeHup = true

// watcher tells when peers leave: clients, and replicas. Each connection is registered once, edge
// triggered, for RDHUP only: it costs nothing until the peer closes or shuts
// down its write side. A client that only shuts down its write side is
// treated as gone, too: the two cannot be told apart before a write fails.
//
// Connections are known by an own id, never by the fd's number, which the
// system gives to the next connection at once.
type watcher struct {
	ep   *os.File // non-blocking, so that Go's own poller waits for it: no thread is blocked
	epfd int
	mu   sync.Mutex
	m    map[uint64]leaver
	done chan struct{}
}

func newWatcher() (*watcher, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("disconnect watcher: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, fmt.Errorf("disconnect watcher: %w", err)
	}
	w := &watcher{ep: os.NewFile(uintptr(fd), "epoll"), epfd: fd, m: make(map[uint64]leaver), done: make(chan struct{})}
	raw, err := w.ep.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("disconnect watcher: %w", err)
	}
	go w.run(raw)
	return w, nil
}

func (w *watcher) add(raw syscall.RawConn, c leaver) {
	id := c.watchID()
	w.mu.Lock()
	w.m[id] = c
	w.mu.Unlock()
	_ = raw.Control(func(fd uintptr) {
		ev := unix.EpollEvent{Events: unix.EPOLLRDHUP | uint32(unix.EPOLLET&0xffffffff), Fd: int32(uint32(id)), Pad: int32(uint32(id >> 32))}
		_ = unix.EpollCtl(w.epfd, unix.EPOLL_CTL_ADD, int(fd), &ev)
	})
}

// remove forgets c. Closing the fd takes it out of the epoll set.
func (w *watcher) remove(c leaver) {
	w.mu.Lock()
	delete(w.m, c.watchID())
	w.mu.Unlock()
}

func (w *watcher) run(raw syscall.RawConn) {
	defer close(w.done)
	events := make([]unix.EpollEvent, 128)
	var left []leaver
	_ = raw.Read(func(fd uintptr) bool {
		for {
			n, err := unix.EpollWait(int(fd), events, 0)
			if err == unix.EINTR {
				continue
			}
			if err != nil {
				return true
			}
			if n == 0 {
				return false
			}
			w.mu.Lock()
			for _, ev := range events[:n] {
				if c := w.m[uint64(uint32(ev.Fd))|uint64(uint32(ev.Pad))<<32]; c != nil {
					left = append(left, c)
				}
			}
			w.mu.Unlock()
			for i, c := range left {
				c.left()
				left[i] = nil
			}
			left = left[:0]
		}
	})
}

func (w *watcher) close() {
	_ = w.ep.Close()
	<-w.done
}

// quiet tells whether an idle connection has nothing to read: neither bytes
// nor an end. Anything else makes it unfit for reuse.
func quiet(fd uintptr) bool {
	var b [1]byte
	_, _, errno := syscall.RawSyscall6(syscall.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&b[0])), 1, syscall.MSG_PEEK|syscall.MSG_DONTWAIT, 0, 0)
	return errno == syscall.EAGAIN
}

// tuneListener makes accepted connections give up on a peer that vanished:
// unacknowledged data for longer than d ends the connection. Accepted sockets
// inherit the option.
func tuneListener(ln net.Listener, d time.Duration) {
	sc, ok := ln.(syscall.Conn)
	if !ok {
		return
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d/time.Millisecond))
	})
}
