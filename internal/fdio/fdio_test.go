package fdio

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"testing"
	"time"
)

func pair(t *testing.T) (a, b net.Conn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	a, err = net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if b, err = ln.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

func randomBytes(n int) []byte {
	r := rand.New(rand.NewPCG(1, 2))
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(r.Uint32())
	}
	return p
}

// What is written arrives, whole and once, also when it is far more than the
// socket takes at a time.
func TestWrapPassesAll(t *testing.T) {
	a, b := pair(t)
	w, r := Wrap(a), Wrap(b)
	if w == a || r == b {
		t.Fatal("a TCP connection was not wrapped")
	}
	sent := randomBytes(20 << 20)
	werr := make(chan error, 1)
	go func() {
		_, err := w.Write(sent)
		a.Close()
		werr <- err
	}()
	got, err := io.ReadAll(r)
	if err != nil || !bytes.Equal(got, sent) {
		t.Fatalf("%d bytes of %d, %v", len(got), len(sent), err)
	}
	if err := <-werr; err != nil {
		t.Fatal(err)
	}
}

func TestWrapKeepsDeadlines(t *testing.T) {
	a, _ := pair(t)
	w := Wrap(a)
	_ = w.SetDeadline(time.Unix(1, 0))
	if _, err := w.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read: %v", err)
	}
	if _, err := w.Write([]byte("x")); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("write: %v", err)
	}
}

func TestWrapTellsOfAReset(t *testing.T) {
	a, b := pair(t)
	w := Wrap(a)
	_ = b.(*net.TCPConn).SetLinger(0)
	b.Close()
	if n, err := w.Read(make([]byte, 8)); err == nil || err == io.EOF {
		t.Errorf("%d bytes, %v after a reset", n, err)
	}
}

// The pieces go out in order and nothing of them twice, wherever the socket
// stops taking more.
func TestWritevGoesOnWhereItStopped(t *testing.T) {
	a, b := pair(t)
	raw, err := a.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	_ = a.(*net.TCPConn).SetWriteBuffer(16 << 10)
	all := randomBytes(9 << 20)
	var v Pieces
	v.Set(all[:100], nil, all[100:3<<20], all[3<<20:(3<<20)+1], all[(3<<20)+1:])
	werr := make(chan error, 1)
	go func() {
		var last error
		err := raw.Write(func(fd uintptr) bool {
			for last = nil; !v.Empty() && last == nil; {
				last = Writev(fd, &v)
			}
			return last != ErrAgain
		})
		a.Close()
		werr <- errors.Join(err, last)
	}()
	got, err := io.ReadAll(b)
	if err != nil || !bytes.Equal(got, all) {
		t.Fatalf("%d bytes of %d, %v", len(got), len(all), err)
	}
	if err := <-werr; err != nil {
		t.Fatal(err)
	}
}
