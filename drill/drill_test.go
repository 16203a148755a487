package drill

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// matrix is failure-matrix.md's rows that are due now; those that need Redis,
// a key issuer or durable jobs come with these.
var matrix = []string{"replica-crash", "replica-crash-streaming", "replica-hang", "replica-slow", "replica-503", "replica-429", "client-4xx", "gpu-pending",
	"metrics-gone", "router-overload", "tenant-burst", "otlp-down", "scraper-absent", "service-down", "config-broken", "tenant-bleed",
	"tool-index-collision", "leaked-permit", "blocked-probe", "retry-storm", "model-substitution", "truncated-stream", "brownout-recovery", "recovery-flap",
	"shared-domain", "untested-fallback", "stale-cache", "region-lost", "cold-scale-up", "client-storm-disconnect", "router-crash", "peer-partition",
	// And some that it does not name: the alert of a recovery that does not come, two ends of a real vLLM, a hung
	// replica that wakes, and a router that stands still.
	"recovery-stalled", "replica-abort", "engine-killed", "replica-wakes", "router-stall"}

func TestEveryRowOfTheMatrixIsADrill(t *testing.T) {
	all, err := All()
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]bool{}
	for _, s := range all {
		have[s.Name] = true
	}
	for _, n := range matrix {
		if !have[n] {
			t.Errorf("no drill %s", n)
		}
	}
}

func TestScenarioFilesAreReadStrictly(t *testing.T) {
	head := "name: x\ntitle: t\nsymptom: s\nmechanism: m\nblast_radius: b\nfirst_action: f\n"
	for want, text := range map[string]string{
		"field expects not found": head + "expects: []\n",
		"asserts nothing":         head,
		"symptom is missing":      "name: x\ntitle: t\nmechanism: m\nblast_radius: b\nfirst_action: f\nexpect: [{check: ok}]\n",
		`no check "okay"`:         head + "expect: [{check: okay}]\n",
		`no load "b"`:             head + "load: [{name: a, rate: 1, for: 1s}]\nexpect: [{check: ok, load: b}]\n",
		"never end":               head + "load: [{name: a, rate: 1}]\nexpect: [{check: ok}]\n",
		"is not a duration":       head + "load: [{name: a, rate: 1, for: 5}]\nexpect: [{check: ok}]\n",
		// What follows would hold, or be left out, whatever the router does.
		"neither min nor max":              head + "expect: [{check: failed}]\n",
		"min is over max":                  head + "expect: [{check: ok, min: 2, max: 1}]\n",
		`no state "ejectd"`:                head + "expect: [{check: no_state, state: ejectd}]\n",
		`no metric "penstock_shed"`:        head + "expect: [{check: metric, metric: penstock_shed, max: 0}]\n",
		`"x-degraded" is not looked at`:    head + "expect: [{check: header, header: x-degraded, max: 0}]\n",
		`no replica "a2"; there are: a0`:   head + "replicas: [{name: a}]\nexpect: [{check: replica_saw, of: a2, max: 0}]\n",
		"value is missing":                 head + "expect: [{check: log, max: 0}]\n",
		`no router "r1"`:                   head + "load: [{name: a, rate: 1, for: 5s, via: r1}]\nexpect: [{check: ok, min: 1}]\n",
		`step 0 (at 1s): no replica "b*"`:  head + "replicas: [{name: a}]\nsteps: [{at: 1s, replica: b*, heal: true}]\nexpect: [{check: accounts_zero}]\n",
		`fault: unknown mode "kil"`:        head + "replicas: [{name: a}]\nsteps: [{replica: a0, fault: {mode: kil}}]\nexpect: [{check: accounts_zero}]\n",
		"wants either fault or heal":       head + "replicas: [{name: a}]\nsteps: [{replica: a0}]\nexpect: [{check: accounts_zero}]\n",
		"wants one of replica":             head + "steps: [{at: 1s, note: nothing}]\nexpect: [{check: accounts_zero}]\n",
		"needs routers: 2":                 head + "steps: [{network: split}]\nexpect: [{check: accounts_zero}]\n",
		"which: no router 1":               head + "steps: [{router: kill, which: 1}]\nexpect: [{check: accounts_zero}]\n",
		"which: goes with router":          head + "routers: 2\nreplicas: [{name: a}]\nsteps: [{replica: a0, heal: true, which: 1}]\nexpect: [{check: accounts_zero}]\n",
		"is not a method and a path":       head + "steps: [{admin: /admin/v1/reload}]\nexpect: [{check: accounts_zero}]\n",
		"a replica's name is ${a0.name}":   head + "replicas: [{name: a}]\nsteps: [{admin: \"POST /admin/v1/replicas/${a0}/drain\"}]\nexpect: [{check: accounts_zero}]\n",
		"more than one document":           head + "expect: [{check: accounts_zero}]\n---\nname: y\n",
		"knows the modes kill and hang":    head + "services: [{name: s}]\nsteps: [{service: s, fault: {mode: refuse}}]\nexpect: [{check: accounts_zero}]\n",
		`router: "hup" is not kill, stop,`: head + "steps: [{router: hup}]\nexpect: [{check: accounts_zero}]\n",
	} {
		if _, err := Parse("x.yaml", []byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("wanted %q, got %v", want, err)
		}
	}
}

// The assertions themselves: each can fail.
func TestChecksCanFail(t *testing.T) {
	two := 2.0
	good := &Call{Load: "l", Status: 200, Done: true, Last: true, Sent: 1, First: 1.1}
	cut := &Call{Load: "l", N: 1, Status: 200, ErrorEvent: true, Code: "upstream_stream_failed", Last: true, Sent: 2}
	shed := &Call{Load: "l", N: 2, Status: 503, Code: "capacity_exhausted", RetryAfter: 1, Last: true, Sent: 3}
	half := &Call{Load: "l", N: 3, Status: 200, Done: true, Last: true, Sent: 4, Header: map[string]string{"X-Degraded": "true"}}
	zero, one := 0.0, 1.0
	for _, c := range []struct {
		what  string
		calls []*Call
		e     Expect
		ok    bool
	}{
		{"a cut stream is a failure", []*Call{good, cut}, Expect{Check: "failed", Max: &zero}, false},
		{"an honest refusal is none", []*Call{good, shed}, Expect{Check: "failed", Max: &zero}, true},
		{"no request at all proves nothing", nil, Expect{Check: "failed", Max: &zero}, false},
		{"a share below its limit", []*Call{good, shed}, Expect{Check: "ok", Min: &one, Args: map[string]float64{"share": 1}}, false},
		{"half a disclosure is none", []*Call{half}, Expect{Check: "disclosed", Min: &one}, false},
		{"no degraded answer where some are due", []*Call{good}, Expect{Check: "disclosed", Min: &one}, false},
		{"too few error events", []*Call{cut}, Expect{Check: "error_events", Code: "upstream_stream_failed", Min: &two}, false},
		{"a metric that is not there", nil, Expect{Check: "metric", Metric: "penstock_x", Min: &one}, false},
		{"no account on the page", nil, Expect{Check: "accounts_zero"}, false},
		{"a state never seen", nil, Expect{Check: "state", State: "up"}, false},
		{"no reading of the state", nil, Expect{Check: "no_state", State: "up"}, false},
		{"no repeat at all is no spread", []*Call{good}, Expect{Check: "retry_spread", Max: &one}, false},
		{"no answer with anchors", []*Call{good}, Expect{Check: "anchors", Min: &one}, false},
	} {
		rec := &record{st: &stage{sc: &Scenario{}}, calls: c.calls, final: map[string]float64{}}
		if ok, seen := checks[c.e.Check](rec, &c.e); ok != c.ok {
			t.Errorf("%s: %v, %s", c.what, ok, seen)
		}
	}
	for _, e := range []Expect{{Check: "metric", Metric: "penstock_shed_total", Max: &zero}, {Check: "disclosed", Max: &zero}, {Check: "accounts_zero"}} {
		if ok, seen := checks[e.Check](&record{st: &stage{sc: &Scenario{}}}, &e); ok {
			t.Errorf("%s holds of a router that does not answer: %s", e.Check, seen)
		}
	}
}

// Accounts are those of every router that is there at the end: one that a step
// has ended has none, one that is gone by itself proves nothing.
func TestAccountsOfAllRoutersAreLookedAt(t *testing.T) {
	zero := map[string]float64{accounts[0]: 0, accounts[1] + `{replica="a"}`: 0}
	leak := map[string]float64{accounts[0]: 0, accounts[1] + `{replica="a"}`: 1}
	killed := []Step{{At: 1, Router: "kill", Which: 1}}
	paused := []Step{{At: 2, Router: "cont", Which: 1}, {At: 1, Router: "stop", Which: 1}}
	for _, c := range []struct {
		what   string
		steps  []Step
		final  map[string]float64
		others []map[string]float64
		ok     bool
	}{
		{"all are at zero", nil, zero, []map[string]float64{zero, zero}, true},
		{"the last one leaks", nil, zero, []map[string]float64{zero, leak}, false},
		{"one does not answer", nil, zero, []map[string]float64{nil, zero}, false},
		{"one shows no account", nil, zero, []map[string]float64{{}, zero}, false},
		{"one was killed", killed, zero, []map[string]float64{nil, zero}, true},
		{"another one than was killed leaks", killed, zero, []map[string]float64{nil, leak}, false},
		{"one was paused, and leaks", paused, zero, []map[string]float64{leak, zero}, false},
	} {
		rec := &record{st: &stage{sc: &Scenario{Steps: c.steps}}, final: c.final, others: c.others}
		if ok, seen := checkAccountsZero(rec, &Expect{}); ok != c.ok {
			t.Errorf("%s: %v, %s", c.what, ok, seen)
		}
	}
}

// The runner itself, on the real binary, with the two quickest drills; and a
// scenario that must fail does.
func TestRunnerPlaysDrills(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	binary := build(t, "")
	t.Setenv("TMPDIR", t.TempDir())
	for _, name := range []string{"client-4xx", "stale-cache", "shared-domain"} {
		sc, err := Find(name)
		if err != nil {
			t.Fatal(err)
		}
		rep := playOn(t, sc, binary, "")
		if !rep.OK {
			t.Errorf("%s", text(rep))
		}
		checkReport(t, rep)
	}
	sc, err := Find("client-4xx")
	if err != nil {
		t.Fatal(err)
	}
	wrong := *sc
	zero := 0.0
	wrong.Load[0].For, wrong.Load[1].For = Duration(1e9), Duration(1e9)
	wrong.Expect = []Expect{{Check: "status", Load: "wrong", Status: 400, Max: &zero}}
	if rep := playOn(t, &wrong, binary, ""); rep.OK {
		t.Errorf("an assertion that does not hold passed:\n%s", text(rep))
	}
	left, err := os.ReadDir(os.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range left {
		if strings.HasPrefix(d.Name(), "penstock-drill-") {
			t.Errorf("%s was left behind", d.Name())
		}
	}
}

// A drill that could not be played has not passed: neither when the router
// does not start nor when `check` cannot be run.
func TestDrillThatCannotBePlayedFails(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	for _, name := range []string{"client-4xx", "shared-domain"} {
		var out, errs bytes.Buffer
		if code := Main(t.Context(), []string{"--binary", "/nowhere/penstock", name}, &out, &errs); code != 1 || !strings.Contains(out.String(), "drill "+name+": FAILED") {
			t.Errorf("exit status %d, %s%s", code, &out, &errs)
		}
	}
}

// What would be left out or misread is told before anything is played.
func TestCommandLineIsReadWhole(t *testing.T) {
	file := filepath.Join(t.TempDir(), "x.yaml")
	if err := os.WriteFile(file, []byte("name: x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"list", "client-4xx"}, 2, "list stands alone"},
		{[]string{"client-4xx", "all"}, 2, "all stands alone"},
		{[]string{"--file", file, "client-4xx"}, 2, `leave "client-4xx" out`},
		{[]string{"--file", file}, 2, "title is missing"},
		{[]string{"all", "--jsn", "f.json"}, 2, "not defined: -jsn"},
		{[]string{"client-4xx", "--json", "f.json", "all"}, 2, "all stands alone"}, // f.json is no drill
		{[]string{"list", "--file", file}, 2, `leave "list" out`},
		{[]string{"--help"}, 0, "usage: penstock drill"},
	} {
		var out, errs bytes.Buffer
		if code := Main(t.Context(), c.args, &out, &errs); code != c.code || !strings.Contains(errs.String(), c.want) {
			t.Errorf("%q: exit status %d, %s%s", c.args, code, &out, &errs)
		}
	}
}

func checkReport(t *testing.T, rep *Report) {
	t.Helper()
	var j, h bytes.Buffer
	if err := JSON(&j, []*Report{rep}); err != nil || !json.Valid(j.Bytes()) {
		t.Errorf("JSON: %v", err)
	}
	if err := HTML(&h, []*Report{rep}); err != nil || !strings.Contains(h.String(), rep.Name) {
		t.Errorf("HTML: %v", err)
	}
}

func TestFailuresPageHasEveryDrill(t *testing.T) {
	all, err := All()
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	Failures(&b, all)
	for _, s := range all {
		if !strings.Contains(b.String(), "## "+s.Name+"\n") || !strings.Contains(b.String(), s.FirstAction) {
			t.Errorf("%s is not whole on the page", s.Name)
		}
	}
}
