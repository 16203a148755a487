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

// fat is a stream without an end.
func fat(c *fakeConn) {
	event := strings.Replace(frameD(1), "t1", strings.Repeat("t", 4000), 1)
	c.sseHead()
	for {
		c.chunk(event)
	}
}

// A client that reads nothing makes its replica silent, since the router reads
// from it no faster. That is no hang, and must not cost the replica its place,
// or others their answers. One request that does wait for the replica is enough
// to find it hung.
func TestAClientThatDoesNotReadDoesNotMakeAReplicaLookHung(t *testing.T) {
	clock := newFakeClock()
	r := newFakeReplica(t, func(c *fakeConn) {
		switch c.req.header("X-Kind") {
		case "fat":
			fat(c)
		case "silent":
			c.waitClose()
		}
		ok(c)
	})
	g := newRig(t, []*fakeReplica{r}, func(o *Options, c *admission.Config) {
		o.Now = clock.now
		c.HangAfter = 0.2
		o.WriteTimeout = time.Hour
	})
	// Time passes in steps in which the pool's timer is not late.
	pass := func(seconds float64) fleet.State {
		for end := clock.now() + seconds; clock.now() < end; clock.add(tickEvery / 2) {
			g.p.pools[0].tick()
			if s := g.replicas()[0].Health.State; s != fleet.StateUp {
				return s
			}
		}
		return fleet.StateUp
	}
	for range 3 {
		g.stingy(chat(sseBody, "X-Kind: fat"))
	}
	eventually(t, "their writes wait", func() bool { return g.p.waits.Load() == 3 })
	if s := pass(3); s != fleet.StateUp { // it would be taken for hung 1.4 s after its last sign
		t.Fatalf("the replica is %v", s)
	}
	if a := g.do(chat(plainBody)); a.status != 200 {
		t.Errorf("another request: %d %s", a.status, a.body)
	}
	if n := g.p.waits.Load(); n != 3 {
		t.Errorf("%d writes wait", n)
	}

	g.stingy(chat(plainBody, "X-Kind: silent"))
	eventually(t, "it is at the replica", func() bool { return len(r.requests()) == 5 })
	if s := pass(60); s != fleet.StateEjected {
		t.Errorf("one waits for the replica, which is %v", s)
	}
}

// A write that waits ends at its time-out, and the replica's work with it.
func TestAClientThatDoesNotReadIsCutAtTheWriteTimeout(t *testing.T) {
	r := newFakeReplica(t, fat)
	g := newRig(t, []*fakeReplica{r}, func(o *Options, _ *admission.Config) { o.WriteTimeout = 300 * time.Millisecond })
	g.stingy(chat(sseBody))
	// That its write waits is too short to be seen surely.
	eventually(t, "it is cut, and counted as a client that left", func() bool {
		return g.metric(`penstock_cancellations_total{phase="streaming"}`) == 1 && g.p.open.Load() == 0
	})
	g.settled()
	if n := g.p.waits.Load(); n != 0 {
		t.Errorf("%d writes wait", n)
	}
	if s := g.replicas()[0].Health.State; s != fleet.StateUp {
		t.Errorf("the replica is %v", s)
	}
}
