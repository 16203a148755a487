package scraper

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/penstock/penstock/fleet"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

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

// What a router that stood still did not see in time is not held against a
// replica.
func TestTimeoutOfARouterThatStoodStillIsNoEvidence(t *testing.T) {
	for _, late := range []time.Duration{0, time.Second} {
		run(t, 1, nil, func(t *testing.T, w *world) {
			f := w.fakes[name(1)]
			f.black["/metrics"], f.black["/health"], f.late = true, true, late
			w.add(1)
			time.Sleep(20 * time.Second)
			es := w.seen(1, w.start)
			for _, kind := range []fleet.Evidence{fleet.EvidenceScrapeFailed, fleet.EvidenceProbeFailed} {
				if n := evidence(es, kind); (n > 0) != (late == 0) {
					t.Errorf("time-outs seen %v late: told %d times of %v", late, n, kind)
				}
			}
			f.set(func() { f.late = 0 })
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
