package wire

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// recorded is the body of a recorded answer: what stands behind the head, with
// the chunk framing taken off. whole tells that the last chunk was there.
func recorded(t testing.TB, name string) (body []byte, whole bool) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata/vllm", name))
	if err != nil {
		t.Fatal(err)
	}
	head, rest, _ := bytes.Cut(b, []byte("\r\n\r\n"))
	if !bytes.Contains(bytes.ToLower(head), []byte("transfer-encoding: chunked")) {
		return rest, true
	}
	for {
		line, after, ok := bytes.Cut(rest, []byte("\r\n"))
		if !ok {
			return body, false
		}
		n, err := strconv.ParseInt(string(line), 16, 32)
		if err != nil || len(after) < int(n)+2 {
			return append(body, after...), false
		}
		if n == 0 {
			return body, true
		}
		body, rest = append(body, after[:n]...), after[n+2:]
	}
}

// result is all that an observer says of a stream.
type result struct {
	Committed, ErrorEvent, Done bool
	CommitOffset, BadOffset     int64
	Events, Content, Calls      int
	Finish, ErrorText, Model    string
	Usage                       Usage
	Class                       ErrorClass
	Violation                   Violation
	End                         Ending
}

func resultOf(o *Observer) result {
	return result{o.Committed, o.ErrorEvent, o.Done, o.CommitOffset, o.BadOffset, o.Events, o.Content, o.Calls,
		o.Finish, o.ErrorText, o.Model(), o.Usage, o.ErrorClass, o.Violation, o.Ended()}
}

// watch feeds a stream cut into pieces by next(left), which gives the next
// piece's length.
func watch(o *Observer, stream []byte, whole bool, next func(left int) int) result {
	for p := stream; len(p) > 0; {
		n := next(len(p))
		piece := append([]byte(nil), p[:n]...)
		o.Feed(piece)
		for i := range piece {
			piece[i] = 0xee // the proxy's buffer is used again
		}
		p = p[n:]
	}
	if whole {
		o.Close()
	} else {
		o.Cut()
	}
	return resultOf(o)
}

// cuts returns the ways a stream is cut: whole, byte by byte, one event each,
// at random.
func cuts(stream []byte, seed uint64) map[string]func(int) int {
	r := rand.New(rand.NewPCG(seed, 99))
	at := 0
	return map[string]func(int) int{
		"whole":  func(left int) int { return left },
		"bytes":  func(int) int { return 1 },
		"random": func(left int) int { return 1 + r.IntN(min(left, 1+r.IntN(700))) },
		"events": func(left int) int {
			at = len(stream) - left
			if i := bytes.Index(stream[at:], []byte("\n\n")); i >= 0 {
				return i + 2
			}
			return left
		},
	}
}

// same checks that a stream gives one and the same result however it is cut,
// and that it is the reference's.
func checkCuts(t *testing.T, name string, k Kind, stream []byte, whole bool, models ...string) result {
	t.Helper()
	want := referStream(stream, whole, models)
	var o Observer
	for cut, next := range cuts(stream, uint64(len(stream))) {
		o.Reset(k, models...)
		if got := watch(&o, stream, whole, next); got != want {
			t.Errorf("%s cut %s:\n got %+v\nwant %+v", name, cut, got, want)
		}
	}
	return want
}

func TestHealthyRecordings(t *testing.T) {
	type want struct {
		kind               Kind
		prompt, completion int
		cached             int
		finish             string
	}
	for name, w := range map[string]want{
		"chat_stream":                           {KindChat, 0, 0, 0, "length"},
		"chat_stream_usage":                     {KindChat, 25, 12, 0, "length"},
		"chat_stream_usage_continuous":          {KindChat, 25, 12, 0, "length"},
		"chat_stream_n2":                        {KindChat, 25, 10, 0, "length"},
		"chat_stream_logprobs":                  {KindChat, 0, 0, 0, "length"},
		"chat_stream_return_token_ids":          {KindChat, 0, 0, 0, "length"},
		"chat_stream_stop_token_ids":            {KindChat, 0, 0, 0, "stop"},
		"chat_stream_tool_auto":                 {KindChat, 0, 0, 0, "length"},
		"chat_stream_tool_named":                {KindChat, 119, 59, 96, "stop"},
		"chat_stream_tool_required":             {KindChat, 0, 0, 0, "tool_calls"},
		"completion_stream":                     {KindCompletions, 0, 0, 0, "length"},
		"completion_stream_usage":               {KindCompletions, 6, 10, 0, "length"},
		"completion_stream_n2":                  {KindCompletions, 0, 0, 0, "length"},
		"completion_stream_prompt_list":         {KindCompletions, 0, 0, 0, "length"},
		"completion_stream_echo_logprobs":       {KindCompletions, 0, 0, 0, "length"},
		"responses_stream":                      {KindResponses, 10, 16, 0, "length"},
		"messages_stream":                       {KindMessages, 10, 8, 0, "max_tokens"},
		"force_include_usage_chat_stream":       {KindChat, 10, 3, 0, "length"},
		"force_include_usage_completion_stream": {KindCompletions, 3, 3, 0, "length"},
		"drain_stream_queued":                   {KindCompletions, 13, 20, 0, "length"},
	} {
		stream, whole := recorded(t, name+".http")
		if !whole {
			t.Errorf("%s: recording is cut", name)
		}
		r := checkCuts(t, name, w.kind, stream, whole, "tiny")
		if r.Violation != ViolationNone || r.End != EndOK || r.Finish != w.finish || r.Model != "tiny" || r.BadOffset != -1 || !r.Committed {
			t.Errorf("%s: %+v", name, r)
		}
		if r.Usage != (Usage{w.prompt, w.cached, w.completion, w.prompt > 0}) {
			t.Errorf("%s: usage %+v", name, r.Usage)
		}
	}
}

func TestFailedRecordings(t *testing.T) {
	type want struct {
		kind      Kind
		end       Ending
		committed bool
		class     ErrorClass
		violation Violation
	}
	for name, w := range map[string]want{
		"kill9engine_chat_stream_running":       {KindChat, EndError, true, ErrorEngineDead, ViolationNone},
		"kill9engine_stream_running":            {KindCompletions, EndError, true, ErrorEngineDead, ViolationNone},
		"kill9engine_stream_queued":             {KindCompletions, EndError, false, ErrorEngineDead, ViolationNone},
		"kill9worker_chat_stream_running":       {KindChat, EndError, true, ErrorEngineDead, ViolationNone},
		"kill9worker_stream_running":            {KindCompletions, EndError, true, ErrorEngineDead, ViolationNone},
		"kill9worker_stream_queued":             {KindCompletions, EndError, false, ErrorEngineDead, ViolationNone},
		"kill9api_chat_stream_running":          {KindChat, EndTruncated, true, ErrorNone, Truncated},
		"kill9api_stream_running":               {KindCompletions, EndTruncated, true, ErrorNone, Truncated},
		"kill9api_stream_queued":                {KindCompletions, EndTruncated, false, ErrorNone, Truncated},
		"disconnect_stream_partial":             {KindCompletions, EndTruncated, true, ErrorNone, Truncated},
		"sigterm_chat_stream_running":           {KindChat, EndAbort, true, ErrorNone, AbortAsSuccess},
		"sigterm_stream_running":                {KindCompletions, EndAbort, true, ErrorNone, AbortAsSuccess},
		"sigterm_stream_queued":                 {KindCompletions, EndEmpty, false, ErrorNone, DoneWithoutContent},
		"draining_new_completion_tokens_stream": {KindCompletions, EndEmpty, false, ErrorNone, DoneWithoutContent},
	} {
		stream, whole := recorded(t, name+".http")
		r := checkCuts(t, name, w.kind, stream, whole, "tiny")
		if r.End != w.end || r.Committed != w.committed || r.Class != w.class || r.Violation != w.violation {
			t.Errorf("%s: %+v", name, r)
		}
		if r.BadOffset < 0 || r.BadOffset > int64(len(stream)) {
			t.Errorf("%s: BadOffset %d of %d", name, r.BadOffset, len(stream))
		}
		// What stands before BadOffset is whole, healthy events.
		if good := stream[:max(0, r.BadOffset)]; r.End != EndTruncated && len(good) > 0 &&
			(!bytes.HasSuffix(good, []byte("\n\n")) || bytes.Contains(good, []byte(`"abort"`)) || bytes.Contains(good, []byte("EngineCore"))) {
			t.Errorf("%s: before BadOffset: ...%q", name, good[max(0, len(good)-80):])
		}
	}
}

// frames of the case files
func tok(i int) string {
	return fmt.Sprintf(`data: {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "t%d"}, "finish_reason": null}]}`+"\n\n", i)
}

const (
	finFrame  = `data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\n"
	useFrame  = `data: {"id":"c","object":"chat.completion.chunk","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}` + "\n\n"
	doneFrame = "data: [DONE]\n\n"
	roleFrame = `data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n"
)

// P7: however an event is spelled and cut, it is seen, and the bytes
// "data: [DONE]" inside content do not end the stream.
func TestOddSpellings(t *testing.T) {
	s := ": ping\n\n" + "data:{\"choices\":[{\"index\":0,\"delta\":{\"content\":\"北京🌍\"}}]}\r\n\r\n" +
		"event: x\nid: 7\ndata: {\"choices\":[{\"index\":0,\ndata: \"delta\":{\"content\":\"say data: [DONE] now\"}}]}\n\n" +
		finFrame + useFrame + doneFrame
	r := checkCuts(t, "p7", KindChat, []byte(s), true)
	if r.End != EndOK || r.Violation != ViolationNone || r.Content != 2 || r.Usage != (Usage{7, 0, 3, true}) || r.CommitOffset != int64(len(": ping\n\n")) {
		t.Errorf("%+v", r)
	}
	for i := 0; i < len(s); i++ { // every place for one cut
		var o Observer
		o.Reset(KindChat)
		o.Feed([]byte(s[:i]))
		o.Feed([]byte(s[i:]))
		o.Close()
		if got := resultOf(&o); got != r {
			t.Fatalf("cut at %d:\n got %+v\nwant %+v", i, got, r)
		}
	}
	checkCuts(t, "lone CR", KindChat, []byte(strings.ReplaceAll(roleFrame+tok(1)+tok(2)+finFrame+doneFrame, "\n", "\r")), true)
	checkCuts(t, "CRLF", KindChat, []byte(strings.ReplaceAll(roleFrame+tok(1)+tok(2)+tok(3)+finFrame+doneFrame, "\n", "\r\n")), true)
	r = checkCuts(t, "no last blank line", KindChat, []byte(tok(1)+finFrame+"data: [DONE]"), true)
	if r.End != EndOK {
		t.Errorf("%+v", r)
	}
}

// P8: usage in every place it may stand.
func TestUsageInEveryShape(t *testing.T) {
	u := `,"usage":{"prompt_tokens":7,"completion_tokens":%d,"total_tokens":10,"prompt_tokens_details":{"cached_tokens":4}}`
	with := func(frame, usage string) string { return strings.Replace(frame, "}\n\n", usage+"}\n\n", 1) }
	all := ""
	for i := 1; i <= 3; i++ {
		all += with(tok(i), fmt.Sprintf(u, i))
	}
	u3 := fmt.Sprintf(u, 3)
	for name, s := range map[string]string{
		"own event":    tok(1) + tok(2) + tok(3) + finFrame + with(strings.Replace(finFrame, `[{"index":0,"delta":{},"finish_reason":"stop"}]`, "[]", 1), u3),
		"on finish":    tok(1) + tok(2) + tok(3) + with(finFrame, u3),
		"no delta":     tok(1) + tok(2) + tok(3) + with(strings.Replace(finFrame, `"delta":{},`, "", 1), u3),
		"every event":  all + with(finFrame, u3),
		"null, then":   with(tok(1), `,"usage":null`) + with(tok(2), `,"usage":null`) + with(tok(3), `,"usage":null`) + with(finFrame, u3),
		"usage first":  strings.ReplaceAll(all, `{"id": "c",`, `{"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}},"x":1,"id":"c",`) + with(finFrame, u3),
		"after others": with(finFrame, fmt.Sprintf(u, 99)) + with(finFrame, u3),
	} {
		r := checkCuts(t, name, KindChat, []byte(s+doneFrame), true)
		if r.Usage != (Usage{7, 4, 3, true}) || r.End != EndOK {
			t.Errorf("%s: %+v", name, r)
		}
	}
	if r := checkCuts(t, "none", KindChat, []byte(tok(1)+finFrame+doneFrame), true); r.Usage.Seen {
		t.Errorf("%+v", r)
	}
}

func TestWhatCommits(t *testing.T) {
	delta := func(d string) string {
		return `data: {"id":"c","choices":[{"index":0,"delta":` + d + `,"finish_reason":null}]}` + "\n\n"
	}
	for name, c := range map[string]struct {
		s    string
		want bool
	}{
		"comment":            {": ping\n\n: ping\n\n", false},
		"role":               {roleFrame, false},
		"empty content":      {delta(`{"content":""}`), false},
		"null content":       {delta(`{"content":null}`), false},
		"empty reasoning":    {delta(`{"reasoning":"","content":null}`), false},
		"no calls":           {delta(`{"content":null,"tool_calls":[]}`), false},
		"usage":              {useFrame, false},
		"error":              {"data: {\"error\": {\"message\": \"x\"}}\n\n", false},
		"done":               {doneFrame, false},
		"abort":              {strings.Replace(finFrame, "stop", "abort", 1), false},
		"abort with text":    {strings.Replace(tok(1), "null", `"abort"`, 1), false},
		"half an event":      {tok(1)[:len(tok(1))-1], false},
		"empty text":         {`data: {"choices":[{"index":0,"text":"","finish_reason":null}]}` + "\n\n", false},
		"message_start":      {"event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"x\",\"content\":[]}}\n\n", false},
		"block start":        {"event: content_block_start\ndata: {\"type\":\"content_block_start\",\"content_block\":{\"type\":\"text\",\"text\":\"\"},\"index\":0}\n\n", false},
		"ping event":         {"event: ping\ndata: {\"type\":\"ping\"}\n\n", false},
		"response.created":   {"event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"r\"}}\n\n", false},
		"message item":       {"data: {\"type\":\"response.output_item.added\",\"item\":{\"type\":\"message\"}}\n\n", false},
		"content":            {tok(1), true},
		"text":               {`data: {"choices":[{"index":0,"text":"x","finish_reason":null}]}` + "\n\n", true},
		"reasoning":          {delta(`{"reasoning":"hm"}`), true},
		"reasoning_content":  {delta(`{"reasoning_content":"hm"}`), true},
		"refusal":            {delta(`{"refusal":"no"}`), true},
		"tool call":          {delta(`{"tool_calls":[{"index":0,"id":"a","function":{"name":"f"}}]}`), true},
		"finish":             {finFrame, true},
		"tool_use":           {"data: {\"type\":\"content_block_start\",\"content_block\":{\"type\":\"tool_use\",\"id\":\"t\",\"name\":\"f\"},\"index\":0}\n\n", true},
		"stop_reason":        {"data: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"}}\n\n", true},
		"function item":      {"data: {\"type\":\"response.output_item.added\",\"item\":{\"type\":\"function_call\",\"id\":\"i\"}}\n\n", true},
		"response.completed": {"event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"r\",\"usage\":{\"input_tokens\":7,\"output_tokens\":3}}}\n\n", true},
	} {
		var o Observer
		o.Reset(KindChat)
		lead := ": hello\n\n" + roleFrame
		o.Feed([]byte(lead))
		o.Feed([]byte(c.s))
		if o.Committed != c.want {
			t.Errorf("%s: committed %v", name, o.Committed)
		}
		if c.want && o.CommitOffset != int64(len(lead)) {
			t.Errorf("%s: CommitOffset %d, want %d", name, o.CommitOffset, len(lead))
		}
		if failed := name == "error" || name == "done" || strings.HasPrefix(name, "abort"); o.Failed() != failed {
			t.Errorf("%s: failed %v", name, o.Failed())
		}
		checkCuts(t, name, KindChat, []byte(lead+c.s), false)
	}
}

func TestEndings(t *testing.T) {
	completed := "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"r\",\"usage\":{\"input_tokens\":7,\"output_tokens\":3,\"total_tokens\":10}}}\n\n"
	for name, c := range map[string]struct {
		s     string
		whole bool
		end   Ending
		v     Violation
	}{
		"healthy":                 {tok(1) + finFrame + doneFrame, true, EndOK, ViolationNone},
		"healthy, reset after":    {tok(1) + finFrame + doneFrame, false, EndOK, ViolationNone},
		"no [DONE], clean":        {tok(1) + finFrame, true, EndOK, ViolationNone},
		"no [DONE], reset":        {tok(1) + finFrame, false, EndTruncated, Truncated},
		"no finish":               {tok(1) + doneFrame, true, EndOK, MissingFinish},
		"n=2, one without finish": {tok(1) + strings.Replace(tok(2), `"index": 0`, `"index": 1`, 1) + finFrame + doneFrame, true, EndOK, MissingFinish},
		"nothing":                 {"", true, EndTruncated, Truncated},
		"reset":                   {tok(1) + tok(2), false, EndTruncated, Truncated},
		"clean cut":               {tok(1) + tok(2), true, EndTruncated, Truncated},
		"inside a line":           {tok(1) + `data: {"id":"c","cho`, false, EndTruncated, Truncated},
		"inside a line, clean":    {tok(1) + `data: {"id":"c","cho`, true, EndTruncated, Truncated},
		"only [DONE]":             {doneFrame, true, EndEmpty, DoneWithoutContent},
		"role and [DONE]":         {roleFrame + doneFrame, true, EndEmpty, DoneWithoutContent},
		"empty answer":            {roleFrame + finFrame + doneFrame, true, EndOK, ViolationNone},
		"abort":                   {tok(1) + strings.Replace(finFrame, "stop", "abort", 1) + doneFrame, true, EndAbort, AbortAsSuccess},
		"error then done":         {tok(1) + "data: {\"error\": {\"message\": \"EngineCore encountered an issue.\", \"code\": 500}}\n\n" + doneFrame, true, EndError, ViolationNone},
		"error as text":           {"data: {\"error\":\"boom\"}\n\n", true, EndError, ViolationNone},
		"old error":               {"data: {\"object\":\"error\",\"message\":\"m\",\"code\":400}\n\n" + doneFrame, true, EndError, ViolationNone},
		"error null":              {strings.Replace(tok(1), `{"id"`, `{"error":null,"id"`, 1) + finFrame + doneFrame, true, EndOK, ViolationNone},
		"finish error":            {tok(1) + strings.Replace(finFrame, "stop", "error", 1) + doneFrame, true, EndError, ViolationNone},
		"event: error":            {"event: error\ndata: overloaded\n\n", true, EndError, ViolationNone},
		"responses alone":         {completed, true, EndOK, ViolationNone},
		"responses, cut":          {strings.Replace(completed, "completed", "created", 2), true, EndTruncated, Truncated},
		"responses failed":        {"data: {\"type\":\"response.failed\",\"response\":{\"id\":\"r\",\"error\":{\"code\":\"server_error\",\"message\":\"m\"}}}\n\n", true, EndError, ViolationNone},
		"message_stop alone":      {"data: {\"type\":\"message_stop\"}\n\n", true, EndEmpty, DoneWithoutContent},
		"anthropic error":         {"event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"busy\"}}\n\n", true, EndError, ViolationNone},
	} {
		if r := checkCuts(t, name, KindChat, []byte(c.s), c.whole); r.End != c.end || r.Violation != c.v {
			t.Errorf("%s: %v %v: %+v", name, r.End, r.Violation, r)
		}
	}
}

// healthyNames are streams for the benchmarks, too.
func BenchmarkObserve(b *testing.B) {
	for _, name := range []string{"sigterm_chat_stream_running", "sigterm_stream_running", "drain_stream_queued", "chat_stream_tool_required", "responses_stream", "messages_stream"} {
		stream, _ := recorded(b, name+".http")
		var pieces [][]byte
		for p := stream; len(p) > 0; {
			i := bytes.Index(p, []byte("\n\n")) + 2
			pieces = append(pieces, p[:i])
			p = p[i:]
		}
		b.Run(name, func(b *testing.B) {
			var o Observer
			b.ReportAllocs()
			for b.Loop() {
				o.Reset(KindChat)
				for _, p := range pieces {
					o.Feed(p)
				}
				o.Close()
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(pieces)), "ns/event")
		})
	}
}

func TestObserveDoesNotAllocate(t *testing.T) {
	for _, name := range []string{"chat_stream_n2", "chat_stream_usage_continuous", "sigterm_stream_running", "chat_stream_tool_named", "responses_stream", "messages_stream"} {
		stream, _ := recorded(t, name+".http")
		var o Observer
		expect := []string{"tiny"}
		run := func() {
			o.Reset(KindChat, expect...)
			o.Feed(stream)
			o.Close()
		}
		run()
		if n := testing.AllocsPerRun(20, run); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

// A stream or body of unusual size does not stay in memory with the reused
// values (ten thousand flights may hold one each).
func TestReuseKeepsLittle(t *testing.T) {
	var o Observer
	o.Reset(KindChat)
	big := strings.Repeat("y", 200<<10)
	for i := range 20 {
		s := toolDelta(i, fmt.Sprintf(`,"id":"i%d","function":{"name":"f","arguments":%q}`, i, big))
		o.Feed([]byte(s[:1000]))
		o.Feed([]byte(s[1000:]))
	}
	o.Feed([]byte(strings.ReplaceAll(tok(1), "t1", big) + strings.ReplaceAll(tok(1), "t1", big)))
	o.Reset(KindChat)
	kept := cap(o.line) + cap(o.data) + cap(o.scratch)
	for _, c := range o.calls[:cap(o.calls)] {
		kept += cap(c.args)
	}
	for _, m := range o.templates {
		kept += cap(m.text)
	}
	if kept > 4*keepBytes {
		t.Errorf("the observer keeps %d bytes", kept)
	}
	var b Body
	body := `{"` + strings.Repeat(`\u0061`, 300<<10) + `":1,"model":"m","prompt":"` + strings.Repeat(`\n`, 1<<20) + `"}`
	if e := b.Scan(KindCompletions, jsonType, []byte(body)); e != nil {
		t.Fatal(e)
	}
	if kept = cap(b.scratch) + 8*cap(b.Blocks); kept > 8*keepBytes {
		t.Errorf("the body scan keeps %d bytes", kept)
	}
}
