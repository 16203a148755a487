package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/penstock/penstock/bench/model"
	"github.com/penstock/penstock/bench/replica"
	"github.com/penstock/penstock/config"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/internal/freeport"
	"github.com/penstock/penstock/ladder"
)

// ladderFile is a route with a smaller model as its second tier.
func ladderFile(t *testing.T, dir, small, domains string, extra ...string) string {
	t.Helper()
	d1, d2, _ := strings.Cut(domains, "/")
	text := fmt.Sprintf(`state_dir: %q
pools:
  - {name: big, models: [big], replicas: {static: ["http://127.0.0.1:2"]}, labels: {domain: %s}}
  - {name: small, models: [small], replicas: {static: [%q]}, labels: {domain: %s}}
routes:
  - model: chat
    tiers:
      - {pool: big}
      - {pool: small, model: small, validate: {prompts: %q, pass: 0.9, every: 12h}}
`, dir, d1, small, d2, filepath.Join(dir, "checks.jsonl")) + strings.Join(extra, "")
	file := filepath.Join(dir, "p.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func command1(args ...string) (int, string) {
	var out bytes.Buffer
	code := run(context.Background(), args, &out, &out)
	return code, out.String()
}

func smallReplica(t *testing.T) string {
	t.Helper()
	p, ok := model.ByName("h100-8b")
	if !ok {
		t.Fatal("no profile")
	}
	addr := freeport.Addr(t)
	r, err := replica.Start(replica.Options{Listen: addr, Profile: &p, Model: "small", Speed: 50})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return "http://" + addr
}

// older makes all results in dir's record older.
func older(t *testing.T, dir string, by time.Duration) {
	t.Helper()
	record := ladder.RecordFile(dir)
	rec, err := ladder.LoadRecord(record)
	if err != nil || len(rec) != 1 {
		t.Fatalf("%v %v", rec, err)
	}
	for k, v := range rec {
		v.At = v.At.Add(-by)
		rec[k] = v
	}
	if err := rec.Save(record); err != nil {
		t.Fatal(err)
	}
}

// The whole way of a fallback into use: refused, tried, taken; and out again.
func TestFallbackIsUsedOnlyWhileItsValidationIsYoung(t *testing.T) {
	dir := t.TempDir()
	checks := filepath.Join(dir, "checks.jsonl")
	if err := os.WriteFile(checks, []byte(`{"prompt":"the word gazebo","contains":"gazebo"}`+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	small := smallReplica(t)
	file := ladderFile(t, dir, small, "r1/r2")
	if code, out := command1("check", file); code == 0 || !strings.Contains(out, "ERR_UNTESTED_COMPENSATION_REJECTED") || !strings.Contains(out, "small") {
		t.Fatalf("check before any validation: %d %s", code, out)
	}
	if code, out := command1("validate-fallbacks", file); code != 0 || !strings.Contains(out, "passed  chat/small/small") {
		t.Fatalf("validate-fallbacks: %d %s", code, out)
	}
	if code, out := command1("check", file); code != 0 {
		t.Fatalf("check after it: %d %s", code, out)
	}
	// Answers that are not good enough take it out of use, however young its pass is.
	bad, good := []byte(`{"prompt":"the word gazebo","contains":"zeppelin"}`+"\n"), []byte(`{"prompt":"the word gazebo","contains":"gazebo"}`+"\n")
	if err := os.WriteFile(checks, bad, 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out := command1("validate-fallbacks", file); code != 1 || !strings.Contains(out, "FAILED  chat/small/small: 0 of 1 prompts") || !strings.Contains(out, "1 failed") {
		t.Fatalf("validate-fallbacks with a test that cannot pass: %d %s", code, out)
	}
	if code, out := command1("check", file); code == 0 || !strings.Contains(out, "ERR_UNTESTED_COMPENSATION_REJECTED") || !strings.Contains(out, "failed its validation") {
		t.Fatalf("check after a failed validation: %d %s", code, out)
	}
	if err := os.WriteFile(checks, good, 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out := command1("validate-fallbacks", file); code != 0 {
		t.Fatalf("validate-fallbacks once more: %d %s", code, out)
	}
	// A replica that cannot be asked says nothing of the tier's answers.
	hung := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // its end is what tells the server of a client that leaves
		<-r.Context().Done()
	}))
	defer hung.Close()
	for url, why := range map[string]string{"http://127.0.0.1:1": "refused", hung.URL: "no answer within 100ms"} {
		timeout := "1m"
		if url == hung.URL {
			timeout = "100ms"
		}
		other := ladderFile(t, dir, url, "r1/r2")
		code, out := command1("validate-fallbacks", "--timeout", timeout, other)
		if code != 1 || !strings.Contains(out, "at "+url+": prompt 1 of 1 ... ") || !strings.Contains(out, why) || !strings.Contains(out, "its last pass holds for ") || !strings.Contains(out, "0 failed, 1 could not be tried") {
			t.Errorf("validate-fallbacks at %s: %d %s", url, code, out)
		}
		if code, out := command1("check", other); code != 0 {
			t.Errorf("check after it: %d %s", code, out)
		}
	}
	file = ladderFile(t, dir, small, "r1/r2")
	// --due asks again once validate.every is over; until then check does not warn.
	if code, out := command1("validate-fallbacks", "--due", file); code != 0 || !strings.Contains(out, "not due chat/small/small") || !strings.Contains(out, "1 were not due") || strings.Contains(out, "prompt 1") {
		t.Errorf("validate-fallbacks --due right after a pass: %d %s", code, out)
	}
	if code, out := command1("check", file); code != 0 || strings.Contains(out, "warning") {
		t.Errorf("check right after a pass: %d %s", code, out)
	}
	older(t, dir, 13*time.Hour)
	if code, out := command1("check", file); code != 0 || !strings.Contains(out, "warning: routes[0].tiers[1].validate.every: the last pass is 13h0m0s old, over 12h0m0s") {
		t.Errorf("check with a pass over every: %d %s", code, out)
	}
	if code, out := command1("validate-fallbacks", "--due", file); code != 0 || !strings.Contains(out, "passed  chat/small/small") {
		t.Errorf("validate-fallbacks --due with a pass over every: %d %s", code, out)
	}
	// A day later it is too old.
	older(t, dir, ladder.MaxValidationAge+time.Minute)
	if code, out := command1("check", file); code == 0 || !strings.Contains(out, "ERR_UNTESTED_COMPENSATION_REJECTED") {
		t.Fatalf("check with a record of yesterday: %d %s", code, out)
	}
}

// A running router takes a tier whose validation fails out of use, and tells it.
func TestARunningRouterHeedsAFailedValidation(t *testing.T) {
	dir := t.TempDir()
	core, logs := observer.New(zap.InfoLevel)
	d := downgrade{&ladder.Validation{Route: "chat", Pool: "small", Model: "small", Pass: 0.9, Every: 12 * time.Hour}, ""}
	v := &validations{file: ladder.RecordFile(dir), log: zap.New(core), list: []downgrade{d}, used: map[string]bool{}, late: map[string]bool{}}
	const overdue = "a fallback tier's last pass is older than validate.every: run penstock validate-fallbacks before it is 24h old and the tier out of use"
	for _, step := range []struct {
		res  *ladder.Result
		good bool
		said string
	}{
		{nil, false, "a fallback tier is not used until it passes penstock validate-fallbacks"},
		{&ladder.Result{At: time.Now(), Share: 1}, true, "a fallback tier may be used again: it passed its validation"},
		{&ladder.Result{At: time.Now(), Share: 1}, true, ""},
		{&ladder.Result{At: time.Now().Add(-13 * time.Hour), Share: 1}, true, overdue},
		{&ladder.Result{At: time.Now().Add(-14 * time.Hour), Share: 1}, true, ""},
		{&ladder.Result{At: time.Now(), Share: 1}, true, ""},
		{&ladder.Result{At: time.Now().Add(-13 * time.Hour), Share: 1}, true, overdue},
		{&ladder.Result{At: time.Now(), Share: 0.5, Failed: "5 of 10 prompts passed"}, false, "a fallback tier is not used until it passes penstock validate-fallbacks"},
		{&ladder.Result{At: time.Now(), Share: 0.4, Failed: "4 of 10 prompts passed"}, false, ""},
	} {
		if step.res != nil {
			if err := (ladder.Record{d.Key(): *step.res}).Save(v.file); err != nil {
				t.Fatal(err)
			}
		}
		v.read = time.Time{} // its 5 s are over
		if good := v.good(d.Validation); good != step.good {
			t.Errorf("after %+v: %v", step.res, good)
		}
		said := logs.TakeAll()
		if step.said == "" && len(said) > 0 || step.said != "" && (len(said) != 1 || said[0].Message != step.said) {
			t.Errorf("after %+v the log has %v, want %q", step.res, said, step.said)
		}
	}
}

func TestValidationSaysWhatIsWrong(t *testing.T) {
	dir := t.TempDir()
	file := ladderFile(t, dir, "http://127.0.0.1:1", "r1/r2")
	if code, out := command1("validate-fallbacks", file); code == 0 || !strings.Contains(out, "checks.jsonl") {
		t.Errorf("no prompts file: %d %s", code, out)
	}
	if err := os.WriteFile(filepath.Join(dir, "checks.jsonl"), []byte("{\"prompt\":\"x\"}\nnonsense\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out := command1("validate-fallbacks", file); code == 0 || !strings.Contains(out, "checks.jsonl:2") || strings.Contains(out, "127.0.0.1:1") {
		t.Errorf("a broken line, which is no replica's fault: %d %s", code, out)
	}
	if code, out := command1("check", file); code == 0 || !strings.Contains(out, "p.yaml:9:routes[0].tiers[1].validate.prompts: ") || !strings.Contains(out, "checks.jsonl:2") {
		t.Errorf("check with a broken line: %d %s", code, out)
	}
	if err := os.WriteFile(filepath.Join(dir, "checks.jsonl"), []byte("{\"prompt\":\"x\"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out := command1("validate-fallbacks", file); code == 0 || !strings.Contains(out, "127.0.0.1:1") {
		t.Errorf("no replica: %d %s", code, out)
	}
}

func TestFallbackInItsPrimarysFailureDomainIsRefused(t *testing.T) {
	dir := t.TempDir()
	for _, args := range [][]string{{"check", ladderFile(t, dir, "http://127.0.0.1:1", "r1/r1")}, {"serve", "--config", ladderFile(t, dir, "http://127.0.0.1:1", "r1/r1")}} {
		if code, out := command1(args...); code == 0 || !strings.Contains(out, "ERR_SHARED_FAILURE_DOMAIN_DETECTED") {
			t.Errorf("%s: %d %s", args[0], code, out)
		}
	}
}

// Which tier of the configuration is which on the wire.
func TestTiersOfAConfiguration(t *testing.T) {
	dir := t.TempDir()
	static := filepath.Join(dir, "static.json")
	if err := os.WriteFile(static, []byte(`{"id":"s","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"busy"},"finish_reason":"stop"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	file := ladderFile(t, dir, "http://127.0.0.1:1", "r1/r2", fmt.Sprintf("      - {reduce: {max_tokens: 64}}\n      - {cached: {scope: shared, staleness: 1h}}\n      - {static: {file: %q}}\n    regions: [eu]\n", static))
	cfg, err := load(config.Source{File: file})
	if err != nil {
		t.Fatal(err)
	}
	r, err := routeOptions(cfg, &cfg.Routes[0], newLabels(cfg))
	if err != nil {
		t.Fatal(err)
	}
	want := []struct {
		kind   ladder.Kind
		number int
	}{{ladder.KindPool, 0}, {ladder.KindPool, 2}, {ladder.KindReduce, 1}, {ladder.KindCached, 2}, {ladder.KindStatic, 2}}
	for i, w := range want {
		if got := r.Tiers[i]; got.Kind != w.kind || got.Number != w.number {
			t.Errorf("tier %d is kind %d number %d, wanted %d and %d", i, got.Kind, got.Number, w.kind, w.number)
		}
	}
	if r.Regions == 0 || r.Tiers[1].Validate == nil || !r.Tiers[3].Shared || r.Tiers[3].Staleness != time.Hour {
		t.Errorf("%+v", r.Route)
	}
	if list := downgrades(cfg); len(list) != 1 || list[0].Model != "small" {
		t.Errorf("downgrades %v", list)
	}
}

// What the file says of a pool's abilities and of a reduce tier reaches the
// parts that heed it.
func TestAbilitiesAndReduceAreWired(t *testing.T) {
	if capsOf(nil) != fleet.AbilityAll {
		t.Error("a pool that says nothing of abilities has them all")
	}
	if c := capsOf([]string{}); c == 0 || c&(fleet.AbilityTools|fleet.AbilityImages) != 0 {
		t.Errorf("a pool without abilities has %b", c)
	}
	if c := capsOf([]string{"tools", "audio"}); c&fleet.AbilityTools == 0 || c&fleet.AbilityAudio == 0 || c&fleet.AbilityVideo != 0 {
		t.Errorf("tools and audio are %b", c)
	}
	src := config.Source{File: "p.yaml", Data: []byte(`
pools:
  - {name: p, models: [m], abilities: [], side_effects: true, replicas: {static: ["http://h:1"]}}
classes: [{name: c, exact: true}]
routes:
  - {model: chat, degrade: {stalled_after: 9s, trials: 7}, tiers: [{pool: p}, {reduce: {max_tokens: 5, drop_tools: true}}]}
`)}
	c, err := config.Load(src)
	if err != nil {
		t.Fatal(err)
	}
	if c.Pools[0].Abilities == nil || !poolOptions(&c.Pools[0]).SideEffects || !classOptions(c)[0].Exact {
		t.Errorf("%+v", c.Pools[0])
	}
	o, err := routeOptions(c, &c.Routes[0], newLabels(c))
	if err != nil {
		t.Fatal(err)
	}
	if r := o.Tiers[1]; r.MaxTokens != 5 || !r.DropTools || o.Rules.Stalled != 9 || o.Rules.Trials != 7 || o.Rules.RampFrom != 0.25 {
		t.Errorf("%+v %+v", o.Rules, o.Tiers)
	}
}
