package proxy

import (
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/admission"
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

// A Connection header names what is not to go on. The tenant that a request is
// counted for is not the client's to take away on the way to the replica.
func TestAConnectionHeaderDoesNotHideTheTenant(t *testing.T) {
	r := newFakeReplica(t, ok)
	g := newRig(t, []*fakeReplica{r})
	g.do(chat(plainBody, "X-Sandbox-ID: t1", "X-A: 1", "Connection: x-sandbox-id, X-Request-ID, traceparent, Content-Type, X-A"))
	q := r.requests()
	if len(q) != 1 || q[0].header("X-Sandbox-ID") != "t1" || q[0].header("X-Request-ID") == "" || q[0].header("Content-Type") == "" || q[0].header("X-A") != "" {
		t.Errorf("the replica got %+v", q)
	}
	g.settled()
}

// One request that asks for a thousand million answers is refused by the
// replica. Until then it must not be more in the accounts than a replica takes.
func TestOneRequestCannotDrownTheAccounts(t *testing.T) {
	gate := make(chan struct{})
	r := newFakeReplica(t, func(c *fakeConn) {
		<-gate
		ok(c)
	})
	g := newRig(t, []*fakeReplica{r})
	for _, body := range []string{
		`{"model":"m1","n":1000000000,"messages":[{"role":"user","content":"hi"}]}`,
		`{"model":"m1","n":9223372036854775807,"prompt":["a","b","c"]}`,
	} {
		path := "/v1/chat/completions"
		if strings.Contains(body, "prompt") {
			path = "/v1/completions"
		}
		before, done := len(r.requests()), make(chan struct{})
		go func() {
			defer close(done)
			g.do(post(path, body))
		}()
		eventually(t, "it is at the replica", func() bool { return len(r.requests()) == before+1 })
		if out := g.replicas()[0].Own.OutTokens; out <= 0 || out > 1e8 {
			t.Errorf("%.60s: %v tokens to come", body, out)
		}
		gate <- struct{}{}
		<-done
	}
	g.settled()
}

// A replica that moves from one pool to another, as by a reload, is in both for a
// moment. Its series stay, and show what its new pool knows.
func TestSeriesOfAReplicaThatMoves(t *testing.T) {
	r := newFakeReplica(t, ok)
	g := newRig(t, []*fakeReplica{r}, func(o *Options, _ *admission.Config) {
		o.Pools = append(o.Pools, PoolOptions{Name: "q", Models: []string{"m2"}, Core: admission.New(admission.Config{})})
	})
	label := func(name, more string) string { return name + `{replica="` + r.addr() + `"` + more + `}` }
	if err := g.p.AddReplica("q", ReplicaSpec{ID: 2, Addr: r.addr(), Models: []string{"m2"}}); err != nil {
		t.Fatal(err)
	}
	g.do(chat(plainBody))
	g.p.RemoveReplica(1)
	g.do(chat(strings.Replace(plainBody, "m1", "m2", 1)))
	if n := g.metric(label("penstock_attempts_total", "")); n != 2 {
		t.Errorf("attempts: %v", n)
	}
	for state, want := range map[string]float64{"up": 0, "ramping": 1, "draining": 0} {
		if n := g.metric(label("penstock_replica_state", `,state="`+state+`"`)); n != want {
			t.Errorf("state %s: %v, want %v", state, n, want)
		}
	}
	g.settled()
	g.p.RemoveReplica(2)
	if n := g.metric(label("penstock_attempts_total", "")); n != -1 {
		t.Errorf("a replica that is in no pool has series: %v", n)
	}
}
