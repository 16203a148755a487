package proxy

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
)

func TestMain(m *testing.M) {
	// fasthttp's pool of workers has a janitor that wakes every 10 s to see that the server has stopped.
	// So has its client, which services use.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*workerPool).Start.func2"),
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*HostClient).connsCleaner"), goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*TCPDialer).tcpAddrsClean"))
}

func (g *rig) dial() net.Conn {
	g.t.Helper()
	c, err := net.Dial("tcp", g.addr)
	if err != nil {
		g.t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	return c
}

// eventually waits for f without a fixed sleep.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// P1: the client leaves in each phase, in each way; the replica sees its end,
// the accounts are at zero, and the replica is not blamed.
func TestClientLeaves(t *testing.T) {
	phases := map[string]struct {
		handle func(c *fakeConn)
		read   string // the client waits for this before it leaves
	}{
		"headers":     {func(c *fakeConn) { c.waitClose() }, ""},
		"first_token": {func(c *fakeConn) { c.sseHead(); c.chunk(frameRole); c.waitClose() }, ""},
		"streaming":   {func(c *fakeConn) { c.sseHead(); c.chunk(frameD(1)); c.waitClose() }, `"t1"`},
	}
	ways := map[string]func(c net.Conn){
		"close":       func(c net.Conn) { _ = c.Close() },
		"reset":       func(c net.Conn) { _ = c.(*net.TCPConn).SetLinger(0); _ = c.Close() },
		"write close": func(c net.Conn) { _ = c.(*net.TCPConn).CloseWrite() },
	}
	for name, ph := range phases {
		for way, leave := range ways {
			t.Run(name+"/"+way, func(t *testing.T) {
				r, other := newFakeReplica(t, ph.handle), newFakeReplica(t, ph.handle)
				g := newRig(t, []*fakeReplica{r, other})
				c := g.dial()
				defer c.Close()
				_, _ = io.WriteString(c, chat(sseBody))
				eventually(t, "the request at a replica", func() bool { return len(r.requests())+len(other.requests()) == 1 })
				if ph.read != "" {
					br := bufio.NewReader(c)
					for {
						l, err := br.ReadString('\n')
						if err != nil {
							t.Fatal(err)
						}
						if strings.Contains(l, ph.read) {
							break
						}
					}
				} else if name == "first_token" {
					eventually(t, "the head read", func() bool { return g.inPhase(phaseFirstToken) })
				}
				leave(c)
				eventually(t, "the upstream closed", func() bool {
					r.mu.Lock()
					other.mu.Lock()
					defer r.mu.Unlock()
					defer other.mu.Unlock()
					return len(r.closed)+len(other.closed) == 1
				})
				g.settled()
				if way == "write close" {
					// Treated as gone: the connection ends, nothing hangs.
					if _, err := io.Copy(io.Discard, c); err != nil {
						t.Errorf("the connection was not ended: %v", err)
					}
				}
				if v := g.metric(`penstock_cancellations_total{phase="` + name + `"}`); v != 1 {
					t.Errorf("cancellations in phase %s: %v", name, v)
				}
				if v := g.metric(`penstock_requests_total{path="chat",code="499"}`); v != 1 {
					t.Errorf("counted as 499: %v", v)
				}
				if len(r.requests())+len(other.requests()) != 1 {
					t.Error("a second attempt was made for nobody")
				}
				for _, v := range g.replicas() {
					if v.Health.Fails != 0 || !v.Health.Open() {
						t.Errorf("the replica was blamed: %+v", v.Health)
					}
				}
			})
		}
	}
}

func (g *rig) inPhase(ph phase) bool {
	g.p.connMu.Lock()
	defer g.p.connMu.Unlock()
	for c := range g.p.conns {
		if phase(c.flight.phase.Load()) == ph {
			return true
		}
	}
	return false
}

// streaming waits until a stream has begun, and lets its replica go on.
func (g *rig) streaming(begun chan<- struct{}) {
	g.t.Helper()
	defer close(begun) // also when it never does: the replica's end waits for its handler
	eventually(g.t, "the stream begun", func() bool { return g.inPhase(phaseStreaming) })
}

// A held request whose client leaves gives its place in the queue back.
func TestHeldClientLeaves(t *testing.T) {
	release := make(chan struct{})
	r := newFakeReplica(t, func(c *fakeConn) { <-release; ok(c) })
	g := newRig(t, []*fakeReplica{r}, func(_ *Options, c *admission.Config) { c.Cap = 1 })
	first := make(chan answer, 1)
	go func() { first <- g.do(chat(plainBody)) }()
	eventually(t, "the first request placed", func() bool { return len(r.requests()) == 1 })
	second := g.dial()
	_, _ = io.WriteString(second, chat(plainBody))
	eventually(t, "the second held", func() bool { return g.metric(`penstock_held_requests{pool="p"}`) == 1 })
	third := make(chan answer, 1)
	go func() { third <- g.do(chat(plainBody)) }()
	eventually(t, "the third held", func() bool { return g.metric(`penstock_held_requests{pool="p"}`) == 2 })
	_ = second.Close()
	eventually(t, "the second gone", func() bool { return g.metric(`penstock_held_requests{pool="p"}`) == 1 })
	close(release)
	for _, ch := range []chan answer{first, third} {
		if a := <-ch; a.status != 200 {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
	if n := len(r.requests()); n != 2 {
		t.Errorf("%d requests at the replica, want 2", n)
	}
	if v := g.metric(`penstock_cancellations_total{phase="held"}`); v != 1 {
		t.Errorf("cancellations of held ones: %v", v)
	}
	g.settled()
}

// P11: whatever the ending, the accounts come back to zero.
func TestAccountsReturnToZero(t *testing.T) {
	h := func(c *fakeConn) {
		switch c.n % 8 {
		case 0:
			c.json(502, `{"error":{"message":"x"}}`, "")
		case 1:
			c.waitClose()
		case 2:
			c.rst()
		case 3:
			c.sseHead()
			c.chunk(frameD(1))
			c.chunk(frameD(2))
			c.rst()
		case 4:
			c.json(200, `{"x":"`+strings.Repeat("y", 3_000_000)+`"}`, "")
		case 5:
			c.json(200, "{not json", "")
		case 6:
			c.sseHead()
			c.send("not a chunk")
			c.waitClose()
		default:
			ok(c)
		}
	}
	r1, r2 := newFakeReplica(t, h), newFakeReplica(t, h)
	g := newRig(t, []*fakeReplica{r1, r2}, func(o *Options, c *admission.Config) {
		o.FirstToken, o.AnswerTimeout = 50*time.Millisecond, 50*time.Millisecond
		c.Classes = []admission.Class{{Name: "standard", Wait: 0.2}}
		c.Cap = 4
	})
	seed := uint64(time.Now().UnixNano())
	t.Log("seed", seed)
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			rng := rand.New(rand.NewPCG(seed, uint64(w)))
			paths := []string{"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages"}
			for range 40 {
				c, err := net.Dial("tcp", g.addr)
				if err != nil {
					t.Error(err)
					return
				}
				body := []string{plainBody, sseBody}[rng.IntN(2)]
				path := paths[rng.IntN(4)]
				if path == "/v1/embeddings" {
					body = `{"model":"m1","input":"x"}`
				} else if path == "/v1/completions" {
					body = `{"model":"m1","prompt":"x"}`
				}
				_, _ = io.WriteString(c, post(path, body))
				if rng.IntN(3) == 0 {
					time.Sleep(time.Duration(rng.IntN(30)) * time.Millisecond)
				} else {
					_ = c.SetDeadline(time.Now().Add(time.Minute))
					if _, err := readAnswer(bufio.NewReader(c), false); err != nil {
						t.Errorf("no answer: %v", err)
					}
				}
				_ = c.Close()
			}
		}()
	}
	wg.Wait()
	g.settled()
	eventually(t, "no client connection is left", func() bool { return g.p.open.Load() == 0 })
	r1.set(ok)
	r2.set(ok)
	n := 0
	eventually(t, "an answer again", func() bool {
		n++ // another request each time: the storm guard knows one that comes again and again
		// What the health probes would tell meanwhile.
		g.p.Evidence(1, fleet.EvidenceProbeOK)
		g.p.Evidence(2, fleet.EvidenceProbeOK)
		a := g.do(chat(strings.Replace(plainBody, "hi", fmt.Sprint("hi ", n), 1)))
		if n%500 == 499 {
			t.Log(a.status, a.body, g.replicas()[0].Health, g.replicas()[1].Health, g.p.now())
		}
		return a.status == 200
	})
	g.settled()
}

// Two tenants on the same connections, failing over and leaving: no byte of
// one may ever be seen by the other, or by the other's request upstream.
func TestTwoTenantCanary(t *testing.T) {
	h := func(c *fakeConn) {
		tenant := c.req.header("X-Sandbox-ID")
		body := string(c.req.body)
		other := map[string]string{"alice": "bob", "bob": "alice"}[tenant]
		if other == "" || strings.Contains(body, other) || strings.Contains(c.req.head, other) {
			t.Errorf("tenant %q: foreign bytes in %s %s", tenant, c.req.head, body)
		}
		switch c.n % 5 {
		case 0:
			c.rst()
		case 1:
			c.json(503, `{"error":{"message":"`+tenant+`"}}`, "Retry-After: 1\r\n")
		default:
			c.sseHead()
			for range 3 {
				c.chunk(`data: {"choices":[{"index":0,"delta":{"content":"` + tenant + `"}}]}` + "\n\n")
			}
			c.chunk(frameFin + frameDone)
			c.end()
		}
	}
	reps := []*fakeReplica{newFakeReplica(t, h), newFakeReplica(t, h), newFakeReplica(t, h)}
	g := newRig(t, reps, func(_ *Options, c *admission.Config) { c.Classes = []admission.Class{{Name: "standard", Wait: 0.02}} })
	var wg sync.WaitGroup
	for w := range 6 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			// One connection carries both tenants in turn, as behind a gateway.
			c := g.dial()
			br := bufio.NewReader(c)
			defer func() { _ = c.Close() }()
			for i := range 60 {
				me, other := "alice", "bob"
				if (i+w)%2 == 0 {
					me, other = other, me
				}
				id := fmt.Sprintf("%s-%d-%d", me, w, i)
				secret := strings.Repeat(me+" ", 1+(i*37)%400)
				_, err := io.WriteString(c, chat(`{"model":"m1","stream":true,"user":"`+me+`","messages":[{"role":"user","content":"`+secret+`"}]}`,
					"X-Sandbox-ID: "+me, "X-Request-ID: "+id, "Authorization: Bearer key-"+me))
				if err != nil {
					t.Error(err)
					return
				}
				a, err := readAnswer(br, false)
				if err != nil {
					t.Error(err)
					return
				}
				if strings.Contains(a.body, other) || a.headers.Get("X-Sandbox-ID") != me || a.headers.Get("X-Request-ID") != id {
					t.Errorf("%s got %v %s", me, a.headers, a.body)
				}
				if a.close {
					_ = c.Close()
					c = g.dial()
					br = bufio.NewReader(c)
				}
			}
		}()
	}
	wg.Wait()
	g.settled()
	if strings.Contains(g.logs.String(), "key-") {
		t.Error("a credential is in the log")
	}
}

// Drain: /readyz says no at once, streams end whole, Shutdown waits for them.
func TestShutdownFinishesStreams(t *testing.T) {
	next := make(chan struct{})
	r := newFakeReplica(t, func(c *fakeConn) {
		c.sseHead()
		c.chunk(frameD(1))
		<-next
		c.chunk(frameFin + frameDone)
		c.end()
	})
	g := newRig(t, []*fakeReplica{r})
	got := make(chan answer, 1)
	go func() { got <- g.do(chat(sseBody)) }()
	eventually(t, "the stream under way", func() bool { return g.inPhase(phaseStreaming) })
	if a := g.do("GET /readyz HTTP/1.1\r\nHost: r\r\n\r\n"); a.status != 200 {
		t.Fatalf("ready before: %d %s", a.status, a.body)
	}
	g.p.StartDrain()
	if a := g.do("GET /readyz HTTP/1.1\r\nHost: r\r\n\r\n"); a.status != 503 || !strings.Contains(a.body, "not_ready") {
		t.Fatalf("ready while draining: %d %s", a.status, a.body)
	}
	done := make(chan error, 1)
	go func() { done <- g.p.Shutdown(context.Background()) }()
	select {
	case <-done:
		t.Fatal("Shutdown did not wait for the stream")
	case <-time.After(50 * time.Millisecond):
	}
	close(next)
	if a := <-got; a.err != nil || !strings.HasSuffix(a.body, frameDone) {
		t.Errorf("the stream was cut: %q %v", a.body, a.err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// At its deadline Shutdown ends what still runs: with an error, not a hang.
func TestShutdownCutsAtItsDeadline(t *testing.T) {
	r := newFakeReplica(t, func(c *fakeConn) { c.sseHead(); c.chunk(frameD(1)); c.waitClose() })
	g := newRig(t, []*fakeReplica{r})
	got := make(chan answer, 1)
	go func() { got <- g.do(chat(sseBody)) }()
	eventually(t, "the stream under way", func() bool { return g.inPhase(phaseStreaming) })
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if err := g.p.Shutdown(ctx); err != nil {
		t.Errorf("cut requests did not end: %v", err)
	}
	if a := <-got; a.err == nil || !strings.Contains(a.body, `"code":"upstream_stream_failed"`) {
		t.Errorf("the stream ended with %q %v", a.body, a.err)
	}
	g.settled()
}
