//go:build !linux

package proxy

import (
	"net"
	"syscall"
	"time"
)

const edgeHup = false

// watcher without epoll: a goroutine polls the connections that serve a
// request with a peeking read every pollEvery. Slower to notice than on
// Linux, and blind behind pipelined bytes; good enough to develop on.
type watcher struct {
	stop chan struct{}
	done chan struct{}
	ops  chan func(map[uint64]watched)
}

type watched struct {
	c   leaver
	raw syscall.RawConn
}

const pollEvery = 20 * time.Millisecond

func newWatcher() (*watcher, error) {
	w := &watcher{stop: make(chan struct{}), done: make(chan struct{}), ops: make(chan func(map[uint64]watched))}
	go w.run()
	return w, nil
}

func (w *watcher) do(f func(map[uint64]watched)) {
	select {
	case w.ops <- f:
	case <-w.done:
	}
}

func (w *watcher) add(raw syscall.RawConn, c leaver) {
	w.do(func(m map[uint64]watched) { m[c.watchID()] = watched{c, raw} })
}

func (w *watcher) remove(c leaver) {
	w.do(func(m map[uint64]watched) { delete(m, c.watchID()) })
}

func (w *watcher) run() {
	defer close(w.done)
	m := make(map[uint64]watched)
	t := time.NewTicker(pollEvery)
	defer t.Stop()
	for {
		select {
		case f := <-w.ops:
			f(m)
		case <-w.stop:
			return
		case <-t.C:
			for _, x := range m {
				ended := false
				_ = x.raw.Control(func(fd uintptr) {
					var b [1]byte
					n, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK)
					ended = n == 0 && err == nil || err != nil && err != syscall.EAGAIN && err != syscall.EINTR
				})
				if ended {
					x.c.left()
				}
			}
		}
	}
}

func (w *watcher) close() {
	close(w.stop)
	<-w.done
}

func quiet(fd uintptr) bool {
	var b [1]byte
	_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK)
	return err == syscall.EAGAIN
}

func tuneListener(net.Listener, time.Duration) {}
