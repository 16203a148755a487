package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/penstock/penstock/bench/replica"
	"github.com/penstock/penstock/config"
)

// What the table calls live is applied by reload.go: whoever marks one more has
// to write there how. The list is that of apply, refresh and their callees.
func TestLiveSettingsAreThoseThatAReloadApplies(t *testing.T) {
	applied := []string{"admin_hosts", "pools[].models", "pools[].aliases", "pools[].replicas.static", "pools[].labels", "pools[].headroom",
		"pools[].objective.ttft", "pools[].objective.ttft_per_1k", "pools[].objective.itl", "pools[].api_key", "pools[].concurrency",
		"classes[].wait", "classes[].deadline", "classes[].min_share", "classes[].objective.ttft", "classes[].objective.ttft_per_1k", "classes[].objective.itl",
		"limits.max_in_flight", "limits.held_requests", "limits.held_bytes", "timeouts.drain_delay", "timeouts.drain_timeout", "health.hang_after",
		"tls.cert_file", "tls.key_file", "log.level"}
	for _, o := range config.Options {
		if o.Live != slices.Contains(applied, o.Path) {
			t.Errorf("%s: the table says live: %v", o.Path, o.Live)
		}
	}
}

// reloader is a router with a configuration file that changes.
type reloader struct {
	*process
	file string
}

func startReloader(t *testing.T, text string) *reloader {
	t.Helper()
	r := &reloader{file: filepath.Join(t.TempDir(), "p.yaml")}
	r.write(t, text)
	r.process = startServe(t, "--config", r.file)
	r.until("ready", r.ready)
	return r
}

func (r *reloader) write(t *testing.T, text string) {
	t.Helper()
	if err := os.WriteFile(r.file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// reload returns what was applied and what needs a restart.
func (r *reloader) reload(text string) (applied, restart string) {
	r.t.Helper()
	r.write(r.t, text)
	resp, err := http.Post(r.admin+"/admin/v1/reload", "", nil)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	var out struct {
		OK      bool
		Error   string
		Applied []string `json:"applied"`
		Restart []string `json:"needs_restart"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&out); err != nil || !out.OK {
		r.t.Fatalf("reload: %v %+v", err, out)
	}
	return strings.Join(out.Applied, " "), strings.Join(out.Restart, " ")
}

func TestReloadAppliesNamesKeysAndBounds(t *testing.T) {
	var key atomic.Value
	key.Store("")
	s, err := replica.Start(replica.Options{Model: "m1", Aliases: []string{"m2"}, Speed: 5, OnRequest: func(_ string, h http.Header, _ []byte) { key.Store(h.Get("Authorization")) }})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	file := func(pool, rest string) string {
		return fmt.Sprintf("pools:\n  - name: main\n    replicas: {static: [%q]}\n%s%s", s.URL(), pool, rest)
	}
	p := startReloader(t, file("    models: [m1]\n    aliases: [chat]\n", "classes: [{name: only, deadline: 5m}]\n"))
	status := func(model string, want int) {
		t.Helper()
		if code, body := p.chat(model); code != want {
			t.Errorf("model %s: %d, want %d: %s", model, code, want, body)
		}
	}
	status("chat", 200)
	status("talk", 404)

	applied, restart := p.reload(file("    models: [m2, m1]\n    aliases: {talk: m2}\n    api_key: k1\n    objective: {ttft: 9s}\n",
		"classes: [{name: only, deadline: 5m}]\nscrape: {interval: 1s}\nadmin_hosts: [router.test]\nlog: {level: warn}\n"))
	if applied != "admin_hosts log.level pools[main].aliases pools[main].api_key pools[main].models pools[main].objective.ttft" || restart != "scrape.interval" {
		t.Errorf("applied %q, needs a restart %q", applied, restart)
	}
	status("chat", 404)
	if code, body := p.chat("talk"); code != 200 || !strings.Contains(body, `"model":"m2"`) {
		t.Errorf("the alias does not stand for the first model now: %d %s", code, body)
	}
	if got := key.Load(); got != "Bearer k1" {
		t.Errorf("the replica got the key %q", got)
	}
	_, conf := get(p.admin + "/admin/v1/config")
	if !strings.Contains(conf, `"interval":"250ms"`) || !strings.Contains(conf, `"ttft":"9s"`) {
		t.Errorf("the configuration in force is not shown: %s", conf)
	}
	req, _ := http.NewRequest("GET", p.admin+"/metrics", nil)
	req.Host = "router.test"
	if resp, err := http.DefaultClient.Do(req); err != nil || resp.StatusCode != 200 {
		t.Errorf("asked by a name of admin_hosts: %v %v", resp, err)
	} else {
		resp.Body.Close()
	}

	// What it cannot apply it names, each pool and class with its name.
	applied, restart = p.reload("pools:\n  - name: other\n    replicas: {static: [\"http://127.0.0.1:9\"]}\n" + strings.TrimPrefix(file("    models: [m2, m1]\n", ""), "pools:\n") +
		"classes: [{name: only, deadline: 1ms, wait: 0s}, {name: low}]\n")
	if restart != "classes classes[low] pools[other]" || !strings.Contains(applied, "classes[only].deadline") {
		t.Errorf("applied %q, needs a restart %q", applied, restart)
	}
	p.until("the log names what needs a restart", func() bool {
		return strings.Contains(p.log.String(), "these settings need a restart to take effect: classes, classes[low], pools[other]")
	})
	if code, body := p.chat("m1"); code != 504 && !strings.Contains(body, "deadline_exceeded") {
		t.Errorf("a deadline of 1 ms: %d %s", code, body)
	}

	p.reload(file("    models: [m1]\n", "classes: [{name: only, deadline: 5m}]\nlimits: {max_in_flight: 1}\n"))
	status("m1", 200)
	hold, err := http.Post(p.api+"/v1/chat/completions", "application/json", strings.NewReader(`{"model":"m1","stream":true,"max_tokens":5000,"messages":[{"role":"user","content":"long"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	if code, body := p.chat("m1"); code != 503 || !strings.Contains(body, "concurrency_limit") {
		t.Errorf("one more than max_in_flight: %d %s", code, body)
	}
	hold.Body.Close()
	p.stop()
}

// Reloads that change names, keys, limits and replicas all the time lose
// nothing: every request is answered whole.
func TestReloadUnderLoadLosesNothing(t *testing.T) {
	a, b := emulated(t, ""), emulated(t, "")
	conf := func(i int) string {
		replicas := []string{a.URL(), b.URL()}
		if i%3 == 1 {
			replicas = replicas[:1]
		} else if i%3 == 2 {
			replicas = replicas[1:]
		}
		q, _ := json.Marshal(replicas)
		models := []string{"", "    models: [m1]\n"}[i%2]
		return fmt.Sprintf("pools:\n  - name: main\n    replicas: {static: %s}\n    aliases: [chat, a%d]\n    api_key: k%d\n    labels: {region: r%d}\n%s    objective: {ttft: %ds}\n"+
			"classes: [{name: only, wait: 20s, deadline: %dm}]\n", q, i, i/2, i%4, models, 20+i%5, 2+i%3)
	}
	p := startReloader(t, conf(0))
	var wg sync.WaitGroup
	var done atomic.Bool
	var served atomic.Int64
	for i := range 8 {
		wg.Go(func() {
			for !done.Load() {
				model, stream := []string{"m1", "chat"}[i%2], i%4 < 3
				resp, err := http.Post(p.api+"/v1/chat/completions", "application/json",
					strings.NewReader(fmt.Sprintf(`{"model":%q,"stream":%v,"max_tokens":40,"messages":[{"role":"user","content":"w%d"}]}`, model, stream, i)))
				if err != nil {
					t.Errorf("client %d: %v", i, err)
					return
				}
				body, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err != nil || resp.StatusCode != 200 || stream != strings.Contains(string(body), "[DONE]") || strings.Contains(string(body), `"error"`) {
					t.Errorf("client %d: %d %v %s", i, resp.StatusCode, err, body)
					return
				}
				served.Add(1)
			}
		})
	}
	for i := 1; i <= 30; i++ {
		before := served.Load()
		if i%2 == 0 {
			p.reload(conf(i))
		} else {
			n := strings.Count(p.log.String(), `"by":"SIGHUP"`)
			p.write(t, conf(i))
			p.signal(syscall.SIGHUP)
			p.until("the reload was done", func() bool { return strings.Count(p.log.String(), `"by":"SIGHUP"`) > n })
		}
		p.until("some were served since", func() bool { return served.Load() >= before+8 || t.Failed() })
	}
	done.Store(true)
	wg.Wait()
	p.until("nothing is in flight", func() bool {
		_, m := get(p.admin + "/metrics")
		return strings.Contains(m, "\npenstock_requests_in_flight 0\n") && strings.Contains(m, `penstock_held_requests{pool="main"} 0`)
	})
	if code, body := p.chat("a30"); code != 200 {
		t.Errorf("the last alias: %d %s", code, body)
	}
	p.stop()
}
