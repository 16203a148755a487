package wire

import (
	"bytes"
	"os"
	"strconv"
	"strings"
	"testing"
)

func recordedAnswer(t *testing.T, name string) (status int, body []byte) {
	t.Helper()
	b, err := os.ReadFile("testdata/vllm/" + name + ".http")
	if err != nil {
		t.Fatal(err)
	}
	head, body, _ := bytes.Cut(b, []byte("\r\n\r\n"))
	status, _ = strconv.Atoi(strings.Fields(string(head))[1])
	return status, body
}

func TestRecordedAnswers(t *testing.T) {
	for name, c := range map[string]struct {
		kind  Kind
		want  Answer
		calls int
	}{
		"chat_nonstream":                 {KindChat, Answer{Usage: Usage{25, 0, 12, true}, Finish: "length", Model: "tiny", Choices: 1, Text: true}, 0},
		"chat_nonstream_n2":              {KindChat, Answer{Usage: Usage{25, 0, 24, true}, Finish: "length", Model: "tiny", Choices: 2, Text: true}, 0},
		"chat_nonstream_tool_required":   {KindChat, Answer{Usage: Usage{119, 96, 59, true}, Finish: "tool_calls", Model: "tiny", Choices: 1, Calls: 1, Text: true}, 1},
		"completion_nonstream_n2":        {KindCompletions, Answer{Usage: Usage{6, 0, 20, true}, Finish: "length", Model: "tiny", Choices: 2, Text: true}, 0},
		"responses_nonstream":            {KindResponses, Answer{Usage: Usage{10, 0, 16, true}, Finish: "length", Model: "tiny", Choices: 1, Text: true}, 0},
		"messages_nonstream":             {KindMessages, Answer{Usage: Usage{10, 0, 8, true}, Finish: "max_tokens", Model: "tiny", Choices: 1, Text: true}, 0},
		"sigterm_nonstream_queued":       {KindCompletions, Answer{Usage: Usage{20, 0, 0, true}, Finish: "abort", Model: "tiny", Choices: 1, Aborted: true, Violation: AbortAsSuccess}, 0},
		"sigterm_nonstream_running":      {KindCompletions, Answer{Usage: Usage{3, 0, 242, true}, Finish: "abort", Model: "tiny", Choices: 1, Text: true, Aborted: true, Violation: AbortAsSuccess}, 0},
		"draining_new_completion_tokens": {KindCompletions, Answer{Usage: Usage{3, 0, 0, true}, Finish: "abort", Model: "tiny", Choices: 1, Aborted: true, Violation: AbortAsSuccess}, 0},
	} {
		_, body := recordedAnswer(t, name)
		if got := ParseAnswer(c.kind, body, "tiny"); got != c.want {
			t.Errorf("%s:\n got %+v\nwant %+v", name, got, c.want)
		}
		if got := ParseAnswer(c.kind, body, "tiny"); got.Failed() != c.want.Aborted {
			t.Errorf("%s: failed %v", name, got.Failed())
		}
		if got := ParseAnswer(c.kind, body, "other"); got.Violation == ViolationNone {
			t.Errorf("%s: another model was taken", name)
		}
		if got := ParseAnswer(c.kind, body[:len(body)-1]); !got.Failed() || got.Violation != BrokenJSON {
			t.Errorf("%s cut: %+v", name, got)
		}
	}
	for body, want := range map[string]ErrorClass{
		`{"error":{"message":"cannot schedule new futures after shutdown","code":500}}`: ErrorDraining,
		`{"object":"error","message":"x","code":400}`:                                   ErrorClient,
		`{"error":"boom"}`: ErrorServer,
		`{"object":"list","data":[{"embedding":[0.1]}],"usage":{"prompt_tokens":3,"total_tokens":3}}`: ErrorNone,
		`{"error":null,"choices":[{"message":{"content":"x"},"finish_reason":"stop"}]}`:               ErrorNone,
	} {
		if a := ParseAnswer(KindEmbeddings, []byte(body)); a.Err != want || a.Failed() != (want != ErrorNone) {
			t.Errorf("%s: %+v", body, a)
		}
	}
	if a := ParseAnswer(KindAudio, []byte("hello world")); a.Failed() {
		t.Errorf("a transcript as text: %+v", a)
	}
	if a := ParseAnswer(KindChat, nil); !a.Failed() {
		t.Errorf("nothing: %+v", a)
	}
}

func TestClassifyRecordedErrors(t *testing.T) {
	for name, want := range map[string]ErrorClass{
		"draining_new_chat":                  ErrorDraining,
		"draining_new_chat_stream":           ErrorDraining,
		"draining_new_completion":            ErrorDraining,
		"draining_new_tokenize":              ErrorDraining,
		"kill9engine_new_request":            ErrorEngineDead,
		"err_engine_dead_chat_500":           ErrorEngineDead,
		"err_engine_dead_chat_stream_500":    ErrorEngineDead,
		"err_engine_died_during_request_500": ErrorEngineDead,
		"err_queue_overflow_503":             ErrorBusy,
		"err_queue_overflow_chat_503":        ErrorBusy,
		"err_queue_overflow_stream_503":      ErrorBusy,
		"err_bad_temperature":                ErrorClient,
		"err_context_too_long_chat_400":      ErrorClient,
		"err_unknown_model_404":              ErrorClient,
		"err_no_such_route_404":              ErrorClient,
		"err_wrong_method_405":               ErrorClient,
		"chat_badkey_401":                    ErrorClient,
		"err_trailing_slash":                 ErrorServer, // a redirect, never passed on
		"chat_nonstream":                     ErrorNone,
	} {
		status, body := recordedAnswer(t, name)
		if got := ClassifyError(status, body); got != want {
			t.Errorf("%s (%d): %v, want %v", name, status, got, want)
		}
	}
	// A client cannot take a replica out by what it writes.
	if got := ClassifyError(400, []byte(`{"error":{"message":"bad: cannot schedule new futures after shutdown EngineDeadError"}}`)); got != ErrorClient {
		t.Errorf("echoed text: %v", got)
	}
	if got := ClassifyError(429, nil); got != ErrorBusy {
		t.Errorf("429: %v", got)
	}
}

func BenchmarkParseAnswer(b *testing.B) {
	for _, name := range []string{"chat_nonstream", "sigterm_nonstream_running", "responses_nonstream"} {
		raw, err := os.ReadFile("testdata/vllm/" + name + ".http")
		if err != nil {
			b.Fatal(err)
		}
		_, body, _ := bytes.Cut(raw, []byte("\r\n\r\n"))
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(body)))
			for b.Loop() {
				ParseAnswer(KindChat, body, "tiny")
			}
		})
	}
}
