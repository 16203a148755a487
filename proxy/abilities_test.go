package proxy

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/ladder"
)

const toolBody = `{"model":"route","tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"auto","max_tokens": 500,"messages":[{"role":"user","content":"hi"}]}`

// A reduce tier leaves out tools that the request can do without, and no byte
// else; the prompts of an exact class stay as they are.
func TestReduceDropsOptionalTools(t *testing.T) {
	for name, c := range map[string]struct {
		exact  bool
		tier   ladder.Tier
		body   string
		status int
		sent   string // the last body at the replica
	}{
		"dropped": {false, ladder.Tier{DropTools: true}, toolBody, 200,
			`{"model":"m1","max_tokens": 500,"messages":[{"role":"user","content":"hi"}]}`},
		"dropped, and fewer tokens": {false, ladder.Tier{DropTools: true, MaxTokens: 9}, toolBody, 200,
			`{"model":"m1","max_tokens": 9,"messages":[{"role":"user","content":"hi"}]}`},
		"exact keeps its tools": {true, ladder.Tier{DropTools: true, MaxTokens: 9}, toolBody, 200,
			strings.Replace(strings.Replace(toolBody, "500", "9", 1), `"route"`, `"m1"`, 1)},
		"nothing to reduce for an exact one": {true, ladder.Tier{DropTools: true}, toolBody, 429, ""},
		"a call is asked for":                {false, ladder.Tier{DropTools: true}, strings.Replace(toolBody, `"auto"`, `"required"`, 1), 429, ""},
	} {
		t.Run(name, func(t *testing.T) {
			first := true
			r1 := newFakeReplica(t, func(c *fakeConn) {
				if first {
					first = false
					c.json(429, `{"error":{"message":"too much"}}`, "Retry-After: 1\r\n")
					return
				}
				ok(c)
			})
			c.tier.Kind, c.tier.Number = ladder.KindReduce, 1
			g := climbRig(t, []*fakeReplica{r1}, nil, ladder.Route{Tiers: []ladder.Tier{poolTier("p", 0), c.tier}},
				func(o *Options, _ *admission.Config) { o.Classes = []ClassOptions{{Name: "c", Exact: c.exact}} })
			a := g.do(chat(c.body))
			if a.status != c.status {
				t.Fatalf("%d %s", a.status, a.body)
			}
			reqs := r1.requests()
			if c.status != 200 {
				if len(reqs) != 1 {
					t.Errorf("%d requests at the replica", len(reqs))
				}
				return
			}
			disclosed(t, a, "1", "reduced", "capacity")
			if got := string(reqs[len(reqs)-1].body); got != c.sent {
				t.Errorf("sent   %s\nwanted %s", got, c.sent)
			}
			g.settled()
		})
	}
}

// A request that needs what no living replica can do fails closed; one that
// does not goes on. A fallback that cannot do it is passed over.
func TestAbilitiesFailClosed(t *testing.T) {
	image := `{"model":"m1","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]}]}`
	tools := strings.Replace(toolBody, "route", "m1", 1)
	r1 := newFakeReplica(t, ok)
	g := newRig(t, nil)
	if err := g.p.AddReplica(g.p.pools[0].opt.Name, ReplicaSpec{ID: 7, Addr: r1.addr(), Models: []string{"m1"}, Warm: true, Caps: fleet.AbilityText | fleet.AbilityTools}); err != nil {
		t.Fatal(err)
	}
	for body, want := range map[string]int{plainBody: 200, tools: 200, image: 503} {
		a := g.do(chat(body))
		if a.status != want || want == 503 && !strings.Contains(a.body, `"no_permitted_replica"`) {
			t.Errorf("%s: %d %s", body, a.status, a.body)
		}
	}
	if n := len(r1.requests()); n != 2 {
		t.Errorf("%d requests at the replica, want 2", n)
	}
	g.settled()
}

// A replica that acts outside of its answer is not asked twice for one request,
// unless the client says by an Idempotency-Key that a repeat does no harm, or
// it did not take the request on.
func TestSideEffectsAreNotRepeated(t *testing.T) {
	reset := func(c *fakeConn) { c.rst() }
	full := func(c *fakeConn) { c.json(503, `{"error":{"message":"full"}}`, "Retry-After: 1\r\n") }
	for name, c := range map[string]struct {
		first   func(*fakeConn)
		headers []string
		status  int
		asked   int // requests at the two replicas
	}{
		"may have begun":      {reset, nil, 502, 1},
		"declared repeatable": {reset, []string{"Idempotency-Key: k1"}, 200, 2},
		"not taken on":        {full, nil, 200, 2},
	} {
		t.Run(name, func(t *testing.T) {
			var n atomic.Int32
			h := func(k *fakeConn) {
				if n.Add(1) == 1 {
					c.first(k)
					return
				}
				ok(k)
			}
			r1, r2 := newFakeReplica(t, h), newFakeReplica(t, h)
			g := newRig(t, []*fakeReplica{r1, r2}, func(o *Options, _ *admission.Config) { o.Pools[0].SideEffects = true })
			a := g.do(chat(plainBody, c.headers...))
			if a.status != c.status || c.status == 502 && a.headers.Get("X-Should-Retry") != "false" {
				t.Errorf("%d %v %s", a.status, a.headers, a.body)
			}
			if got := len(r1.requests()) + len(r2.requests()); got != c.asked {
				t.Errorf("%d requests at the replicas, want %d", got, c.asked)
			}
			g.settled()
		})
	}
}

// No attempt is made that could not begin to answer in time.
func TestNoAttemptThatIsTooLate(t *testing.T) {
	f := &flight{deadlineAt: time.Now().Add(time.Second), predicted: 2}
	if !f.tooLate() {
		t.Error("two seconds to the first token, one is left")
	}
	f.predicted = .5
	if f.tooLate() {
		t.Error("half a second to the first token, one is left")
	}
	f.deadlineAt = time.Time{}
	if f.predicted = 100; f.tooLate() {
		t.Error("there is no deadline")
	}
}
