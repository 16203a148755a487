//go:build linux

package main

import (
	"fmt"
	"net"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// quietRuntime keeps the Go runtime out of the measured core's way: one
// thread, and a collector that runs only when memory demands it.
func quietRuntime() {
	runtime.LockOSThread()
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(1 << 30)
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) == nil {
		lim.Cur = lim.Max
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &lim)
	}
}

// loop is a bare epoll set.
type loop struct {
	ep     int
	events [512]unix.EpollEvent
}

func newLoop() (*loop, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll: %w", err)
	}
	return &loop{ep: ep}, nil
}

func (l *loop) add(fd int, events uint32) error {
	return unix.EpollCtl(l.ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: events, Fd: int32(fd)})
}

func (l *loop) mod(fd int, events uint32) {
	_ = unix.EpollCtl(l.ep, unix.EPOLL_CTL_MOD, fd, &unix.EpollEvent{Events: events, Fd: int32(fd)})
}

// wait returns what is ready; limit < 0 waits for ever.
func (l *loop) wait(limit time.Duration) ([]unix.EpollEvent, error) {
	ms := -1
	if limit >= 0 {
		ms = int((limit + time.Millisecond - 1) / time.Millisecond)
	}
	n, err := unix.EpollWait(l.ep, l.events[:], ms)
	if err == unix.EINTR {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("epoll wait: %w", err)
	}
	return l.events[:n], nil
}

// listen opens a non-blocking listening socket on the loopback.
func listen(port int) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("socket: %w", err)
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return 0, fmt.Errorf("bind port %d: %w", port, err)
	}
	if err := unix.Listen(fd, 4096); err != nil {
		return 0, fmt.Errorf("listen on port %d: %w", port, err)
	}
	return fd, nil
}

// connect opens a connection to addr, which has to be host:port with an IPv4
// address; non-blocking from then on.
func connect(addr string) (int, error) {
	tcp, err := net.ResolveTCPAddr("tcp4", strings.TrimPrefix(addr, "http://"))
	if err != nil {
		return 0, fmt.Errorf("address %q: %w", addr, err)
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("socket: %w", err)
	}
	if err := unix.Connect(fd, &unix.SockaddrInet4{Port: tcp.Port, Addr: [4]byte(tcp.IP.To4())}); err != nil {
		_ = unix.Close(fd)
		return 0, fmt.Errorf("connect to %s: %w", addr, err)
	}
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	_ = unix.SetNonblock(fd, true)
	return fd, nil
}
