package proxy

import (
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/telemetry"
)

func serviceRig(t *testing.T, handle func(c *fakeConn)) (*rig, *fakeReplica) {
	sv := newFakeReplica(t, handle)
	return newRig(t, []*fakeReplica{newFakeReplica(t, ok)}, func(o *Options, _ *admission.Config) {
		o.Services = []ServiceOptions{{Name: "retrieval", Prefix: "/retrieval/", URL: "http://" + sv.addr(), Timeout: 20 * time.Second}}
	}), sv
}

// A service is given its prefix, and nothing above it, however it is written.
func TestServicePathsDoNotClimb(t *testing.T) {
	g, sv := serviceRig(t, func(c *fakeConn) { c.json(200, `{}`, "") })
	for path, want := range map[string]int{
		"/retrieval/a/../../admin": 404, "/retrieval/..": 404, "/retrieval/%2e%2E/admin": 404, "/retrieval/.%2e%2fadmin": 404,
		"/retrieval/..\\admin": 404, "/retrieval/..;x/admin": 404, "/retrieval/%2e.": 404,
		"/retrieval/a..b": 200, "/retrieval/...": 200, "/retrieval/.": 200, "/retrieval/x?back=../..": 200, "/retrieval/a%2Fb%": 200,
	} {
		before := len(sv.requests())
		a := g.do("GET " + path + " HTTP/1.1\r\nHost: r\r\n\r\n")
		if got := len(sv.requests()) - before; a.status != want || (got == 1) != (want == 200) {
			t.Errorf("%s: %d, the service saw %d requests; want %d", path, a.status, got, want)
		}
	}
	g.settled()
}

// The answer's head is the service's: what it said of a body that HEAD does not
// bring, and no length or type where it sent none.
func TestServiceHeadsAreItsOwn(t *testing.T) {
	g, sv := serviceRig(t, func(c *fakeConn) {
		c.send("HTTP/1.1 200 OK\r\nContent-Length: 7\r\nContent-Type: text/x\r\n\r\n")
	})
	a := g.do("HEAD /retrieval/x HTTP/1.1\r\nHost: r\r\n\r\n")
	if a.status != 200 || a.headers.Get("Content-Length") != "7" || a.headers.Get("Content-Type") != "text/x" {
		t.Errorf("HEAD: %d %v", a.status, a.headers)
	}
	sv.set(func(c *fakeConn) { c.send("HTTP/1.1 204 No Content\r\n\r\n") })
	a = g.do("GET /retrieval/x HTTP/1.1\r\nHost: r\r\n\r\n")
	if _, has := a.headers["Content-Length"]; a.status != 204 || has || a.headers.Get("Content-Type") != "" {
		t.Errorf("204: %d %v", a.status, a.headers)
	}
	g.settled()
}

// A service that broke off may have done what was asked: only what does no harm
// a second time is to be repeated.
func TestServiceRepeatsAreToldWhenTheyAreSafe(t *testing.T) {
	g, sv := serviceRig(t, func(c *fakeConn) { c.fin() })
	get := "GET /retrieval/x HTTP/1.1\r\nHost: r\r\n\r\n"
	for _, c := range []struct{ what, raw, want string }{
		{"POST", post("/retrieval/x", "{}"), "false"},
		{"POST with a key", post("/retrieval/x", "{}", "Idempotency-Key: k"), "true"},
		{"GET", get, "true"},
	} {
		a := g.do(c.raw)
		if a.status != 503 || a.headers.Get("X-Should-Retry") != c.want || !strings.Contains(a.body, "retrieval_unavailable") {
			t.Errorf("%s: %d %v %s", c.what, a.status, a.headers, a.body)
		}
	}
	if n := len(sv.requests()); n != 3 {
		t.Errorf("the service saw %d requests", n)
	}
	g = newRig(t, []*fakeReplica{newFakeReplica(t, ok)}, func(o *Options, _ *admission.Config) {
		o.Services = []ServiceOptions{{Name: "retrieval", Prefix: "/retrieval/", URL: "http://127.0.0.1:1"}}
	})
	if a := g.do(post("/retrieval/x", "{}")); a.status != 503 || a.headers.Get("X-Should-Retry") != "true" {
		t.Errorf("a POST that was never sent: %d %v", a.status, a.headers)
	}
	g.settled()
}

// Servers close idle connections, many after 5 s; one that is used again just
// then loses the request, so ours go well before.
func TestServiceConnectionsAreNotKeptForLong(t *testing.T) {
	s, err := newService(ServiceOptions{Name: "x", Prefix: "/x/", URL: "http://127.0.0.1:1"}, telemetry.New(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if d := s.client.MaxIdleConnDuration; d <= 0 || d > 2*time.Second {
		t.Errorf("idle connections are kept for %v", d)
	}
}

func TestServiceBreakerOpensClosesAndLetsOneTrialThrough(t *testing.T) {
	var b breaker
	for range breakerFails {
		if ok, _ := b.allow(1); !ok {
			t.Fatal("open too early")
		}
		b.report(1, false)
	}
	ok, wait := b.allow(1)
	if ok || wait <= 0 || wait > 1 {
		t.Fatalf("after %d failures: %v, wait %v", breakerFails, ok, wait)
	}
	if ok, _ := b.allow(1 + wait); !ok {
		t.Fatal("no trial at the time that was told")
	}
	if ok, _ := b.allow(1 + wait); ok {
		t.Fatal("two trials at a time")
	}
	b.report(3, false)
	if _, again := b.allow(3); again < wait {
		t.Fatalf("a failed trial has to open for longer: %v, then %v", wait, again)
	}
	if ok, _ := b.allow(30); !ok {
		t.Fatal("no second trial")
	}
	b.report(30, true)
	for range 10 {
		if ok, _ := b.allow(30); !ok {
			t.Fatal("not closed by a good answer")
		}
	}
}
