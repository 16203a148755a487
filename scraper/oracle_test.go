package scraper

import (
	"bytes"
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/penstock/penstock/fleet"
)

// oracle computes the sample from what prometheus/common read, in its own way:
// by family and label instead of by line.
type oracle map[string]*dto.MetricFamily

func readOracle(page []byte) (oracle, error) {
	p := expfmt.NewTextParser(model.UTF8Validation)
	fams, err := p.TextToMetricFamilies(bytes.NewReader(page))
	return fams, err
}

func labelOf(m *dto.Metric, name string) string {
	for _, l := range m.Label {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}

// values lists the series of one exposed name, typed or not, with their metric.
func (o oracle) values(name string) (out []float64, ms []*dto.Metric) {
	add := func(v float64, m *dto.Metric) { out, ms = append(out, v), append(ms, m) }
	if f := o["vllm:"+name]; f != nil {
		for _, m := range f.Metric {
			switch {
			case m.Gauge != nil:
				add(m.Gauge.GetValue(), m)
			case m.Counter != nil:
				add(m.Counter.GetValue(), m)
			case m.Untyped != nil:
				add(m.Untyped.GetValue(), m)
			}
		}
	}
	for _, suffix := range []string{"_sum", "_count"} {
		base, ok := strings.CutSuffix(name, suffix)
		if f := o["vllm:"+base]; ok && f != nil {
			for _, m := range f.Metric {
				if m.Histogram == nil {
					continue
				}
				if suffix == "_sum" {
					add(m.Histogram.GetSampleSum(), m)
				} else {
					add(max(float64(m.Histogram.GetSampleCount()), m.Histogram.GetSampleCountFloat()), m)
				}
			}
		}
	}
	return out, ms
}

func good(name string, vs []float64) (sum float64, ok bool) {
	most := 1e15
	if strings.HasPrefix(name, "num_requests_") {
		most = 1e7
	}
	for _, v := range vs {
		if math.IsNaN(v) || v > most || v < 0 {
			return 0, false
		}
		sum += v
	}
	return sum, len(vs) > 0
}

func (o oracle) first(none float64, names ...string) float64 {
	for _, n := range names {
		vs, _ := o.values(n)
		if s, ok := good(n, vs); ok {
			return s
		}
	}
	return none
}

func (o oracle) both(as, bs []string) (float64, float64) {
	for i := range as {
		av, _ := o.values(as[i])
		bv, _ := o.values(bs[i])
		a, aok := good(as[i], av)
		b, bok := good(bs[i], bv)
		if aok && bok {
			return a, b
		}
	}
	return -1, -1
}

func (o oracle) number(m *dto.Metric, label string) float64 {
	s := labelOf(m, label)
	v, err := strconv.ParseFloat(s, 64)
	if err != nil || strings.ContainsAny(s, "pP_") || !(v > 0) || v > 1e15 {
		return 0
	}
	return v
}

// wanted tells whether the page has any series that counts.
func (o oracle) wanted() bool {
	for name := range o {
		n, ok := strings.CutPrefix(name, "vllm:")
		if !ok {
			continue
		}
		for _, exposed := range []string{n, n + "_sum", n + "_count"} {
			if vs, _ := o.values(exposed); len(vs) > 0 && familyOf([]byte(exposed)) != famNone {
				return true
			}
		}
	}
	return false
}

func (o oracle) sample() (s fleet.Sample, load bool) {
	engines, confEngines := map[string]bool{}, map[string]bool{}
	for _, n := range []string{"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"} {
		_, ms := o.values(n)
		for _, m := range ms {
			engines[labelOf(m, "engine")] = true
		}
	}
	_, configs := o.values("cache_config_info")
	for _, m := range configs {
		confEngines[labelOf(m, "engine")] = true
	}
	if s.Engines = len(engines); s.Engines == 0 {
		s.Engines = len(confEngines)
	}
	nan := math.NaN()
	s.Running = o.first(nan, "num_requests_running")
	s.Waiting = o.first(nan, "num_requests_waiting")
	if vs, _ := o.values("num_requests_swapped"); len(vs) > 0 {
		if v, ok := good("num_requests_swapped", vs); ok {
			s.Waiting += v
		}
	}
	// Capacity per engine.
	caps, equal, last := map[string]float64{}, true, -1.0
	s.BlockTokens, s.KVTokens = nan, nan
	for _, m := range configs {
		bt := o.number(m, "block_size")
		if bt > 0 && math.IsNaN(s.BlockTokens) {
			s.BlockTokens = bt
		}
		c := o.number(m, "num_gpu_blocks") * bt
		if c > 1e15 {
			c = 0
		}
		if t := o.number(m, "kv_cache_size_tokens"); t > 0 {
			c, equal = t, false
		}
		equal = equal && (last < 0 || last == c)
		last = c
		caps[labelOf(m, "engine")] = c
	}
	total := 0.0
	for _, c := range caps {
		if c == 0 {
			total = 0
			break
		}
		total += c
	}
	if len(caps) > 1 && equal {
		total = last
	}
	if total > 0 {
		s.KVTokens = total
	}
	s.KVUsage = nan
	for _, n := range []string{"kv_cache_usage_perc", "gpu_cache_usage_perc"} {
		vs, ms := o.values(n)
		if _, ok := good(n, vs); !ok {
			continue
		}
		per, count := map[string]float64{}, map[string]float64{}
		for i, m := range ms {
			per[labelOf(m, "engine")] += vs[i]
			count[labelOf(m, "engine")]++
		}
		var plain, weighed, weight float64
		known, over := true, false
		for e := range per {
			u := per[e] / count[e]
			over = over || u > 1.01
			u = min(u, 1)
			plain += u
			weighed += u * caps[e]
			weight += caps[e]
			known = known && caps[e] > 0
		}
		switch {
		case over:
		case known:
			s.KVUsage = weighed / weight
		default:
			s.KVUsage = plain / float64(len(per))
		}
		break
	}
	s.PrefixQueries, s.PrefixHits = o.both([]string{"prefix_cache_queries_total", "prefix_cache_queries", "gpu_prefix_cache_queries_total", "gpu_prefix_cache_queries"},
		[]string{"prefix_cache_hits_total", "prefix_cache_hits", "gpu_prefix_cache_hits_total", "gpu_prefix_cache_hits"})
	s.Preemptions = o.first(-1, "num_preemptions_total", "num_preemptions")
	s.PromptTokens = o.first(-1, "prompt_tokens_total", "prompt_tokens")
	s.OutputTokens = o.first(-1, "generation_tokens_total", "generation_tokens")
	hist := func(names ...string) (float64, float64) {
		var as, bs []string
		for _, n := range names {
			as, bs = append(as, n+"_sum"), append(bs, n+"_count")
		}
		return o.both(as, bs)
	}
	s.TTFTSum, s.TTFTCount = hist("time_to_first_token_seconds")
	s.ITLSum, s.ITLCount = hist("inter_token_latency_seconds", "time_per_output_token_seconds")
	s.QueueSum, s.QueueCount = hist("request_queue_time_seconds")
	s.PrefillSum, s.PrefillCount = hist("request_prefill_time_seconds")
	s.Steps = o.first(-1, "iteration_tokens_total_count")
	return s, o.wanted()
}

// differ tells which field differs, NaN being equal to NaN and rounding allowed.
func differ(a, b fleet.Sample) string {
	va, vb := reflect.ValueOf(a), reflect.ValueOf(b)
	for i := 0; i < va.NumField(); i++ {
		name := va.Type().Field(i).Name
		if va.Field(i).Kind() != reflect.Float64 {
			if !va.Field(i).Equal(vb.Field(i)) {
				return fmt.Sprintf("%s: %v and %v", name, va.Field(i), vb.Field(i))
			}
			continue
		}
		x, y := va.Field(i).Float(), vb.Field(i).Float()
		if math.IsNaN(x) && math.IsNaN(y) || x == y || math.Abs(x-y) <= 1e-9*max(math.Abs(x), math.Abs(y)) {
			continue
		}
		return fmt.Sprintf("%s: %v and %v", name, x, y)
	}
	return ""
}
