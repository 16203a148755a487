// Package telemetry holds the table of every metric that Penstock exports,
// hands out the metric objects, and renders the page. Rooms take pointers at
// construction and never look a name up on the hot path.
package telemetry

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"sync"

	"github.com/VictoriaMetrics/metrics"
)

// Kind of a metric.
type Kind string

// The kinds.
const (
	Counter   Kind = "counter"
	Gauge     Kind = "gauge"
	Histogram Kind = "histogram"
)

// Def defines one metric family: docs/metrics.md is generated from the table
// of all Defs (defs.go).
type Def struct {
	Name   string
	Kind   Kind
	Labels []string
	Help   string
}

// Registry owns one metrics.Set. All its metrics come from the table.
type Registry struct {
	set *metrics.Set
}

// New returns an empty registry.
func New() *Registry {
	metrics.ExposeMetadata(true) // # HELP and # TYPE
	return &Registry{set: metrics.NewSet()}
}

// full renders name{label="value",...}; a wrong number of values is a bug.
func (d *Def) full(values []string) string {
	if len(values) != len(d.Labels) {
		panic(fmt.Sprintf("BUG: metric %s has labels %v, got values %v", d.Name, d.Labels, values))
	}
	if len(values) == 0 {
		return d.Name
	}
	var b strings.Builder
	b.WriteString(d.Name)
	b.WriteByte('{')
	for i, l := range d.Labels {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "%s=%q", l, values[i])
	}
	b.WriteByte('}')
	return b.String()
}

// Counter returns the counter of d with these label values.
func (r *Registry) Counter(d *Def, values ...string) *metrics.Counter {
	return r.set.GetOrCreateCounter(d.full(values))
}

// Gauge registers f as the gauge of d with these label values.
func (r *Registry) Gauge(d *Def, f func() float64, values ...string) *metrics.Gauge {
	return r.set.GetOrCreateGauge(d.full(values), f)
}

// Histogram returns a Prometheus-style histogram of d with the given upper
// bounds (seconds or tokens).
func (r *Registry) Histogram(d *Def, bounds []float64, values ...string) *metrics.PrometheusHistogram {
	return r.set.GetOrCreatePrometheusHistogramExt(d.full(values), bounds)
}

// Drop removes one series (a replica that left).
func (r *Registry) Drop(d *Def, values ...string) { r.set.UnregisterMetric(d.full(values)) }

// Write renders all metrics in Prometheus text format. The library leaves the
// text of # HELP out; it comes from the table.
func (r *Registry) Write(w io.Writer) {
	var page, out bytes.Buffer
	r.set.WritePrometheus(&page)
	for line := range bytes.Lines(page.Bytes()) {
		out.Write(line)
		if name, ok := bytes.CutPrefix(line, []byte("# HELP ")); ok {
			if help := helpOf()[string(bytes.TrimSpace(name))]; help != "" {
				out.Truncate(out.Len() - 1)
				out.WriteByte(' ')
				_, _ = helpEscapes.WriteString(&out, help)
				out.WriteByte('\n')
			}
		}
	}
	_, _ = w.Write(out.Bytes())
}

var helpEscapes = strings.NewReplacer(`\`, `\\`, "\n", `\n`)

// helpOf is the table's text by the metric's name.
var helpOf = sync.OnceValue(func() map[string]string {
	m := map[string]string{}
	for _, d := range Defs {
		m[d.Name] = d.Help
	}
	return m
})
