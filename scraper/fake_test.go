package scraper

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/telemetry"
)

const goodPage = "vllm:num_requests_running{engine=\"0\"} 3\nvllm:num_requests_waiting{engine=\"0\"} 2\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.5\n" +
	"vllm:cache_config_info{engine=\"0\",block_size=\"16\",num_gpu_blocks=\"100\"} 1\n"

const goodModels = `{"object":"list","data":[{"id":"m1","created":7,"owned_by":"vllm","parent":null,"max_model_len":2048}]}`

// fake is a replica in memory. Its fields are read under mu by its connections.
type fake struct {
	mu     sync.Mutex
	down   bool            // connections are refused
	black  map[string]bool // paths that are never answered
	status map[string]int  // default 200
	page   string
	models string
	raw    string // when set, these bytes are the whole answer to anything
	asked  map[string][]time.Time
	auth   string // last Authorization seen
	conns  map[net.Conn]bool
	late   time.Duration // so long after its deadline the router sees a time-out
}

// lateConn is a connection of a router that stands still when it should see a
// time-out.
type lateConn struct {
	net.Conn
	f *fake
}

func (c lateConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if isTimeout(err) {
		c.f.mu.Lock()
		by := c.f.late
		c.f.mu.Unlock()
		time.Sleep(by)
	}
	return n, err
}

func newFake() *fake {
	return &fake{black: map[string]bool{}, status: map[string]int{}, page: goodPage, models: goodModels,
		asked: map[string][]time.Time{}, conns: map[net.Conn]bool{}}
}

func (f *fake) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fake) serve(c net.Conn) {
	defer c.Close()
	r := bufio.NewReader(c)
	for {
		req, err := http.ReadRequest(r)
		if err != nil {
			return
		}
		f.mu.Lock()
		path := req.URL.Path
		f.asked[path] = append(f.asked[path], time.Now())
		f.auth = req.Header.Get("Authorization")
		black, status, raw := f.black[path], f.status[path], f.raw
		body := map[string]string{"/metrics": f.page, "/v1/models": f.models}[path]
		f.mu.Unlock()
		if black {
			_, _ = r.ReadByte() // until the other end gives up
			return
		}
		if raw == "" {
			if status == 0 {
				status = 200
			}
			raw = fmt.Sprintf("HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s", status, len(body), body)
		}
		if _, err := c.Write([]byte(raw)); err != nil {
			return
		}
	}
}

// kill closes all connections, as a dying process does.
func (f *fake) kill() {
	f.set(func() {
		f.down = true
		for c := range f.conns {
			_ = c.Close()
		}
	})
}

func (f *fake) count(path string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.asked[path])
}

type event struct {
	at time.Time
	id fleet.ID
	e  fleet.Evidence
	s  *fleet.Sample
}

// world holds fakes by address and records what the Sink gets.
type world struct {
	fakes map[string]*fake
	s     *Scraper
	reg   *telemetry.Registry
	logs  *observer.ObservedLogs
	start time.Time

	mu     sync.Mutex
	events []event
	infos  []Info
	eager  bool
}

func (w *world) Observe(id fleet.ID, s fleet.Sample) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, event{time.Now(), id, 0, &s})
}

func (w *world) Evidence(id fleet.ID, e fleet.Evidence) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, event{time.Now(), id, e, nil})
}

func (w *world) dial(ctx context.Context, _, addr string) (net.Conn, error) {
	f := w.fakes[addr]
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.down {
		return nil, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
	}
	a, b := net.Pipe()
	f.conns[b] = true
	go f.serve(b)
	return lateConn{a, f}, nil
}

func newWorld(n int, change func(*Options)) *world {
	w := &world{fakes: map[string]*fake{}, reg: telemetry.New(), start: time.Now()}
	core, logs := observer.New(zapcore.DebugLevel)
	w.logs = logs
	o := Options{Sink: w, Reg: w.reg, Log: zap.New(core), Dial: w.dial,
		Now:   func() float64 { return time.Since(w.start).Seconds() },
		Info:  func(_ fleet.ID, i Info) { w.mu.Lock(); w.infos = append(w.infos, i); w.mu.Unlock() },
		Eager: func(fleet.ID) bool { w.mu.Lock(); defer w.mu.Unlock(); return w.eager }}
	if change != nil {
		change(&o)
	}
	w.s = New(o)
	for i := 1; i <= n; i++ {
		w.fakes[name(i)] = newFake()
	}
	return w
}

func name(i int) string { return fmt.Sprintf("10.0.0.%d:8000", i) }

func (w *world) add(ids ...int) {
	for _, i := range ids {
		w.s.Add(Replica{ID: fleet.ID(i), Name: name(i), Addr: name(i), APIKey: "k"})
	}
}

// told lists what discovery said.
func (w *world) told() []Info {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]Info(nil), w.infos...)
}

// seen lists the events of one replica since t.
func (w *world) seen(id int, since time.Time) (out []event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range w.events {
		if int(e.id) == id && !e.at.Before(since) {
			out = append(out, e)
		}
	}
	return out
}

func evidence(es []event, kind fleet.Evidence) (n int) {
	for _, e := range es {
		if e.s == nil && e.e == kind {
			n++
		}
	}
	return n
}

func (w *world) metrics() string {
	var b strings.Builder
	w.reg.Write(&b)
	return b.String()
}

// run runs f in a bubble of its own time and ends the scraper.
func run(t *testing.T, n int, change func(*Options), f func(t *testing.T, w *world)) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(n, change)
		f(t, w)
		began := time.Now()
		w.s.Close()
		if d := time.Since(began); d > 0 {
			t.Errorf("Close waited %v for an answer", d)
		}
		for _, f := range w.fakes {
			f.kill()
		}
	})
}
