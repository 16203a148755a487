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
}

func goodput(c *Cell) float64 { return c.Goodput.Mean }

const (
	ours   = "penstock"
	noHold = "penstock, no admission"
)

var shapes = []shape{
	{"near_saturation", "TTFT p95: this 0.120 s, Dynamo's cost 0.160, least requests 0.336", []string{ours, "dynamo", "least_requests"},
		func(c *Cell) float64 { return c.TTFTp95.Mean }, "s", func(v []float64) bool { return v[0] < v[1] && v[1] < v[2] }},
	{"mixed_lengths", "goodput: this 0.93, round robin 0.18, least requests 0.09, llm-d 0.13, Dynamo 0.06, SGLang 0.14", []string{ours, "round_robin", "least_requests", "llmd", "dynamo", "sglang_cache_aware"},
		goodput, "", func(v []float64) bool {
			return v[0] > 0.9 && least(v[1:], func(x float64) bool { return x < v[0]-0.2 })
		}},
	{"overload_115", "goodput: hold and shed 0.85 of an ideal 0.86, no admission 0.34", []string{ours, noHold}, goodput, "",
		func(v []float64) bool { return v[0] >= 0.97/1.15 && v[1] < v[0]/2 }},
	{"overload_145", "goodput: hold and shed 0.695 of an ideal 0.69, no admission 0.12", []string{ours, noHold}, goodput, "",
		func(v []float64) bool { return v[0] >= 0.97/1.45 && v[1] < v[0]/2 }},
	{"mooncake", "goodput: this 0.75, LMetric 0.71, Preble 0.66, least requests 0.62, round robin 0.54", []string{ours, "lmetric", "preble", "least_requests", "round_robin"}, goodput, "",
		func(v []float64) bool { return v[0] > v[1] && v[1] > v[2] && v[2] > v[3] && v[3] > v[4] }},
	{"slow_replica", "goodput: this 1.00, llm-d 0.95, round robin 0.88", []string{ours, "llmd", "round_robin"}, goodput, "",
		func(v []float64) bool { return v[0] > 0.99 && v[0] > v[1] && v[1] > v[2] }},
	{"slow_replica", "TPOT p95 with learned scales 17 ms, without 32", []string{ours, NoLearn}, func(c *Cell) float64 { return c.TPOTp95.Mean }, "s",
		func(v []float64) bool { return v[0] < 0.65*v[1] }},
	{"routers_16", "goodput with stale sums: this 0.97 with the cure, Dynamo 0.26", []string{ours, "dynamo"}, goodput, "", func(v []float64) bool { return v[0] > 0.95 && v[1] < 0.5 }},
	{"prior_7x_high", "coefficients too high cost half the goodput; learned scales repair 7x", []string{ours, NoLearn}, goodput, "",
		func(v []float64) bool { return v[0] >= 0.93/1.15 && v[1] < v[0]/2 }},
	{"prior_7x_low", "the same, too low", []string{ours, NoLearn}, goodput, "", func(v []float64) bool { return v[0] >= 0.93/1.15 && v[1] < v[0]/2 }},
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
	fmt.Fprint(w, "\n## Findings of an independent simulator\n\nWhether each is seen here too: its order and the size of the effect; coefficients and streams differ. Not checked by this suite: held queue\nfirst-in-first-out against looking at 32, the same for conversations at 1.7x, and true output lengths.\n\n| scenario | there | here | |\n|---|---|---|---|\n")
	for _, s := range shapes {
		here, v := s.measured(o)
		if v == nil {
			continue
		}
		word := "holds"
		if !s.holds(v) {
			word = "**does not hold**"
		}
		fmt.Fprintf(w, "| %s | %s | %s | %s |\n", s.scenario, s.theirs, here, word)
	}
}

// measured finds the shape's figures in the outcome; nil when they are not all
// there.
func (s *shape) measured(o *Outcome) (text string, v []float64) {
	for i := range o.Rows {
		if o.Rows[i].Scenario != s.scenario {
			continue
		}
		for _, name := range s.cells {
			for k := range o.Rows[i].Cells {
				if c := &o.Rows[i].Cells[k]; c.Policy == name {
					if text != "" {
						text += ", "
					}
					v = append(v, s.of(c))
					text += fmt.Sprintf("%s %.3f", name, s.of(c))
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
	return text, v
}
