package replica

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"testing"
	"time"
)

func start(t testing.TB, o Options) *Server {
	t.Helper()
	s, err := Start(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// shape is the skeleton of a JSON value: names and types, not values.
func shape(v any) string {
	switch x := v.(type) {
	case map[string]any:
		keys := make([]string, 0, len(x))
		for k := range x {
			keys = append(keys, k)
		}
		sort.Strings(keys)
		var b strings.Builder
		b.WriteByte('{')
		for _, k := range keys {
			fmt.Fprintf(&b, "%s:%s ", k, shape(x[k]))
		}
		return b.String() + "}"
	case []any:
		set := map[string]bool{}
		for _, e := range x {
			set[shape(e)] = true
		}
		return fmt.Sprint(sortedKeys(set))
	case string:
		return "string"
	case float64:
		return "number"
	case bool:
		return "bool"
	}
	return "null"
}

func sortedKeys(m map[string]bool) []string {
	out := make([]string, 0, len(m))
	for k := range m {
		out = append(out, k)
	}
	sort.Strings(out)
	return out
}

// exchange sends raw request bytes and reads the answer.
func exchange(t *testing.T, addr string, req []byte) (*http.Response, []byte) {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := c.Write(req); err != nil {
		t.Fatal(err)
	}
	return answerOf(t, c, req)
}

func answerOf(t *testing.T, r io.Reader, req []byte) (*http.Response, []byte) {
	t.Helper()
	method, _, _ := strings.Cut(string(req), " ")
	resp, err := http.ReadResponse(bufio.NewReader(r), &http.Request{Method: method})
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, body
}

// events are the shapes of a stream's events, each once.
func events(body []byte) []string {
	set := map[string]bool{}
	for _, ev := range strings.Split(string(body), "\n\n") {
		name := ""
		for _, line := range strings.Split(ev, "\n") {
			if n, ok := strings.CutPrefix(line, "event: "); ok {
				name = n
			}
			if d, ok := strings.CutPrefix(line, "data: "); ok {
				var v any
				if json.Unmarshal([]byte(d), &v) != nil {
					set[d] = true
					continue
				}
				set[name+" "+shape(v)] = true
			}
		}
	}
	return sortedKeys(set)
}

// Every recorded exchange with a real vLLM 0.32 must come out in the same
// shape: status, headers, member names and types, kinds of events.
func TestShapesAreVLLMs(t *testing.T) {
	s := start(t, Options{MaxModelLen: 2048, APIKey: "sk-local-fixture", Dev: true, Speed: 20})
	reqs, err := filepath.Glob("testdata/*.req")
	if err != nil || len(reqs) < 50 {
		t.Fatalf("fixtures: %d, %v", len(reqs), err)
	}
	for _, path := range reqs {
		name := strings.TrimSuffix(filepath.Base(path), ".req")
		t.Run(name, func(t *testing.T) {
			req, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			raw, err := os.ReadFile(strings.TrimSuffix(path, ".req") + ".http")
			if err != nil {
				t.Fatal(err)
			}
			want, wantBody := answerOf(t, bytes.NewReader(raw), req)
			got, gotBody := exchange(t, s.Addr(), req)
			if got.StatusCode != want.StatusCode {
				t.Fatalf("status %d, want %d: %s", got.StatusCode, want.StatusCode, gotBody)
			}
			for h := range want.Header {
				if _, ok := got.Header[h]; !ok && h != "Vary" {
					t.Errorf("no header %s", h)
				}
			}
			if a, b := got.Header.Get("Content-Type"), want.Header.Get("Content-Type"); a != b {
				t.Errorf("content type %q, want %q", a, b)
			}
			if strings.HasPrefix(want.Header.Get("Content-Type"), "text/event-stream") {
				a, b := events(gotBody), events(wantBody)
				if fmt.Sprint(a) != fmt.Sprint(b) {
					t.Errorf("events\n%s\nwant\n%s", strings.Join(a, "\n"), strings.Join(b, "\n"))
				}
				return
			}
			if strings.HasPrefix(name, "err_") && name != "err_model_missing_field" && name != "err_trailing_slash" || strings.Contains(name, "401") {
				if string(gotBody) != string(wantBody) {
					t.Errorf("body %s\nwant %s", gotBody, wantBody)
				}
				return
			}
			var a, b any
			_ = json.Unmarshal(gotBody, &a)
			_ = json.Unmarshal(wantBody, &b)
			if shape(a) != shape(b) {
				t.Errorf("body %s\nwant the shape of %s\n%s\n%s", gotBody, wantBody, shape(a), shape(b))
			}
		})
	}
}

func TestContextTooLongIsVLLMs(t *testing.T) {
	s := start(t, Options{MaxModelLen: 100})
	body := fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":5}`, strings.Repeat("abcd", 100))
	resp, err := http.Post(s.URL()+"/v1/completions", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, _ := io.ReadAll(resp.Body)
	want := `{"error":{"message":"This model's maximum context length is 100 tokens. However, your prompt contains at least 100 input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value=100)","type":"BadRequestError","param":"input_tokens","code":400}}`
	if resp.StatusCode != 400 || string(b) != want {
		t.Fatalf("%d %s", resp.StatusCode, b)
	}
}
