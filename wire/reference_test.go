package wire

import (
	"encoding/json"
	"strings"
	"unicode/utf8"
)

// referStream is the observer written the slow and plain way, over the whole
// stream at once with encoding/json: what the fast one must agree with.
func referStream(stream []byte, whole bool, models []string) result {
	r := refState{result: result{BadOffset: -1}, models: models, open: map[int]bool{}, calls: map[[2]int]*refCall{}}
	var data []string
	named, begun := false, false
	i := 0
	r.at = 0
	for i < len(stream) {
		if !begun {
			r.at, begun = i, true
		}
		j := i
		for j < len(stream) && stream[j] != '\n' && stream[j] != '\r' {
			j++
		}
		if j == len(stream) {
			break // a line that does not end
		}
		line := string(stream[i:j])
		i = j + 1
		if stream[j] == '\r' && i < len(stream) && stream[i] == '\n' {
			i++
		}
		if line == "" {
			if data != nil {
				r.event(strings.Join(data, "\n"), named)
			}
			data, named, begun = nil, false, false
			continue
		}
		data, named = refField(line, data, named)
	}
	rest := string(stream[i:])
	left := len(rest)
	if whole {
		if rest != "" {
			data, named = refField(rest, data, named)
			left = 0
		}
		if d := strings.Join(data, "\n"); data != nil && (d == "[DONE]" || json.Valid([]byte(d))) {
			r.event(d, named)
		}
	}
	r.Model = r.model
	r.End = r.ended(whole)
	if r.End == EndTruncated {
		r.at = len(stream) - left
		r.violate(Truncated)
	}
	r.End = r.ended(whole)
	return r.result
}

func refField(line string, data []string, named bool) ([]string, bool) {
	name, v, _ := strings.Cut(line, ":")
	v = strings.TrimPrefix(v, " ")
	switch name {
	case "data":
		data = append(data, v)
	case "event":
		named = v == "error"
	}
	return data, named
}

type refCall struct {
	id, name string
	args     string
	checked  bool
}

type refState struct {
	result
	models  []string
	at      int
	id      string
	model   string
	aborted bool
	open    map[int]bool // choice -> not finished
	calls   map[[2]int]*refCall
}

func (r *refState) bad() {
	if r.BadOffset < 0 {
		r.BadOffset = int64(r.at)
	}
}

func (r *refState) violate(v Violation) {
	if r.Violation == ViolationNone {
		r.Violation = v
	}
	r.bad()
}

func (r *refState) commit() {
	if !r.Committed && !r.ErrorEvent && !r.aborted {
		r.Committed, r.CommitOffset = true, int64(r.at)
	}
}

func (r *refState) ended(closed bool) Ending {
	switch {
	case r.ErrorEvent:
		return EndError
	case r.aborted:
		return EndAbort
	case r.Done && !r.Committed:
		return EndEmpty
	case r.Done:
		return EndOK
	case closed && r.Committed && len(r.open) > 0 && !r.unfinished():
		return EndOK
	}
	return EndTruncated
}

func (r *refState) unfinished() bool {
	for _, o := range r.open {
		if o {
			return true
		}
	}
	return false
}

type obj = map[string]any

func str(v any) string { s, _ := v.(string); return s }
func num(v any) int    { f, _ := v.(float64); return int(f) }
func sub(v any) obj    { o, _ := v.(obj); return o }

func (r *refState) event(data string, named bool) {
	r.Events++
	if data == "[DONE]" {
		r.done()
		return
	}
	if r.Done {
		return
	}
	if !utf8.ValidString(data) {
		r.violate(BrokenUTF8)
	}
	var o obj
	if err := json.Unmarshal([]byte(data), &o); err != nil || o == nil {
		if named {
			r.fail(data, data)
		} else {
			r.violate(BrokenJSON)
		}
		return
	}
	typ := str(o["type"])
	switch {
	case o["error"] != nil || named || typ == "error" || str(o["object"]) == "error":
		msg := data
		if m, ok := o["message"].(string); ok {
			msg = m
		} else if m, ok := o["error"].(string); ok {
			msg = m
		}
		if m, ok := sub(o["error"])["message"].(string); ok {
			msg = m
		}
		r.fail(data, msg)
	case strings.HasPrefix(typ, "response."):
		r.responses(strings.TrimPrefix(typ, "response."), o, data)
	case strings.HasPrefix(typ, "message_"), strings.HasPrefix(typ, "content_block_"):
		r.messages(typ, o)
	case typ == "ping":
	default:
		r.chunk(o)
	}
}

func (r *refState) fail(data, msg string) {
	r.bad()
	if r.ErrorEvent {
		return
	}
	r.ErrorEvent, r.ErrorText, r.Class = true, msg, ClassifyError(0, []byte(data))
}

func (r *refState) same(o obj) {
	if id := str(o["id"]); id != "" {
		if r.id == "" {
			r.id = id
		} else if r.id != id {
			r.violate(IDChanged)
		}
	}
	m := str(o["model"])
	switch {
	case m == "":
	case r.model != "":
		if m != r.model {
			r.violate(ModelChanged)
		}
	default:
		r.model = m
		ok := len(r.models) == 0
		for _, w := range r.models {
			ok = ok || w == m || w == ""
		}
		if !ok {
			r.violate(ModelSubstitution)
		}
	}
}

func (r *refState) usage(v any) {
	set := func(o obj, key string, to *int) {
		if f, ok := o[key].(float64); ok {
			*to, r.Usage.Seen = int(f), true
		}
	}
	u := sub(v)
	for _, k := range []string{"prompt_tokens", "input_tokens"} {
		set(u, k, &r.Usage.Prompt)
	}
	for _, k := range []string{"completion_tokens", "output_tokens"} {
		set(u, k, &r.Usage.Completion)
	}
	set(u, "cache_read_input_tokens", &r.Usage.Cached)
	set(sub(u["prompt_tokens_details"]), "cached_tokens", &r.Usage.Cached)
	set(sub(u["input_tokens_details"]), "cached_tokens", &r.Usage.Cached)
}

func (r *refState) chunk(o obj) {
	r.same(o)
	r.usage(o["usage"])
	list, _ := o["choices"].([]any)
	for _, e := range list {
		c := sub(e)
		n := num(c["index"])
		if _, ok := r.open[n]; !ok {
			r.open[n] = true
		}
		reason := str(c["finish_reason"])
		if reason == "abort" || reason == "error" {
			r.finish(n, reason)
		}
		content := str(c["text"]) != ""
		d := sub(c["delta"])
		for _, k := range []string{"content", "reasoning", "reasoning_content", "refusal"} {
			content = content || str(d[k]) != ""
		}
		content = content || d["function_call"] != nil || d["audio"] != nil
		calls, _ := d["tool_calls"].([]any)
		for _, e := range calls {
			t := sub(e)
			fn := sub(t["function"])
			r.tool(n, num(t["index"]), str(t["id"]), str(fn["name"]), str(fn["arguments"]))
			content = content || str(t["id"]) != "" || str(fn["name"]) != "" || str(fn["arguments"]) != ""
		}
		if content {
			r.Content++
			r.commit()
		}
		if reason != "" {
			r.finish(n, reason)
		}
	}
}

func (r *refState) tool(choice, index int, id, name, args string) {
	c := r.calls[[2]int{choice, index}]
	if c == nil {
		c = &refCall{}
		r.calls[[2]int{choice, index}] = c
		r.Calls++
	}
	if id != "" && c.id != "" && id != c.id || name != "" && c.name != "" && name != c.name {
		r.violate(ToolIndexCollision)
	} else {
		if id != "" {
			c.id = id
		}
		if name != "" {
			c.name = name
		}
	}
	c.args += args
}

func (r *refState) finish(n int, reason string) {
	if _, ok := r.open[n]; ok {
		r.open[n] = false
	}
	r.Finish = reason
	switch reason {
	case "abort", "cancelled":
		r.aborted = true
		r.violate(AbortAsSuccess)
		return
	case "error":
		r.bad()
		if r.ErrorText == "" {
			r.ErrorText, r.Class = "finish_reason error", ErrorServer
		}
		r.ErrorEvent = true
		return
	case "stop", "tool_calls", "function_call", "tool_use", "completed":
		for k, c := range r.calls {
			if k[0] == n && !c.checked {
				c.checked = true
				if c.args != "" && !json.Valid([]byte(c.args)) {
					r.violate(BrokenToolArguments)
				}
			}
		}
	}
	r.commit()
}

func (r *refState) done() {
	if r.Done {
		return
	}
	r.Done = true
	switch {
	case r.ErrorEvent || r.aborted:
	case !r.Committed:
		r.violate(DoneWithoutContent)
	case r.unfinished():
		r.violate(MissingFinish)
	}
}

func (r *refState) delta(s string) bool {
	if s == "" {
		return false
	}
	r.Content++
	r.commit()
	return true
}

func (r *refState) responses(name string, o obj, data string) {
	resp := sub(o["response"])
	r.same(resp)
	r.usage(resp["usage"])
	index := num(o["output_index"])
	delta := str(o["delta"])
	status := str(resp["status"])
	if status == "" {
		status = name
	}
	switch name {
	case "completed", "incomplete":
		switch {
		case status == "failed" || resp["error"] != nil:
			msg := data
			if m, ok := sub(resp["error"])["message"].(string); ok {
				msg = m
			}
			r.fail(data, msg)
		case status == "cancelled":
			r.finish(0, status)
		case str(sub(resp["incomplete_details"])["reason"]) == "max_output_tokens":
			r.finish(0, "length")
		default:
			r.finish(0, status)
		}
		r.done()
	case "failed":
		msg := data
		if m, ok := sub(resp["error"])["message"].(string); ok {
			msg = m
		}
		r.fail(data, msg)
		r.done()
	case "cancelled":
		r.finish(0, name)
		r.done()
	case "output_item.added":
		it := sub(o["item"])
		switch str(it["type"]) {
		case "", "message", "reasoning":
			return
		case "function_call":
			id := str(it["call_id"])
			if _, ok := it["call_id"]; !ok {
				id = str(it["id"])
			}
			r.tool(0, index, id, str(it["name"]), "")
		}
		r.commit()
	case "function_call_arguments.delta":
		if r.delta(delta) {
			r.tool(0, index, "", "", delta)
		}
	default:
		if strings.HasSuffix(name, ".delta") {
			r.delta(delta)
		}
	}
}

func (r *refState) messages(typ string, o obj) {
	r.usage(o["usage"])
	index := num(o["index"])
	switch typ {
	case "message_start":
		m := sub(o["message"])
		r.same(m)
		r.usage(m["usage"])
		if _, ok := r.open[0]; !ok {
			r.open[0] = true // a second one, out of a damaged stream, opens nothing anew
		}
	case "content_block_start":
		b := sub(o["content_block"])
		switch str(b["type"]) {
		case "tool_use", "server_tool_use":
			r.tool(0, index, str(b["id"]), str(b["name"]), "")
			r.commit()
		case "text":
			r.delta(str(b["text"]))
		}
	case "content_block_delta":
		d := sub(o["delta"])
		for _, k := range []string{"text", "thinking", "partial_json"} {
			if r.delta(str(d[k])) && k == "partial_json" {
				r.tool(0, index, "", "", str(d[k]))
			}
		}
	case "message_delta":
		if s := str(sub(o["delta"])["stop_reason"]); s != "" {
			r.finish(0, s)
		}
	case "message_stop":
		r.done()
	}
}
