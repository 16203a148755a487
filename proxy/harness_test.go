package proxy

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
)

// rig is a proxy on a loopback port with one pool of fake replicas.
type rig struct {
	t    *testing.T
	p    *Proxy
	core *admission.Pool
	addr string
	logs *syncBuffer
}

type rigOption func(o *Options, c *admission.Config)

func newRig(t *testing.T, replicas []*fakeReplica, options ...rigOption) *rig {
	t.Helper()
	g := &rig{t: t, logs: &syncBuffer{}}
	enc := zapcore.NewJSONEncoder(zapcore.EncoderConfig{MessageKey: "msg", LevelKey: "level"})
	o := Options{Log: zap.New(zapcore.NewCore(enc, g.logs, zapcore.DebugLevel))}
	cfg := admission.Config{}
	o.Pools = []PoolOptions{{Name: "p", Models: []string{"m1"}, Aliases: []string{"chat"}}}
	for _, f := range options {
		f(&o, &cfg)
	}
	g.core = admission.New(cfg)
	for i := range o.Pools {
		if o.Pools[i].Core == nil {
			o.Pools[i].Core = g.core
		}
	}
	p, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	g.p = p
	for i, r := range replicas {
		if err := p.AddReplica("p", ReplicaSpec{ID: fleet.ID(i + 1), Addr: r.addr(), Models: []string{"m1"}, Warm: true}); err != nil {
			t.Fatal(err)
		}
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g.addr = ln.Addr().String()
	served := make(chan error, 1)
	go func() { served <- p.Serve(ln) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := p.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return g
}

// fakeClock is a clock that the test moves.
type fakeClock struct{ nanos atomic.Int64 }

func newFakeClock() *fakeClock {
	c := &fakeClock{}
	c.add(1)
	return c
}

func (c *fakeClock) now() float64 { return time.Duration(c.nanos.Load()).Seconds() }

func (c *fakeClock) add(seconds float64) { c.nanos.Add(int64(seconds * float64(time.Second))) }

// dialControl runs f before each connecting to replica 1. Under the pool's
// mutex, which each request takes: the dialer is not its own lock's.
func (g *rig) dialControl(f func() error) {
	r := g.p.byID[1]
	r.pool.mu.Lock()
	r.dialer.Control = func(string, string, syscall.RawConn) error { return f() }
	r.pool.mu.Unlock()
}

// syncBuffer collects log lines.
type syncBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (m *syncBuffer) Write(p []byte) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.buf.Write(p)
}

func (m *syncBuffer) Sync() error { return nil }

func (m *syncBuffer) String() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.buf.String()
}

// answer is what a client got, raw.
type answer struct {
	status  int
	headers http.Header
	body    string
	err     error // of reading the body: io.ErrUnexpectedEOF when it was cut
	close   bool
}

// do sends raw bytes and reads one answer.
func (g *rig) do(raw string) answer {
	g.t.Helper()
	c, err := net.Dial("tcp", g.addr)
	if err != nil {
		g.t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := io.WriteString(c, raw); err != nil {
		g.t.Fatal(err)
	}
	a, err := readAnswer(bufio.NewReader(c), strings.HasPrefix(raw, "HEAD"))
	if err != nil {
		g.t.Fatalf("no answer: %v", err)
	}
	return a
}

func readAnswer(br *bufio.Reader, head bool) (answer, error) {
	var a answer
	method := "GET"
	if head {
		method = "HEAD"
	}
	resp, err := http.ReadResponse(br, &http.Request{Method: method})
	if err != nil {
		return a, err
	}
	a.status, a.headers, a.close = resp.StatusCode, resp.Header, resp.Close
	b, err := io.ReadAll(resp.Body)
	a.body, a.err = string(b), err
	return a, nil
}

func post(path, body string, headers ...string) string {
	h := ""
	for _, x := range headers {
		h += x + "\r\n"
	}
	return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n%s", path, h, len(body), body)
}

func chat(body string, headers ...string) string {
	return post("/v1/chat/completions", body, headers...)
}

// settled waits until every account is at zero, and fails when they do not get there.
func (g *rig) settled() {
	g.t.Helper()
	var why string
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		why = g.unsettled()
		if why == "" {
			return
		}
	}
	g.t.Fatalf("accounts are not at zero: %s", why)
}

func (g *rig) unsettled() string {
	if n := g.p.InFlight(); n != 0 {
		return fmt.Sprintf("%d in flight", n)
	}
	for _, pl := range g.p.pools {
		pl.mu.Lock()
		flights, held := len(pl.flights), pl.held
		st := pl.core.(interface{ Stats() admission.Stats }).Stats()
		var own fleet.Load
		for _, v := range pl.core.View().Replicas {
			own = own.Add(v.Own)
		}
		pl.mu.Unlock()
		own.LastFirst = 0
		switch {
		case flights != 0 || held != 0:
			return fmt.Sprintf("flights %d held %d", flights, held)
		case own != fleet.Load{}:
			return fmt.Sprintf("replica accounts %+v", own)
		case st.Held != 0 || st.Placed != st.Finished+st.Failed+st.Cancelled:
			return fmt.Sprintf("stats %+v", st)
		}
	}
	return ""
}

// metric reads one series from the page; -1 when it is not there.
func (g *rig) metric(name string) float64 {
	var b bytes.Buffer
	g.p.reg.Write(&b)
	for _, l := range strings.Split(b.String(), "\n") {
		if i := strings.LastIndexByte(l, ' '); i > 0 && l[:i] == name {
			var v float64
			_, _ = fmt.Sscan(l[i+1:], &v)
			return v
		}
	}
	return -1
}

// replicas is a copy of what the core knows of them.
func (g *rig) replicas() []fleet.Replica {
	pl := g.p.pools[0]
	pl.mu.Lock()
	defer pl.mu.Unlock()
	return append([]fleet.Replica(nil), g.core.View().Replicas...)
}
