package apptest

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sort"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/freeport"
)

// binary is the penstock that TestMain built, or PENSTOCK_BIN.
var binary string

func TestMain(m *testing.M) { os.Exit(buildAndRun(m)) }

func buildAndRun(m *testing.M) int {
	if binary = os.Getenv("PENSTOCK_BIN"); binary == "" {
		dir, err := os.MkdirTemp("", "penstock-apptest-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		binary = filepath.Join(dir, "penstock")
		args := []string{"build", "-o", binary}
		if raceOn {
			args = append(args, "-race") // go test -race tests a race-detecting router too
		}
		cmd := exec.Command("go", append(args, "github.com/penstock/penstock/cmd/router")...)
		if out, err := cmd.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "building the binary: %v\n%s", err, out)
			return 1
		}
	}
	// Most of a test is waiting, so more run at once than there are cores.
	flag.Parse()
	flag.Set("test.parallel", strconv.Itoa(max(10, runtime.GOMAXPROCS(0))))
	return m.Run()
}

// logBuffer gathers a process's output; safe for concurrent use.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// router is a running penstock process.
type router struct {
	t       testing.TB
	URL     string // http://127.0.0.1:port, the public listener
	Addr    string // the same as host:port
	Admin   string // http://..., the admin listener
	Config  string // path of its configuration file, "" when started by flags
	log     logBuffer
	cmd     *exec.Cmd
	exited  chan struct{}
	exitErr error
	client  *http.Client
	ended   bool
	// When a test leaves requests cut on purpose (SIGKILL and the like) it
	// sets noEndCheck.
	noEndCheck bool
}

// startFlags runs `penstock serve --replica ...` without a file.
func startFlags(t testing.TB, replicas ...string) *router {
	t.Helper()
	args := []string{}
	for _, r := range replicas {
		args = append(args, "--replica", r)
	}
	return launch(t, binary, "", args...)
}

// startConfig runs `penstock serve --config` with the given file text; listen
// and admin are put in front of it.
func startConfig(t testing.TB, yaml string, args ...string) *router {
	t.Helper()
	return startWith(t, binary, yaml, args...)
}

// startWith is startConfig with another program.
func startWith(t testing.TB, program, yaml string, args ...string) *router {
	t.Helper()
	file := filepath.Join(t.TempDir(), "penstock.yaml")
	writeFile(t, file, yaml)
	return launch(t, program, file, append([]string{"--config", file}, args...)...)
}

// start runs a router with one pool of these replicas. extra is more YAML at
// the top level.
func start(t testing.TB, extra string, replicas ...*mock) *router {
	t.Helper()
	var urls []string
	for _, m := range replicas {
		urls = append(urls, m.url())
	}
	r := startConfig(t, poolYAML("main", urls...)+extra)
	r.knows(replicas...)
	return r
}

// knows waits until replicas have joined: /readyz is satisfied by one.
func (r *router) knows(replicas ...*mock) {
	r.t.Helper()
	r.eventually(10*time.Second, "all replicas have joined", func() bool {
		for _, m := range replicas {
			if r.stateOf(m) == "" {
				return false
			}
		}
		return true
	})
}

// poolYAML is a configuration with one pool.
func poolYAML(name string, urls ...string) string {
	return fmt.Sprintf("pools:\n  - name: %s\n    replicas: {static: [\"%s\"]}\n", name, strings.Join(urls, `", "`))
}

func writeFile(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func launch(t testing.TB, program, config string, args ...string) *router {
	t.Helper()
	r := &router{t: t, Addr: freeport.Addr(t), Config: config, exited: make(chan struct{})}
	r.URL, r.Admin = "http://"+r.Addr, "http://"+freeport.Addr(t)
	r.client = &http.Client{
		Transport:     &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 128},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	args = append([]string{"serve", "--listen", r.Addr, "--admin", strings.TrimPrefix(r.Admin, "http://")}, args...)
	r.cmd = exec.Command(program, args...)
	r.cmd.Stdout, r.cmd.Stderr = &r.log, &r.log
	r.cmd.Env = append(os.Environ(), "GORACE=halt_on_error=0 exitcode=66",
		"PENSTOCK_TIMEOUTS_DRAIN_DELAY=0s") // there is no balancer to notice; TestDrain sets its own
	if err := r.cmd.Start(); err != nil {
		t.Fatalf("starting the router: %v", err)
	}
	go func() { r.exitErr = r.cmd.Wait(); close(r.exited) }()
	t.Cleanup(r.finish)
	r.waitReady()
	return r
}

// waitReady waits for /readyz on the public listener.
func (r *router) waitReady() {
	r.t.Helper()
	r.eventually(20*time.Second, "/readyz is 200", func() bool {
		select {
		case <-r.exited:
			r.t.Fatalf("the router left at once: %v\n%s", r.exitErr, r.log.String())
		default:
		}
		resp, err := r.client.Get(r.URL + "/readyz")
		if err != nil {
			return false
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		return resp.StatusCode == 200
	})
}

// eventually polls cond until it holds; the test ends when it never does.
func (r *router) eventually(limit time.Duration, what string, cond func() bool) {
	r.t.Helper()
	end := time.Now().Add(limit)
	for !cond() {
		if time.Now().After(end) {
			r.t.Fatalf("not within %v: %s\n%s", limit, what, r.tail())
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (r *router) tail() string {
	s := r.log.String()
	if len(s) > 6000 {
		s = "..." + s[len(s)-6000:]
	}
	return "router log:\n" + s
}

// accounts are the gauges that have to be exactly zero when nothing runs.
var accounts = []string{"penstock_requests_in_flight", "penstock_held_requests", "penstock_held_tokens",
	"penstock_replica_requests_in_flight", "penstock_replica_prefill_tokens", "penstock_replica_kv_tokens", "penstock_tenant_requests_in_flight"}

// zeroAccounts waits until every account is exactly zero, and fails on a
// negative one.
func (r *router) zeroAccounts(limit time.Duration) {
	r.t.Helper()
	end := time.Now().Add(limit)
	for {
		bad := ""
		m := r.metrics()
		if _, ok := m["penstock_requests_in_flight"]; !ok {
			bad = " penstock_requests_in_flight is missing"
		}
		for _, name := range accounts {
			for series, v := range m {
				if base(series) == name && v != 0 {
					bad += fmt.Sprintf(" %s=%v", series, v)
				}
				if base(series) == name && v < 0 {
					r.t.Errorf("negative account: %s=%v", series, v)
				}
			}
		}
		if bad == "" {
			return
		}
		if time.Now().After(end) {
			r.t.Errorf("accounts not back at zero within %v:%s\n%s", limit, bad, r.tail())
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// finish is the end of every test: accounts at zero, SIGTERM, status 0, and a
// log without panics, BUGs and data races.
func (r *router) finish() {
	r.client.CloseIdleConnections()
	if r.ended {
		return
	}
	r.ended = true
	if !r.noEndCheck {
		r.zeroAccounts(20 * time.Second)
	}
	r.terminate(20 * time.Second)
}

// terminate sends SIGTERM and waits for the process to leave with status 0.
func (r *router) terminate(limit time.Duration) {
	r.t.Helper()
	r.ended = true
	select {
	case <-r.exited:
	default:
		r.cmd.Process.Signal(syscall.SIGTERM)
	}
	r.waitExit(limit)
}

func (r *router) waitExit(limit time.Duration) {
	r.t.Helper()
	r.ended = true
	select {
	case <-r.exited:
		if r.exitErr != nil {
			r.t.Errorf("the router left with %v", r.exitErr)
		}
	case <-time.After(limit):
		r.cmd.Process.Kill()
		<-r.exited
		r.t.Errorf("the router did not leave within %v of SIGTERM", limit)
	}
	log := r.log.String()
	for _, word := range []string{"panic", "BUG:", "DATA RACE", "fatal error:"} {
		if i := strings.Index(log, word); i >= 0 {
			r.t.Errorf("the router's log has %q:\n%s", word, log[max(0, i-300):min(len(log), i+3000)])
		}
	}
	if r.t.Failed() {
		r.t.Log(r.tail())
	}
}

// metrics reads the router's own page: series as written to value.
func (r *router) metrics() map[string]float64 {
	r.t.Helper()
	resp, err := http.Get(r.Admin + "/metrics")
	if err != nil {
		r.t.Fatalf("metrics: %v\n%s", err, r.tail())
	}
	defer resp.Body.Close()
	m := map[string]float64{}
	sc := bufio.NewScanner(resp.Body)
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		line := sc.Text()
		i := strings.LastIndexByte(line, ' ')
		if i < 0 || line[0] == '#' {
			continue
		}
		if v, err := strconv.ParseFloat(line[i+1:], 64); err == nil {
			m[line[:i]] = v
		}
	}
	return m
}

func base(series string) string { b, _, _ := strings.Cut(series, "{"); return b }

// sum adds the series of one metric that carry all the given label="value" texts.
func (r *router) sum(name string, labels ...string) float64 {
	r.t.Helper()
	total := 0.0
	for series, v := range r.metrics() {
		if base(series) == name && hasAll(series, labels) {
			total += v
		}
	}
	return total
}

// series lists the series of one metric that carry all the labels.
func (r *router) series(name string, labels ...string) []string {
	var out []string
	for s := range r.metrics() {
		if (name == "" || base(s) == name) && hasAll(s, labels) {
			out = append(out, s)
		}
	}
	sort.Strings(out)
	return out
}

func hasAll(s string, parts []string) bool {
	for _, p := range parts {
		if !strings.Contains(s, p) {
			return false
		}
	}
	return true
}

// label writes one label as the metrics page has it.
func label(k, v string) string { return fmt.Sprintf("%s=%q", k, v) }

// wantMetric waits until a sum has a value.
func (r *router) wantMetric(want float64, name string, labels ...string) {
	r.t.Helper()
	end := time.Now().Add(20 * time.Second)
	for {
		got := r.sum(name, labels...)
		if got == want {
			return
		}
		if time.Now().After(end) {
			r.t.Errorf("%s%v = %v, want %v", name, labels, got, want)
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// stateOf returns the word of the state a replica is in, by penstock_replica_state.
func (r *router) stateOf(m *mock) string {
	for s, v := range r.metrics() {
		if v == 1 && base(s) == "penstock_replica_state" && strings.Contains(s, m.Addr) {
			_, rest, _ := strings.Cut(s, `state="`)
			word, _, _ := strings.Cut(rest, `"`)
			return word
		}
	}
	return ""
}
