package scraper

import (
	"bytes"
	"errors"
	"math"
	"strconv"
	"unsafe"

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
// (NaN, infinite, negative, or a KV-cache use over 1). Such a field is left as
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

// family is one exposed name that is wanted. Names of one thing across vLLM
// versions are apart here and are chosen between at the end, because one page
// may have several of them (0.9.2 has gpu_cache_usage_perc and
// kv_cache_usage_perc): summing them would count twice.
type family uint8

const (
	famNone family = iota
	famRunning
	famWaiting
	famSwapped
	famKV
	famGPUKV
	famQueriesTotal
	famQueries
	famGPUQueriesTotal
	famGPUQueries
	famHitsTotal
	famHits
	famGPUHitsTotal
	famGPUHits
	famPreemptTotal
	famPreempt
	famPromptTotal
	famPrompt
	famOutputTotal
	famOutput
	famTTFTSum
	famTTFTCount
	famITLSum
	famITLCount
	famTPOTSum
	famTPOTCount
	famQueueSum
	famQueueCount
	famPrefillSum
	famPrefillCount
	famSteps
	famConfig
	famCount
)

// familyOf finds a name (without "vllm:"). The compiler turns the switch into
// a search by length and content, which does not allocate.
func familyOf(name []byte) family {
	switch string(name) {
	case "num_requests_running":
		return famRunning
	case "num_requests_waiting":
		return famWaiting
	case "num_requests_swapped": // v0 engine
		return famSwapped
	case "kv_cache_usage_perc":
		return famKV
	case "gpu_cache_usage_perc":
		return famGPUKV
	case "prefix_cache_queries_total":
		return famQueriesTotal
	case "prefix_cache_queries":
		return famQueries
	case "gpu_prefix_cache_queries_total":
		return famGPUQueriesTotal
	case "gpu_prefix_cache_queries":
		return famGPUQueries
	case "prefix_cache_hits_total":
		return famHitsTotal
	case "prefix_cache_hits":
		return famHits
	case "gpu_prefix_cache_hits_total":
		return famGPUHitsTotal
	case "gpu_prefix_cache_hits":
		return famGPUHits
	case "num_preemptions_total":
		return famPreemptTotal
	case "num_preemptions":
		return famPreempt
	case "prompt_tokens_total":
		return famPromptTotal
	case "prompt_tokens":
		return famPrompt
	case "generation_tokens_total":
		return famOutputTotal
	case "generation_tokens":
		return famOutput
	case "time_to_first_token_seconds_sum":
		return famTTFTSum
	case "time_to_first_token_seconds_count":
		return famTTFTCount
	case "inter_token_latency_seconds_sum":
		return famITLSum
	case "inter_token_latency_seconds_count":
		return famITLCount
	case "time_per_output_token_seconds_sum": // up to 0.9
		return famTPOTSum
	case "time_per_output_token_seconds_count":
		return famTPOTCount
	case "request_queue_time_seconds_sum":
		return famQueueSum
	case "request_queue_time_seconds_count":
		return famQueueCount
	case "request_prefill_time_seconds_sum":
		return famPrefillSum
	case "request_prefill_time_seconds_count":
		return famPrefillCount
	case "iteration_tokens_total_count": // a histogram in spite of its name
		return famSteps
	case "cache_config_info":
		return famConfig
	}
	return famNone
}

// sum adds the series of one family over engines.
type sum struct {
	v   float64
	n   int
	bad bool
}

func (a *sum) add(v float64) {
	a.n++
	if !(v >= 0) || math.IsInf(v, 1) { // !(v >= 0) is true for NaN too
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

// line takes one sample line that begins with "vllm:".
func (p *page) line(line []byte) error {
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
	p.sums[fam].add(v)
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
		e.kv.add(v)
	case famGPUKV:
		e.gpu.add(v)
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

// value reads what follows the labels: blanks, a number, and perhaps an
// integer time stamp.
func value(rest []byte) (float64, error) {
	if n := len(rest); n > 0 && rest[n-1] == '\r' {
		rest = rest[:n-1]
	}
	rest = trimBlank(rest)
	num := rest
	if i := indexBlank(rest); i >= 0 {
		num = rest[:i]
		if stamp := trimBlankRight(trimBlank(rest[i:])); len(stamp) > 0 {
			if _, err := strconv.ParseInt(text(stamp), 10, 64); err != nil {
				return 0, ErrValue
			}
		}
	}
	return number(num)
}

// number parses as the text format does: Go's syntax without hexadecimal
// floats and underscores.
func number(num []byte) (float64, error) {
	for _, c := range num {
		if c == 'p' || c == 'P' || c == '_' {
			return 0, ErrValue
		}
	}
	v, err := strconv.ParseFloat(text(num), 64)
	if err != nil {
		return 0, ErrValue
	}
	return v, nil
}

// positive reads a label's value as a number over 0; anything else is 0, "not
// said".
func positive(val []byte) float64 {
	v, err := number(val)
	if err != nil || !(v > 0) || math.IsInf(v, 1) {
		return 0
	}
	return v
}

// text views b as a string for the time of a strconv call, which keeps nothing
// of it (its errors hold a copy).
func text(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// nextLabel splits the first name="value" off labels. val is as written, with
// its escapes.
func nextLabel(labels []byte) (key, val, rest []byte, err error) {
	labels = trimBlank(labels)
	if len(labels) == 0 {
		return nil, nil, nil, nil
	}
	eq := bytes.IndexByte(labels, '=')
	if eq < 0 {
		return nil, nil, nil, ErrLabels
	}
	key = trimBlankRight(labels[:eq])
	labels = trimBlank(labels[eq+1:])
	if len(labels) == 0 || labels[0] != '"' {
		return nil, nil, nil, ErrLabels
	}
	end := 1
	for {
		i := bytes.IndexByte(labels[end:], '"')
		if i < 0 {
			return nil, nil, nil, ErrLabels
		}
		end += i
		// An odd number of backslashes before the quote escapes it.
		back := 0
		for labels[end-1-back] == '\\' {
			back++
		}
		if back%2 == 0 {
			break
		}
		end++
	}
	val, labels = labels[1:end], trimBlank(labels[end+1:])
	if len(labels) > 0 {
		if labels[0] != ',' {
			return nil, nil, nil, ErrLabels
		}
		labels = labels[1:]
	}
	return key, val, labels, nil
}

// engineKey names an engine by its label's value; no label and an empty one
// are the same. Up to 7 bytes are taken as they are, longer ones are hashed.
func engineKey(val []byte) uint64 {
	h := uint64(0)
	if len(val) <= 7 {
		for _, c := range val {
			h = h<<8 | uint64(c)
		}
		return h
	}
	h = 14695981039346656037
	for _, c := range val {
		h = (h ^ uint64(c)) * 1099511628211
	}
	return h | 1<<63
}

func isName(c byte) bool {
	return c >= 'a' && c <= 'z' || c == '_' || c >= '0' && c <= '9' || c >= 'A' && c <= 'Z' || c == ':'
}

func isBlank(c byte) bool { return c == ' ' || c == '\t' }

func trimBlank(b []byte) []byte {
	for len(b) > 0 && isBlank(b[0]) {
		b = b[1:]
	}
	return b
}

func trimBlankRight(b []byte) []byte {
	for len(b) > 0 && isBlank(b[len(b)-1]) {
		b = b[:len(b)-1]
	}
	return b
}

func indexBlank(b []byte) int {
	for i, c := range b {
		if isBlank(c) {
			return i
		}
	}
	return -1
}
