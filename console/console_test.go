package console

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/telemetry"
)

// fakeRouter is a router that stands still.
type fakeRouter struct {
	ready     bool
	pools     []Pool
	decisions []Decision
	requests  []Request
	config    any
}

func (f *fakeRouter) Now() float64          { return 100 }
func (f *fakeRouter) Ready() (bool, []byte) { return f.ready, []byte(`{"status":"x","pools":[]}`) }
func (f *fakeRouter) Pools() []Pool         { return f.pools }
func (f *fakeRouter) Decisions() []Decision { return append([]Decision(nil), f.decisions...) }
func (f *fakeRouter) Requests() []Request   { return append([]Request(nil), f.requests...) }
func (f *fakeRouter) Config() any           { return f.config }
func (f *fakeRouter) Drain(id fleet.ID, on bool) bool {
	found := false
	for p := range f.pools {
		for i := range f.pools[p].Replicas {
			if r := &f.pools[p].Replicas[i]; r.ID == id {
				found = true
				r.Health.State = fleet.StateUp
				if on {
					r.Health.State = fleet.StateDraining
				}
			}
		}
	}
	return found
}

func sampleRouter() *fakeRouter {
	nan := math.NaN()
	a := Replica{Replica: fleet.Replica{ID: 1, Name: "10.0.0.1:8000", ScalePrefill: 1.5, ScaleDecode: 1, Own: fleet.Load{Requests: 3, Prefilling: 1, PrefillTokens: 700},
		Sample: fleet.Sample{At: 99, Engines: 1, Running: 3, Waiting: nan, KVUsage: 0.5, PrefixQueries: 100, PrefixHits: 25},
		Health: fleet.Health{State: fleet.StateUp, Reason: fleet.EvidenceRefused, Share: 1, Since: 40}},
		Served: []string{"m1"}, Learned: true, Info: admission.ReplicaInfo{Ratio: 1.2, Predicted: 0.1, TTFT: 0.12, Samples: 9},
		Scrape: Scrape{Metrics: "ok", Probe: "ok", Models: "ok", Age: 0.2, Seen: true}}
	b := Replica{Replica: fleet.Replica{ID: 2, Name: "10.0.0.2:8000", Health: fleet.Health{State: fleet.StateEjected, Reason: fleet.EvidenceRefused, Until: 103, Since: 98}},
		Scrape: Scrape{Metrics: "refused", Error: "connection refused", Age: 60}}
	c := Replica{Replica: fleet.Replica{ID: 3, Name: "10.0.0.1:8000"}}
	p := Pool{Name: "p", Models: []string{"m1"}, Stats: admission.Stats{Held: 2, Placed: 10}, Replicas: []Replica{b, a}}
	p.Stats.Shed[admission.ReasonCapacity] = 4
	return &fakeRouter{ready: true, pools: []Pool{p, {Name: "q", Replicas: []Replica{c}, Waiting: []Waiting{{"b:1", "connection refused"}}}}, config: map[string]string{"listen": ":8080"},
		decisions: []Decision{
			{At: 90, Request: "old", Verdict: "shed", Reason: "capacity"},
			{At: 99, Request: "new", Verdict: "placed", Replica: "10.0.0.1:8000", TTFT: 0.1, Candidates: []Candidate{{Replica: "10.0.0.1:8000", State: "up", TTFT: 0.1, Own: nan}}},
		}}
}

func serve(t *testing.T, f *fakeRouter) func(method, path string, header ...string) (int, http.Header, string) {
	t.Helper()
	reg := telemetry.New()
	reg.Counter(telemetry.Requests, "chat", "200").Inc()
	srv := httptest.NewServer(New(Options{Router: f, Reg: reg, Version: "v1.2", Started: 40}))
	t.Cleanup(srv.Close)
	return func(method, path string, header ...string) (int, http.Header, string) {
		t.Helper()
		req, err := http.NewRequest(method, srv.URL+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i+1 < len(header); i += 2 {
			req.Header.Set(header[i], header[i+1])
		}
		resp, err := srv.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, resp.Header, string(b)
	}
}

func decode[T any](t *testing.T, s string) (v T) {
	t.Helper()
	if err := json.Unmarshal([]byte(s), &v); err != nil {
		t.Fatalf("%v in %s", err, s)
	}
	return v
}

func TestPagesThatNeedNothing(t *testing.T) {
	do := serve(t, sampleRouter())
	for path, want := range map[string]string{
		"/metrics":      `penstock_requests_total{path="chat",code="200"} 1`,
		"/healthz":      "ok",
		"/readyz":       `"status"`,
		"/debug/pprof/": "goroutine",
		"/":             "<h2>Replicas",
		"/console.js":   "refresh",
		"/console.css":  "body",
	} {
		status, h, body := do("GET", path)
		if status != 200 || !strings.Contains(body, want) {
			t.Errorf("%s: %d %.200s", path, status, body)
		}
		if h.Get("X-Content-Type-Options") != "nosniff" || !strings.Contains(h.Get("Content-Security-Policy"), "default-src 'self'") {
			t.Errorf("%s: headers %v", path, h)
		}
	}
}

// The page must work with the strict policy that is sent along, and offline.
func TestPageIsSelfContained(t *testing.T) {
	do := serve(t, sampleRouter())
	for _, path := range []string{"/", "/console.js", "/console.css"} {
		_, _, body := do("GET", path)
		for _, bad := range []string{"http://", "https://", "//cdn", "<script>", " onclick=", "style=\"", "innerHTML", "backend", "worker"} {
			if strings.Contains(body, bad) {
				t.Errorf("%s contains %q", path, bad)
			}
		}
	}
}

func TestNotReadyIs503(t *testing.T) {
	f := sampleRouter()
	f.ready = false
	do := serve(t, f)
	if status, h, _ := do("GET", "/readyz"); status != 503 || h.Get("Retry-After") == "" || h.Get("retry-after-ms") == "" || h.Get("x-should-retry") != "true" {
		t.Errorf("%d %v", status, h)
	}
	if status, _, _ := do("GET", "/healthz"); status != 200 {
		t.Errorf("liveness looks at something: %d", status)
	}
}

func TestReplicas(t *testing.T) {
	do := serve(t, sampleRouter())
	_, _, body := do("GET", "/admin/v1/replicas?pool=p")
	list := decode[struct{ Replicas []map[string]any }](t, body).Replicas
	if len(list) != 2 || list[0]["name"] != "10.0.0.1:8000" {
		t.Fatal(body)
	}
	up, dead := list[0], list[1]
	sample := up["sample"].(map[string]any)
	if up["reason"] != "" || up["share"] != 1.0 || sample["running"] != 3.0 || sample["waiting"] != nil || sample["prefix_hit_rate"] != 0.25 || sample["age_seconds"] != 0.2 ||
		up["account"].(map[string]any)["prefill_tokens"] != 700.0 || up["learned"].(map[string]any)["prefill_scale"] != 1.5 {
		t.Error(body)
	}
	if dead["state"] != "ejected" || dead["reason"] != "refused" || dead["state_ends_in_seconds"] != 3.0 || dead["learned"] != nil ||
		dead["sample"].(map[string]any)["running"] != nil || dead["scrape"].(map[string]any)["error"] != "connection refused" {
		t.Error(body)
	}
}

func TestPoolsSayWhatWasShedAndWhy(t *testing.T) {
	do := serve(t, sampleRouter())
	_, _, body := do("GET", "/admin/v1/pools")
	both := decode[struct{ Pools []map[string]any }](t, body).Pools
	p := both[0]
	if fmt.Sprint(p["never_answered"]) != "[]" || fmt.Sprint(both[1]["never_answered"]) != "[map[error:connection refused name:b:1]]" {
		t.Error(body)
	}
	if fmt.Sprint(p["shed"]) != "map[capacity:4]" || fmt.Sprint(p["states"]) != "map[ejected:1 up:1]" || p["held_requests"] != 2.0 {
		t.Error(body)
	}
}

func TestDecisions(t *testing.T) {
	do := serve(t, sampleRouter())
	_, _, body := do("GET", "/admin/v1/decisions")
	list := decode[struct{ Decisions []map[string]any }](t, body).Decisions
	if len(list) != 2 || list[0]["request"] != "new" || list[0]["ttft_observed_seconds"] != nil || list[0]["seconds_ago"] != 1.0 ||
		list[0]["candidates"].([]any)[0].(map[string]any)["own_seconds"] != nil || list[1]["own_seconds"] != nil || list[0]["ttft_predicted_seconds"] != 0.1 {
		t.Error(body)
	}
	for query, want := range map[string]string{"?n=1": "new", "?verdict=shed": "old", "?request=old": "old"} {
		_, _, body := do("GET", "/admin/v1/decisions"+query)
		if list := decode[struct{ Decisions []map[string]any }](t, body).Decisions; len(list) != 1 || list[0]["request"] != want {
			t.Errorf("%s: %s", query, body)
		}
	}
	for _, bad := range []string{"n=0", "n=-1", "n=1001", "n=x", "verdict=sheds"} {
		if status, _, body := do("GET", "/admin/v1/decisions?"+bad); status != 400 || !strings.Contains(body, `"code":"invalid_request"`) {
			t.Errorf("%s: %d %s", bad, status, body)
		}
	}
}

func TestDrainByNumberAndByName(t *testing.T) {
	f := sampleRouter()
	do := serve(t, f)
	status, _, body := do("POST", "/admin/v1/replicas/1/drain")
	got := decode[struct {
		Draining bool
		Replicas []struct {
			ID    int
			State string
		}
	}](t, body)
	if status != 200 || !got.Draining || len(got.Replicas) != 1 || got.Replicas[0].ID != 1 || got.Replicas[0].State != "draining" {
		t.Errorf("%d %s", status, body)
	}
	if status, _, body = do("POST", "/admin/v1/replicas/1/undrain"); status != 200 || strings.Contains(body, `"state":"draining"`) {
		t.Errorf("%d %s", status, body)
	}
	// The name stands for one replica in two pools.
	if status, _, body = do("POST", "/admin/v1/replicas/10.0.0.1:8000/drain"); status != 200 || strings.Count(body, `"state":"draining"`) != 2 {
		t.Errorf("%d %s", status, body)
	}
	if f.pools[0].Replicas[0].Health.State != fleet.StateEjected {
		t.Error("another replica was touched")
	}
}

func TestWhatIsNotThereIsTold(t *testing.T) {
	do := serve(t, sampleRouter())
	for _, c := range []struct{ method, path string }{
		{"POST", "/admin/v1/replicas/9/drain"}, {"POST", "/admin/v1/replicas/nobody/undrain"}, {"GET", "/nothing"}, {"POST", "/nothing"},
		{"GET", "/page/index.html"}, {"GET", "/admin/v1/"},
	} {
		status, _, body := do(c.method, c.path)
		e := decode[struct {
			Error struct{ Message, Type, Code string }
		}](t, body).Error
		if status != 404 || e.Code != "not_found" || e.Message == "" || e.Type == "" {
			t.Errorf("%s %s: %d %s", c.method, c.path, status, body)
		}
	}
}

// A path that is there, asked by the wrong method, is not "no such path".
func TestAWrongMethodIsToldWhichIsRight(t *testing.T) {
	h := New(Options{Router: sampleRouter(), Reg: telemetry.New(), Also: map[string]http.HandlerFunc{"POST /admin/v1/reload": func(http.ResponseWriter, *http.Request) {}}})
	for _, c := range []struct{ method, path, allow string }{
		{"GET", "/admin/v1/replicas/1/drain", "POST"}, {"DELETE", "/admin/v1/replicas/1/undrain", "POST"}, {"GET", "/admin/v1/reload", "POST"},
		{"POST", "/admin/v1/replicas", "GET, HEAD"}, {"PUT", "/metrics", "GET, HEAD"}, {"POST", "/", "GET, HEAD"}, {"POST", "/console.js", "GET, HEAD"},
	} {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(c.method, c.path, nil)
		r.Host = "localhost"
		h.ServeHTTP(w, r)
		if w.Code != 405 || w.Header().Get("Allow") != c.allow || !strings.Contains(w.Body.String(), `"code":"method_not_allowed"`) {
			t.Errorf("%s %s: %d, Allow %q, %s", c.method, c.path, w.Code, w.Header().Get("Allow"), w.Body)
		}
	}
}

// 0 would say that no prompt fits.
func TestAnUnknownLongestPromptIsNull(t *testing.T) {
	f := sampleRouter()
	f.pools[0].Replicas[0].Profile = &fleet.Profile{Name: "h100-8b", MaxModelLen: 131072}
	f.pools[0].Replicas[1].Profile = &fleet.Profile{Name: "own"}
	_, _, body := serve(t, f)("GET", "/admin/v1/replicas?pool=p")
	if strings.Count(body, `"max_model_len":131072`) != 1 || strings.Count(body, `"max_model_len":null`) != 1 {
		t.Error(body)
	}
}

// There is no login: a page of another site must not be able to drain.
func TestOtherSitesMayNotChangeAnything(t *testing.T) {
	f := sampleRouter()
	do := serve(t, f)
	for _, h := range [][]string{{"Sec-Fetch-Site", "cross-site"}, {"Origin", "http://evil.example"}} {
		if status, _, body := do("POST", "/admin/v1/replicas/1/drain", h...); status != 403 || !strings.Contains(body, `"error"`) {
			t.Errorf("%v: %d %s", h, status, body)
		}
	}
	if f.pools[0].Replicas[1].Health.State != fleet.StateUp {
		t.Error("it was drained")
	}
	if status, _, _ := do("POST", "/admin/v1/replicas/1/drain", "Sec-Fetch-Site", "same-origin"); status != 200 {
		t.Errorf("the own page may not: %d", status)
	}
}

// A name of another site's that resolves to this address is one origin for a
// browser: what it may read here would be that site's.
func TestAnUnknownHostNameIsRefused(t *testing.T) {
	called := false
	h := New(Options{Router: sampleRouter(), Reg: telemetry.New(), Hosts: func() []string { return []string{"router-1", "penstock.prod.svc"} },
		Also: map[string]http.HandlerFunc{"POST /admin/v1/reload": func(http.ResponseWriter, *http.Request) { called = true }}})
	ask := func(method, path, host string) *httptest.ResponseRecorder {
		r := httptest.NewRequest(method, path, nil)
		r.Host = host
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w
	}
	for _, path := range []string{"/", "/metrics", "/admin/v1/config", "/admin/v1/requests", "/debug/pprof/cmdline"} {
		for _, host := range []string{"evil.example", "evil.example:9090", "localhost.evil.example", "127.0.0.1.evil.example", "notlocalhost", "[::1].evil.example", "router-1.evil.example"} {
			if w := ask("GET", path, host); w.Code != 421 || !strings.Contains(w.Body.String(), "admin_hosts") || w.Header().Get("Cache-Control") != "no-store" {
				t.Errorf("%s under %s: %d %s", path, host, w.Code, w.Body)
			}
		}
		for _, host := range []string{"", "localhost", "localhost:9090", "LOCALHOST.", "a.localhost:9090", "127.0.0.1", "127.0.0.1:9090", "10.1.2.3:9090", "[::1]:9090", "[fe80::1%eth0]:9090", "Router-1:9090", "penstock.prod.svc:9090"} {
			if w := ask("GET", path, host); w.Code != 200 {
				t.Errorf("%s under %s: %d %s", path, host, w.Code, w.Body)
			}
		}
	}
	if w := ask("POST", "/admin/v1/reload", "evil.example"); w.Code != 421 || called {
		t.Errorf("reload: %d, called %v", w.Code, called)
	}
	for _, path := range []string{"/healthz", "/readyz"} { // a balancer's probe may use any name
		if w := ask("GET", path, "evil.example"); w.Code != 200 {
			t.Errorf("%s: %d", path, w.Code)
		}
	}
}

type hidden string

func (hidden) String() string { return "[secret]" }

type ratio float64

func (r ratio) String() string { return fmt.Sprintf("%g%%", float64(r)*100) }

func TestConfigIsShownWithoutSecrets(t *testing.T) {
	type sub struct {
		APIKey  hidden        `yaml:"api_key"`
		NoKey   hidden        `yaml:"no_key_set"`
		Plain   string        `yaml:"password"`
		KeyFile string        `yaml:"key_file"`
		Wait    time.Duration `yaml:"wait"`
		Room    ratio         `yaml:"headroom"`
		lines   int
	}
	f := sampleRouter()
	f.config = &struct {
		Listen string            `yaml:"listen"`
		Pools  []sub             `yaml:"pools"`
		Map    map[string]string `yaml:"headers"`
		URL    string            `yaml:"store"`
		Secret []byte            `yaml:"secret"`
		File   string            `yaml:"-"`
		Nil    *sub              `yaml:"tls"`
		Count  int               `yaml:"count"`
		Inf    float64           `yaml:"ceiling"`
	}{":8080", []sub{{"s3cr3t1", "", "s3cr3t2", "/run/key", 250 * time.Millisecond, 0.2, 1}}, map[string]string{"auth_token": "s3cr3t3", "zone": "a"},
		"redis://u:s3cr3t4@h:1/0", []byte("s3cr3t5"), "x.yaml", nil, 7, math.Inf(1)}
	do := serve(t, f)
	status, _, body := do("GET", "/admin/v1/config")
	if status != 200 || strings.Contains(body, "s3cr3t") {
		t.Fatalf("%d %s", status, body)
	}
	c := decode[struct{ Config map[string]any }](t, body).Config
	p := c["pools"].([]any)[0].(map[string]any)
	if p["wait"] != "250ms" || p["headroom"] != "20%" || p["api_key"] != secret || p["no_key_set"] != "" || p["key_file"] != "/run/key" || c["listen"] != ":8080" ||
		c["store"] != "redis://"+secret+"@h:1/0" || c["count"] != 7.0 || c["tls"] != nil || c["headers"].(map[string]any)["zone"] != "a" || len(p) != 6 {
		t.Error(body)
	}
	if _, ok := c["file"]; ok {
		t.Error(body)
	}
}

func TestRequestsOldestFirst(t *testing.T) {
	f := sampleRouter()
	f.requests = []Request{{ID: "young", Age: 1}, {ID: "old", Age: 9, Phase: "streaming"}}
	do := serve(t, f)
	_, _, body := do("GET", "/admin/v1/requests")
	got := decode[struct {
		Total    int
		Requests []struct{ ID string }
	}](t, body)
	if got.Total != 2 || got.Requests[0].ID != "old" {
		t.Error(body)
	}
}
