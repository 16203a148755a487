package proxy

import (
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
)

// stingy dials the proxy, sends raw, and never reads.
func (g *rig) stingy(raw string) net.Conn {
	g.t.Helper()
	d := net.Dialer{Control: smallReceiveBuffer}
	c, err := d.Dial("tcp", g.addr)
	if err != nil {
		g.t.Fatal(err)
	}
	if _, err := io.WriteString(c, raw); err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { _ = c.Close() })
	return c
}

// A client that reads nothing makes its replica silent, since the router reads
// from it no faster. That is no hang, and must not cost the replica its place,
// or others their answers.
func TestAClientThatDoesNotReadDoesNotMakeAReplicaLookHung(t *testing.T) {
	fat := strings.Replace(frameD(1), "t1", strings.Repeat("t", 4000), 1)
	r := newFakeReplica(t, func(c *fakeConn) {
		if !strings.Contains(c.req.head, "fat") {
			ok(c)
			return
		}
		c.sseHead()
		for {
			c.chunk(fat)
		}
	})
	g := newRig(t, []*fakeReplica{r}, func(o *Options, c *admission.Config) {
		c.HangAfter = 0.2
		o.WriteTimeout = time.Minute
	})
	for range 3 {
		g.stingy(chat(sseBody, "X-Kind: fat"))
	}
	eventually(t, "their writes wait", func() bool { return g.p.waits.Load() == 3 })
	// It would be taken for hung 1.4 s after its last sign.
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if s := g.replicas()[0].Health.State; s != fleet.StateUp {
			t.Fatalf("the replica is %v", s)
		}
	}
	if a := g.do(chat(plainBody)); a.status != 200 {
		t.Errorf("another request: %d %s", a.status, a.body)
	}
	if n := g.p.waits.Load(); n != 3 {
		t.Errorf("%d writes wait", n)
	}
}

// A write that waits ends at its time-out, and the replica's work with it.
func TestAClientThatDoesNotReadIsCutAtTheWriteTimeout(t *testing.T) {
	fat := strings.Replace(frameD(1), "t1", strings.Repeat("t", 4000), 1)
	r := newFakeReplica(t, func(c *fakeConn) {
		c.sseHead()
		for {
			c.chunk(fat)
		}
	})
	g := newRig(t, []*fakeReplica{r}, func(o *Options, _ *admission.Config) { o.WriteTimeout = 300 * time.Millisecond })
	g.stingy(chat(sseBody))
	eventually(t, "its write waits", func() bool { return g.p.waits.Load() == 1 })
	eventually(t, "it is cut", func() bool { return g.p.waits.Load() == 0 && g.p.open.Load() == 0 })
	g.settled()
	if v := g.metric(`penstock_cancellations_total{phase="streaming"}`); v != 1 {
		t.Errorf("counted as %v clients that left", v)
	}
	if s := g.replicas()[0].Health.State; s != fleet.StateUp {
		t.Errorf("the replica is %v", s)
	}
}
