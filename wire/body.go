package wire

import "strconv"

// Body is what one look at a request body found. It is reused: Scan resets
// it. It keeps offsets and copied strings, never a slice of the body.
type Body struct {
	// Resolve, when set, maps an asked model name to the served one before it
	// seeds the fingerprints, so that an alias and its model share them. Scan
	// leaves it as it is.
	Resolve func(model string) string

	Kind      Kind
	Multipart bool // form data: the model's span is bare, without quotes

	Model                string // decoded value, never empty after a good Scan
	ModelStart, ModelEnd int    // span of the value, quotes included

	Stream       bool
	IncludeUsage bool // stream_options.include_usage

	// MaxOut is the output bound that applies: max_completion_tokens before
	// max_tokens, max_output_tokens on /v1/responses. 0 = not given.
	MaxOut                 int
	MaxOutStart, MaxOutEnd int // span of the number; equal when not given
	MinOut                 int // min_tokens, 0 = not given
	IgnoreEOS              bool
	N                      int // "n", at least 1
	Prompts                int // prompts in the body (a list of them on completions, embeddings), at least 1
	ZeroTemperature        bool
	ServiceTier            string

	HasTools, HasImages, HasAudio, HasVideo bool
	MediaParts, MediaBytes                  int // content parts that are media, and their bytes in the body

	ASCII, Other int // prompt bytes, decoded: ASCII, and bytes of other characters
	TokenIDs     int // prompt tokens that came as ids; not in ASCII or Other

	Blocks     []uint64 // chained fingerprints, one per BlockBytes of the canonical prompt
	BlockBytes int
	CanonBytes int // length of the canonical prompt

	open    int // index behind the root's '{'
	seen    uint32
	spans   [promptSlots]span
	chain   chain
	scratch []byte
	names   [8]string // copies of the last models and tiers: no allocation for a name seen before
	nextN   int
}

type span struct {
	start, end int
	texts      int // how many strings of the body stand before it
}

// The parts of the prompt, in the order in which they are fingerprinted,
// wherever they stand in the body.
const (
	slotTools = iota
	slotSystem
	slotMain
	slotMore
	slotSalt
	promptSlots
)

// keys that must not be there twice, because two readers may take different ones
const (
	seenModel = 1 << iota
	seenStream
	seenMaxTokens
	seenMaxCompletion
	seenMaxOutput
	seenOptions
	seenN
)

func (b *Body) reset(k Kind) {
	*b = Body{Resolve: b.Resolve, Kind: k, N: 1, Prompts: 1, Blocks: b.Blocks[:0], scratch: b.scratch, names: b.names, nextN: b.nextN}
}

func badBody(param, format string, args ...any) *Error {
	e := NewError(CodeInvalidRequest, format, args...)
	e.Param = param
	return e
}

// Scan reads what routing needs from a request body of kind k, and checks that
// the whole body is valid JSON (form data on KindAudio). Only keys of the root
// object count, by their decoded spelling and exact case. A result other than
// nil is the 400 to answer.
func (b *Body) Scan(k Kind, contentType string, body []byte) *Error {
	b.reset(k)
	if k == KindAudio {
		return b.scanForm(contentType, body)
	}
	s := scanner{b: body, texts: getTexts()}
	defer func() {
		putTexts(s.texts)
		if cap(b.scratch) > keepBytes {
			b.scratch = nil
		}
	}()
	i := s.space(0)
	if i >= len(body) {
		return badBody("", "the body is empty; a JSON object is expected")
	}
	if body[i] != '{' {
		if end := s.value(i, 0); end < 0 || s.space(end) < len(body) {
			if end >= 0 {
				s.fail(s.space(end), "the end of the body")
			}
			return badBody("", "the body is not valid JSON: %s", s.fault())
		}
		return badBody("", "the body must be a JSON object")
	}
	var bad *Error
	if i = b.root(&s, i+1, &bad); i < 0 {
		return badBody("", "the body is not valid JSON: %s", s.fault())
	}
	if i = s.space(i); i < len(body) {
		s.fail(i, "the end of the body")
		return badBody("", "the body is not valid JSON: %s", s.fault())
	}
	if bad != nil {
		return bad
	}
	if b.seen&seenModel == 0 {
		return badBody("model", "you must give a model: the key \"model\" is missing")
	}
	b.fingerprint(body, s.texts)
	return nil
}

// root scans the members of the root object from behind its '{'. A fault of
// meaning goes to bad; the scan goes on, since a fault of syntax comes first.
func (b *Body) root(s *scanner, i int, bad **Error) int {
	b.open = i
	i = s.space(i)
	if i < len(s.b) && s.b[i] == '}' {
		return i + 1
	}
	for {
		start, end, v := s.key(i)
		if v < 0 {
			return -1
		}
		before := len(s.texts.list) // the key included
		if i = s.value(v, 1); i < 0 {
			return -1
		}
		key := s.b[start:end]
		if x := s.texts.list[before-1]; x.dec != 0 {
			key = s.texts.decoded(s.b, x, start)
		}
		if e := b.member(key, s.b, span{v, i, before}); e != nil && *bad == nil {
			*bad = e
		}
		i = s.space(i)
		if i >= len(s.b) || s.b[i] != ',' {
			break
		}
		i = s.space(i + 1)
	}
	if i >= len(s.b) || s.b[i] != '}' {
		return s.fail(i, "',' or '}'")
	}
	return i + 1
}

// member takes note of one member of the root object.
func (b *Body) member(key, body []byte, sp span) *Error {
	val := body[sp.start:sp.end]
	switch string(key) {
	case "model":
		if e := b.once(seenModel, "model"); e != nil {
			return e
		}
		if val[0] != '"' {
			return badBody("model", "model must be a string")
		}
		b.scratch = appendDecoded(b.scratch[:0], val[1:len(val)-1])
		if len(b.scratch) == 0 {
			return badBody("model", "model must not be empty")
		}
		b.Model, b.ModelStart, b.ModelEnd = b.name(b.scratch), sp.start, sp.end
	case "stream":
		if e := b.once(seenStream, "stream"); e != nil {
			return e
		}
		return boolean("stream", val, &b.Stream)
	case "stream_options":
		if e := b.once(seenOptions, "stream_options"); e != nil {
			return e
		}
		return b.options(val)
	case "max_tokens", "max_completion_tokens", "max_output_tokens":
		return b.maxOut(key, val, sp)
	case "n":
		if e := b.once(seenN, "n"); e != nil {
			return e
		}
		n, e := integer("n", val)
		b.N = max(1, n)
		return e
	case "min_tokens":
		n, e := integer("min_tokens", val)
		b.MinOut = n
		return e
	case "ignore_eos":
		b.IgnoreEOS = string(val) == "true"
	case "temperature":
		b.ZeroTemperature = isZero(val)
	case "service_tier":
		if val[0] == '"' {
			b.scratch = appendDecoded(b.scratch[:0], val[1:len(val)-1])
			b.ServiceTier = b.name(b.scratch)
		}
	case "cache_salt":
		b.spans[slotSalt] = sp
	default:
		b.part(key, body, sp)
	}
	return nil
}

// part notes where the parts of the prompt stand, by the API's names for them.
func (b *Body) part(key, body []byte, sp span) {
	slot := -1
	switch string(key) {
	case "tools", "functions":
		slot = slotTools
		s := scanner{b: body}
		b.HasTools = b.HasTools || body[sp.start] == '[' && body[s.space(sp.start+1)] != ']'
	case "system":
		if b.Kind == KindMessages {
			slot = slotSystem
		}
	case "instructions":
		if b.Kind == KindResponses {
			slot = slotSystem
		}
	case "messages":
		slot = slotMain
	case "prompt":
		if b.Kind == KindCompletions || b.Kind == KindTokenize {
			slot = slotMain
		}
	case "tokens":
		if b.Kind == KindDetokenize {
			slot = slotMain
		}
	case "input":
		if b.Kind == KindResponses || b.Kind == KindEmbeddings {
			slot = slotMain
		}
	case "query", "text_1", "queries":
		if b.Kind == KindRerank || b.Kind == KindScore {
			slot = slotMain
		}
	case "documents", "text_2":
		if b.Kind == KindRerank || b.Kind == KindScore {
			slot = slotMore
		}
	}
	if slot >= 0 {
		b.spans[slot] = sp
	}
}

func (b *Body) once(bit uint32, name string) *Error {
	if b.seen&bit != 0 {
		return badBody(name, "the key %q is there twice", name)
	}
	b.seen |= bit
	return nil
}

func (b *Body) maxOut(key, val []byte, sp span) *Error {
	bit, name := uint32(seenMaxTokens), "max_tokens"
	switch string(key) {
	case "max_completion_tokens":
		bit, name = seenMaxCompletion, "max_completion_tokens"
	case "max_output_tokens":
		bit, name = seenMaxOutput, "max_output_tokens"
	}
	if e := b.once(bit, name); e != nil {
		return e
	}
	switch {
	case bit == seenMaxOutput && b.Kind != KindResponses, bit != seenMaxOutput && b.Kind == KindResponses,
		bit == seenMaxCompletion && b.Kind != KindChat:
		return nil // not a parameter of this API: goes on untouched and means nothing
	case string(val) == "null":
		return nil
	}
	n, e := integer(name, val)
	if e != nil {
		return e
	}
	if bit == seenMaxTokens && b.MaxOutEnd > b.MaxOutStart {
		return nil // max_completion_tokens was given and counts
	}
	b.MaxOut, b.MaxOutStart, b.MaxOutEnd = n, sp.start, sp.end
	return nil
}

// options reads stream_options, an object that is known to be valid JSON.
func (b *Body) options(val []byte) *Error {
	if string(val) == "null" {
		return nil
	}
	if val[0] != '{' {
		return badBody("stream_options", "stream_options must be an object")
	}
	s := scanner{b: val}
	i := s.space(1)
	for val[i] != '}' {
		start, end, v := s.key(i)
		i = s.value(v, 0)
		b.scratch = appendDecoded(b.scratch[:0], val[start:end])
		if string(b.scratch) == "include_usage" {
			if e := boolean("stream_options.include_usage", val[v:i], &b.IncludeUsage); e != nil {
				return e
			}
		}
		if i = s.space(i); val[i] == ',' {
			i = s.space(i + 1)
		}
	}
	return nil
}

func boolean(name string, val []byte, to *bool) *Error {
	switch string(val) {
	case "true":
		*to = true
	case "false", "null":
		*to = false
	default:
		return badBody(name, "%s must be true or false", name)
	}
	return nil
}

// maxInt bounds the counts that a client may give; larger ones mean the same.
const maxInt = 1 << 30

// integer reads a count: a JSON number without a fraction (1e3 and 10.0 are
// taken, as vLLM takes them), or null for 0. Negative ones are left for the replica
// to refuse and read as 0 here.
func integer(name string, val []byte) (int, *Error) {
	if string(val) == "null" {
		return 0, nil
	}
	n := 0
	for i, c := range val {
		if c-'0' > 9 {
			if i > 0 || c == '-' {
				break
			}
			return 0, badBody(name, "%s must be a whole number", name)
		}
		if n = n*10 + int(c-'0'); n > maxInt {
			return maxInt, nil
		}
		if i == len(val)-1 {
			return n, nil
		}
	}
	f, err := strconv.ParseFloat(string(val), 64)
	switch {
	case f > maxInt:
		return maxInt, nil
	case f < -maxInt:
		return 0, nil
	case err != nil, f != float64(int(f)):
		return 0, badBody(name, "%s must be a whole number", name)
	case f <= 0:
		return 0, nil
	}
	return int(f), nil
}

// isZero tells whether a JSON number is zero in any spelling.
func isZero(val []byte) bool {
	if val[0] != '-' && val[0] != '0' {
		return false
	}
	for _, c := range val {
		if c|0x20 == 'e' {
			break
		}
		if c >= '1' && c <= '9' {
			return false
		}
	}
	return true
}

// name returns a string equal to p that does not alias it.
func (b *Body) name(p []byte) string {
	for _, n := range b.names {
		if n == string(p) {
			return n
		}
	}
	n := string(p)
	if len(n) <= 256 {
		b.names[b.nextN%len(b.names)] = n
		b.nextN++
	}
	return n
}
