package proxy

import (
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/fleet"
)

// A deadline that the client set itself cuts its answer, and says nothing of
// the replica: else a client could eject a healthy fleet with short deadlines.
func TestAClientsOwnDeadlineIsNoEvidenceAgainstTheReplica(t *testing.T) {
	r := newFakeReplica(t, func(c *fakeConn) {
		c.sseHead()
		for i := 0; i < 4; i++ {
			c.chunk(frameD(i))
		}
		c.waitClose()
	})
	g := newRig(t, []*fakeReplica{r})
	for range 8 {
		a := g.do(chat(sseBody, "X-Request-Timeout-Ms: 150"))
		if !strings.Contains(a.body, "deadline_exceeded") {
			t.Fatalf("%d %q", a.status, a.body)
		}
	}
	if s := g.replicas()[0].Health.State; s != fleet.StateUp {
		t.Errorf("the replica is %v", s)
	}
	g.settled()
}

// The same when the deadline ends the connecting.
func TestADeadlineThatEndsADialIsNoEvidence(t *testing.T) {
	r := newFakeReplica(t, ok)
	g := newRig(t, []*fakeReplica{r})
	g.dialControl(func() error {
		time.Sleep(20 * time.Millisecond)
		return nil
	})
	for range 5 {
		if a := g.do(chat(plainBody, "X-Request-Timeout-Ms: 10")); a.status != 504 || !strings.Contains(a.body, "deadline_exceeded") {
			t.Fatalf("%d %s", a.status, a.body)
		}
	}
	if h := g.replicas()[0].Health; h.State != fleet.StateUp || h.Fails != 0 {
		t.Errorf("the replica is %v, failures %d", h.State, h.Fails)
	}
	if a := g.do(chat(plainBody)); a.status != 200 {
		t.Errorf("the next one: %d %s", a.status, a.body)
	}
	g.settled()
}

// What discloses a degraded answer is the router's to say, and a busy
// replica's senseless Retry-After is not passed on.
func TestAReplicaCannotSpeakForTheRouter(t *testing.T) {
	r := newFakeReplica(t, func(c *fakeConn) {
		c.json(200, plainAnswerForHostile, "X-Degraded: true\r\nX-Degraded-Tier: 2\r\nX-Stream-Integrity: bad\r\nX-Penstock-Replica: evil\r\n")
	})
	g := newRig(t, []*fakeReplica{r})
	a := g.do(chat(plainBody))
	for k := range a.headers {
		if k = strings.ToLower(k); strings.HasPrefix(k, "x-degraded") || k == "x-stream-integrity" || k == "x-penstock-replica" {
			t.Errorf("%s came through", k)
		}
	}
	r.set(func(c *fakeConn) { c.json(429, `{"error":{"message":"busy"}}`, "Retry-After: -5\r\n") })
	if a = g.do(chat(plainBody)); a.status != 429 || a.headers.Get("Retry-After") != "1" {
		t.Errorf("%d, Retry-After %q", a.status, a.headers.Get("Retry-After"))
	}
	g.settled()
}

const plainAnswerForHostile = `{"id":"c","object":"chat.completion","created":1,"model":"m1","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}]}`

// Two tenants must never be one to the router: a tenant header that is too
// long to be kept whole, or given twice, is refused.
func TestATenantThatCannotBeToldApartIsRefused(t *testing.T) {
	r1 := newFakeReplica(t, ok)
	g := newRig(t, []*fakeReplica{r1})
	long := strings.Repeat("a", 257)
	for _, h := range [][]string{{"X-Sandbox-ID: " + long}, {"X-Sandbox-ID: a", "X-Sandbox-ID: b"}} {
		if a := g.do(chat(plainBody, h...)); a.status != 400 || !strings.Contains(a.body, "X-Sandbox-ID") {
			t.Errorf("%.40q: %d %s", h, a.status, a.body)
		}
	}
	if n := len(r1.requests()); n != 0 {
		t.Errorf("%d of them reached a replica", n)
	}
	g.settled()
}
