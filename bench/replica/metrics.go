package replica

import (
	_ "embed"
	"math"
	"strconv"
	"strings"
)

// metricsTemplate is the body of /metrics of a real vLLM 0.32.0 just after its
// start: names, HELP, label order and buckets are the real ones.
//
//go:embed metrics_032.txt
var metricsTemplate string

// histogram is one vLLM histogram.
type histogram struct {
	bounds []float64
	counts []float64 // per bucket, not cumulative
	sum, n float64
}

func (h *histogram) observe(v float64) { h.add(v, 1) }

func (h *histogram) add(v, times float64) {
	for i, b := range h.bounds {
		if v <= b {
			h.counts[i] += times
			break
		}
	}
	h.sum += v * times
	h.n += times
}

// page renders the metrics page: fixed text and the slots between it.
type page struct {
	slots []slot
	tail  string
	hist  map[string]*histogram // by family, without the vllm: prefix
}

type slot struct {
	text string // everything since the last slot, up to the value
	val  func() float64
}

// gauge tells which families NaNMetrics spoils.
var spoiled = []string{"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}

// newPage cuts the template at every value that the replica knows. scalar maps
// NAME or NAME{reason or source or finished_reason value} to a reader.
func newPage(modelName string, cache [3]string, created float64, scalar map[string]func() float64) *page {
	p := &page{hist: map[string]*histogram{}}
	var text strings.Builder
	for line := range strings.Lines(metricsTemplate) {
		if strings.HasPrefix(line, "#") || strings.TrimSpace(line) == "" {
			text.WriteString(line)
			continue
		}
		line = strings.Replace(line, `model_name="tiny"`, "model_name="+quote(modelName), 1)
		sp := strings.LastIndexByte(line, ' ')
		series := line[:sp]
		name, labels, _ := strings.Cut(series, "{")
		val := p.reader(name, labels, created, scalar)
		if name == "vllm:cache_config_info" {
			series = cacheInfo(series, cache)
		}
		if val == nil {
			text.WriteString(series + line[sp:])
			continue
		}
		text.WriteString(series + " ")
		p.slots = append(p.slots, slot{text.String(), val})
		text.Reset()
		text.WriteByte('\n')
	}
	p.tail = text.String()
	return p
}

func cacheInfo(series string, cache [3]string) string {
	for i, l := range []string{"block_size", "num_gpu_blocks", "kv_cache_size_tokens"} {
		for _, lead := range []string{"{", ","} {
			at := strings.Index(series, lead+l+`="`)
			if at < 0 {
				continue
			}
			at += len(lead+l) + 2
			end := at + strings.IndexByte(series[at:], '"')
			series = series[:at] + cache[i] + series[end:]
		}
	}
	return series
}

func label(labels, name string) string {
	_, rest, ok := strings.Cut(labels, name+`="`)
	if !ok {
		return ""
	}
	v, _, _ := strings.Cut(rest, `"`)
	return v
}

// reader finds who knows the value of a series; nil = keep the template's.
func (p *page) reader(name, labels string, created float64, scalar map[string]func() float64) func() float64 {
	if !strings.HasPrefix(name, "vllm:") {
		return nil
	}
	key := name
	for _, l := range []string{"finished_reason", "source", "reason"} {
		if v := label(labels, l); v != "" {
			key = name + "{" + v + "}"
			break
		}
	}
	if f, ok := scalar[key]; ok {
		return f
	}
	if strings.HasSuffix(name, "_created") {
		return func() float64 { return created }
	}
	fam := strings.TrimPrefix(name, "vllm:")
	for _, suffix := range []string{"_bucket", "_count", "_sum"} {
		base, ok := strings.CutSuffix(fam, suffix)
		if !ok {
			continue
		}
		h := p.hist[base]
		if h == nil {
			h = &histogram{}
			p.hist[base] = h
		}
		switch suffix {
		case "_count":
			return func() float64 { return h.n }
		case "_sum":
			return func() float64 { return h.sum }
		}
		bound, err := strconv.ParseFloat(label(labels, "le"), 64)
		if err != nil {
			return nil
		}
		if math.IsInf(bound, 1) {
			return func() float64 { return h.n }
		}
		h.bounds, h.counts = append(h.bounds, bound), append(h.counts, 0)
		upTo := len(h.bounds)
		return func() float64 {
			n := 0.0
			for _, c := range h.counts[:upTo] {
				n += c
			}
			return n
		}
	}
	return nil
}

// render writes the page as prometheus_client does (integers as "1.0").
func (p *page) render(nan bool) []byte {
	b := make([]byte, 0, len(metricsTemplate)+2048)
	for _, s := range p.slots {
		b = append(b, s.text...)
		v := s.val()
		if nan {
			if line := s.text[strings.LastIndexByte(s.text, '\n')+1:]; spoil(line) {
				v = math.NaN()
				if strings.HasPrefix(line, spoiled[2]) {
					v = -1
				}
			}
		}
		b = appendFloat(b, v)
	}
	return append(b, p.tail...)
}

func spoil(line string) bool {
	for _, s := range spoiled {
		if strings.HasPrefix(line, s+"{") {
			return true
		}
	}
	return false
}

func appendFloat(b []byte, v float64) []byte {
	switch {
	case math.IsNaN(v):
		return append(b, "NaN"...)
	case v == math.Trunc(v) && math.Abs(v) < 1e15:
		b = strconv.AppendInt(b, int64(v), 10)
		return append(b, ".0"...)
	}
	return strconv.AppendFloat(b, v, 'g', -1, 64)
}
