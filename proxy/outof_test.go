package proxy

import (
	"net"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/penstock/penstock/fleet"
)

// outOfFiles is a listener of a process that has no file descriptor left for
// its first connections.
type outOfFiles struct {
	net.Listener
	left atomic.Int32
}

func (l *outOfFiles) Accept() (net.Conn, error) {
	if l.left.Add(-1) >= 0 {
		return nil, &net.OpError{Op: "accept", Net: "tcp", Err: syscall.EMFILE}
	}
	return l.Listener.Accept()
}

// A router that runs out of files must not end for it.
func TestAcceptingGoesOnAfterTheFilesWereUsedUp(t *testing.T) {
	r := newFakeReplica(t, ok)
	g := newRig(t, []*fakeReplica{r})
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln := &outOfFiles{Listener: inner}
	ln.left.Store(3)
	done := make(chan error, 1)
	go func() { done <- g.p.Serve(ln) }()
	g.addr = inner.Addr().String()
	if a := g.do(chat(plainBody)); a.status != 200 {
		t.Errorf("%d %s", a.status, a.body)
	}
	select {
	case err := <-done:
		t.Errorf("the server ended: %v", err)
	default:
	}
	if !strings.Contains(g.logs.String(), "cannot accept connections now") {
		t.Error("the log does not tell")
	}
	g.settled()
}

// Nor may it take its replicas for dead.
func TestNoFileForADialIsNoEvidence(t *testing.T) {
	r := newFakeReplica(t, ok)
	g := newRig(t, []*fakeReplica{r})
	var broken atomic.Bool
	broken.Store(true)
	g.dialControl(func() error {
		if broken.Load() {
			return syscall.EMFILE
		}
		return nil
	})
	for range 4 {
		if a := g.do(chat(plainBody)); a.status != 502 && a.status != 503 {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
	if h := g.replicas()[0].Health; h.State != fleet.StateUp || h.Fails != 0 {
		t.Errorf("the replica is %v, failures %d", h.State, h.Fails)
	}
	broken.Store(false)
	if a := g.do(chat(plainBody)); a.status != 200 {
		t.Errorf("with files again: %d %s", a.status, a.body)
	}
	g.settled()
}
