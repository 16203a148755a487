package wire

// Violation is a way in which an answer stream breaks its protocol. The set is
// closed: String gives the kind label of penstock_stream_integrity_total.
type Violation uint8

const (
	ViolationNone Violation = iota
	// ToolIndexCollision: a new call's id or name at an index where a call
	// with another one is already open, so that a client would join the two.
	ToolIndexCollision
	IDChanged           // the answer's id changed in mid-stream
	ModelChanged        // the answer's model changed in mid-stream
	ModelSubstitution   // a model other than the expected ones answered
	DoneWithoutContent  // a terminal event with nothing before it
	AbortAsSuccess      // finish_reason "abort" in a stream that else looks whole
	MissingFinish       // a terminal event, but a choice never got its finish_reason
	BrokenJSON          // an event's data is not JSON
	BrokenUTF8          // an event's data is not UTF-8
	BrokenToolArguments // a finished tool call's arguments are not JSON
	Truncated           // the stream ended without its terminal event
	violationCount
)

// ViolationCount is the number of kinds, ViolationNone included.
const ViolationCount = int(violationCount)

var violationWords = [...]string{"none", "tool_index_collision", "id_changed", "model_changed", "model_substitution",
	"done_without_content", "abort_as_success", "missing_finish", "broken_json", "broken_utf8", "broken_tool_arguments", "truncated"}

func (v Violation) String() string {
	if int(v) < len(violationWords) {
		return violationWords[v]
	}
	return "unknown"
}

// Ending is how an answer stream ended.
type Ending uint8

const (
	EndOK        Ending = iota
	EndAbort            // a finish_reason "abort": the replica was told to stop
	EndEmpty            // a terminal event and nothing else
	EndError            // an error event
	EndTruncated        // no terminal event (also: it has not come yet)
)

var endingWords = [...]string{"ok", "abort", "empty", "error", "truncated"}

func (e Ending) String() string {
	if int(e) < len(endingWords) {
		return endingWords[e]
	}
	return "unknown"
}

// call is one tool call of a stream, by choice and index.
type call struct {
	choice, index int
	id, name      uint64 // hashes, 0 = not given yet
	args          []byte // decoded arguments so far
	open          bool   // args are all there and not checked yet
}

const (
	maxCalls = 128       // calls watched in one stream
	maxArgs  = 256 << 10 // bytes of arguments kept per call for the check at its end
)

// call finds or makes the state of one tool call; nil when there are too many.
func (o *Observer) call(choice, index int) *call {
	for i := range o.calls {
		if c := &o.calls[i]; c.choice == choice && c.index == index {
			return c
		}
	}
	if len(o.calls) >= maxCalls {
		return nil
	}
	if n := len(o.calls); n < cap(o.calls) {
		o.calls = o.calls[:n+1]
		o.calls[n] = call{choice: choice, index: index, args: o.calls[n].args[:0], open: true}
		return &o.calls[n]
	}
	o.calls = append(o.calls, call{choice: choice, index: index, open: true})
	return &o.calls[len(o.calls)-1]
}

// identify notes the id and name of a call, as hashes (0 = not in this event),
// and tells a collision.
func (o *Observer) identify(c *call, id, name uint64) {
	if c == nil {
		return
	}
	if id != 0 && c.id != 0 && id != c.id || name != 0 && c.name != 0 && name != c.name {
		o.violate(ToolIndexCollision)
		return
	}
	if id != 0 {
		c.id = id
	}
	if name != 0 {
		c.name = name
	}
}

func (c *call) feed(raw []byte) {
	if c == nil || len(c.args) > maxArgs {
		return
	}
	c.args = appendDecoded(c.args, raw)
}

// checkCalls checks the arguments of the calls of one choice (-1 = all), once
// they are whole. Empty ones are left alone: some models call a function
// without parameters that way.
func (o *Observer) checkCalls(choice int) {
	for i := range o.calls {
		c := &o.calls[i]
		if !c.open || choice >= 0 && c.choice != choice {
			continue
		}
		c.open = false
		if len(c.args) > 0 && len(c.args) <= maxArgs && !validJSON(c.args) {
			o.violate(BrokenToolArguments)
		}
	}
}

// validJSON tells whether p is one JSON value.
func validJSON(p []byte) bool {
	s := scanner{b: p}
	i := s.value(s.space(0), 0)
	return i >= 0 && s.space(i) == len(p)
}
