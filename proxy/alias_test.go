package proxy

import (
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
)

// aliasBody asks for an alias.
var aliasBody = strings.Replace(plainBody, `"m1"`, `"chat"`, 1)

// aliasRig is a router with an alias and one replica that has not told its models.
func aliasRig(t *testing.T, options ...rigOption) (*rig, *fakeReplica) {
	r := newFakeReplica(t, ok)
	g := newRig(t, nil, append(options, func(o *Options, _ *admission.Config) { o.Pools[0].Models = nil })...)
	if err := g.p.AddReplica("p", ReplicaSpec{ID: 1, Addr: r.addr(), Warm: true}); err != nil {
		t.Fatal(err)
	}
	return g, r
}

// waiting sends a request for the alias and returns when it is in the router.
func (g *rig) waiting() <-chan answer {
	got := make(chan answer, 1)
	go func() { got <- g.do(chat(aliasBody)) }()
	eventually(g.t, "one waits", func() bool { return g.p.InFlight() == 1 })
	return got
}

// An alias whose model no replica has told yet is not sent as it is: the
// replica would not know it. It waits, and a client that leaves is let go.
func TestAliasWaitsUntilItsModelIsKnown(t *testing.T) {
	g, r := aliasRig(t)
	if a := g.do(chat(aliasBody, "X-Request-Timeout-Ms: 50")); a.status != 504 {
		t.Errorf("its deadline passes: %d %s", a.status, a.body)
	}
	c := g.dial()
	_, _ = io.WriteString(c, chat(aliasBody))
	eventually(t, "one waits", func() bool { return g.p.InFlight() == 1 })
	c.Close()
	g.settled()
	if v := g.metric(`penstock_requests_total{path="chat",code="499"}`); v != 1 {
		t.Errorf("counted as 499: %v", v)
	}

	answered := g.waiting()
	if n := len(r.requests()); n != 0 {
		t.Errorf("%d requests sent before the model was known", n)
	}
	g.p.SetModels(fleet.ID(1), []ModelInfo{{ID: "m1"}})
	if a := <-answered; a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	if q := r.requests(); string(q[0].body) != plainBody {
		t.Errorf("the replica got %s", q[0].body)
	}
	g.settled()
}

// No replica tells: after unreadWait the request is refused, and may come again.
func TestTheWaitForAnAliassModelEnds(t *testing.T) {
	clock := newFakeClock()
	g, r := aliasRig(t, func(o *Options, _ *admission.Config) { o.Now = clock.now })
	sent := clock.now()
	got := g.waiting()
	var a answer
	for waits := true; waits; clock.add(0.1) {
		if clock.now() > sent+600 {
			t.Fatal("it waits on and on")
		}
		select {
		case a = <-got:
			waits = false
		case <-time.After(unreadLook):
		}
	}
	if took := clock.now() - sent; took < unreadWait.Seconds() {
		t.Errorf("refused after %v s", took)
	}
	if a.status != 503 || !strings.Contains(a.body, `"code":"capacity_exhausted"`) || a.headers.Get("Retry-After") == "" || a.headers.Get("X-Should-Retry") != "true" {
		t.Errorf("%d %v %s", a.status, a.headers, a.body)
	}
	if v := g.metric(`penstock_shed_total{reason="no_replica"}`); v != 1 {
		t.Errorf("counted as shed: %v", v)
	}
	if v := g.metric(`penstock_shed_total{reason="none"}`); v != -1 {
		t.Errorf("a reason that no shed has is on the page: %v", v)
	}
	if n := len(r.requests()); n != 0 {
		t.Errorf("%d requests sent", n)
	}
	g.settled()
}

// A shutdown waits for a request that waits; at its own end it refuses it.
func TestShutdownWhileAnAliasWaits(t *testing.T) {
	t.Run("in time", func(t *testing.T) {
		g, _ := aliasRig(t)
		got := g.waiting()
		done := make(chan error, 1)
		go func() { done <- g.p.Shutdown(context.Background()) }()
		eventually(t, "the router drains", g.p.draining.Load)
		g.p.SetModels(fleet.ID(1), []ModelInfo{{ID: "m1"}})
		if a := <-got; a.status != 200 {
			t.Errorf("%d %s", a.status, a.body)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		g.settled()
	})
	t.Run("too late", func(t *testing.T) {
		g, r := aliasRig(t)
		got := g.waiting()
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if err := g.p.Shutdown(ctx); err != nil {
			t.Errorf("it did not end: %v", err)
		}
		if a := <-got; a.status != 503 || !strings.Contains(a.body, `"code":"not_ready"`) {
			t.Errorf("%d %s", a.status, a.body)
		}
		if n := len(r.requests()); n != 0 {
			t.Errorf("%d requests sent", n)
		}
		g.settled()
	})
}
