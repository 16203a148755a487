package proxy

import (
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/admission"
)

// While an operator has drained all replicas, no queue drains either: what
// clients are told must not grow with how many of them come.
func TestRetryAfterWithAllReplicasDrained(t *testing.T) {
	r := newFakeReplica(t, ok)
	g := newRig(t, []*fakeReplica{r})
	for range 3 {
		g.do(chat(plainBody))
	}
	g.p.DrainReplica(1, true)
	for i := range 300 {
		body := strings.Replace(plainBody, `"hi"`, fmt.Sprintf(`"%d %s"`, i, strings.Repeat("word ", 200)), 1)
		a := g.do(chat(body))
		after, err := strconv.Atoi(a.headers.Get("Retry-After"))
		if a.status != 503 || err != nil || after < 1 || after > 3 {
			t.Fatalf("request %d: %d, Retry-After %q: %s", i, a.status, a.headers.Get("Retry-After"), a.body)
		}
	}
	g.p.DrainReplica(1, false)
	if a := g.do(chat(plainBody)); a.status != 200 {
		t.Errorf("after the drain: %d %s", a.status, a.body)
	}
	g.settled()
}

// A client that was refused and comes again with the same request is known to
// the core by then, so that the turn it was told is its own.
func TestReturningClientIsKnown(t *testing.T) {
	var mu sync.Mutex
	var offered, told []uint64
	hold := make(chan struct{})
	r := newFakeReplica(t, func(c *fakeConn) {
		<-hold
		ok(c)
	})
	rec := admission.Record(admission.New(admission.Config{Cap: 1, MaxHeld: 1}), func(c *admission.Call) {
		mu.Lock()
		defer mu.Unlock()
		switch c.Op {
		case admission.OpAdmit:
			offered = append(offered, c.Work.Print)
		case admission.OpTold:
			told = append(told, c.Print)
		}
	})
	g := newRig(t, []*fakeReplica{r}, func(o *Options, _ *admission.Config) { o.Pools[0].Core = rec })
	g.core = rec.Pool
	body := func(i int) string { return strings.Replace(plainBody, `"hi"`, fmt.Sprintf(`"%d"`, i), 1) }
	var busy sync.WaitGroup
	for i := range 2 { // one runs, one is held
		busy.Go(func() { g.do(chat(body(i))) })
	}
	for n := 0; n < 2; {
		mu.Lock()
		n = len(offered)
		mu.Unlock()
		time.Sleep(time.Millisecond)
	}
	a := g.do(chat(body(9)))
	ms, err := strconv.Atoi(a.headers.Get("retry-after-ms"))
	if a.status != 503 || err != nil || ms < 1 {
		t.Fatalf("%d, retry-after-ms %q", a.status, a.headers.Get("retry-after-ms"))
	}
	close(hold)
	busy.Wait()
	if a := g.do(chat(body(9))); a.status != 200 {
		t.Errorf("it came again: %d %s", a.status, a.body)
	}
	g.do(chat(body(10)))
	g.settled()
	mu.Lock()
	defer mu.Unlock()
	if len(told) != 1 || told[0] == 0 || len(offered) != 5 || offered[3] != told[0] || offered[4] == told[0] {
		t.Errorf("told %x, offered %x", told, offered)
	}
}

// What a replica says of its context in GET /v1/models decides where long
// requests go, and that one which fits nowhere is refused by the router.
func TestContextOfReplicas(t *testing.T) {
	var short, long atomic.Int32
	r1 := newFakeReplica(t, func(c *fakeConn) { short.Add(1); ok(c) })
	r2 := newFakeReplica(t, func(c *fakeConn) { long.Add(1); ok(c) })
	g := newRig(t, []*fakeReplica{r1, r2})
	g.p.SetModels(1, []ModelInfo{{ID: "m1", MaxModelLen: 1000}})
	g.p.SetModels(2, []ModelInfo{{ID: "m1", MaxModelLen: 4000}})
	body := func(words int) string {
		return strings.Replace(plainBody, `"hi"`, `"`+strings.Repeat("word ", words)+`"`, 1)
	}
	for range 6 {
		if a := g.do(chat(body(1600))); a.status != 200 { // about 2,000 tokens
			t.Fatalf("%d %s", a.status, a.body)
		}
	}
	if short.Load() != 0 || long.Load() != 6 {
		t.Errorf("%d of 6 prompts of 2,000 tokens went to the replica that takes 1,000", short.Load())
	}
	a := g.do(chat(body(16_000)))
	if a.status != 400 || !strings.Contains(a.body, `"context_length_exceeded"`) {
		t.Errorf("20,000 tokens, 4,000 is the longest context: %d %s", a.status, a.body)
	}
	g.settled()
}

// A replica's own 503 is passed on with the truth about the request's attempts:
// a repeat of the client's SDK has used one, however often it says it tried.
func TestBusyAnswersCountTheClientsOwnRepeats(t *testing.T) {
	for retries, want := range map[string]string{"0": "true", "1": "false", "99": "false"} {
		r := newFakeReplica(t, func(c *fakeConn) { c.json(503, `{"error":{"message":"full"}}`, "") })
		g := newRig(t, []*fakeReplica{r})
		a := g.do(chat(plainBody, "X-Stainless-Retry-Count: "+retries))
		if a.status != 503 || !strings.Contains(a.body, "full") || a.headers.Get("X-Should-Retry") != want || a.headers.Get("Retry-After-Ms") == "" {
			t.Errorf("repeat %s: %d %v %s, want x-should-retry: %s", retries, a.status, a.headers, a.body, want)
		}
		g.settled()
	}
}
