package drill

import (
	"fmt"
	"io"
	"math"
	"sort"
)

// Phase is what clients saw of the requests sent between two acts of the
// injector.
type Phase struct {
	From     float64 `json:"from"`
	To       float64 `json:"to"`
	Asked    int     `json:"asked"`
	OK       int     `json:"ok"` // degraded ones included
	Degraded int     `json:"degraded"`
	Refused  int     `json:"refused"`
	Failed   int     `json:"failed"`
	Left     int     `json:"left"`
	TTFTp95  float64 `json:"ttft_p95"`
}

// phases cuts the calls where the injector acted. Acts within a second are one.
func phases(calls []*Call, steps []Step) []Phase {
	if len(calls) == 0 {
		return nil
	}
	at := []float64{0}
	for _, s := range steps {
		at = append(at, s.At.S())
	}
	sort.Float64s(at)
	var out []Phase
	for _, t := range at {
		if len(out) == 0 || t-out[len(out)-1].From >= 1 {
			out = append(out, Phase{From: t})
		}
	}
	ttft := make([][]float64, len(out))
	last := 0.0
	for _, c := range calls {
		i := sort.Search(len(out), func(i int) bool { return out[i].From > c.Sent }) - 1
		p := &out[max(0, i)]
		last = max(last, c.Sent)
		p.Asked++
		switch {
		case c.Left:
			p.Left++
		case c.OK():
			p.OK++
			ttft[max(0, i)] = append(ttft[max(0, i)], c.First-c.Sent)
			if c.Header["X-Degraded"] != "" {
				p.Degraded++
			}
		case c.Honest():
			p.Refused++
		default:
			p.Failed++
		}
	}
	for i := range out {
		out[i].To = math.Ceil(last)
		if i+1 < len(out) {
			out[i].To = out[i+1].From
		}
		if len(ttft[i]) > 0 {
			out[i].TTFTp95 = quantile(ttft[i], .95)
		}
	}
	return out
}

func phaseTable(w io.Writer, ph []Phase) {
	if len(ph) == 0 {
		return
	}
	fmt.Fprintf(w, "  %-20s %8s %8s %8s %8s %8s %8s %10s\n", "what clients saw", "tries", "answered", "degraded", "refused", "failed", "left", "TTFT p95")
	for _, p := range ph {
		if p.Asked == 0 {
			continue
		}
		ttft := "-"
		if p.OK > 0 {
			ttft = fmt.Sprintf("%.3f s", p.TTFTp95)
		}
		fmt.Fprintf(w, "    %6.1f to %6.1f s %8d %8d %8d %8d %8d %8d %10s\n", p.From, p.To, p.Asked, p.OK, p.Degraded, p.Refused, p.Failed, p.Left, ttft)
	}
}
