package apptest

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// undisturbed runs a healthy stream through the router while bad happens: it
// has begun before, ends after, and has to be whole.
func undisturbed(t *testing.T, opts mockOpts, extra string, bad func(r *router, u1 *mock)) {
	t.Helper()
	release := make(chan struct{})
	inner := opts.Handle
	opts.Handle = func(c *conn) {
		if c.header("X-Request-ID") != "the-healthy-one" {
			inner(c)
			return
		}
		c.sseHead()
		c.chunk(frame(1))
		<-release
		for _, e := range []string{frame(2), frame(3), frameFin, frameUse, frameDone} {
			c.chunk(e)
		}
		c.end()
	}
	u1 := newMock(t, opts)
	r := start(t, extra, u1)
	c := r.dial()
	c.send(request(chat, reqStream, "X-Request-ID: the-healthy-one", "Connection: close"))
	c.until(`"t1"`, 10*time.Second)
	bad(r, u1)
	wantOK(t, r.post(chat, reqBody))
	close(release)
	if got := c.until("[DONE]", 10*time.Second); !strings.Contains(got, frame(3)) || strings.Contains(got, `"error"`) {
		t.Errorf("the healthy stream was disturbed: %q", got)
	}
}

// TestBadBodies: what is wrong with a body is told in contract.md's words, and
// the replica never sees it.
func TestBadBodies(t *testing.T) {
	t.Parallel()
	undisturbed(t, mockOpts{Handle: (*conn).ok}, "limits: {max_body: 64KiB}\n", func(r *router, u1 *mock) {
		before := u1.count()
		for name, v := range map[string]struct {
			body   string
			status int
			code   string
		}{
			"empty":             {"", 400, "invalid_request"},
			"not JSON":          {`{"model":"m1",`, 400, "invalid_request"},
			"bare word":         {`hello`, 400, "invalid_request"},
			"array":             {`[{"model":"m1"}]`, 400, "invalid_request"},
			"trailing garbage":  {reqBody + `}`, 400, "invalid_request"},
			"two objects":       {reqBody + reqBody, 400, "invalid_request"},
			"missing model":     {`{"messages":[{"role":"user","content":"hi"}]}`, 400, "invalid_request"},
			"model is a number": {`{"model":7,"messages":[]}`, 400, "invalid_request"},
			"model is null":     {`{"model":null,"messages":[]}`, 400, "invalid_request"},
			"model is empty":    {`{"model":"","messages":[]}`, 400, "invalid_request"},
			"stream is text":    {`{"model":"m1","messages":[],"stream":"yes"}`, 400, "invalid_request"},
			"control character": {"{\"model\":\"m1\",\"messages\":[],\"x\":\"a\x00b\"}", 400, "invalid_request"},
			"bad escape":        {`{"model":"m\q1","messages":[]}`, 400, "invalid_request"},
			"deep nesting":      {`{"model":"m1","messages":` + strings.Repeat("[", 30000) + strings.Repeat("]", 30000) + `}`, 400, "invalid_request"},
			"unknown model":     {`{"model":"nobody","messages":[]}`, 404, "model_not_found"},
			"too large":         {`{"model":"m1","messages":[{"role":"user","content":"` + strings.Repeat("x", 100<<10) + `"}]}`, 413, "request_too_large"},
		} {
			a := r.post(chat, v.body)
			t.Run(name, func(t *testing.T) { wantError(t, a, v.status, v.code) })
		}
		if n := u1.count() - before; n != 0 {
			t.Errorf("%d bad bodies reached the replica", n)
		}
		r.wantMetric(0, "penstock_replica_ejections_total")
	})
}

// TestErrorsOnMessagesAreAnthropic: /v1/messages answers in its own shape.
func TestErrorsOnMessagesAreAnthropic(t *testing.T) {
	t.Parallel()
	u1 := replica(t, (*conn).ok)
	r := start(t, "", u1)
	a := r.post("/v1/messages", `{"model":"nobody","max_tokens":5,"messages":[]}`)
	if a.Status != 404 || !strings.Contains(string(a.Body), `"type":"error"`) {
		t.Errorf("answer %d %q, want 404 in the Anthropic shape", a.Status, a.Body)
	}
}

// TestOversizeChunked: a body without a length is cut off at the limit.
func TestOversizeChunked(t *testing.T) {
	t.Parallel()
	undisturbed(t, mockOpts{Handle: (*conn).ok}, "limits: {max_body: 64KiB}\n", func(r *router, u1 *mock) {
		c := r.dial()
		c.send("POST " + chat + " HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
		piece := fmt.Sprintf("%x\r\n%s\r\n", 4096, strings.Repeat("x", 4096))
		for range 64 {
			if c.send(piece) != nil {
				break
			}
		}
		if got, closed := c.rest(10 * time.Second); !closed || (got != "" && !strings.HasPrefix(got, "HTTP/1.1 413")) {
			t.Errorf("an endless body: closed %v, answer %.200q", closed, got)
		}
	})
}

// TestSmuggling: every head that two parsers may read differently is refused,
// and nothing behind it is ever taken for a request.
func TestSmuggling(t *testing.T) {
	t.Parallel()
	smuggled := request(chat, strings.Replace(reqBody, "hi", "smuggled", 1))
	n := len(smuggled)
	head := "POST " + chat + " HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
	length := fmt.Sprintf("Content-Length: %d\r\n", len(reqBody))
	bad := map[string]string{
		"CL and TE":               head + "Content-Length: " + fmt.Sprint(n+5) + "\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"TE and CL":               head + "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
		"two CL":                  head + length + "Content-Length: 0\r\n\r\n" + reqBody,
		"CL list":                 head + fmt.Sprintf("Content-Length: %d, 0\r\n\r\n", len(reqBody)) + reqBody,
		"CL with sign":            head + fmt.Sprintf("Content-Length: +%d\r\n\r\n", len(reqBody)) + reqBody,
		"CL negative":             head + "Content-Length: -1\r\n\r\n" + reqBody,
		"CL hex":                  head + fmt.Sprintf("Content-Length: 0x%x\r\n\r\n", len(reqBody)) + reqBody,
		"TE unknown":              head + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
		"TE list":                 head + "Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n",
		"TE twice":                head + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
		"space before colon":      head + "Transfer-Encoding : chunked\r\n" + length + "\r\n" + reqBody,
		"space in name":           head + "X Y: 1\r\n" + length + "\r\n" + reqBody,
		"folded line":             head + "X-A: 1\r\n  folded: 2\r\n" + length + "\r\n" + reqBody,
		"bare LF":                 strings.ReplaceAll(head+length+"\r\n", "\r\n", "\n") + reqBody,
		"bare CR":                 head + "X-A: 1\rX-B: 2\r\n" + length + "\r\n" + reqBody,
		"NUL in a value":          head + "X-A: a\x00b\r\n" + length + "\r\n" + reqBody,
		"no Host":                 strings.Replace(head, "Host: x\r\n", "", 1) + length + "\r\n" + reqBody,
		"two Hosts":               head + "Host: y\r\n" + length + "\r\n" + reqBody,
		"Host with user":          strings.Replace(head, "Host: x", "Host: a@b", 1) + length + "\r\n" + reqBody,
		"HTTP/2.0":                strings.Replace(head, "HTTP/1.1", "HTTP/2.0", 1) + length + "\r\n" + reqBody,
		"HTTP/1.2x":               strings.Replace(head, "HTTP/1.1", "HTTP/1.2x", 1) + length + "\r\n" + reqBody,
		"CONNECT":                 "CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: 127.0.0.1:22\r\n\r\n",
		"TRACE":                   "TRACE / HTTP/1.1\r\nHost: x\r\n\r\n",
		"chunk size not a number": head + "Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
		"chunk size overflows":    head + "Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nabc\r\n0\r\n\r\n",
		"chunk longer than said":  head + "Transfer-Encoding: chunked\r\n\r\n3\r\nabcdef\r\n0\r\n\r\n",
		"garbage":                 "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n",
	}
	undisturbed(t, mockOpts{Handle: (*conn).ok}, "", func(r *router, u1 *mock) {
		for name, bytes := range bad {
			t.Run(name, func(t *testing.T) {
				c := r.dial()
				c.send(bytes + smuggled)
				got, closed := c.rest(5 * time.Second)
				if !closed {
					t.Errorf("the connection stays open; answer %.200q", got)
				}
				if got != "" && !strings.HasPrefix(got, "HTTP/1.1 4") && !strings.HasPrefix(got, "HTTP/1.1 5") {
					t.Errorf("answer %.200q, want a refusal", got)
				}
				if strings.Count(got, "HTTP/1.1 ") > 1 {
					t.Errorf("what came behind the bad request was answered too: %q", got)
				}
			})
		}
		for _, c := range u1.reqs() {
			if strings.Contains(string(c.Body), "smuggled") {
				t.Errorf("a smuggled request reached the replica:\n%s", c.Head)
			}
		}
	})
}

// TestHugeHeaders: heads over the limit are refused, those under it pass whole.
func TestHugeHeaders(t *testing.T) {
	t.Parallel()
	undisturbed(t, mockOpts{Handle: (*conn).ok}, "", func(r *router, u1 *mock) {
		for name, h := range map[string]string{
			"one":  "X-Big: " + strings.Repeat("a", 64<<10),
			"many": strings.TrimSuffix(strings.Repeat("X-Many: 12345678901234567890\r\n", 4000), "\r\n"),
		} {
			c := r.dial()
			c.send(request(chat, reqBody, h))
			got, closed := c.rest(10 * time.Second)
			if !closed || (got != "" && !strings.HasPrefix(got, "HTTP/1.1 431") && !strings.HasPrefix(got, "HTTP/1.1 400")) {
				t.Errorf("%s: closed %v, answer %.200q, want 431", name, closed, got)
			}
		}
		value := strings.Repeat("b", 12<<10)
		wantOK(t, r.post(chat, reqBody, "X-Fits", value))
		if c := u1.reqs(); c[len(c)-1].header("X-Fits") != value {
			t.Errorf("a header of 12 KiB did not arrive whole")
		}
	})
}

// TestDripFedHead: a head that never ends holds no one up, and is cut off.
func TestDripFedHead(t *testing.T) {
	t.Parallel()
	undisturbed(t, mockOpts{Handle: (*conn).ok}, "timeouts: {header: 1s}\n", func(r *router, u1 *mock) {
		c := r.dial()
		c.send("POST " + chat + " HTTP/1.1\r\nHost: x\r\n")
		start := time.Now()
		for i := 0; time.Since(start) < 15*time.Second; i++ {
			time.Sleep(200 * time.Millisecond)
			if c.send(fmt.Sprintf("X-%d: 1\r\n", i)) != nil {
				return // cut off
			}
		}
		t.Errorf("a drip-fed head is still taken after 15 s of a limit of 1 s")
	})
}

// TestOtherPaths: what is not in the contract is 404 in the API's error shape,
// and no spelling of a path gets around that.
func TestOtherPaths(t *testing.T) {
	t.Parallel()
	undisturbed(t, mockOpts{Handle: (*conn).ok}, "", func(r *router, u1 *mock) {
		before := u1.count()
		for _, p := range []string{"/", "/v1", "/v1/chat", chat + "/", "/v1/chat/completions/x", "/v1//chat/completions", "//v1/chat/completions",
			"/v1/../v1/chat/completions", "/v1/chat/./completions", "/v1/chat%2fcompletions", "/V1/chat/completions", "/metrics", "/admin/v1/replicas",
			"/debug/pprof/", "/load_lora_adapter", "/v1/load_lora_adapter", "/sleep", "/reset_prefix_cache"} {
			c := r.dial()
			c.send(request(p, reqBody, "Connection: close"))
			got, _ := c.rest(5 * time.Second)
			if !strings.HasPrefix(got, "HTTP/1.1 404") && !strings.HasPrefix(got, "HTTP/1.1 400") {
				t.Errorf("POST %s: %.150q, want 404", p, got)
			}
			if !strings.Contains(got, `"error":{`) {
				t.Errorf("POST %s: not in the error shape: %q", p, got)
			}
		}
		if a := r.get(chat); a.Status != 404 {
			t.Errorf("GET %s: %d", chat, a.Status)
		}
		if n := u1.count() - before; n != 0 {
			t.Errorf("%d of them reached the replica", n)
		}
	})
}
