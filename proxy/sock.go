package proxy

import (
	"io"
	"syscall"

	"github.com/penstock/penstock/internal/fdio"
)

// sock is a connection's file descriptor and what is read and written there:
// the part that a client's and a replica's connection have in common. One
// goroutine at a time uses it.
type sock struct {
	raw syscall.RawConn // nil when the system or TLS gives none

	in      *buffer // unread bytes; nil while none are there
	large   bool    // the last read filled its buffer: take a larger one
	readN   int
	readErr error
	out     fdio.Pieces // what flush still has to send

	writeErr           error
	readable, writable func(fd uintptr) bool
	full               func() // called when a write has to wait; nil = nobody wants to know
}

// bind makes the functions that the poller calls, once.
func (s *sock) bind() {
	s.readable = s.readStep
	s.writable = s.writeStep
}

// readStep borrows a buffer only when bytes are there, so that a connection
// that waits holds none.
func (s *sock) readStep(fd uintptr) bool {
	b := getBuffer(s.large)
	n, err := fdio.Read(fd, b.b)
	if err == fdio.ErrAgain {
		putBuffer(b)
		return false
	}
	if n > 0 {
		b.w = n
		s.in = b
	} else {
		putBuffer(b)
	}
	s.readN, s.readErr = n, err
	return true
}

// read waits for at least one byte. The window has to be used up.
func (s *sock) read() error {
	if err := s.raw.Read(s.readable); err != nil {
		return err
	}
	if s.in == nil {
		if s.readErr == nil {
			return io.EOF
		}
		return s.readErr
	}
	return nil
}

func (s *sock) writeStep(fd uintptr) bool {
	s.writeErr = nil
	for !s.out.Empty() && s.writeErr == nil {
		s.writeErr = fdio.Writev(fd, &s.out)
	}
	if s.writeErr == fdio.ErrAgain {
		if s.full != nil {
			s.full()
		}
		return false
	}
	return true
}

// flush writes what stands in out.
func (s *sock) flush() error {
	err := s.raw.Write(s.writable)
	s.out.Reset()
	if err != nil {
		return err
	}
	return s.writeErr
}
