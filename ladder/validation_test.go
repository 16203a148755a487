package ladder

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A slip in a prompts file is told; read past, it would let any answer pass.
func TestPromptsAreReadStrictly(t *testing.T) {
	file := filepath.Join(t.TempDir(), "checks.jsonl")
	for text, want := range map[string]string{
		`{"prompt":"hello","contains":"hello"}`:        "",
		`{"messages":[{"role":"user","content":"x"}]}`: "",
		"\n" + `{"prompt":"hello","contain":"hello"}`:  `checks.jsonl:2: not a line of JSON like {"prompt": "...", "contains": "..."}: json: unknown field "contain"`,
		`{"prompt":"a"} {"prompt":"b"}`:                "more than one value",
		`{"contains":"x"}`:                             `needs "prompt" or "messages"`,
		"\n":                                           "holds no prompt",
		`[]`:                                           "checks.jsonl:1: ",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		list, err := readPrompts(file)
		if want == "" && (err != nil || len(list) != 1) || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %d prompts, %v; want %q", text, len(list), err, want)
		}
	}
}

// A bad answer is a fail; where the replica gives none, nothing is known of its
// answers, unless those before it were too bad already.
func TestABadAnswerIsAFailAndNoAnswerIsNone(t *testing.T) {
	leave := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		switch text := string(b); {
		case strings.Contains(text, "hang"):
			select {
			case <-leave:
			case <-r.Context().Done():
			}
		case strings.Contains(text, "busy"):
			w.WriteHeader(http.StatusServiceUnavailable)
		case strings.Contains(text, "unknown"):
			w.WriteHeader(http.StatusNotFound)
		case strings.Contains(text, "cut"):
			panic(http.ErrAbortHandler)
		default:
			_ = json.NewEncoder(w).Encode(map[string]any{"choices": []any{map[string]any{"message": map[string]string{"content": "It is Yes."}}}})
		}
	}))
	defer s.Close()
	defer close(leave)
	file := filepath.Join(t.TempDir(), "checks.jsonl")
	const good, bad, hang, busy, unknown, cut = `{"prompt":"x","contains":"yes"}`, `{"prompt":"x","contains":"no"}`, `{"prompt":"hang"}`, `{"prompt":"busy"}`, `{"prompt":"unknown"}`, `{"prompt":"cut"}`
	for _, c := range []struct {
		prompts []string
		pass    float64
		share   float64
		failed  string // in the result
		none    string // in the error
		asked   int
	}{
		{prompts: []string{good, good}, pass: 1, share: 1, asked: 2},
		{prompts: []string{good, bad, good, good}, pass: 0.75, share: 0.75, asked: 4},
		{prompts: []string{good, bad, good}, pass: 0.75, share: 2. / 3, failed: `2 of 3 prompts passed, 75 % are needed; prompt 2: answer does not contain "no"`, asked: 3},
		{prompts: []string{unknown}, pass: 1, failed: "status 404", asked: 1},
		{prompts: []string{hang, good}, pass: 1, none: "prompt 1 of 2: no answer within 200ms", asked: 1}, // the first: a good one may take longer on a loaded machine
		{prompts: []string{busy, good}, pass: 1, none: "prompt 1 of 2: status 503", asked: 1},
		{prompts: []string{good, cut}, pass: 1, none: "prompt 2 of 2", asked: 2},
		{prompts: []string{bad, busy, good}, pass: 0.6, none: "prompt 2 of 3: status 503", asked: 2},
		{prompts: []string{bad, busy, good}, pass: 0.7, failed: "0 of 3 prompts passed", asked: 2},
	} {
		if err := os.WriteFile(file, []byte(strings.Join(c.prompts, "\n")), 0o600); err != nil {
			t.Fatal(err)
		}
		v := Validation{Route: "r", Pool: "p", Model: "m", Prompts: file, Pass: c.pass}
		asked := 0
		timeout := 200 * time.Millisecond
		if !strings.Contains(strings.Join(c.prompts, ""), hang) {
			timeout = time.Minute
		}
		res, err := v.Validate(t.Context(), Run{Replica: s.URL, Timeout: timeout, Asking: func(int, int) { asked++ }, Answered: func(int, int, error) {}})
		switch {
		case c.none != "":
			if err == nil || !strings.Contains(err.Error(), c.none) {
				t.Errorf("%v at %g: %v, %+v; want no result for %q", c.prompts, c.pass, err, res, c.none)
			}
		case err != nil || res.Share != c.share && c.failed == "" || (res.Failed == "") != (c.failed == "") || !strings.Contains(res.Failed, c.failed):
			t.Errorf("%v at %g: %v, %+v; want %g %q", c.prompts, c.pass, err, res, c.share, c.failed)
		}
		if asked != c.asked {
			t.Errorf("%v: %d prompts were asked, want %d", c.prompts, asked, c.asked)
		}
	}
}

// The last result counts, and a pass for 24 h.
func TestTheLastResultOfATierCounts(t *testing.T) {
	now := time.Now()
	v := &Validation{Route: "r", Pool: "p", Model: "m", Pass: 0.9}
	for want, r := range map[string]Record{
		"":                          {v.Key(): {At: now.Add(-23 * time.Hour), Share: 0.9}},
		"within 24h (the last one":  {v.Key(): {At: now.Add(-25 * time.Hour), Share: 1}},
		"within 24h":                {},
		"failed its validation of ": {v.Key(): {At: now, Share: 0.95, Failed: "x"}},
		"80 %":                      {v.Key(): {At: now, Share: 0.8}},
	} {
		if why := r.Why(v, now); r.Good(v, now) != (want == "") || !strings.Contains(why, want) {
			t.Errorf("%+v: %q, want %q", r, why, want)
		}
	}
}
