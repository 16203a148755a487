package wire

import (
	"bytes"
	"encoding/binary"
	"unicode/utf8"

	"github.com/zeebo/xxh3"
)

// Usage is what the replica says a request cost, in tokens. When a stream says
// it more than once, the last value of each counts.
type Usage struct {
	Prompt, Cached, Completion int
	Seen                       bool
}

// maxEvent bounds one event's data; an event can hold a whole answer
// (response.completed) or long log-probabilities. A longer one is reported as
// BrokenJSON and not looked at.
const maxEvent = 16 << 20

// Observer watches the body bytes of one answer stream (transfer framing
// removed), in pieces of any size. It never changes or holds them back, and it
// does not allocate on the usual event. Reset makes it ready for a stream; the
// zero Observer watches a chat stream of any model.
type Observer struct {
	Committed    bool  // an event with content, a tool call, a healthy finish or an output item was seen
	CommitOffset int64 // bytes before that event's first byte; valid when Committed
	// BadOffset is how many bytes came before the first event that showed a
	// failure or a violation; -1 = none did. What stands before is whole events.
	BadOffset int64
	Fed       int64 // bytes fed

	Events  int // events with data, [DONE] included
	Content int // events with generated content, per choice: about the number of tokens
	Calls   int // tool calls begun

	Finish     string // last finish_reason, stop_reason or status seen
	Usage      Usage
	ErrorEvent bool
	ErrorText  string     // its message, at most 512 bytes
	ErrorClass ErrorClass // what it says of the replica
	Done       bool       // the terminal event came: [DONE], message_stop, response.completed ...
	Violation  Violation  // the first one

	kind    Kind
	expect  []string
	aborted bool
	closed  bool

	seen, finished uint64 // choices by index (0..63)
	id             uint64 // hash of the answer's id, 0 = not seen
	model          []byte // as first seen, decoded
	calls          []call

	// Line and event assembly.
	line       []byte // a line that is not whole yet
	data       []byte // data of the event under way, when it had to be copied
	cur        []byte // data of the event under way, inside the piece being fed
	pending    pending
	named      bool // the event under way has an event: field "error"
	open       bool // the event under way has any line
	skipLF     bool
	eventStart int64 // offset of the event under way

	templates [4]template
	used      int // how many are learned
	last      int // the one that matched last
	learned   int
	scratch   []byte
}

type pending uint8

const (
	noData   pending = iota
	dataHere         // in cur
	dataKept         // in data
)

// Reset makes the observer ready for an answer of kind k. models are the names
// that the replica may answer with; none = any. The slice is kept.
func (o *Observer) Reset(k Kind, models ...string) {
	*o = Observer{kind: k, expect: models, BadOffset: -1, CommitOffset: 0,
		model: o.model[:0], calls: o.calls[:0], line: o.line[:0], data: o.data[:0], templates: o.templates, scratch: o.scratch[:0]}
	// What one huge event needed must not be kept for the life of the pool.
	if cap(o.line) > keepBytes {
		o.line = nil
	}
	if cap(o.data) > keepBytes {
		o.data = nil
	}
	kept := 0
	for _, c := range o.calls[:cap(o.calls)] {
		kept += cap(c.args)
	}
	if kept > keepBytes {
		o.calls = nil
	}
}

// keepBytes bounds each buffer that is kept for the next stream or request.
const keepBytes = 64 << 10

// Feed takes the next piece of the body. p is not kept.
func (o *Observer) Feed(p []byte) {
	base := o.Fed
	o.Fed += int64(len(p))
	i, begin := 0, -1 // begin: where in p the event under way began, -1 = in an earlier piece
	if o.skipLF && len(p) > 0 {
		o.skipLF = false
		if p[0] == '\n' {
			i = 1
		}
	}
	for i < len(p) {
		if !o.open && len(o.line) == 0 {
			o.eventStart, begin = base+int64(i), i
			if !o.Done {
				if n := o.fast(p[i:]); n > 0 {
					i += n
					continue
				}
			}
		}
		n, next := lineEnd(p[i:])
		if n < 0 {
			o.keepLine(p[i:])
			break
		}
		line := p[i : i+n]
		if i += next; i == len(p) && p[i-1] == '\r' {
			o.skipLF = true
		}
		if len(o.line) > 0 {
			o.keepLine(line)
			o.field(o.line, false)
			o.line = o.line[:0]
			continue
		}
		if len(line) > 0 {
			o.field(line, true)
			continue
		}
		if begin >= 0 {
			o.dispatch(p[begin:i])
		} else {
			o.dispatch(nil)
		}
	}
	if o.pending == dataHere {
		o.data = append(o.data[:0], o.cur...)
		o.cur, o.pending = nil, dataKept
	}
}

// lineEnd finds the end of the first line: n bytes, the next line begins at
// next. n is -1 when there is no end in p. Lines end with LF, CRLF or CR.
func lineEnd(p []byte) (n, next int) {
	n = bytes.IndexByte(p, '\n')
	head := p
	if n >= 0 {
		head = p[:n]
	}
	if c := bytes.IndexByte(head, '\r'); c >= 0 {
		if c+1 == n {
			return c, n + 1
		}
		return c, c + 1
	}
	return n, n + 1
}

func (o *Observer) keepLine(p []byte) {
	if len(o.line)+len(p) > maxEvent {
		o.violate(BrokenJSON)
		return
	}
	o.line = append(o.line, p...)
}

// field takes one line of an event that is not blank. here tells that line
// lies in the piece being fed and stays valid until Feed returns.
func (o *Observer) field(line []byte, here bool) {
	o.open = true
	name, val := line, []byte(nil)
	if c := bytes.IndexByte(line, ':'); c >= 0 {
		name, val = line[:c], line[c+1:]
		if len(val) > 0 && val[0] == ' ' {
			val = val[1:]
		}
	}
	switch string(name) {
	case "data":
		switch {
		case o.pending == noData && here:
			o.cur, o.pending = val, dataHere
		case o.pending == noData:
			o.data, o.pending = append(o.data[:0], val...), dataKept
		default:
			if o.pending == dataHere {
				o.data, o.cur, o.pending = append(o.data[:0], o.cur...), nil, dataKept
			}
			if len(o.data)+len(val) > maxEvent {
				o.violate(BrokenJSON)
				return
			}
			o.data = append(append(o.data, '\n'), val...)
		}
	case "event":
		o.named = string(val) == "error"
	}
}

// dispatch ends the event under way. raw is the whole event when it lies in
// one piece, so that its form can be learned.
func (o *Observer) dispatch(raw []byte) {
	data := o.cur
	single := o.pending == dataHere
	if o.pending == dataKept {
		data = o.data
	}
	if o.pending != noData {
		o.event(data, raw, single)
	}
	o.cur, o.pending, o.named, o.open = nil, noData, false, false
}

// Close tells that the body ended as its framing says.
func (o *Observer) Close() {
	if o.closed {
		return
	}
	o.closed = true
	// An event that only lacks its blank line still counts when it is whole.
	if len(o.line) > 0 {
		o.field(o.line, false)
		o.line = o.line[:0]
	}
	if o.pending == dataKept && (validJSON(o.data) || string(o.data) == "[DONE]") {
		o.dispatch(nil)
	}
	o.checkCut()
}

// Cut tells that the body broke off: a reset, a time-out, a missing last chunk.
func (o *Observer) Cut() { o.checkCut() }

func (o *Observer) checkCut() {
	if o.Ended() == EndTruncated {
		o.eventStart = o.Fed - int64(len(o.line)) // for BadOffset: nothing is wrong before
		o.violate(Truncated)
	}
}

// Ended tells how the stream ended, or would if nothing more came.
func (o *Observer) Ended() Ending {
	switch {
	case o.ErrorEvent:
		return EndError
	case o.aborted:
		return EndAbort
	case o.Done && !o.Committed:
		return EndEmpty
	case o.Done:
		return EndOK
	case o.closed && o.Committed && o.seen != 0 && o.seen&^o.finished == 0:
		// Every choice has its finish_reason and the framing is whole: only
		// the [DONE] line lacks, which some servers leave out.
		return EndOK
	}
	return EndTruncated
}

// Failed tells that the replica has already shown that this answer fails: an
// error event, an abort, or a terminal event with nothing before it. While
// Committed is false, another replica may be tried.
func (o *Observer) Failed() bool {
	return o.ErrorEvent || o.aborted || o.Done && !o.Committed
}

func (o *Observer) violate(v Violation) {
	if o.Violation == ViolationNone {
		o.Violation = v
	}
	o.bad()
}

// bad notes where the first event stands that showed anything wrong.
func (o *Observer) bad() {
	if o.BadOffset < 0 {
		o.BadOffset = o.eventStart
	}
}

// commit notes that the answer has begun, unless it has already failed.
func (o *Observer) commit() {
	if !o.Committed && !o.ErrorEvent && !o.aborted {
		o.Committed, o.CommitOffset = true, o.eventStart
	}
}

// template is the form of an event whose only changing parts are one string of
// content and some numbers behind it.
type template struct {
	text   []byte // the literal bytes, one after the other
	prefix int    // text[:prefix] stands before the content, opening quote included
	segs   [maxSegs]segment
	n      int // segments in use
	call   int // index into calls that the content is arguments of, -1 = text
}

const (
	maxSegs   = 8
	maxLearns = 32      // per stream: events without a stable form cost no more than this
	maxForm   = 8 << 10 // bytes of the longest event whose form is learned
)

// segment is literal bytes, text[from:to], and what number follows them.
type segment struct {
	from, to int
	num      number
}

// number is what a number in an event means.
type number uint8

const (
	numNone number = iota // the end of the event: no number follows
	numAny                // sequence numbers, totals: skipped
	numPrompt
	numCached
	numCompletion
)

// fast takes the event at the start of p when it has a learned form, and
// returns its length; 0 = it has not, or is not whole.
func (o *Observer) fast(p []byte) int {
	for k := range o.used {
		t := o.last + k
		if t >= o.used {
			t -= o.used
		}
		if n := o.match(&o.templates[t], p); n > 0 {
			o.last = t
			return n
		}
	}
	return 0
}

func (o *Observer) match(t *template, p []byte) int {
	if len(p) < len(t.text) || string(p[:t.prefix]) != string(t.text[:t.prefix]) {
		return 0
	}
	end := stringEnd(p, t.prefix)
	if end < 0 {
		return 0
	}
	usage := o.Usage
	i := end
	for k := range t.n {
		s := &t.segs[k]
		lit := t.text[s.from:s.to]
		if len(p)-i < len(lit) || string(p[i:i+len(lit)]) != string(lit) {
			return 0
		}
		i += len(lit)
		if s.num == numNone {
			break
		}
		n, digits := 0, i
		for i < len(p) && p[i]-'0' <= 9 {
			if n > maxInt {
				return 0
			}
			n = n*10 + int(p[i]-'0')
			i++
		}
		if i == digits || p[digits] == '0' && i > digits+1 {
			return 0
		}
		usage.set(s.num, n)
	}
	content := p[t.prefix:end]
	if !ascii(content) && !utf8.Valid(content) {
		return 0 // the slow path says what is wrong
	}
	o.Events++
	o.Usage = usage
	if t.call >= 0 {
		o.calls[t.call].feed(content)
	}
	if len(content) > 0 {
		o.Content++
		o.commit()
	}
	return i
}

func (u *Usage) set(k number, n int) {
	switch k {
	case numPrompt:
		u.Prompt = n
	case numCached:
		u.Cached = n
	case numCompletion:
		u.Completion = n
	default:
		return
	}
	u.Seen = true
}

// stringEnd returns the index of the quote that ends the JSON string whose text
// begins at i; -1 when it is not whole or not valid.
func stringEnd(p []byte, i int) int {
	for {
		if i = plain(p, i); i >= len(p) {
			return -1
		}
		if p[i] == '"' {
			return i
		}
		if p[i] != '\\' || i+1 >= len(p) {
			return -1
		}
		if plainEscapes[p[i+1]] != 0 {
			i += 2
			continue
		}
		if p[i+1] != 'u' || i+6 > len(p) || !isHex(p[i+2]) || !isHex(p[i+3]) || !isHex(p[i+4]) || !isHex(p[i+5]) {
			return -1
		}
		i += 6
	}
}

func ascii(p []byte) bool {
	for len(p) >= 8 {
		if binary.LittleEndian.Uint64(p)&swarHigh != 0 {
			return false
		}
		p = p[8:]
	}
	for _, c := range p {
		if c >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// learn keeps the form of the event raw: its data begins at raw[at], and f says
// where in the data its content and its numbers stand.
func (o *Observer) learn(raw []byte, at int, f *facts) {
	if o.learned >= maxLearns || len(raw) > maxForm || !bytes.HasSuffix(raw, []byte("\n\n")) && !bytes.HasSuffix(raw, []byte("\n\r\n")) {
		return
	}
	o.learned++
	slot := o.used
	if slot < len(o.templates) {
		o.used++
	} else {
		slot = o.learned % len(o.templates)
	}
	t := &o.templates[slot]
	t.text, t.prefix, t.n, t.call = append(t.text[:0], raw[:at+f.textStart]...), at+f.textStart, 0, f.call
	from := at + f.textEnd
	for _, h := range f.nums[:f.nnums] {
		start := len(t.text)
		t.text = append(t.text, raw[from:at+h.start]...)
		t.segs[t.n] = segment{start, len(t.text), h.num}
		t.n++
		from = at + h.end
	}
	start := len(t.text)
	t.text = append(t.text, raw[from:]...)
	t.segs[t.n] = segment{start, len(t.text), numNone}
	t.n++
}

// hash is a non-zero hash of a string's raw bytes.
func hash(p []byte) uint64 { return xxh3.Hash(p) | 1 }
