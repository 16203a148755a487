package wire

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
)

// The contract's rows, written out a second time on purpose: a change of the
// table must be a change of the contract.
func TestErrorTableIsTheContract(t *testing.T) {
	want := map[string]int{
		"invalid_request": 400, "context_length_exceeded": 400, "invalid_api_key": 401, "invalid_token": 401,
		"model_not_found": 404, "request_too_large": 413, "rate_limited": 429, "budget_exceeded": 429,
		"ERR_RETRY_STORM_DETECTED": 429, "upstream_error": 502, "capacity_exhausted": 503, "concurrency_limit": 503,
		"no_permitted_replica": 503, "jwks_unavailable": 503, "budget_store_unavailable": 503, "NAME_unavailable": 503,
		"deadline_exceeded": 504, "upstream_stream_failed": 502, "stream_integrity": 502,
	}
	seen := map[string]bool{}
	for _, e := range ErrorTable() {
		if seen[e.Code] {
			t.Errorf("%s is there twice", e.Code)
		}
		seen[e.Code] = true
		if s, ok := want[e.Code]; ok && s != e.Status {
			t.Errorf("%s: status %d, want %d", e.Code, e.Status, s)
		}
		if has := e.RetryAfter > 0; has != (e.Status == 429 || e.Status == 503) {
			t.Errorf("%s (%d): RetryAfter %v", e.Code, e.Status, e.RetryAfter)
		}
	}
	for c := range want {
		if !seen[c] {
			t.Errorf("%s is missing", c)
		}
	}
}

func TestRetryHeaders(t *testing.T) {
	for _, c := range []struct {
		after     float64
		s, ms     string
		code      string
		should    bool
		setShould bool
	}{
		{after: 0.0004, s: "1", ms: "1", code: CodeCapacityExhausted, should: true},
		{after: 0.25, s: "1", ms: "250", code: CodeCapacityExhausted, should: true},
		{after: 1.0001, s: "2", ms: "1001", code: CodeRateLimited, should: true},
		{after: 7, s: "7", ms: "7000", code: CodeRateLimited, should: false, setShould: true},
		{after: -3, s: "1", ms: "1000", code: CodeConcurrencyLimit, should: true},
		{after: math.NaN(), s: "1", ms: "1000", code: CodeConcurrencyLimit, should: true},
		{after: math.Inf(1), s: "2592000", ms: "2592000000", code: CodeConcurrencyLimit, should: true},
		{after: 5, s: "", ms: "", code: CodeUpstreamError, should: false},
		{after: 0, s: "", ms: "", code: CodeDeadlineExceeded, should: false},
	} {
		e := NewError(c.code, "x")
		e.RetryAfter = c.after
		if c.setShould {
			e.Retry = c.should
		}
		h := map[string]string{}
		e.EachHeader(func(k, v string) { h[k] = v })
		want := map[bool]string{true: "true", false: "false"}[c.should]
		if h["Retry-After"] != c.s || h["retry-after-ms"] != c.ms || h["x-should-retry"] != want {
			t.Errorf("%s %v: got %v", c.code, c.after, h)
		}
	}
}

func TestErrorShapes(t *testing.T) {
	e := NewError(CodeModelNotFound, "no pool serves %q \x01\xff\u2028", "m\n")
	e.Param = "model"
	type object struct {
		Message, Type, Code string
		Param               *string
	}
	var oa struct{ Error object }
	if err := json.Unmarshal(e.AppendBody(nil, KindChat), &oa); err != nil {
		t.Fatal(err)
	}
	if oa.Error.Code != "model_not_found" || *oa.Error.Param != "model" || oa.Error.Type != "not_found_error" ||
		!strings.Contains(oa.Error.Message, "\x01\ufffd\u2028") {
		t.Errorf("openai shape: %+v", oa)
	}
	var an struct {
		Type  string
		Error object
	}
	if err := json.Unmarshal(e.AppendBody(nil, KindMessages), &an); err != nil {
		t.Fatal(err)
	}
	if an.Type != "error" || an.Error.Type != "not_found_error" || an.Error.Message == "" {
		t.Errorf("anthropic shape: %+v", an)
	}

	e = NewError(CodeUpstreamStreamFailed, "replica a:1 closed in mid-stream")
	for k, prefix := range map[Kind]string{KindChat: "data: {\"error\":{", KindCompletions: "data: {\"error\":{",
		KindMessages: "event: error\ndata: {\"type\":\"error\"", KindResponses: "event: error\ndata: {\"type\":\"error\""} {
		ev := string(e.AppendEvent(nil, k))
		if !strings.HasPrefix(ev, prefix) || !strings.HasSuffix(ev, "}\n\n") || strings.Count(ev, "\n\n") != 1 {
			t.Errorf("%v: %q", k, ev)
		}
		var any struct{ Error object }
		if err := json.Unmarshal([]byte(ev[strings.Index(ev, "{"):]), &any); err != nil || any.Error.Code != "upstream_stream_failed" {
			t.Errorf("%v: %q: %v", k, ev, err)
		}
	}
	if c := ServiceUnavailable("retriever", "down"); c.Code != "retriever_unavailable" || c.Status != 503 {
		t.Errorf("%+v", c)
	}
}

func TestKindOf(t *testing.T) {
	for p, want := range map[string]Kind{
		"/v1/chat/completions": KindChat, "/v1/completions": KindCompletions, "/v1/responses": KindResponses,
		"/v1/messages": KindMessages, "/v1/embeddings": KindEmbeddings, "/v1/rerank": KindRerank, "/rerank": KindRerank,
		"/v2/rerank": KindRerank, "/v1/score": KindScore, "/score": KindScore, "/v1/audio/transcriptions": KindAudio,
		"/v1/audio/translations": KindAudio, "/tokenize": KindTokenize, "/detokenize": KindDetokenize, "/v1/models": KindModels,
		"/v1/models?limit=2": KindModels,
	} {
		if k, ok := KindOf(p); k != want || !ok {
			t.Errorf("%s: %v %v", p, k, ok)
		}
	}
	for _, p := range []string{"", "/", "/v1/chat/completions/", "//v1/chat/completions", "/v1/Chat/completions",
		"/v1/%63hat/completions", "/v1/chat/../chat/completions", "/v1/embeddings;x", "/metrics"} {
		if k, ok := KindOf(p); ok || k != KindNone {
			t.Errorf("%q: %v", p, k)
		}
	}
	if KindCount != int(KindModels)+1 {
		t.Error("a kind has no word")
	}
}
