package proxy

import (
	"io"
	"strings"
	"testing"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
)

// An alias whose model no replica has told yet is not sent as it is: the
// replica would not know it. It waits, and a client that leaves is let go.
func TestAliasWaitsUntilItsModelIsKnown(t *testing.T) {
	r := newFakeReplica(t, ok)
	g := newRig(t, nil, func(o *Options, _ *admission.Config) { o.Pools[0].Models = nil })
	if err := g.p.AddReplica("p", ReplicaSpec{ID: 1, Addr: r.addr(), Warm: true}); err != nil {
		t.Fatal(err)
	}
	body := strings.Replace(plainBody, `"m1"`, `"chat"`, 1)
	if a := g.do(chat(body, "X-Request-Timeout-Ms: 50")); a.status != 504 {
		t.Errorf("its deadline passes: %d %s", a.status, a.body)
	}
	c := g.dial()
	_, _ = io.WriteString(c, chat(body))
	eventually(t, "one waits", func() bool { return g.p.InFlight() == 1 })
	c.Close()
	g.settled()
	if v := g.metric(`penstock_requests_total{path="chat",code="499"}`); v != 1 {
		t.Errorf("counted as 499: %v", v)
	}

	answered := make(chan answer, 1)
	go func() { answered <- g.do(chat(body)) }()
	eventually(t, "one waits", func() bool { return g.p.InFlight() == 1 })
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
