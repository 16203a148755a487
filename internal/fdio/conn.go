package fdio

import (
	"io"
	"net"
	"syscall"
)

// conn is a connection whose reads and writes go by this package.
type conn struct {
	net.Conn
	raw         syscall.RawConn
	p           []byte
	n           int
	err         error
	read, write func(fd uintptr) bool
}

// Wrap returns c with reads and writes by this package, or c itself when it
// has no file descriptor of its own (TLS, pipes). One goroutine at a time may
// use it; deadlines and Close may come from others.
func Wrap(c net.Conn) net.Conn {
	sc, ok := c.(*net.TCPConn)
	if !ok {
		return c
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return c
	}
	w := &conn{Conn: c, raw: raw}
	w.read = func(fd uintptr) bool {
		w.n, w.err = Read(fd, w.p)
		return w.err != ErrAgain
	}
	w.write = func(fd uintptr) bool {
		for w.n < len(w.p) {
			n, err := Write(fd, w.p[w.n:])
			w.n += n
			if w.err = err; err != nil {
				return err != ErrAgain
			}
		}
		return true
	}
	return w
}

func (w *conn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	w.p, w.n, w.err = p[:min(len(p), Most)], 0, nil
	err := w.raw.Read(w.read)
	w.p = nil
	switch {
	case err != nil:
		return 0, err
	case w.err == nil && w.n == 0:
		return 0, io.EOF
	}
	return w.n, w.err
}

func (w *conn) Write(p []byte) (int, error) {
	w.p, w.n, w.err = p, 0, nil
	err := w.raw.Write(w.write)
	w.p = nil
	if err == nil {
		err = w.err
	}
	return w.n, err
}
