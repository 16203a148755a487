package telemetry

import (
	"bytes"
	"strings"
	"testing"
)

// Each family on the page has one HELP line with its text from the table, before its samples.
func TestThePageTellsWhatEachMetricIs(t *testing.T) {
	r := New()
	r.Counter(Sheds, "capacity").Inc()
	r.Counter(Sheds, "queue_full").Add(2)
	r.Gauge(InFlight, func() float64 { return 3 })
	r.Histogram(HoldTime, []float64{1, 2}, "p").Update(1.5)
	var page bytes.Buffer
	r.Write(&page)
	for _, d := range []*Def{Sheds, InFlight, HoldTime} {
		head := "# HELP " + d.Name + " " + d.Help + "\n# TYPE " + d.Name + " " + string(d.Kind) + "\n" + d.Name
		if strings.Count(page.String(), "# HELP "+d.Name) != 1 || !strings.Contains(page.String(), head) {
			t.Errorf("%s: no %q in\n%s", d.Name, head, page.String())
		}
	}
	if !strings.Contains(page.String(), "penstock_shed_total{reason=\"queue_full\"} 2\n") || !strings.HasSuffix(page.String(), "\n") {
		t.Error(page.String())
	}
}
