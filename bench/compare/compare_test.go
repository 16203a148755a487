package compare

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/penstock/penstock/scorer"
)

func small(t *testing.T) *Outcome {
	t.Helper()
	list, err := pick("near_saturation,loss_of_one,mooncake")
	if err != nil {
		t.Fatal(err)
	}
	ps, err := ParsePolicies("penstock,penstock_nohold,round_robin")
	if err != nil {
		t.Fatal(err)
	}
	o, err := Run(Options{Scenarios: list, Policies: ps, Seeds: 2, Scale: 0.1})
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func TestSuiteRunsAndEveryFormatIsWritten(t *testing.T) {
	o := small(t)
	if len(o.Rows) != 3 || o.Rows[2].Skipped == "" {
		t.Fatalf("rows %d, the trace scenario without traces: %q", len(o.Rows), o.Rows[2].Skipped)
	}
	for _, r := range o.Rows[:2] {
		if len(r.Cells) != 3 || r.Requests == 0 {
			t.Fatalf("%s: %d cells, %d requests", r.Scenario, len(r.Cells), r.Requests)
		}
		for _, c := range r.Cells {
			if c.Goodput.Mean <= 0 || c.Goodput.Mean > 1 || math.IsNaN(c.Goodput.CI) || c.TTFTp95.Mean < c.TTFTp50.Mean {
				t.Errorf("%s / %s: %+v", r.Scenario, c.Policy, c)
			}
		}
	}
	dir := t.TempDir()
	for _, kind := range []string{"json", "csv", "html", "doc"} {
		path := filepath.Join(dir, kind)
		if err := write(o, kind, path); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		text := string(b)
		switch kind {
		case "json":
			var back Outcome
			if err := json.Unmarshal(b, &back); err != nil || back.Rows[0].Cells[0].Goodput != o.Rows[0].Cells[0].Goodput {
				t.Error("JSON does not come back", err)
			}
		case "csv":
			rows, err := csv.NewReader(bytes.NewReader(b)).ReadAll()
			if err != nil || len(rows) != 1+2*3*2 {
				t.Errorf("CSV: %d rows, %v", len(rows), err)
			}
		case "html":
			if strings.Contains(text, "://") || strings.Contains(text, "src=") || strings.Count(text, "<svg") != 2 {
				t.Error("the page is not self-contained, or lacks its plots")
			}
		case "doc":
			for _, want := range []string{"## Verdict", "Goodput at a glance", "Not run: no folder of traces", "round_robin"} {
				if !strings.Contains(text, want) {
					t.Errorf("docs lack %q", want)
				}
			}
		}
	}
}

// A scenario in which another policy is better must be named as a loss.
func TestLossesAreShown(t *testing.T) {
	o := &Outcome{Seeds: 1, Rows: []Row{
		{Scenario: "lost", Cells: []Cell{{Policy: "ours", Goodput: Value{Mean: 0.8}}, {Policy: "theirs", Goodput: Value{Mean: 0.9}}}},
		{Scenario: "tied_but_slow", Cells: []Cell{{Policy: "ours", Goodput: Value{Mean: 0.9}, TTFTp95: Value{Mean: 0.2}}, {Policy: "theirs", Goodput: Value{Mean: 0.9}, TTFTp95: Value{Mean: 0.1}}}},
		{Scenario: "won", Cells: []Cell{{Policy: "ours", Goodput: Value{Mean: 0.9}}, {Policy: "theirs", Goodput: Value{Mean: 0.5}}}},
	}}
	var b bytes.Buffer
	o.verdict(&b)
	for _, want := range []string{"first in goodput in 2 of 3", "loss: lost: goodput 0.800, theirs has 0.900", "loss: tied_but_slow: TTFT p95 200 ms, theirs has 100 ms"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in:\n%s", want, b.String())
		}
	}
	if strings.Contains(b.String(), "loss: won") {
		t.Error("a win is called a loss")
	}
}

func TestConfidenceInterval(t *testing.T) {
	v := mean([]float64{1, 2, 3})
	if math.Abs(v.Mean-2) > 1e-12 || math.Abs(v.CI-4.30/math.Sqrt(3)) > 1e-9 {
		t.Errorf("%+v", v)
	}
}

func TestEveryPolicyOfTheDaemonIsCompared(t *testing.T) {
	have := map[string]bool{}
	for _, p := range DefaultPolicies() {
		have[p.Core] = true
	}
	for _, n := range scorer.Names() {
		if !have[n] {
			t.Errorf("policy %s is not compared", n)
		}
	}
	if _, err := ParsePolicies("penstock,nonsense"); err == nil {
		t.Error("an unknown policy was taken")
	}
	if _, err := pick("nonsense"); err == nil {
		t.Error("an unknown scenario was taken")
	}
}

func TestScenariosBuild(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range Suite() {
		if seen[s.Name] || s.Title == "" || s.Note == "" {
			t.Errorf("scenario %q twice, or without title or note", s.Name)
		}
		seen[s.Name] = true
		c, err := s.Build(&Env{}, 1, 0.05)
		if errors.Is(err, errNoTraces) {
			continue
		}
		if err != nil || len(c.Requests) == 0 {
			t.Errorf("%s: %d requests, %v", s.Name, len(c.Requests), err)
		}
	}
}

func TestSimMain(t *testing.T) {
	var out, errs bytes.Buffer
	if code := SimMain([]string{"--scenario", "hot_prefixes", "--scale", "0.1", "--timeline", "2", "--policy", "dynamo+hold"}, &out, &errs); code != 0 || !strings.Contains(out.String(), "hot_prefixes / dynamo+hold") {
		t.Fatal(code, out.String(), errs.String())
	}
	if code := SimMain([]string{"--scenario", "nowhere"}, &out, &errs); code != 2 {
		t.Error("an unknown scenario:", code)
	}
}

func TestCapacitySweep(t *testing.T) {
	ps, _ := ParsePolicies("penstock_nohold,round_robin")
	var b bytes.Buffer
	if err := Capacity(Options{Policies: ps, Scale: 0.2}, []float64{100, 600}, &b); err != nil {
		t.Fatal(err)
	}
	if lines := strings.Split(strings.TrimSpace(b.String()), "\n"); len(lines) != 3 || !strings.HasSuffix(lines[1], "100") {
		t.Errorf("\n%s", b.String())
	}
}
