package compare

import (
	"fmt"
	"io"
)

// shape is one finding of an independent simulator (other coefficients, other
// streams) that this one has to show too: the order and the size of the effect,
// not the figure.
type shape struct {
	scenario string
	theirs   string // what was found there
	cells    []string
	of       func(c *Cell) float64
	unit     string
	holds    func(v []float64) bool // v is by cells
	large    func(v []float64) bool // that the effect is about as large as there; nil: holds says so
}

func goodput(c *Cell) float64 { return c.Goodput.Mean }

const (
	ours   = "penstock"
	noHold = "penstock, no admission"
)

var shapes = []shape{
	{"near_saturation", "TTFT p95: this 0.120 s, Dynamo's cost 0.160, least requests 0.336", []string{ours, "dynamo", "least_requests"},
		func(c *Cell) float64 { return c.TTFTp95.Mean }, "s", func(v []float64) bool { return v[0] < v[1] && v[1] < v[2] }, nil},
	{"mixed_lengths", "goodput: this 0.93, round robin 0.18, least requests 0.09, llm-d 0.13, Dynamo 0.06, SGLang 0.14", []string{ours, "round_robin", "least_requests", "llmd", "dynamo", "sglang_cache_aware"},
		goodput, "", func(v []float64) bool {
			return v[0] > 0.9 && least(v[1:], func(x float64) bool { return x < v[0]-0.2 })
		}, nil},
	{"overload_115", "goodput: hold and shed 0.85 of an ideal 0.86, no admission 0.34", []string{ours, noHold}, goodput, "",
		func(v []float64) bool { return v[0] >= 0.97/1.15 && v[1] < v[0]/2 }, nil},
	{"overload_145", "goodput: hold and shed 0.695 of an ideal 0.69, no admission 0.12", []string{ours, noHold}, goodput, "",
		func(v []float64) bool { return v[0] >= 0.97/1.45 && v[1] < v[0]/2 }, nil},
	{"mooncake", "goodput: this 0.75, LMetric 0.71, Preble 0.66, least requests 0.62, round robin 0.54", []string{ours, "lmetric", "preble", "least_requests", "round_robin"}, goodput, "",
		func(v []float64) bool { return v[0] > v[1] && v[1] > v[2] && v[2] > v[3] && v[3] > v[4] }, nil},
	{"slow_replica", "goodput: this 1.00, llm-d 0.95, round robin 0.88", []string{ours, "llmd", "round_robin"}, goodput, "",
		func(v []float64) bool { return v[0] > 0.99 && v[0] > v[1] && v[1] > v[2] }, nil},
	{"near_saturation", "TTFT p99: this 0.207 s, Dynamo's cost 0.274, least requests 0.710", []string{ours, "dynamo", "least_requests"},
		func(c *Cell) float64 { return c.TTFTp99.Mean }, "s", func(v []float64) bool { return v[0] < v[1] && v[1] < v[2] }, nil},
	{"slow_replica", "TPOT p95 with learned scales 17 ms, without 32", []string{ours, NoLearn}, func(c *Cell) float64 { return c.TPOTp95.Mean }, "s",
		func(v []float64) bool { return v[0] < 0.65*v[1] }, nil},
	{"stale_sums", "16 routers, goodput with stale sums: Dynamo 0.26, this 0.86; with the cure 0.95 and 0.97", []string{dynStale, stale, "dynamo", ours}, goodput, "",
		func(v []float64) bool { return v[0] < v[2]-0.1 && v[1] < v[3] && v[0] < v[1] && v[3] >= 0.97 },
		func(v []float64) bool { return v[0] < 0.5 && v[1] < 0.9 }},
	{"queue_115", "goodput: strict first in, first out 0.865, look at 32 0.900, and wait for warm ones 0.902", []string{inOrder, anyWarm, ours}, goodput, "",
		func(v []float64) bool { return v[1] > v[0]+0.01 && v[2] > v[1]-0.005 }, nil},
	{"queue_115", "TTFT p50 of the same: 0.33, 0.08, 0.07 s", []string{inOrder, anyWarm, ours}, func(c *Cell) float64 { return c.TTFTp50.Mean }, "s",
		func(v []float64) bool { return v[1] < v[0] && v[2] < v[0] },
		func(v []float64) bool { return v[1] < v[0]/2 && v[2] < v[0]/2 }},
	{"queue_conversations", "the same, conversations at 1.7x: 0.54, 0.69, 0.71", []string{inOrder, anyWarm, ours}, goodput, "",
		func(v []float64) bool { return v[1] > v[0]+0.01 && v[2] > v[1]-0.005 }, nil},
	{"queue_115", "true output lengths known: almost nothing gained", []string{lengths, ours}, goodput, "", func(v []float64) bool { return v[0] < v[1]+0.01 }, nil},
	{"wrong_choice", "coefficients wrong by 4x either way: no loss in the choice", []string{noHold1, noHold4h, noHold4l}, goodput, "",
		func(v []float64) bool { return least(v[1:], func(x float64) bool { return x > v[0]-0.02 }) }, nil},
	{"wrong_admission", "4x too high costs admission half the goodput", []string{NoLearn, high4}, goodput, "", func(v []float64) bool { return v[1] < 0.6*v[0] }, nil},
	{"prior_7x_high", "coefficients too high cost half the goodput; learned scales repair 7x", []string{ours, NoLearn}, goodput, "",
		func(v []float64) bool { return v[0] >= 0.93/1.15 && v[1] < v[0]/2 }, nil},
	{"prior_7x_low", "the same, too low", []string{ours, NoLearn}, goodput, "", func(v []float64) bool { return v[0] >= 0.93/1.15 && v[1] < v[0]/2 }, nil},
}

func least(v []float64, ok func(float64) bool) bool {
	for _, x := range v {
		if !ok(x) {
			return false
		}
	}
	return true
}

// shapes writes which of the shapes are seen here.
func (o *Outcome) shapes(w io.Writer) {
	fmt.Fprint(w, "\n## Findings of an independent simulator\n\nWhether each is seen here too: the order, and an effect of about that size; where only the order is, that is said (bench/compare/shapes.go has the conditions);\n"+
		"coefficients and streams differ. Scenarios that are not in the suite are it with one thing changed (bench/compare/findings.go).\n\n| scenario | there | here | |\n|---|---|---|---|\n")
	seen, small := 0, 0
	for _, s := range shapes {
		here, v := s.measured(o)
		word := "reproduced"
		switch {
		case v == nil:
			here, word = "", "not run"
		case !s.holds(v):
			word = "**not reproduced**"
		case s.large != nil && !s.large(v):
			seen, small = seen+1, small+1
			word = "reproduced, the effect is smaller"
		default:
			seen++
		}
		fmt.Fprintf(w, "| %s | %s | %s | %s |\n", s.scenario, s.theirs, here, word)
	}
	fmt.Fprintf(w, "\n%d of %d are reproduced, %d of them with a smaller effect.\n", seen, len(shapes), small)
}

// measured finds the shape's figures in the outcome; nil when they are not all
// there.
func (s *shape) measured(o *Outcome) (text string, v []float64) {
	for _, rows := range [][]Row{o.Rows, o.Findings} {
		for i := range rows {
			if rows[i].Scenario != s.scenario {
				continue
			}
			for _, name := range s.cells {
				if c := rows[i].cell(name); c != nil {
					v = append(v, s.of(c))
					text += fmt.Sprintf(", %s %.3f", name, s.of(c))
					if s.unit != "" {
						text += " " + s.unit
					}
				}
			}
		}
	}
	if len(v) < len(s.cells) {
		return "", nil
	}
	return text[2:], v
}

// cell is the policy's cell in the row, nil when it did not run.
func (r *Row) cell(policy string) *Cell {
	for i := range r.Cells {
		if r.Cells[i].Policy == policy {
			return &r.Cells[i]
		}
	}
	return nil
}
