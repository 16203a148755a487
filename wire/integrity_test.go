package wire

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

func ev(s string) string { return "data: " + s + "\n\n" }

func toolDelta(index int, fields string) string {
	return ev(fmt.Sprintf(`{"id":"c","model":"m","choices":[{"index":0,"delta":{"tool_calls":[{"index":%d%s}]},"finish_reason":null}]}`, index, fields))
}

func TestViolations(t *testing.T) {
	begin := func(i int, id, name string) string {
		return toolDelta(i, fmt.Sprintf(`,"id":%q,"type":"function","function":{"name":%q,"arguments":""}`, id, name))
	}
	args := func(i int, a string) string {
		return toolDelta(i, fmt.Sprintf(`,"function":{"arguments":%q}`, a))
	}
	fin := func(reason string) string {
		return ev(`{"id":"c","model":"m","choices":[{"index":0,"delta":{},"finish_reason":"`+reason+`"}]}`) + doneFrame
	}
	text := func(id, model, s string) string {
		return ev(fmt.Sprintf(`{"id":%q,"model":%q,"choices":[{"index":0,"delta":{"content":%q},"finish_reason":null}]}`, id, model, s))
	}
	for name, c := range map[string]struct {
		s    string
		want Violation
		at   string // the event at BadOffset begins with this; "" = not checked
	}{
		"parallel calls":              {begin(0, "a", "f") + args(0, `{"x":`) + begin(1, "b", "f") + args(1, `{}`) + args(0, `1}`) + fin("tool_calls"), ViolationNone, ""},
		"two calls at one index":      {begin(0, "a", "f") + args(0, `{}`) + begin(0, "b", "g") + args(0, `{}`) + fin("tool_calls"), ToolIndexCollision, begin(0, "b", "g")},
		"same function, one index":    {begin(0, "a", "f") + begin(0, "b", "f") + fin("tool_calls"), ToolIndexCollision, begin(0, "b", "f")},
		"new name without id":         {begin(0, "a", "f") + toolDelta(0, `,"function":{"name":"g"}`) + fin("tool_calls"), ToolIndexCollision, ""},
		"id and name repeated":        {begin(0, "a", "f") + begin(0, "a", "f") + args(0, "{}") + fin("tool_calls"), ViolationNone, ""},
		"collision in fast arguments": {begin(0, "a", "f") + args(0, `{`) + args(0, ` `) + args(0, ` `) + begin(0, "b", "f") + args(0, `}`) + fin("tool_calls"), ToolIndexCollision, begin(0, "b", "f")},
		"id changed":                  {text("c", "m", "x") + text("c", "m", "y") + text("d", "m", "z") + fin("stop"), IDChanged, text("d", "m", "z")},
		"model changed":               {text("c", "m", "x") + text("c", "m", "y") + text("c", "m2", "z") + fin("stop"), ModelChanged, text("c", "m2", "z")},
		"model substitution":          {text("c", "small", "x") + ev(`{"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}`) + doneFrame, ModelSubstitution, text("c", "small", "x")},
		"the other served name":       {text("c", "served", "x") + ev(`{"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}`) + doneFrame, ViolationNone, ""},
		"broken JSON":                 {text("c", "m", "x") + text("c", "m", "y") + "data: {\"id\":\"c\",\n\n" + fin("stop"), BrokenJSON, "data: {\"id\":\"c\",\n\n"},
		"garbage":                     {text("c", "m", "x") + "data: <html>\n\n" + fin("stop"), BrokenJSON, ""},
		"control byte in content":     {text("c", "m", "x") + text("c", "m", "y") + strings.Replace(text("c", "m", "zz"), "zz", "z\x01", 1) + fin("stop"), BrokenJSON, ""},
		"bad escape in content":       {text("c", "m", "x") + text("c", "m", "y") + strings.Replace(text("c", "m", "zz"), "zz", `\q`, 1) + fin("stop"), BrokenJSON, ""},
		"broken UTF-8":                {text("c", "m", "x") + text("c", "m", "y") + strings.Replace(text("c", "m", "zz"), "zz", "z\xe5\x8c", 1) + fin("stop"), BrokenUTF8, ""},
		"arguments cut, length":       {begin(0, "a", "f") + args(0, `{"x":`) + fin("length"), ViolationNone, ""},
		"arguments broken":            {begin(0, "a", "f") + args(0, `{"x":`) + fin("tool_calls"), BrokenToolArguments, ""},
		"arguments interleaved":       {begin(0, "a", "f") + args(0, `{"x":{`) + args(0, `"y"`) + args(0, `]}`) + fin("tool_calls"), BrokenToolArguments, ""},
		"no arguments":                {begin(0, "a", "f") + fin("tool_calls"), ViolationNone, ""},
		"the first one counts":        {text("c", "m", "x") + text("d", "m", "y") + "data: {\n\n" + doneFrame, IDChanged, text("d", "m", "y")},
	} {
		r := checkCuts(t, name, KindChat, []byte(c.s), true, "m", "served")
		if r.Violation != c.want {
			t.Errorf("%s: %v, want %v", name, r.Violation, c.want)
		}
		if c.want == ViolationNone && (r.BadOffset != -1 || r.End != EndOK) {
			t.Errorf("%s: %+v", name, r)
		}
		if c.at != "" && !strings.HasPrefix(c.s[max(0, r.BadOffset):], c.at) {
			t.Errorf("%s: BadOffset %d is at %.80q", name, r.BadOffset, c.s[max(0, r.BadOffset):])
		}
	}
	seen := map[string]bool{}
	for v := Violation(0); int(v) < ViolationCount; v++ {
		if w := v.String(); w == "unknown" || seen[w] {
			t.Errorf("violation %d: %q", v, w)
		} else {
			seen[w] = true
		}
	}
}

func TestViolationsOfTheOtherAPIs(t *testing.T) {
	for name, c := range map[string]struct {
		s    string
		want Violation
	}{
		"messages, one index": {ev(`{"type":"message_start","message":{"id":"a","model":"m"}}`) +
			ev(`{"type":"content_block_start","content_block":{"type":"tool_use","id":"t1","name":"f"},"index":1}`) +
			ev(`{"type":"content_block_delta","delta":{"type":"input_json_delta","partial_json":"{}"},"index":1}`) +
			ev(`{"type":"content_block_start","content_block":{"type":"tool_use","id":"t2","name":"f"},"index":1}`) +
			ev(`{"type":"message_delta","delta":{"stop_reason":"tool_use"}}`) + ev(`{"type":"message_stop"}`), ToolIndexCollision},
		"messages, broken arguments": {ev(`{"type":"message_start","message":{"id":"a","model":"m"}}`) +
			ev(`{"type":"content_block_start","content_block":{"type":"tool_use","id":"t1","name":"f"},"index":1}`) +
			ev(`{"type":"content_block_delta","delta":{"type":"input_json_delta","partial_json":"{\"a\""},"index":1}`) +
			ev(`{"type":"message_delta","delta":{"stop_reason":"tool_use"}}`) + ev(`{"type":"message_stop"}`), BrokenToolArguments},
		"messages, no stop_reason": {ev(`{"type":"message_start","message":{"id":"a","model":"m"}}`) +
			ev(`{"type":"content_block_delta","delta":{"type":"text_delta","text":"x"},"index":0}`) + ev(`{"type":"message_stop"}`), MissingFinish},
		"messages, other model": {ev(`{"type":"message_start","message":{"id":"a","model":"z"}}`) +
			ev(`{"type":"message_delta","delta":{"stop_reason":"end_turn"}}`) + ev(`{"type":"message_stop"}`), ModelSubstitution},
		"responses, one index": {ev(`{"type":"response.output_item.added","output_index":1,"item":{"type":"function_call","call_id":"a","name":"f"}}`) +
			ev(`{"type":"response.function_call_arguments.delta","output_index":1,"delta":"{}"}`) +
			ev(`{"type":"response.output_item.added","output_index":1,"item":{"type":"function_call","call_id":"b","name":"f"}}`) +
			ev(`{"type":"response.completed","response":{"id":"r","status":"completed"}}`), ToolIndexCollision},
		"responses, id changed": {ev(`{"type":"response.created","response":{"id":"r"}}`) +
			ev(`{"type":"response.completed","response":{"id":"s","status":"completed"}}`), IDChanged},
		"responses, healthy": {ev(`{"type":"response.created","response":{"id":"r","model":"m"}}`) +
			ev(`{"type":"response.output_item.added","output_index":0,"item":{"type":"function_call","call_id":"a","name":"f"}}`) +
			ev(`{"type":"response.function_call_arguments.delta","output_index":0,"delta":"{\"x\":"}`) +
			ev(`{"type":"response.function_call_arguments.delta","output_index":0,"delta":"1}"}`) +
			ev(`{"type":"response.completed","response":{"id":"r","model":"m","status":"completed"}}`), ViolationNone},
	} {
		if r := checkCuts(t, name, KindResponses, []byte(c.s), true, "m"); r.Violation != c.want {
			t.Errorf("%s: %v, want %v", name, r.Violation, c.want)
		}
	}
}

// Streams that are put together and damaged at random give, however they are
// cut, what the plain reference says.
func TestRandomStreamsAgainstReference(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 5))
	names := []string{"chat_stream", "chat_stream_usage_continuous", "chat_stream_n2", "chat_stream_tool_named", "chat_stream_tool_required",
		"completion_stream_usage", "completion_stream_n2", "messages_stream", "responses_stream", "kill9engine_stream_queued", "chat_stream_logprobs"}
	var sources [][]string
	for _, n := range names {
		s, _ := recorded(t, n+".http")
		sources = append(sources, strings.SplitAfter(string(s), "\n\n"))
	}
	for round := range 400 {
		frames := append([]string(nil), sources[r.IntN(len(sources))]...)
		for range r.IntN(4) {
			i := r.IntN(len(frames))
			switch r.IntN(7) {
			case 0: // lost
				frames = append(frames[:i:i], frames[i+1:]...)
			case 1: // twice
				frames = append(frames[:i+1:i+1], frames[i:]...)
			case 2: // from another stream
				o := sources[r.IntN(len(sources))]
				frames = append(append(frames[:i:i], o[r.IntN(len(o))]), frames[i:]...)
			case 3: // a byte damaged
				if b := []byte(frames[i]); len(b) > 0 {
					b[r.IntN(len(b))] = "x\"{}[]\xff\n: "[r.IntN(10)]
					frames[i] = string(b)
				}
			case 4: // cut
				frames = append(frames[:i:i], frames[i][:r.IntN(len(frames[i])+1)])
			case 5:
				frames[i] = strings.Replace(frames[i], `"length"`, []string{`"abort"`, `"stop"`, `"error"`, "null"}[r.IntN(4)], 1)
			case 6: // other line ends
				frames[i] = strings.ReplaceAll(frames[i], "\n", []string{"\r\n", "\r"}[r.IntN(2)])
			}
			if len(frames) == 0 {
				break
			}
		}
		stream := []byte(strings.Join(frames, ""))
		checkCuts(t, fmt.Sprintf("round %d", round), KindChat, stream, r.IntN(2) == 0, "tiny")
		if t.Failed() {
			t.Fatalf("stream %q", stream)
		}
	}
}

// FuzzObserver: the result does not depend on where a stream is cut, whatever
// its bytes.
func FuzzObserver(f *testing.F) {
	for _, n := range []string{"chat_stream_usage_continuous", "chat_stream_n2", "completion_stream_usage", "messages_stream", "responses_stream", "kill9engine_stream_queued"} {
		s, _ := recorded(f, n+".http")
		f.Add(s[:min(len(s), 3000)], uint64(1))
	}
	f.Add([]byte(toolDelta(0, `,"id":"a","function":{"name":"f"}`)+toolDelta(0, `,"function":{"arguments":"{"}`)+toolDelta(0, `,"function":{"arguments":"}"}`)), uint64(2))
	f.Add([]byte(tok(1)+": c\n\n"+tok(2)+"event: error\r\n\r\n"+finFrame+doneFrame), uint64(3))
	f.Fuzz(func(t *testing.T, stream []byte, seed uint64) {
		var first *result
		for cut, next := range cuts(stream, seed) {
			var o Observer
			o.Reset(KindChat, "tiny")
			got := watch(&o, stream, seed%2 == 0, next)
			if first == nil {
				first = &got
			} else if got != *first {
				t.Fatalf("cut %s:\n got %+v\nfirst %+v\nstream %q", cut, got, *first, bytes.TrimSpace(stream))
			}
		}
		ParseAnswer(KindChat, stream, "tiny")
		ClassifyError(0, stream)
	})
}
