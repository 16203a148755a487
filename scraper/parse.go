package scraper

import (
	"bytes"
	"errors"
	"math"

	"github.com/penstock/penstock/fleet"
)

// Errors of Parse. Each means that the page as a whole cannot be used.
var (
	ErrTruncated = errors.New("metrics page ends in the middle of a line")
	ErrForeign   = errors.New("metrics page has none of vLLM's families")
	ErrValue     = errors.New("metrics page has a value or time stamp that is not a number")
	ErrLabels    = errors.New("metrics page has malformed labels")
	ErrEngines   = errors.New("metrics page has more data-parallel engines than can be summed")
)

// Refused is the set of Sample fields whose values on a page were unusable
// (NaN, infinite, negative, far beyond any server, or a KV-cache use over 1). Such a field is left as
// if the page did not have it; the others stand.
type Refused uint32

// The members of Refused.
const (
	RefusedRunning Refused = 1 << iota
	RefusedWaiting
	RefusedKVUsage
	RefusedPrefix
	RefusedPreemptions
	RefusedPromptTokens
	RefusedOutputTokens
	RefusedTTFT
	RefusedITL
	RefusedQueue
	RefusedPrefill
	RefusedSteps
)

var refusedWords = [...]string{"running", "waiting", "kv_usage", "prefix_cache", "preemptions", "prompt_tokens", "output_tokens",
	"ttft", "itl", "queue_time", "prefill_time", "steps"}

// Words lists the members, for logs.
func (r Refused) Words() []string {
	var out []string
	for i, w := range refusedWords {
		if r&(1<<i) != 0 {
			out = append(out, w)
		}
	}
	return out
}

// sum adds the series of one family over engines.
type sum struct {
	v   float64
	n   int
	bad bool
}

// mostSaid is above what any counter or size can be; mostRequests above what can
// run or wait at one server. Beyond them a figure is no figure.
const (
	mostSaid     = 1e15
	mostRequests = 1e7
)

func (a *sum) add(v, most float64) {
	a.n++
	if !(v >= 0 && v <= most) { // NaN too
		a.bad = true
		return
	}
	a.v += v
}

func (a *sum) usable() bool { return a.n > 0 && !a.bad }

// maxEngines bounds the data-parallel engines of one page.
const maxEngines = 128

// engine is what the page says of one data-parallel engine.
type engine struct {
	key     uint64
	load    bool    // has a load gauge: counted in Sample.Engines
	kv      sum     // kv_cache_usage_perc
	gpu     sum     // gpu_cache_usage_perc
	config  bool    // has a cache_config_info
	tokens  float64 // kv_cache_size_tokens, 0 = not said
	blocks  float64 // num_gpu_blocks x block_size, 0 = not said
	weighed float64 // capacity that counts (set by capacity)
}

// page is the state of one scan; it lives on the stack of Parse.
type page struct {
	sums    [famCount]sum
	engines [maxEngines]engine
	n       int     // engines in use
	block   float64 // block_size
}

var vllmPrefix = []byte("vllm:")

// Parse reads one Prometheus text page of a vLLM server of any version from
// 0.6 (v0 engine) to 0.32 into s, without allocation. Only the wanted families
// are looked at; the rest of the page, _created siblings and lora_requests_info
// (a set of stale, time-stamped series) are passed over.
//
// Data-parallel engines are summed; KV-cache use is weighed by capacity. All
// fields of s but At and Broken are set; what the page does not have, or has
// with a value that cannot be (see Refused), is NaN for gauges and -1 for
// counters. On an error s is not changed.
//
// While a replica drains it reports 0 running and 0 waiting and looks idle;
// nothing is done about that here, because only an answer tells a draining
// replica from an idle one.
func Parse(body []byte, s *fleet.Sample) (Refused, error) {
	var p page
	for len(body) > 0 {
		end := bytes.IndexByte(body, '\n')
		if end < 0 {
			return 0, ErrTruncated
		}
		line := body[:end]
		body = body[end+1:]
		if len(line) > 0 && isBlank(line[0]) {
			line = trimBlank(line)
		}
		// Most lines are comments or other exporters'; one compare drops them.
		if len(line) < len("vllm:x 0") || line[0] != 'v' || !bytes.HasPrefix(line, vllmPrefix) {
			continue
		}
		if unwanted(line) {
			continue
		}
		if err := p.line(line); err != nil {
			return 0, err
		}
	}
	return p.finish(s)
}

// unwanted drops most of vLLM's own lines (nearly all are histogram buckets)
// by a few bytes at known places, before the name is even delimited. It may
// let a line through that is not wanted, never the other way.
func unwanted(line []byte) bool {
	if len(line) < 40 {
		return false
	}
	switch name := line[len("vllm:"):]; name[0] {
	case 'n', 'k', 'g', 'p', 'c':
		return false
	case 't':
		switch name[5] {
		case 't': // time_to_first_token_seconds_{sum,count}
			return name[28] == 'b'
		case 'p': // time_per_output_token_seconds_
			return name[30] == 'b'
		}
		return true
	case 'i':
		switch name[1] {
		case 'n': // inter_token_latency_seconds_
			return name[28] == 'b'
		case 't': // iteration_tokens_total_
			return name[23] == 'b'
		}
		return true
	case 'r':
		switch {
		case name[8] == 'q': // request_queue_time_seconds_
			return name[27] == 'b'
		case name[8] == 'p' && name[10] == 'e': // request_prefill_time_seconds_
			return name[29] == 'b'
		}
		return true
	}
	return true
}

// exemplar begins what OpenMetrics may put behind a counter's value.
var exemplar = []byte(" # {")

// withoutExemplar cuts an exemplar off a line: its labels and value are not the
// series'. A label's value may look like one, so labels have to be closed before it.
func withoutExemplar(line []byte) []byte {
	if bytes.IndexByte(line, '#') < 0 {
		return line
	}
	i := bytes.Index(line, exemplar)
	if i < 0 || bytes.IndexByte(line[:i], '{') >= 0 && bytes.LastIndexByte(line[:i], '}') < 0 {
		return line
	}
	return line[:i]
}

// line takes one sample line that begins with "vllm:".
func (p *page) line(line []byte) error {
	line = withoutExemplar(line)
	var labels, rest []byte
	name := bytes.IndexByte(line, '{')
	if name < 0 {
		for name = len("vllm:"); name < len(line) && isName(line[name]); name++ {
		}
		rest = line[name:]
	}
	fam := familyOf(trimBlankRight(line[len("vllm:"):name]))
	if fam == famNone {
		return nil
	}
	if rest == nil {
		// A label value may hold a brace; a value or time stamp cannot, so the
		// last one closes the labels.
		end := bytes.LastIndexByte(line, '}')
		if end < name {
			return ErrLabels
		}
		labels, rest = line[name+1:end], line[end+1:]
	}
	v, err := value(rest)
	if err != nil {
		return err
	}
	most := mostSaid
	if fam == famRunning || fam == famWaiting || fam == famSwapped {
		most = mostRequests
	}
	p.sums[fam].add(v, most)
	switch fam {
	case famConfig:
		return p.config(labels)
	case famRunning, famWaiting, famKV, famGPUKV:
		return p.gauge(fam, labels, v)
	}
	return nil
}

// gauge notes a load gauge under its engine.
func (p *page) gauge(fam family, labels []byte, v float64) error {
	var key uint64
	for len(labels) > 0 {
		k, val, rest, err := nextLabel(labels)
		if err != nil {
			return err
		}
		if string(k) == "engine" {
			key = engineKey(val)
			break
		}
		labels = rest
	}
	e := p.engine(key)
	if e == nil {
		return ErrEngines
	}
	e.load = true
	switch fam {
	case famKV:
		e.kv.add(v, mostSaid)
	case famGPUKV:
		e.gpu.add(v, mostSaid)
	}
	return nil
}

// config reads the labels of one cache_config_info. Which labels it has
// differs by version; "None" is a usual value.
func (p *page) config(labels []byte) error {
	var key uint64
	var tokens, blocks, block float64
	for len(labels) > 0 {
		k, val, rest, err := nextLabel(labels)
		if err != nil {
			return err
		}
		switch string(k) {
		case "engine":
			key = engineKey(val)
		case "block_size":
			block = positive(val)
		case "num_gpu_blocks":
			blocks = positive(val)
		case "kv_cache_size_tokens":
			tokens = positive(val)
		}
		labels = rest
	}
	e := p.engine(key)
	if e == nil {
		return ErrEngines
	}
	e.config, e.tokens, e.blocks = true, tokens, blocks*block
	if e.blocks > mostSaid {
		e.blocks = 0
	}
	if p.block == 0 {
		p.block = block
	}
	return nil
}

func (p *page) engine(key uint64) *engine {
	for i := 0; i < p.n; i++ {
		if p.engines[i].key == key {
			return &p.engines[i]
		}
	}
	if p.n == maxEngines {
		return nil
	}
	e := &p.engines[p.n]
	e.key = key
	p.n++
	return e
}

// capacity sets each engine's weight and returns the sum in tokens, 0 when it
// is not known. kv_cache_size_tokens is per engine. num_gpu_blocks is not:
// with several data-parallel engines vLLM adds up the blocks of all and then
// shows that sum under each (seen on 0.32: two engines of 160 blocks, both
// series say 320), so equal figures are one figure.
func (p *page) capacity() float64 {
	total, same, n := 0.0, true, 0
	first := -1.0
	for i := 0; i < p.n; i++ {
		e := &p.engines[i]
		if !e.config {
			continue
		}
		n++
		e.weighed = e.blocks
		if e.tokens > 0 {
			e.weighed, same = e.tokens, false
		}
		if first < 0 {
			first = e.weighed
		}
		same = same && e.weighed == first
		if e.weighed == 0 {
			return 0
		}
		total += e.weighed
	}
	if n > 1 && same {
		return first
	}
	return total
}

// usage is the KV-cache use over all engines, weighed by capacity where that
// is known of all, of the newer family when it is usable, else of the older.
func (p *page) usage() (float64, bool) {
	newer := p.sums[famKV].usable()
	if !newer && !p.sums[famGPUKV].usable() {
		return math.NaN(), p.sums[famKV].n+p.sums[famGPUKV].n > 0
	}
	var plain, weighed, weight float64
	n, known := 0, true
	for i := 0; i < p.n; i++ {
		e := &p.engines[i]
		a := &e.kv
		if !newer {
			a = &e.gpu
		}
		if a.n == 0 {
			continue
		}
		u := a.v / float64(a.n)
		if u > 1.01 {
			return math.NaN(), true
		}
		u = min(u, 1) // rounding in the engine
		n++
		plain += u
		weighed += u * e.weighed
		weight += e.weighed
		known = known && e.weighed > 0
	}
	if known && weight > 0 {
		return weighed / weight, false
	}
	return plain / float64(n), false
}

// finish turns the sums into the sample.
func (p *page) finish(s *fleet.Sample) (Refused, error) {
	seen := 0
	for i := range p.sums {
		seen += p.sums[i].n
	}
	if seen == 0 {
		return 0, ErrForeign
	}
	var refused Refused
	loads, configs := 0, 0
	for i := 0; i < p.n; i++ {
		if p.engines[i].load {
			loads++
		}
		if p.engines[i].config {
			configs++
		}
	}
	// With several API processes vLLM shows a gauge only after its first
	// change, so a fresh replica has none: its engines are counted by their
	// configuration.
	if s.Engines = loads; loads == 0 {
		s.Engines = configs
	}
	s.KVTokens, s.BlockTokens = math.NaN(), math.NaN()
	if c := p.capacity(); c > 0 {
		s.KVTokens = c
	}
	if p.block > 0 {
		s.BlockTokens = p.block
	}
	var bad bool
	if s.KVUsage, bad = p.usage(); bad {
		refused |= RefusedKVUsage
	}
	s.Running = p.pick(math.NaN(), &refused, RefusedRunning, famRunning)
	s.Waiting = p.pick(math.NaN(), &refused, RefusedWaiting, famWaiting)
	// Swapped requests (v0) were preempted and wait for memory.
	if w := &p.sums[famSwapped]; w.usable() {
		s.Waiting += w.v
	}
	s.PrefixQueries, s.PrefixHits = p.pair(&refused, RefusedPrefix,
		[]family{famQueriesTotal, famQueries, famGPUQueriesTotal, famGPUQueries}, []family{famHitsTotal, famHits, famGPUHitsTotal, famGPUHits})
	s.Preemptions = p.pick(-1, &refused, RefusedPreemptions, famPreemptTotal, famPreempt)
	s.PromptTokens = p.pick(-1, &refused, RefusedPromptTokens, famPromptTotal, famPrompt)
	s.OutputTokens = p.pick(-1, &refused, RefusedOutputTokens, famOutputTotal, famOutput)
	s.TTFTSum, s.TTFTCount = p.pair(&refused, RefusedTTFT, []family{famTTFTSum}, []family{famTTFTCount})
	s.ITLSum, s.ITLCount = p.pair(&refused, RefusedITL, []family{famITLSum, famTPOTSum}, []family{famITLCount, famTPOTCount})
	s.QueueSum, s.QueueCount = p.pair(&refused, RefusedQueue, []family{famQueueSum}, []family{famQueueCount})
	s.PrefillSum, s.PrefillCount = p.pair(&refused, RefusedPrefill, []family{famPrefillSum}, []family{famPrefillCount})
	s.Steps = p.pick(-1, &refused, RefusedSteps, famSteps)
	return refused, nil
}

// pick returns the first family that the page has with usable values.
func (p *page) pick(none float64, refused *Refused, r Refused, fams ...family) float64 {
	for _, f := range fams {
		if p.sums[f].usable() {
			return p.sums[f].v
		}
	}
	for _, f := range fams {
		if p.sums[f].n > 0 {
			*refused |= r
		}
	}
	return none
}

// pair picks two counters that only mean something together: of the same
// generation of names, both or neither.
func (p *page) pair(refused *Refused, r Refused, as, bs []family) (float64, float64) {
	seen := false
	for i := range as {
		a, b := &p.sums[as[i]], &p.sums[bs[i]]
		if a.usable() && b.usable() {
			return a.v, b.v
		}
		seen = seen || a.bad || b.bad
	}
	if seen {
		*refused |= r
	}
	return -1, -1
}
