package scraper

import (
	"bufio"
	"context"
	"fmt"
	"math"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/telemetry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

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
	return a, nil
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

func TestScrapesAndProbesKeepTheirCadence(t *testing.T) {
	run(t, 2, nil, func(t *testing.T, w *world) {
		w.add(1, 2)
		time.Sleep(10 * time.Second)
		for i := 1; i <= 2; i++ {
			es := w.seen(i, w.start)
			if n := evidence(es, fleet.EvidenceScrapeOK); n < 39 || n > 41 {
				t.Errorf("replica %d: %d scrapes in 10 s, want 40", i, n)
			}
			if n := evidence(es, fleet.EvidenceProbeOK); n < 9 || n > 11 {
				t.Errorf("replica %d: %d probes in 10 s, want 10", i, n)
			}
			if n := w.fakes[name(i)].count("/v1/models"); n < 1 || n > 2 {
				t.Errorf("replica %d: models read %d times", i, n)
			}
		}
		f := w.fakes[name(1)]
		f.mu.Lock()
		defer f.mu.Unlock()
		if len(f.conns) > 6 {
			t.Errorf("%d connections: they are not kept", len(f.conns))
		}
		if f.auth != "Bearer k" {
			t.Errorf("Authorization %q", f.auth)
		}
	})
}

func TestOffsetsSpreadAndDifferByProcess(t *testing.T) {
	const n = 64
	spread := func(seed uint64) (out []time.Duration) {
		s := &Scraper{o: Options{Seed: seed}}
		for i := 0; i < n; i++ {
			p := &replica{Replica: Replica{Name: name(i)}, s: s}
			out = append(out, p.offset("scrape", 250*time.Millisecond))
		}
		return out
	}
	a, b := spread(1), spread(2)
	var quarter [4]int
	same := 0
	for i := range a {
		if a[i] < 0 || a[i] >= 250*time.Millisecond {
			t.Fatalf("offset %v", a[i])
		}
		quarter[int(a[i]*4/(250*time.Millisecond))]++
		if a[i] == b[i] {
			same++
		}
	}
	for i, q := range quarter {
		if q < n/16 {
			t.Errorf("%d of %d offsets in quarter %d", q, n, i)
		}
	}
	if same > 2 {
		t.Errorf("%d offsets are the same in two processes", same)
	}
}

func TestSampleIsStampedAndAges(t *testing.T) {
	run(t, 1, nil, func(t *testing.T, w *world) {
		w.add(1)
		time.Sleep(time.Second)
		st, ok := w.s.Status(1)
		if !ok || !st.Seen || st.Age < 0 || st.Age > 0.25 || st.Scrape != "ok" || !st.Alive {
			t.Errorf("%+v", st)
		}
		f := w.fakes[name(1)]
		f.set(func() { f.status["/metrics"] = 500 })
		broke := time.Now()
		time.Sleep(3 * time.Second)
		es := w.seen(1, broke.Add(250*time.Millisecond))
		if n := evidence(es, fleet.EvidenceScrapeFailed); n < 10 {
			t.Errorf("%d failed scrapes reported", n)
		}
		for _, e := range es {
			if e.s != nil && (!e.s.Broken || e.s.Running != 3 || e.s.At > broke.Sub(w.start).Seconds()) {
				t.Fatalf("not the last good sample, marked: %+v", e.s)
			}
		}
		if st, _ = w.s.Status(1); st.Age < 2.9 || st.Scrape != "status" || st.Error == "" {
			t.Errorf("%+v", st)
		}
		if m := w.metrics(); !strings.Contains(m, `penstock_scrape_age_seconds{replica="10.0.0.1:8000"} 3`) ||
			!strings.Contains(m, `penstock_scrapes_total{replica="10.0.0.1:8000",result="status"} 12`) {
			t.Errorf("staleness is not in the metrics:\n%s", m)
		}
		f.set(func() { f.status["/metrics"] = 0 })
		time.Sleep(time.Second)
		if st, _ = w.s.Status(1); st.Age > 0.25 || st.Error != "" {
			t.Errorf("not recovered: %+v", st)
		}
		if n := w.logs.FilterMessage("metrics page failed").Len(); n != 1 {
			t.Errorf("%d log lines for one outage", n)
		}
		if n := w.logs.FilterMessage("metrics page works again").Len(); n != 1 {
			t.Errorf("%d log lines for one recovery", n)
		}
	})
}

func TestFailureThatGoesOnIsLoggedOnceAMinute(t *testing.T) {
	run(t, 1, nil, func(t *testing.T, w *world) {
		w.fakes[name(1)].down = true
		w.add(1)
		time.Sleep(5*time.Minute - time.Second)
		for _, what := range []string{"metrics page failed", "health probe failed", "reading /v1/models failed"} {
			if n := w.logs.FilterMessage(what).Len(); n != 5 {
				t.Errorf("%s: %d lines in five minutes, want 5", what, n)
			}
		}
	})
}

// The blocked-probe drill: what never answers delays nothing but itself.
func TestBlackHoledReplicaDelaysNobody(t *testing.T) {
	for _, hole := range [][]string{{"/metrics"}, {"/health"}, {"/v1/models"}, {"/metrics", "/health", "/v1/models"}} {
		t.Run(strings.Join(hole, " "), func(t *testing.T) {
			run(t, 3, nil, func(t *testing.T, w *world) {
				f := w.fakes[name(1)]
				for _, path := range hole {
					f.black[path] = true
				}
				w.add(1, 2, 3)
				time.Sleep(10 * time.Second)
				holes := strings.Join(hole, " ")
				for i := 1; i <= 3; i++ {
					es := w.seen(i, w.start)
					if n := evidence(es, fleet.EvidenceScrapeOK); (i != 1 || !strings.Contains(holes, "/metrics")) && n < 39 {
						t.Errorf("replica %d: %d scrapes in 10 s", i, n)
					}
					if n := evidence(es, fleet.EvidenceProbeOK); (i != 1 || !strings.Contains(holes, "/health")) && n < 9 {
						t.Errorf("replica %d: %d probes in 10 s", i, n)
					}
				}
				es := w.seen(1, w.start)
				if strings.Contains(holes, "/metrics") {
					if n := evidence(es, fleet.EvidenceScrapeFailed); n < 4 {
						t.Errorf("black-holed page: %d failures told", n)
					}
					for _, e := range es {
						if e.s != nil {
							t.Fatalf("a sample of a page that never came: %+v", e.s)
						}
					}
				}
				if strings.Contains(holes, "/health") && evidence(es, fleet.EvidenceProbeFailed) < 4 {
					t.Error("black-holed probe: failures are not told")
				}
			})
		})
	}
}

func TestDeadReplicaIsProbedEagerlyAndReadAgainWhenBack(t *testing.T) {
	run(t, 1, nil, func(t *testing.T, w *world) {
		f := w.fakes[name(1)]
		w.add(1)
		time.Sleep(2 * time.Second)
		f.kill()
		died := time.Now()
		time.Sleep(5 * time.Second)
		es := w.seen(1, died)
		if n := evidence(es, fleet.EvidenceProbeRefused); n < 16 {
			t.Errorf("%d refused probes in 5 s; want one each 250 ms", n)
		}
		if len(w.s.Models()) != 0 {
			t.Error("a dead replica's models are listed")
		}
		f.set(func() {
			f.down = false
			f.models = strings.Replace(goodModels, "m1", "m2", 1)
			f.page = strings.Replace(goodPage, `block_size="16"`, `block_size="32"`, 1)
		})
		back := time.Now()
		time.Sleep(600 * time.Millisecond)
		if n := evidence(w.seen(1, back), fleet.EvidenceProbeOK); n == 0 {
			t.Error("its return was not seen within 600 ms")
		}
		if ms := w.s.Models(); len(ms) != 1 || ms[0].ID != "m2" {
			t.Errorf("models after the return: %+v", ms)
		}
		if i, ok := w.s.Info(1); !ok || i.BlockTokens != 32 || i.KVTokens != 3200 || i.MaxModelLen != 2048 {
			t.Errorf("%+v", i)
		}
	})
}

func TestEjectedReplicaIsProbedEagerly(t *testing.T) {
	run(t, 1, nil, func(t *testing.T, w *world) {
		w.add(1)
		time.Sleep(2 * time.Second)
		w.mu.Lock()
		w.eager = true
		w.mu.Unlock()
		from := time.Now()
		time.Sleep(5 * time.Second)
		if n := evidence(w.seen(1, from), fleet.EvidenceProbeOK); n < 19 {
			t.Errorf("%d probes in 5 s", n)
		}
	})
}

func TestReplicaThatIsNotUpAtStartIsFoundLater(t *testing.T) {
	run(t, 1, nil, func(t *testing.T, w *world) {
		f := w.fakes[name(1)]
		f.down = true
		w.add(1)
		time.Sleep(30 * time.Second)
		if len(w.told()) != 0 || len(w.s.Models()) != 0 {
			t.Fatal("models of a replica that never answered")
		}
		f.set(func() { f.down = false })
		time.Sleep(time.Second)
		if is := w.told(); len(is) != 1 || len(is[0].Models) != 1 {
			t.Errorf("%+v", is)
		}
		time.Sleep(time.Minute)
		if is := w.told(); len(is) != 1 {
			t.Errorf("told %d times though nothing changed", len(is))
		}
	})
}

func TestRefusedKeyIsSaidClearly(t *testing.T) {
	run(t, 1, nil, func(t *testing.T, w *world) {
		w.fakes[name(1)].status["/v1/models"] = 401
		w.add(1)
		time.Sleep(2 * time.Second)
		es := w.logs.FilterMessage("reading /v1/models failed").All()
		if len(es) != 1 || !strings.Contains(fmt.Sprint(es[0].ContextMap()), "api_key_file") {
			t.Errorf("%+v", es)
		}
		for _, e := range w.logs.All() {
			if strings.Contains(fmt.Sprint(e.ContextMap()), "Bearer") {
				t.Error("the key is in the log")
			}
		}
	})
}

func TestImpossibleValuesAreLoggedOnce(t *testing.T) {
	run(t, 1, nil, func(t *testing.T, w *world) {
		f := w.fakes[name(1)]
		w.add(1)
		time.Sleep(time.Second)
		for range 2 { // again after it was good: that is news
			f.set(func() { f.page = strings.Replace(goodPage, "} 3", "} NaN", 1) })
			time.Sleep(5 * time.Second)
			f.set(func() { f.page = goodPage })
			time.Sleep(time.Second)
		}
		if n := w.logs.FilterField(zap.Strings("values", []string{"running"})).Len(); n != 2 {
			t.Errorf("logged %d times for two spells", n)
		}
		nan := 0
		for _, e := range w.seen(1, w.start) {
			if e.s != nil && math.IsNaN(e.s.Running) && e.s.Waiting == 2 && !e.s.Broken {
				nan++
			}
		}
		if nan < 38 {
			t.Errorf("%d samples with the good values kept", nan)
		}
	})
}

func TestRemovedReplicaLeavesNothing(t *testing.T) {
	run(t, 2, nil, func(t *testing.T, w *world) {
		w.fakes[name(1)].black["/metrics"] = true // its scrape is under way when it goes
		w.add(1, 2)
		time.Sleep(3 * time.Second)
		if !strings.Contains(w.metrics(), `replica="10.0.0.1:8000"`) {
			t.Fatal("no series")
		}
		synctest.Wait()
		before := len(w.seen(1, w.start))
		w.s.Remove(1)
		time.Sleep(500 * time.Millisecond)
		if m := w.metrics(); strings.Contains(m, `replica="10.0.0.1:8000"`) || !strings.Contains(m, `replica="10.0.0.2:8000"`) {
			t.Errorf("series after the removal:\n%s", m)
		}
		time.Sleep(10 * time.Second)
		if n := len(w.seen(1, w.start)) - before; n != 0 {
			t.Errorf("told of a removed replica: %d times", n)
		}
		if _, ok := w.s.Status(1); ok {
			t.Error("still has a status")
		}
		w.add(1) // and it may come back
		time.Sleep(3 * time.Second)
		if !strings.Contains(w.metrics(), `replica="10.0.0.1:8000"`) {
			t.Error("no series after its return")
		}
	})
}

// Two pools may list one replica: two IDs, one name.
func TestOneReplicaInTwoPools(t *testing.T) {
	run(t, 1, nil, func(t *testing.T, w *world) {
		w.s.Add(Replica{ID: 1, Name: name(1), Addr: name(1)})
		w.s.Add(Replica{ID: 2, Name: name(1), Addr: name(1)})
		time.Sleep(time.Second)
		w.s.Remove(2)
		time.Sleep(time.Second)
		if m := w.metrics(); !strings.Contains(m, `penstock_replica_running_requests{replica="10.0.0.1:8000"} 3`) {
			t.Errorf("the other pool's series went too:\n%s", m)
		}
		w.s.Remove(1)
		if strings.Contains(w.metrics(), "10.0.0.1") {
			t.Error("series are left")
		}
	})
}

func TestModelsAreTheUnionOfLiveReplicas(t *testing.T) {
	run(t, 2, nil, func(t *testing.T, w *world) {
		w.fakes[name(1)].models = string(body(t, "testdata/models_with_lora.http"))
		w.fakes[name(2)].models = string(body(t, "testdata/models.http"))
		w.add(1, 2)
		time.Sleep(2 * time.Second)
		ms := w.s.Models()
		if len(ms) != 3 || ms[0].ID != "lora-a" || ms[0].Parent != "tiny" || ms[0].MaxModelLen != 2048 || ms[2].ID != "tiny" ||
			ms[2].OwnedBy != "vllm" || ms[2].Created != 1796013021 {
			t.Errorf("%+v", ms)
		}
		w.fakes[name(1)].kill()
		time.Sleep(2 * time.Second)
		if ms = w.s.Models(); len(ms) != 1 || ms[0].ID != "tiny" || ms[0].Created != 1796011902 {
			t.Errorf("with only the second alive: %+v", ms)
		}
	})
}

func TestLimitsFromTheRecordedPages(t *testing.T) {
	var i Info
	if err := readLimits(body(t, "testdata/metrics_lora_loaded.http"), &i); err != nil {
		t.Fatal(err)
	}
	if i.BlockTokens != 32 || i.KVTokens != 5120 || strings.Join(i.Adapters, " ") != "lora-a lora-b" {
		t.Errorf("%+v", i)
	}
	if err := readLimits(body(t, "testdata/metrics_dp2_loaded.http"), &i); err != nil || i.KVTokens != 10240 {
		t.Errorf("%+v, %v", i, err)
	}
}

func TestGarbageFromAReplicaIsAFailureAndNoMore(t *testing.T) {
	long := strings.Repeat("x", 3<<20)
	cases := map[string]struct {
		raw  string
		want string
	}{
		"not HTTP":             {"hello\r\n\r\n", "parse"},
		"endless head":         {"HTTP/1.1 200 OK\r\nA: " + long, "parse"},
		"too large":            {fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(long), long), "parse"},
		"negative length":      {"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", "parse"},
		"bad chunk":            {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "parse"},
		"huge chunk":           {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7fffffff\r\n", "parse"},
		"other transfer code":  {"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", "parse"},
		"a web page":           {"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n<html>\n", "parse"},
		"redirect":             {"HTTP/1.1 307 X\r\nLocation: http://evil/\r\nContent-Length: 0\r\n\r\n", "status"},
		"no body promised":     {"HTTP/1.1 204 X\r\n\r\n", "status"},
		"answer that is short": {"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\nvllm:num_requests_running 1\n", "timeout"},
	}
	for what, c := range cases {
		t.Run(what, func(t *testing.T) {
			run(t, 1, nil, func(t *testing.T, w *world) {
				w.fakes[name(1)].raw = c.raw
				w.add(1)
				time.Sleep(6 * time.Second)
				if st, _ := w.s.Status(1); st.Scrape != c.want || st.Seen {
					t.Errorf("%+v", st)
				}
			})
		})
	}
}
