package wire

import (
	"bytes"
	"sync"
)

// ErrorClass is what an error from a replica says of the replica.
type ErrorClass uint8

const (
	ErrorNone       ErrorClass = iota
	ErrorBusy                  // full, not dead: 429, 503
	ErrorDraining              // shutting down, whatever /health says
	ErrorEngineDead            // its engine died; the process will follow
	ErrorClient                // the client's own fault: goes back as it is
	ErrorServer                // any other fault of the replica
)

var errorClassWords = [...]string{"none", "busy", "draining", "engine_dead", "client_error", "server_error"}

func (c ErrorClass) String() string {
	if int(c) < len(errorClassWords) {
		return errorClassWords[c]
	}
	return "unknown"
}

// Texts by which vLLM (0.8 to 0.32) tells its state in an error's message.
var (
	drainingText = []byte("cannot schedule new futures after shutdown")
	deadTexts    = [][]byte{[]byte("EngineCore encountered an issue"), []byte("EngineDeadError"), []byte("AsyncEngineDeadError"),
		[]byte("Background loop has errored"), []byte("Background loop is stopped")}
)

// ClassifyError tells what a replica's error answer means. status is its HTTP
// status, or 0 for an error event inside a stream (its "code" is taken then).
// A redirect counts as ErrorServer: the contract never passes one on.
func ClassifyError(status int, body []byte) ErrorClass {
	if status == 0 {
		status = eventStatus(body)
	}
	if status >= 200 && status < 300 {
		return ErrorNone
	}
	if status >= 500 {
		// Only a server error may say so: a client's 4xx can echo its own
		// input, which must not be able to take a replica out.
		head := body[:min(len(body), 4096)]
		if bytes.Contains(head, drainingText) {
			return ErrorDraining
		}
		for _, t := range deadTexts {
			if bytes.Contains(head, t) {
				return ErrorEngineDead
			}
		}
	}
	switch {
	case status == 429 || status == 503:
		return ErrorBusy
	case status >= 400 && status < 500:
		return ErrorClient
	}
	return ErrorServer
}

// eventStatus reads error.code (or code) of an error event; 500 when there is none.
func eventStatus(b []byte) int {
	s := scanner{b: b}
	i := s.space(0)
	if i >= len(b) || s.value(i, 0) < 0 {
		return 500
	}
	status := 500
	code := func(key []byte, v val) {
		if n, ok := v.number(b); ok && string(key) == "code" && n >= 400 && n < 600 {
			status = n
		}
	}
	members(b, val{i, len(b)}, func(key []byte, v val) {
		code(key, v)
		if string(key) == "error" {
			members(b, v, code)
		}
	})
	return status
}

// Answer is what one look at a whole (not streamed) answer found.
type Answer struct {
	Usage   Usage
	Finish  string // of the last choice
	Model   string
	Choices int
	Calls   int  // tool calls
	Text    bool // some content or tool call is there
	// Aborted: a choice ended with "abort". Nothing was forwarded yet, so
	// another replica may be tried, whatever text there is.
	Aborted bool
	// Err is set when the 200 holds an error object after all.
	Err       ErrorClass
	ErrorText string
	Violation Violation
}

// Failed tells that the answer is not one, though its status was 200.
func (a *Answer) Failed() bool { return a.Aborted || a.Err != ErrorNone || a.Violation == BrokenJSON }

// ParseAnswer looks at the body of a 200. models are the names that the
// replica may answer with; none = any. Audio answers may be plain text.
func ParseAnswer(k Kind, body []byte, models ...string) (a Answer) {
	// An answer has the members of a stream's events, so it is read as one
	// event, with "message" in the place of "delta". What its top holds is
	// noted on the way of the check that it is JSON.
	f := facts{call: -1}
	var r root
	s := scanner{b: body}
	i := s.space(0)
	end := -1
	switch {
	case i >= len(body):
	case body[i] == '{':
		end = s.members(i+1, 1, func(key []byte, v val) { r.take(body, key, v, &f) })
	default:
		end = s.value(i, 0)
	}
	if end < 0 || s.space(end) != len(body) {
		if k != KindAudio {
			a.Violation = BrokenJSON
		}
		return a
	}
	o := answerObservers.Get().(*Observer)
	defer func() {
		o.expect = nil // the caller's
		answerObservers.Put(o)
	}()
	o.Reset(k, models...)
	if r.err.given(body) || string(r.typ.text(body)) == "error" || string(r.object.text(body)) == "error" {
		o.fail(body, &r)
		a.Err, a.ErrorText = o.ErrorClass, o.ErrorText
		return a
	}
	o.same(body, r.id, r.model)
	o.usage(body, r.usage, &f)
	a.choices(o, body, r.choices, &f)
	a.rest(o, body, &r)
	a.Usage, a.Finish, a.Model, a.Calls = o.Usage, o.Finish, o.modelOf(models), o.Calls
	a.Aborted = o.aborted
	if o.ErrorEvent {
		a.Err, a.ErrorText = ErrorServer, o.ErrorText
	}
	a.Text = a.Text || o.Content > 0 || o.Calls > 0
	a.Violation = o.Violation
	return a
}

// answerObservers: an Observer is large, and its buffers are worth keeping.
var answerObservers = sync.Pool{New: func() any { return new(Observer) }}

// modelOf is Model, without an allocation when it is one of names.
func (o *Observer) modelOf(names []string) string {
	for _, n := range names {
		if n == string(o.model) {
			return n
		}
	}
	return o.Model()
}

func (a *Answer) choices(o *Observer, b []byte, v val, f *facts) {
	elements(b, v, func(v val) {
		a.Choices++
		var message, text, finish val
		members(b, v, func(key []byte, v val) {
			switch string(key) {
			case "message":
				message = v
			case "text":
				text = v
			case "finish_reason":
				finish = v
			}
		})
		// Calls of a whole answer have no index; they are numbered as they come.
		members(b, message, func(key []byte, v val) {
			switch string(key) {
			case "content", "reasoning_content", "reasoning", "refusal":
				a.Text = a.Text || len(v.text(b)) > 0
			case "tool_calls":
				elements(b, v, func(v val) { a.wholeCall(o, b, v, f) })
			}
		})
		a.Text = a.Text || len(text.text(b)) > 0
		if t := finish.text(b); len(t) > 0 {
			o.finish(0, t)
		} else if o.Violation == ViolationNone {
			o.Violation = MissingFinish
		}
	})
}

func (a *Answer) wholeCall(o *Observer, b []byte, v val, f *facts) {
	members(b, v, func(key []byte, v val) {
		if string(key) != "function" {
			return
		}
		members(b, v, func(key []byte, v val) {
			if string(key) == "arguments" {
				o.tool(b, 0, o.Calls, nil, nil, v, f)
			}
		})
	})
}

// rest reads what the Responses and Anthropic shapes have at the top.
func (a *Answer) rest(o *Observer, b []byte, r *root) {
	for _, v := range [...]val{r.stop, r.status} {
		if t := v.text(b); len(t) > 0 {
			o.finish(0, t)
		}
	}
	for _, v := range [...]val{r.content, r.output} {
		elements(b, v, func(v val) {
			a.Choices = 1
			a.Text = true
			members(b, v, func(key []byte, v val) {
				if t := v.text(b); string(key) == "type" && (string(t) == "tool_use" || string(t) == "function_call") {
					o.Calls++
				}
			})
		})
	}
	members(b, r.incomplete, func(key []byte, v val) {
		if string(key) == "reason" && string(v.text(b)) == "max_output_tokens" {
			o.Finish = "length"
		}
	})
}
