package apptest

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// recorded is one answer of a real vLLM 0.32 with the request that led to it
// (testdata/vllm, from shared/fixtures/vllm).
type recorded struct {
	name string
	path string
	req  string // request body
	wire []byte // the answer's bytes as they came
	body []byte // its body without framing, as far as it came
}

func load(t *testing.T, name string) recorded {
	t.Helper()
	req, err := os.ReadFile("testdata/vllm/" + name + ".req")
	if err != nil {
		t.Fatal(err)
	}
	wire, err := os.ReadFile("testdata/vllm/" + name + ".http")
	if err != nil {
		t.Fatal(err)
	}
	f := recorded{name: name, wire: wire}
	f.path = strings.Fields(string(req))[1]
	_, f.req, _ = strings.Cut(string(req), "\r\n\r\n")
	if resp, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(wire)), nil); err == nil {
		f.body, _ = io.ReadAll(resp.Body)
	}
	return f
}

// play answers with the recorded bytes, cut as a network may cut them.
func (f recorded) play(c *conn) {
	for w := f.wire; len(w) > 0; {
		n := min(1500, len(w))
		c.send(string(w[:n]))
		w = w[n:]
	}
	time.Sleep(5 * time.Millisecond)
	c.close()
}

// tiny is a replica of the recorded model.
func tiny(t *testing.T, h func(*conn)) *mock {
	return newMock(t, mockOpts{Handle: h, Models: []string{"tiny"}})
}

// TestVLLMAnswersPassUnchanged: what a healthy vLLM says arrives byte for byte.
func TestVLLMAnswersPassUnchanged(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"chat_stream", "chat_stream_usage", "completion_stream", "chat_nonstream", "messages_stream",
		"responses_stream", "chat_stream_tool_auto", "err_context_too_long_chat_400"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := load(t, name)
			u1 := tiny(t, f.play)
			r := start(t, "", u1)
			a := r.post(f.path, f.req)
			if a.ReadErr != nil || !bytes.Equal(a.Body, f.body) {
				t.Errorf("got  %q (%v)\nwant %q", a.Body, a.ReadErr, f.body)
			}
			if want := string(f.wire[9:12]); strconv.Itoa(a.Status) != want {
				t.Errorf("status %d, want %s", a.Status, want)
			}
			if got := u1.reqs()[0].Body; string(got) != f.req {
				t.Errorf("the replica read %q, want %q", got, f.req)
			}
			r.wantMetric(0, "penstock_stream_integrity_total")
			r.wantMetric(0, "penstock_replica_ejections_total")
		})
	}
}

// TestVLLMFailuresBeforeContent: what a dying, draining or full vLLM answers
// before an answer began is not shown to the client; the other replica answers.
// Some of these are 200s that look like success.
func TestVLLMFailuresBeforeContent(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]struct {
		state string        // of the replica after it; "" = not looked at
		alone time.Duration // for so long it gets nothing more
	}{
		"sigterm_stream_queued":                 {},
		"sigterm_nonstream_queued":              {},
		"sigterm_nonstream_running":             {},
		"kill9api_nonstream_running":            {},
		"kill9api_stream_queued":                {},
		"kill9engine_stream_queued":             {},
		"kill9engine_nonstream_running":         {},
		"kill9worker_nonstream_queued":          {},
		"draining_new_chat":                     {"draining", 300 * time.Second},
		"draining_new_chat_stream":              {"draining", 300 * time.Second},
		"draining_new_completion_tokens":        {},
		"draining_new_completion_tokens_stream": {},
		"err_queue_overflow_503":                {"busy", time.Second},
		"err_queue_overflow_stream_503":         {"busy", time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := load(t, name)
			path := strings.TrimSuffix(f.path, "/")
			first := make(chan *mock, 1)
			var us [2]*mock
			for i := range us {
				us[i] = tiny(t, func(c *conn) {
					select {
					case first <- c.m:
						f.play(c)
					default:
						c.ok()
					}
				})
			}
			r := start(t, "", us[0], us[1])
			a := r.post(path, f.req)
			wantOK(t, a)
			if bytes.Contains(a.Body, []byte("abort")) || !bytes.Contains(a.Body, []byte("t1")) {
				t.Errorf("the client got %.400q, want the healthy replica's answer", a.Body)
			}
			bad := <-first
			first <- bad
			if want.state == "" {
				return
			}
			if s := r.stateOf(bad); s != want.state && s != "ejected" {
				t.Errorf("the replica is %q, want %q", s, want.state)
			}
			for range 10 {
				wantOK(t, r.post(path, f.req))
			}
			reqs := bad.reqs()
			for _, more := range reqs[1:] { // on a slow machine one that was busy may have its turn again
				if after := more.At.Sub(reqs[0].At); after < want.alone {
					t.Errorf("%v after such an answer the replica got one more request", after)
				}
			}
		})
	}
}

// TestVLLMFailuresMidStream: after content came the client gets what came, one
// error event and no end that looks like success.
func TestVLLMFailuresMidStream(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"sigterm_chat_stream_running", "kill9api_chat_stream_running", "kill9engine_chat_stream_running"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := load(t, name)
			u1, u2 := tiny(t, f.play), tiny(t, f.play)
			r := start(t, "", u1, u2)
			a := r.post(f.path, f.req)
			begun := f.body[:len(f.body)/2]
			if a.Status != 200 || !bytes.HasPrefix(a.Body, begun) {
				t.Errorf("status %d; what came before the failure is not what the replica sent", a.Status)
			}
			if _, ok := errorEvent(a.Body); !ok {
				t.Errorf("no error event; the stream ended with %q", a.Body[max(0, len(a.Body)-300):])
			}
			if n := bytes.Count(a.Body, []byte(`data: {"error"`)); n > 1 {
				t.Errorf("%d error events, want one", n)
			}
			if bytes.Contains(a.Body, []byte("data: [DONE]")) {
				t.Errorf("a failed stream ended with [DONE]")
			}
			if n := u1.count() + u2.count(); n != 1 {
				t.Errorf("%d requests reached replicas, want 1", n)
			}
			r.wantMetric(1, "penstock_requests_total", label("code", "502"))
		})
	}
}
