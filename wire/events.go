package wire

import (
	"bytes"
	"strings"
	"unicode/utf8"
)

// facts is what the slow path found of one event's form.
type facts struct {
	texts              int // strings of generated content, also empty ones with a call's id
	textStart, textEnd int // span of the last one inside the data, without quotes
	call               int // the tool call whose arguments it is, -1 = text
	unfit              bool
	nums               [maxSegs - 1]numSpan
	nnums              int
}

type numSpan struct {
	start, end int
	num        number
}

// val is a value's span in the data; end is 0 when the key is not there.
type val struct{ start, end int }

func (v val) of(b []byte) []byte { return b[v.start:v.end] }

// given tells whether the value is there and not null.
func (v val) given(b []byte) bool { return v.end > 0 && b[v.start] != 'n' }

// text returns what stands between the quotes; nil when it is not a string.
func (v val) text(b []byte) []byte {
	if v.end == 0 || b[v.start] != '"' {
		return nil
	}
	return b[v.start+1 : v.end-1]
}

// number returns a whole number, ok = false when it is not one.
func (v val) number(b []byte) (n int, ok bool) {
	if v.end == 0 {
		return 0, false
	}
	for _, c := range b[v.start:v.end] {
		if c-'0' > 9 || n > maxInt {
			return 0, false
		}
		n = n*10 + int(c-'0')
	}
	return n, true
}

// members calls f for each member of the object at v, elements for each
// element of an array. b is valid JSON there.
func members(b []byte, v val, f func(key []byte, v val)) {
	if v.end == 0 || b[v.start] != '{' {
		return
	}
	s := scanner{b: b}
	i := s.space(v.start + 1)
	for b[i] != '}' {
		start, end, at := s.key(i)
		i = s.value(at, 0)
		f(b[start:end], val{at, i})
		if i = s.space(i); b[i] == ',' {
			i = s.space(i + 1)
		}
	}
}

func elements(b []byte, v val, f func(v val)) {
	if v.end == 0 || b[v.start] != '[' {
		return
	}
	s := scanner{b: b}
	i := s.space(v.start + 1)
	for b[i] != ']' {
		at := i
		i = s.value(at, 0)
		f(val{at, i})
		if i = s.space(i); b[i] == ',' {
			i = s.space(i + 1)
		}
	}
}

// root is what an event's data has at its top.
type root struct {
	id, model, object, typ, choices, usage, err, delta, index, response, message, item, outputIndex, block val

	// Of whole answers only.
	stop, status, incomplete, content, output val
}

func readRoot(b []byte, v val, f *facts) (r root) {
	members(b, v, func(key []byte, v val) { r.take(b, key, v, f) })
	return r
}

func (r *root) take(b, key []byte, v val, f *facts) {
	switch string(key) {
	case "id":
		r.id = v
	case "model":
		r.model = v
	case "object":
		r.object = v
	case "type":
		r.typ = v
	case "choices":
		r.choices = v
	case "usage":
		r.usage = v
	case "error":
		r.err = v
	case "delta":
		r.delta = v
	case "index":
		r.index = v
	case "response":
		r.response = v
	case "message":
		r.message = v
	case "item":
		r.item = v
	case "output_index":
		r.outputIndex = v
	case "content_block":
		r.block = v
	case "sequence_number":
		f.number(b, v, numAny)
	case "stop_reason":
		r.stop = v
	case "status":
		r.status = v
	case "incomplete_details":
		r.incomplete = v
	case "content":
		r.content = v
	case "output":
		r.output = v
	}
}

// number notes a number that changes from event to event.
func (f *facts) number(b []byte, v val, k number) {
	if _, ok := v.number(b); !ok {
		return
	}
	if f.nnums == len(f.nums) {
		f.unfit = true
		return
	}
	// Kept in the order of their places: objects are read in order, but the
	// usage object may stand before or after the root's own numbers.
	i := f.nnums
	for i > 0 && f.nums[i-1].start > v.start {
		f.nums[i] = f.nums[i-1]
		i--
	}
	f.nums[i] = numSpan{v.start, v.end, k}
	f.nnums++
}

func (f *facts) text(v val, call int) {
	f.texts++
	f.textStart, f.textEnd, f.call = v.start+1, v.end-1, call
}

// event is the slow path: one event's data, whole.
func (o *Observer) event(data, raw []byte, single bool) {
	o.Events++
	if string(data) == "[DONE]" {
		o.done()
		return
	}
	if o.Done {
		return // nothing counts behind the terminal event
	}
	if !utf8.Valid(data) {
		o.violate(BrokenUTF8)
	}
	s := scanner{b: data}
	start := s.space(0)
	end := -1
	if start < len(data) && data[start] == '{' {
		end = s.value(start, 0)
	}
	if end < 0 || s.space(end) != len(data) {
		if o.named {
			o.fail(data, nil)
			return
		}
		o.violate(BrokenJSON)
		return
	}
	f := facts{call: -1}
	bad := o.BadOffset
	o.meaning(data, val{start, end}, &f)
	if raw == nil || !single || f.texts != 1 || f.unfit || f.textStart >= f.textEnd || o.BadOffset != bad {
		return
	}
	if f.nnums > 0 && f.nums[0].start < f.textStart {
		return // its numbers stand before the content: no stable prefix
	}
	o.learn(raw, offsetIn(raw, data), &f)
}

// offsetIn returns where data, the value of the one data line of raw, begins.
func offsetIn(raw, data []byte) int {
	// Both lie in one array and data reaches to its line's end, so that the
	// capacities tell the distance.
	return cap(raw) - cap(data)
}

// meaning reads one event's JSON.
func (o *Observer) meaning(b []byte, v val, f *facts) {
	r := readRoot(b, v, f)
	typ := r.typ.text(b)
	switch {
	case r.err.given(b), o.named, string(typ) == "error", string(r.object.text(b)) == "error":
		o.fail(b, &r)
	case bytes.HasPrefix(typ, []byte("response.")):
		o.responses(b, typ[len("response."):], &r, f)
	case string(typ) == "ping":
	case bytes.HasPrefix(typ, []byte("message_")), bytes.HasPrefix(typ, []byte("content_block_")):
		o.messages(b, typ, &r, f)
	default:
		o.chunk(b, &r, f)
	}
}

// fail takes an error event; r is nil when its data is not JSON.
func (o *Observer) fail(b []byte, r *root) {
	o.bad()
	if o.ErrorEvent {
		return
	}
	o.ErrorEvent = true
	msg := b
	if r != nil {
		if t := r.message.text(b); t != nil {
			msg = t
		} else if t := r.err.text(b); t != nil {
			msg = t
		}
		members(b, r.err, func(key []byte, v val) {
			if t := v.text(b); t != nil && string(key) == "message" {
				msg = t
			}
		})
		msg = appendDecoded(nil, msg)
	}
	if len(msg) > 512 {
		msg = msg[:512]
	}
	o.ErrorText = strings.ToValidUTF8(string(msg), "\ufffd")
	o.ErrorClass = ClassifyError(0, b)
}

// same checks the answer's id and model against the first ones seen.
func (o *Observer) same(b []byte, id, model val) {
	if t := id.text(b); len(t) > 0 {
		if h := hash(t); o.id == 0 {
			o.id = h
		} else if o.id != h {
			o.violate(IDChanged)
		}
	}
	t := model.text(b)
	if len(t) == 0 {
		return
	}
	o.scratch = appendDecoded(o.scratch[:0], t)
	if len(o.model) > 0 {
		if !bytes.Equal(o.model, o.scratch) {
			o.violate(ModelChanged)
		}
		return
	}
	o.model = append(o.model[:0], o.scratch...)
	for _, want := range o.expect {
		if want == "" || want == string(o.model) {
			return
		}
	}
	if len(o.expect) > 0 {
		o.violate(ModelSubstitution)
	}
}

// Model is the model's name in the answer, "" when none was given.
func (o *Observer) Model() string { return string(o.model) }

// usage reads a usage object of any of the three shapes.
func (o *Observer) usage(b []byte, v val, f *facts) {
	set := func(key []byte, v val) {
		k := numAny
		switch string(key) {
		case "prompt_tokens", "input_tokens":
			k = numPrompt
		case "completion_tokens", "output_tokens":
			k = numCompletion
		case "cached_tokens", "cache_read_input_tokens":
			k = numCached
		}
		if n, ok := v.number(b); ok {
			o.Usage.set(k, n)
			f.number(b, v, k)
		}
	}
	members(b, v, func(key []byte, v val) {
		switch string(key) {
		case "prompt_tokens_details", "input_tokens_details":
			members(b, v, set)
		case "completion_tokens_details", "output_tokens_details":
			members(b, v, func(_ []byte, v val) { f.number(b, v, numAny) })
		default:
			set(key, v)
		}
	})
}

// chunk reads an event of the chat and completions APIs.
func (o *Observer) chunk(b []byte, r *root, f *facts) {
	o.same(b, r.id, r.model)
	o.usage(b, r.usage, f)
	elements(b, r.choices, func(v val) {
		var index, delta, text, finish val
		members(b, v, func(key []byte, v val) {
			switch string(key) {
			case "index":
				index = v
			case "delta":
				delta = v
			case "text":
				text = v
			case "finish_reason":
				finish = v
			}
		})
		n, _ := index.number(b)
		o.choice(b, n, delta, text, finish, f)
	})
}

func (o *Observer) choice(b []byte, n int, delta, text, finish val, f *facts) {
	if n < 64 {
		o.seen |= 1 << n
	}
	reason := finish.text(b)
	if string(reason) == "abort" || string(reason) == "error" {
		// Content that comes in the same event does not make it an answer.
		o.finish(n, reason)
	}
	content := o.delta(b, n, delta, f)
	if t := text.text(b); t != nil {
		f.text(text, -1)
		content = content || len(t) > 0
	}
	if content {
		o.Content++
		o.commit()
	}
	if len(reason) > 0 {
		f.unfit = true
		o.finish(n, reason)
	}
}

// delta reads a chat delta and tells whether it holds anything generated.
func (o *Observer) delta(b []byte, choice int, v val, f *facts) (content bool) {
	members(b, v, func(key []byte, v val) {
		switch string(key) {
		case "content", "reasoning_content", "reasoning", "refusal":
			if t := v.text(b); t != nil {
				if len(t) > 0 || f.texts == 0 {
					f.text(v, -1)
				}
				content = content || len(t) > 0
			} else if v.given(b) && string(v.of(b)) != "[]" {
				content, f.unfit = true, true
			}
		case "tool_calls":
			elements(b, v, func(v val) {
				content = o.toolCall(b, choice, v, f) || content
			})
		case "function_call", "audio":
			if v.given(b) {
				content, f.unfit = true, true
			}
		}
	})
	return content
}

func (o *Observer) toolCall(b []byte, choice int, v val, f *facts) (content bool) {
	var index, id, name, args val
	members(b, v, func(key []byte, v val) {
		switch string(key) {
		case "index":
			index = v
		case "id":
			id = v
		case "function":
			members(b, v, func(key []byte, v val) {
				switch string(key) {
				case "name":
					name = v
				case "arguments":
					args = v
				}
			})
		}
	})
	n, _ := index.number(b)
	o.tool(b, choice, n, id.text(b), name.text(b), args, f)
	return len(id.text(b)) > 0 || len(name.text(b)) > 0 || len(args.text(b)) > 0
}

// tool takes one piece of a tool call, whatever the API.
func (o *Observer) tool(b []byte, choice, index int, id, name []byte, args val, f *facts) {
	before := len(o.calls)
	c := o.call(choice, index)
	if len(o.calls) > before {
		o.Calls++
	}
	var idHash, nameHash uint64
	if len(id) > 0 {
		idHash, f.unfit = hash(id), true
	}
	if len(name) > 0 {
		nameHash, f.unfit = hash(name), true
	}
	o.identify(c, idHash, nameHash)
	t := args.text(b)
	if t == nil {
		return
	}
	c.feed(t)
	k := -1
	for i := range o.calls {
		if &o.calls[i] == c {
			k = i
		}
	}
	if k < 0 {
		f.unfit = true
	}
	f.text(args, k)
}

// finish takes a finish reason of choice n.
func (o *Observer) finish(n int, reason []byte) {
	if n < 64 {
		o.finished |= 1 << n
	}
	if bytes.IndexByte(reason, '\\') >= 0 || !utf8.Valid(reason) {
		reason = appendDecoded(nil, reason)
	}
	o.Finish = finishWord(reason)
	switch o.Finish {
	case "abort", "cancelled":
		o.aborted = true
		o.violate(AbortAsSuccess)
		return
	case "error":
		o.bad()
		o.ErrorEvent = true
		if o.ErrorText == "" {
			o.ErrorText, o.ErrorClass = "finish_reason error", ErrorServer
		}
		return
	case "stop", "tool_calls", "function_call", "tool_use", "completed":
		// Only these say that the arguments are whole; "length" cuts them.
		o.checkCalls(n)
	}
	o.commit() // an answer without content is healthy when it says so
}

var finishWords = []string{"stop", "length", "tool_calls", "abort", "content_filter", "function_call", "error", "repetition",
	"end_turn", "max_tokens", "tool_use", "stop_sequence", "pause_turn", "refusal", "completed", "incomplete", "cancelled"}

// finishWord returns the reason as a string that does not alias the event.
func finishWord(p []byte) string {
	for _, w := range finishWords {
		if w == string(p) {
			return w
		}
	}
	return string(p[:min(len(p), 64)])
}

// done takes the terminal event.
func (o *Observer) done() {
	if o.Done {
		return
	}
	o.Done = true
	switch {
	case o.ErrorEvent || o.aborted:
	case !o.Committed:
		o.violate(DoneWithoutContent)
	case o.seen&^o.finished != 0:
		o.violate(MissingFinish)
	}
}
