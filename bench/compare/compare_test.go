package compare

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/penstock/penstock/bench/sim"
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

// A policy that refuses a tenth is not the faster one for it.
func TestRefusingDoesNotShortenTheOffered(t *testing.T) {
	o := &Outcome{Seeds: 1, Rows: []Row{{Scenario: "a", Cells: []Cell{
		{Policy: "ours", Goodput: Value{Mean: 0.9}, TTFTp95: Value{Mean: 0.1}, Offered: Value{Mean: sim.Never}},
		{Policy: "theirs", Goodput: Value{Mean: 0.9}, TTFTp95: Value{Mean: 0.2}, Offered: Value{Mean: 0.2}}}}}}
	var b bytes.Buffer
	o.verdict(&b)
	if want := "loss: a: TTFT p95 over all offered never ms, theirs has 200 ms"; !strings.Contains(b.String(), want) {
		t.Errorf("no %q in:\n%s", want, b.String())
	}
}

// What is reported must not be what was tuned on.
func TestReportsAreOnHeldOutSeeds(t *testing.T) {
	var o, tuning Options
	tuning.Tuning = true
	seen := map[uint64]bool{}
	for i := range 500 {
		seen[tuning.seed(i)] = true
	}
	for i := range 500 {
		if seen[o.seed(i)] {
			t.Fatalf("seed %d is for tuning too", o.seed(i))
		}
	}
}

func TestLearningWorseThanNoneIsNamed(t *testing.T) {
	row := func(name string, mean, ci float64) Row {
		return Row{Scenario: name, Cells: []Cell{{Policy: "penstock"}, {Policy: NoLearn, Behind: Value{mean, ci}}}}
	}
	o := &Outcome{Rows: []Row{row("bad", -0.02, 0.01), row("noise", -0.02, 0.03), row("good", 0.02, 0.01)}}
	var b bytes.Buffer
	o.learning(&b)
	for _, want := range []string{"| bad | -0.0200 ± 0.0100 |  | **worse** |", "| noise | -0.0200 ± 0.0300 |  | no difference shown |", "| good | +0.0200 ± 0.0100 |  | better |"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in:\n%s", want, b.String())
		}
	}
}

func TestShapesThatAreNotSeenAreSaid(t *testing.T) {
	slow := func(ttft float64) Outcome {
		cell := func(name string, v float64) Cell { return Cell{Policy: name, TTFTp95: Value{Mean: v}} }
		return Outcome{Rows: []Row{{Scenario: "near_saturation", Cells: []Cell{cell(ours, ttft), cell("dynamo", 0.16), cell("least_requests", 0.3)}}}}
	}
	for ttft, want := range map[float64]string{0.1: "least_requests 0.300 s | reproduced |", 0.2: "least_requests 0.300 s | **not reproduced** |"} {
		var b bytes.Buffer
		o := slow(ttft)
		o.shapes(&b)
		if !strings.Contains(b.String(), want) || !strings.Contains(b.String(), "| not run |") {
			t.Errorf("TTFT %g: no %q in:\n%s", ttft, want, b.String())
		}
	}
}

// Variants of ours are no rivals; a difference within the seeds' interval is a tie.
func TestRankAmongRivals(t *testing.T) {
	row := func(name string, behind Value) Row {
		return Row{Scenario: name, Cells: []Cell{{Policy: ours, Goodput: Value{Mean: 0.9}},
			{Policy: noHold, Goodput: Value{Mean: 0.95}, Behind: Value{-0.05, 0.01}},
			{Policy: "dynamo", Goodput: Value{Mean: 0.9 - behind.Mean}, Behind: behind}}}
	}
	o := &Outcome{Rows: []Row{row("won", Value{0.1, 0.05}), row("even", Value{-0.001, 0.005}), row("lost", Value{-0.1, 0.05})}}
	var b bytes.Buffer
	o.verdict(&b)
	o.rankTable(&b)
	for _, want := range []string{"by the mean in 1 of 3 scenarios; ahead of all of them beyond the seeds' interval in 1, tied in 1, behind one in 1", "| +0.1000 ± 0.0500 | ahead |", "| -0.0010 ± 0.0050 | tied |", "| -0.1000 ± 0.0500 | **behind** |"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in:\n%s", want, b.String())
		}
	}
}

// With one seed there is no interval, so nothing is said to be beyond it.
func TestOneSeedHasNoInterval(t *testing.T) {
	list, err := pick("near_saturation")
	if err != nil {
		t.Fatal(err)
	}
	ps, err := ParsePolicies("penstock,penstock_nolearn,round_robin")
	if err != nil {
		t.Fatal(err)
	}
	for seeds, one := range map[int]bool{1: true, 2: false} {
		o, err := Run(Options{Scenarios: list, Policies: ps, Seeds: seeds, Scale: 0.05})
		if err != nil {
			t.Fatal(err)
		}
		for name, out := range map[string]func(io.Writer){"table": o.Table, "page": o.Markdown, "html": func(w io.Writer) { _ = o.HTML(w) }} {
			var b bytes.Buffer
			out(&b)
			if got := strings.Contains(strings.ToLower(b.String()), oneSeed); got != one {
				t.Errorf("%d seeds, %s: said to have no interval: %v", seeds, name, got)
			}
			for _, word := range []string{"beyond the seeds' interval", "± 0.000", "| ahead |", "| tied |", "no difference shown"} {
				if one && strings.Contains(b.String(), word) {
					t.Errorf("one seed, %s: %q in\n%s", name, word, &b)
				}
			}
		}
	}
}

// Every policy that is compared is in the help, by the name that is taken.
func TestHelpListsEveryPolicy(t *testing.T) {
	var b bytes.Buffer
	Main([]string{"--help"}, &b, &b)
	if code := SimMain([]string{"--policy", "penstok", "--scale", "0.01"}, &b, &b); code != 2 {
		t.Errorf("an unknown policy: status %d", code)
	}
	for _, d := range DefaultPolicies() {
		if n := strings.Count(b.String(), d.flag()); n < 2 {
			t.Errorf("%s is %d times in help and refusal:\n%s", d.flag(), n, &b)
		}
		if ps, err := ParsePolicies(d.flag()); err != nil || ps[0].Name != d.Name || ps[0].Hold != d.Hold || ps[0].Flat != d.Flat {
			t.Errorf("--policies %s is %+v (%v), in the table %+v", d.flag(), ps, err, d)
		}
	}
}

// Each experiment runs, and each shape has its figures in the suite or in them.
func TestShapesHaveTheirExperiments(t *testing.T) {
	rows, err := findings(Options{Seeds: 1, Scale: 0.02})
	if err != nil {
		t.Fatal(err)
	}
	o := &Outcome{Findings: rows}
	for _, s := range Suite() {
		r := Row{Scenario: s.Name}
		for _, p := range DefaultPolicies() {
			r.Cells = append(r.Cells, Cell{Policy: p.Name})
		}
		o.Rows = append(o.Rows, r)
	}
	for _, s := range shapes {
		if _, v := s.measured(o); v == nil {
			t.Errorf("%s: no figures for %v", s.scenario, s.cells)
		}
	}
}

// Parts of the suite that ran apart come together in its order.
func TestJoin(t *testing.T) {
	dir := t.TempDir()
	part := func(name string, o Outcome) string {
		path := filepath.Join(dir, name)
		if err := write(&o, "json", path); err != nil {
			t.Fatal(err)
		}
		return path
	}
	late := part("late.json", Outcome{Seeds: 2, Scale: 1, Rows: []Row{{Scenario: "mooncake"}}})
	early := part("early.json", Outcome{Seeds: 2, Scale: 1, Rows: []Row{{Scenario: "near_saturation"}}})
	o, err := join([]string{late, early})
	if err != nil || len(o.Rows) != 2 || o.Rows[0].Scenario != "near_saturation" || o.Seeds != 2 {
		t.Fatalf("%+v, %v", o, err)
	}
	if _, err := join([]string{late, part("other.json", Outcome{Seeds: 3, Scale: 1})}); err == nil {
		t.Error("results of different seeds were joined")
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

// What is wrong on the command line is told at once, by the flag's name.
func TestMainRefusesBadFlags(t *testing.T) {
	for flag, args := range map[string][]string{
		"--seeds":    {"--seeds", "0"},
		"--scale":    {"--scale", "NaN"},
		"--workers":  {"--workers", "-1"},
		"--policies": {"--policies", "penstock,penstock"},
		"--doc":      {"--doc", "/nowhere/page.md"},
		"suite":      {"suite"},
		"--parts":    {"--parts", "suite,finding"},
		"--from":     {"--parts", "suite", "--from", "x.json"},
	} {
		var out, errs bytes.Buffer
		if code := Main(append(args, "--quiet"), &out, &errs); code != 2 || !strings.Contains(errs.String(), flag) || out.Len() > 0 {
			t.Errorf("%v: status %d, %s", args, code, errs.String())
		}
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
