package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/penstock/penstock/bench/replica"
	"github.com/penstock/penstock/internal/freeport"
)

// The test binary is the program itself when asked to be: processes are
// tested as processes, with signals, without a build step.
func TestMain(m *testing.M) {
	if os.Getenv("PENSTOCK_TEST_MAIN") == "1" {
		main()
		return
	}
	os.Exit(m.Run())
}

// logBuffer takes a process's output.
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

// process is a running penstock.
type process struct {
	t          *testing.T
	cmd        *exec.Cmd
	log        logBuffer
	api, admin string
	done       chan struct{}
}

func startServe(t *testing.T, args ...string) *process {
	t.Helper()
	return start(t, "serve", append([]string{"--timeouts.drain_delay=0s"}, args...)...)
}

// start runs a subcommand that is a router.
func start(t *testing.T, name string, args ...string) *process {
	t.Helper()
	p := &process{t: t, done: make(chan struct{})}
	api, admin := freeport.Addr(t), freeport.Addr(t)
	p.api, p.admin = "http://"+api, "http://"+admin
	p.cmd = exec.Command(os.Args[0], append([]string{name, "--listen", api, "--admin", admin}, args...)...)
	p.cmd.Env = append(os.Environ(), "PENSTOCK_TEST_MAIN=1")
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { _ = p.cmd.Wait(); close(p.done) }()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.done
		if t.Failed() {
			t.Logf("log:\n%s", p.log.String())
		}
	})
	return p
}

// until polls cond; the bound only ends a test that would never end.
func (p *process) until(what string, cond func() bool) {
	p.t.Helper()
	for range 1500 {
		if cond() {
			return
		}
		select {
		case <-p.done:
			p.t.Fatalf("the process ended before: %s", what)
		case <-time.After(20 * time.Millisecond):
		}
	}
	p.t.Fatalf("never: %s", what)
}

func get(url string) (int, string) {
	resp, err := http.Get(url)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b)
}

func (p *process) ready() bool { code, _ := get(p.api + "/readyz"); return code == 200 }

func (p *process) chat(model string) (int, string) {
	resp, err := http.Post(p.api+"/v1/chat/completions", "application/json",
		strings.NewReader(fmt.Sprintf(`{"model":%q,"stream":true,"max_tokens":3,"messages":[{"role":"user","content":"one two three"}]}`, model)))
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b)
}

func (p *process) signal(s os.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

func (p *process) stop() {
	p.t.Helper()
	p.signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(30 * time.Second):
		p.t.Fatal("SIGTERM did not end it")
	}
	if code := p.cmd.ProcessState.ExitCode(); code != 0 {
		p.t.Errorf("exit status %d after SIGTERM", code)
	}
}

func emulated(t *testing.T, listen string) *replica.Server {
	t.Helper()
	s, err := replica.Start(replica.Options{Listen: listen, Model: "m1", Speed: 5})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// Flags alone are enough, the replica may come later, and its models are
// asked from it.
func TestFlagsOnlyAndTheReplicaComesLater(t *testing.T) {
	addr := freeport.Addr(t)
	p := startServe(t, "--replica", addr, "--model-alias", "chat=m1", "--log-level", "debug")
	p.until("it says that it waits", func() bool { return strings.Contains(p.log.String(), "waiting: a pool has no replica") })
	if code, body := get(p.api + "/readyz"); code != 503 {
		t.Errorf("/readyz without a replica: %d %s", code, body)
	}
	if code, _ := get(p.api + "/healthz"); code != 200 {
		t.Errorf("/healthz: %d", code)
	}
	if code, body := p.chat("m1"); code != 503 {
		t.Errorf("a request without a replica: %d %s", code, body)
	}
	emulated(t, addr)
	p.until("ready", p.ready)
	for _, model := range []string{"m1", "chat"} {
		if code, body := p.chat(model); code != 200 || !strings.Contains(body, "[DONE]") {
			t.Errorf("%s: %d %s", model, code, body)
		}
	}
	if code, body := p.chat("nobody"); code != 404 || !strings.Contains(body, "model_not_found") {
		t.Errorf("unknown model: %d %s", code, body)
	}
	log := p.log.String()
	for _, want := range []string{"penstock serves", p.api, p.admin, "policy work", "http://" + addr} {
		if !strings.Contains(log, want) {
			t.Errorf("the log does not say %q", want)
		}
	}
	if code, body := get(p.admin + "/metrics"); code != 200 || !strings.Contains(body, "penstock_build_info") {
		t.Errorf("/metrics: %d", code)
	}
	if code, _ := get(p.admin + "/debug/pprof/cmdline"); code != 200 {
		t.Errorf("pprof: %d", code)
	}
	p.stop()
}

// An alias may stand for any model that the replicas serve, not only the first.
func TestAliasOfAnotherModel(t *testing.T) {
	s, err := replica.Start(replica.Options{Model: "m1", Aliases: []string{"m2"}, Speed: 5})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	p := startServe(t, "--replica", s.URL(), "--model-alias", "second=m2", "--model-alias", "first=m1")
	p.until("ready", p.ready)
	_, body := get(p.api + "/v1/models")
	var list struct{ Data []struct{ ID, Root string } }
	if err := json.Unmarshal([]byte(body), &list); err != nil {
		t.Fatal(err)
	}
	roots := map[string]string{}
	for _, m := range list.Data {
		roots[m.ID] = m.Root
	}
	if roots["second"] != "m2" || roots["first"] != "m1" {
		t.Errorf("models %s", body)
	}
	if code, body := p.chat("second"); code != 200 || !strings.Contains(body, `"model":"m2"`) {
		t.Errorf("%d %s", code, body)
	}
	p.stop()
}

// Two routers see each other, and each other's account.
func TestPeers(t *testing.T) {
	s := emulated(t, "")
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte("MDEyMzQ1Njc4OWFiY2RlZg==\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	bindA, bindB := freeport.Addr(t), freeport.Addr(t)
	router := func(name, bind, join string) *process {
		file := filepath.Join(t.TempDir(), "p.yaml")
		text := fmt.Sprintf("pools: [{name: main, models: [m1], replicas: {static: [%q]}}]\npeers: {name: %s, bind: %q, join: [%q], key_file: %q}\n", s.URL(), name, bind, join, key)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return startServe(t, "--config", file)
	}
	a := router("one", bindA, bindB)
	b := router("two", bindB, bindA)
	a.until("ready", a.ready)
	b.until("ready", b.ready)
	var out bytes.Buffer
	a.until("one sees two", func() bool {
		out.Reset()
		return showPeers(context.Background(), []string{"--admin", a.admin}, &out, &out) == 0 && strings.Contains(out.String(), "two") && strings.Contains(out.String(), "fresh")
	})
	if strings.Contains(out.String(), "differs") {
		t.Errorf("equal configurations differ:\n%s", out.String())
	}
	// A long answer through two is in one's view of the replica.
	go func() {
		resp, err := http.Post(b.api+"/v1/chat/completions", "application/json", strings.NewReader(`{"model":"m1","stream":true,"max_tokens":2000,"messages":[{"role":"user","content":"long"}]}`))
		if err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
	}()
	a.until("two's request is in one's account", func() bool {
		var r struct {
			Replicas []struct {
				Peers struct{ Requests int } `json:"peers_account"`
			}
		}
		_, body := get(a.admin + "/admin/v1/replicas")
		return json.Unmarshal([]byte(body), &r) == nil && len(r.Replicas) == 1 && r.Replicas[0].Peers.Requests == 1
	})
	b.stop()
	a.until("two has left", func() bool {
		out.Reset()
		return showPeers(context.Background(), []string{"--admin", a.admin, "--json"}, &out, &out) == 0 && !strings.Contains(out.String(), `"fresh": 1`)
	})
	a.stop()
}

// A replica that never told what it serves, for a slip in its address say, is in
// no pool; it can be seen nevertheless.
func TestReplicaThatNeverAnsweredIsShown(t *testing.T) {
	p := startServe(t, "--replica", emulated(t, "").URL(), "--replica", "http://127.0.0.1:1")
	p.until("ready", p.ready)
	p.until("it is shown, and why", func() bool {
		var r struct {
			Pools []struct {
				Replicas int
				Waiting  []struct{ Name, Error string } `json:"never_answered"`
			}
		}
		_, body := get(p.admin + "/admin/v1/pools")
		if json.Unmarshal([]byte(body), &r) != nil || len(r.Pools) != 1 || r.Pools[0].Replicas != 1 || len(r.Pools[0].Waiting) != 1 {
			return false
		}
		w := r.Pools[0].Waiting[0]
		return w.Name == "127.0.0.1:1" && strings.Contains(w.Error, "refused")
	})
}

// A reload lets replicas come and go; a broken file changes nothing and is
// counted.
func TestReload(t *testing.T) {
	a, b := emulated(t, ""), emulated(t, "")
	file := filepath.Join(t.TempDir(), "p.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	pool := func(urls ...string) string {
		q, _ := json.Marshal(urls)
		return fmt.Sprintf("pools:\n  - name: main\n    models: [m1]\n    replicas: {static: %s}\n", q)
	}
	write(pool(a.URL()))
	p := startServe(t, "--config", file)
	p.until("ready", p.ready)
	replicas := func() string { _, body := get(p.admin + "/admin/v1/replicas"); return body }
	metric := func(series, value string) bool {
		_, body := get(p.admin + "/metrics")
		return strings.Contains(body, series+" "+value+"\n")
	}
	write(pool(b.URL()) + "scrape: {interval: 1s}\n")
	p.signal(syscall.SIGHUP)
	p.until("the other replica took the place", func() bool {
		r := replicas()
		return strings.Contains(r, b.Addr()) && !strings.Contains(r, a.Addr())
	})
	p.until("counted", func() bool { return metric(`penstock_config_reloads_total{result="ok"}`, "1") })
	if !strings.Contains(p.log.String(), "these settings need a restart to take effect: scrape.interval") {
		t.Error("the log does not name the setting that needs a restart")
	}
	write(pool(a.URL()) + "scrap: {}\n")
	p.signal(syscall.SIGHUP)
	p.until("counted", func() bool { return metric(`penstock_config_reloads_total{result="refused"}`, "1") })
	if !strings.Contains(p.log.String(), `p.yaml:5:scrap: unknown key; did you mean \"scrape\"?`) {
		t.Error("the log does not say what is wrong")
	}
	if code, body := p.chat("m1"); code != 200 || !strings.Contains(replicas(), b.Addr()) {
		t.Errorf("the last good configuration is not in force: %d %s", code, body)
	}
	resp, err := http.Post(p.admin+"/admin/v1/reload", "", nil)
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if resp.StatusCode != 422 || !strings.Contains(string(body), "p.yaml:5:scrap") {
		t.Errorf("reload by the admin API: %d %s", resp.StatusCode, body)
	}
	p.stop()
}

// The demo says what it waits for at its end, and does not wait for it on and
// on: the answer here would take minutes.
func TestTheDemoEnds(t *testing.T) {
	p := start(t, "demo", "--rate", "0", "--replicas", "1")
	p.until("ready", p.ready)
	resp, err := http.Post(p.api+"/v1/chat/completions", "application/json", strings.NewReader(
		fmt.Sprintf(`{"model":%q,"stream":true,"max_tokens":20000,"messages":[{"role":"user","content":"one two three"}]}`, demoModel)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	p.signal(syscall.SIGINT)
	select {
	case <-p.done:
	case <-time.After(time.Minute):
		t.Fatal("it waits on and on")
	}
	if !strings.Contains(p.log.String(), "ending; what you have sent is answered for 3s more at most") {
		t.Error("it does not say what it waited for")
	}
	if code := p.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exit status %d", code)
	}
}

func TestATakenPortIsNamed(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	cmd := exec.Command(os.Args[0], "serve", "--replica", "127.0.0.1:9", "--listen", ln.Addr().String(), "--admin", "off")
	cmd.Env = append(os.Environ(), "PENSTOCK_TEST_MAIN=1")
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), ln.Addr().String()+" is taken by another process; choose another with --listen") {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestCommandLine(t *testing.T) {
	good := filepath.Join(t.TempDir(), "good.yaml")
	if err := os.WriteFile(good, []byte("pools: [{name: a, replicas: {static: [\"http://h:1\"]}}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	bad := filepath.Join(filepath.Dir(good), "bad.yaml") // what shows only when it is put to use
	if err := os.WriteFile(bad, []byte("pools: [{name: a, replicas: {static: [\"http://h:1\"]}}]\nroutes:\n- {model: m, tiers: [{pool: a}, {static: {file: gone.json}}]}\npeers: {key_file: good.yaml}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args   []string
		status int
		want   string
	}{
		{nil, 2, "usage: penstock"},
		{[]string{"--help"}, 0, "penstock serve --replica"},
		{[]string{"version"}, 0, "policies: "},
		{[]string{"surve"}, 2, `unknown command "surve"`},
		{[]string{"serve"}, 2, "there are no replicas: give --replica URL"},
		{[]string{"serve", "--help"}, 0, "SIGTERM drains"},
		{[]string{"serve", "http://h:1"}, 2, "a replica is given as --replica URL"},
		{[]string{"serve", "--replica", "ftp://h"}, 1, `scheme "ftp" is not http or https`},
		{[]string{"serve", "--replica", "h:1", "--policy", "wrk"}, 1, `"wrk" is unknown; did you mean "work"?`},
		{[]string{"serve", "--replica", "h:1", "--scrape.interval=5"}, 1, `flag:--scrape.interval: "5" has no unit`},
		{[]string{"serve", "--replica", "h:1", "--model-alias", "x"}, 2, "write it as ALIAS=MODEL"},
		{[]string{"check"}, 2, "usage: penstock check"},
		{[]string{"check", "/nowhere.yaml"}, 1, "/nowhere.yaml: cannot read the configuration"},
		{[]string{"check", bad}, 1, bad + ":3:routes[0].tiers[1]: static.file: open "},
		{[]string{"check", bad}, 1, bad + ":4:peers.key_file: " + good + ": line 1: not base64"},
		{[]string{"check", good}, 0, "good (1 pools, 1 static replicas, 1 classes)"},
	} {
		var out bytes.Buffer
		if status := run(context.Background(), c.args, &out, &out); status != c.status || !strings.Contains(out.String(), c.want) {
			t.Errorf("%v: status %d, want %d with %q:\n%s", c.args, status, c.status, c.want, out.String())
		}
	}
}

// An objective that no batch can keep is warned of, with the figure; one that
// leaves room is not.
func TestCheckWarnsOfAnObjectiveThatLeavesNoRoom(t *testing.T) {
	file := filepath.Join(t.TempDir(), "p.yaml")
	for _, c := range []struct{ pool, classes, want string }{
		{"profile: h100-8b, objective: {itl: 7ms}", "", "warning: pools[0].objective.itl: 7ms is under what each token of a single request takes by the profile (7.4 ms)"},
		{"profile: h100-8b, objective: {itl: 7500us}", "", "pools[0].objective.itl: 7.5ms is hardly over"},
		{"profile: h100-8b, objective: {itl: 10ms}", ", objective: {itl: 5ms}", "classes[0].objective.itl: 5ms is under"},
		{"profile: h100-8b, objective: {itl: 10ms}", ", objective: {itl: 9ms}", ""},
		{"profile: h100-8b", "", ""},
		{"objective: {itl: 1ms}", "", ""}, // the step is learned
	} {
		text := fmt.Sprintf("pools: [{name: a, %s, replicas: {static: [\"http://h:1\"]}}]\nclasses: [{name: c%s}]\n", c.pool, c.classes)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		code, out := command1("check", file)
		if code != 0 || !strings.Contains(out, c.want) || (c.want == "") == strings.Contains(out, "warning") {
			t.Errorf("%s: status %d, wanted %q:\n%s", text, code, c.want, out)
		}
	}
}

// Each command tells its own usage on --help, which is no failure, and takes
// no argument that it would not look at.
func TestEveryCommandHasHelpAndTakesNoStrayArgument(t *testing.T) {
	verbs := [][]string{{"bench", "replica"}, {"bench", "load"}, {"bench", "sim"}, {"bench", "compare"}}
	for _, c := range commands() {
		verbs = append(verbs, []string{c.name})
	}
	for _, verb := range verbs {
		for _, help := range []string{"--help", "-h"} {
			if code, out := command1(append(slices.Clone(verb), help)...); code != 0 || !strings.Contains(strings.ToLower(out), "usage") {
				t.Errorf("%v %s: status %d\n%s", verb, help, code, out)
			}
		}
		stray := append(slices.Clone(verb), "stray.yaml")
		if slices.Contains([]string{"check", "validate-fallbacks"}, verb[0]) {
			stray = append(stray, "stray.yaml")
		}
		if code, out := command1(stray...); code != 2 || !strings.Contains(out, `"stray.yaml"`) {
			t.Errorf("%v: status %d\n%s", stray, code, out)
		}
	}
}
