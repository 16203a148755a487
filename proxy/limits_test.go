package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/wire"
)

// What could be read in two ways is refused, in the API's shape, and the
// connection ends: nothing behind it is taken for a request.
func TestAmbiguousRequestsAreRefused(t *testing.T) {
	r := newFakeReplica(t, ok)
	g := newRig(t, []*fakeReplica{r})
	n := fmt.Sprint(len(plainBody))
	smuggled := "GET /v1/models HTTP/1.1\r\nHost: r\r\n\r\n"
	for name, raw := range map[string]string{
		"CL and TE":          "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled,
		"TE and CL":          "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n" + smuggled,
		"two CL":             "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 4\r\nContent-Length: " + n + "\r\n\r\n" + plainBody,
		"CL with a sign":     "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Length: +" + n + "\r\n\r\n" + plainBody,
		"TE not chunked":     "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
		"two TE":             "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
		"TE in HTTP/1.0":     "POST /v1/chat/completions HTTP/1.0\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"obs-fold":           "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nX-A: 1\r\n folded\r\nContent-Length: " + n + "\r\n\r\n" + plainBody,
		"space before colon": "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Length : " + n + "\r\n\r\n" + plainBody,
		"space in a name":    "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nX A: 1\r\nContent-Length: " + n + "\r\n\r\n" + plainBody,
		"no colon":           "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nnonsense\r\nContent-Length: " + n + "\r\n\r\n" + plainBody,
		"bare LF in head":    "POST /v1/chat/completions HTTP/1.1\r\nHost: r\nContent-Length: " + n + "\r\n\r\n" + plainBody,
		"bare LF first line": "POST /v1/chat/completions HTTP/1.1\nHost: r\r\nContent-Length: " + n + "\r\n\r\n" + plainBody,
		"bare CR":            "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nX-A: 1\rX-B: 2\r\nContent-Length: " + n + "\r\n\r\n" + plainBody,
		"NUL in a value":     "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nX-A: a\x00b\r\nContent-Length: " + n + "\r\n\r\n" + plainBody,
		"HTTP/2.0":           "POST /v1/chat/completions HTTP/2.0\r\nHost: r\r\nContent-Length: " + n + "\r\n\r\n" + plainBody,
		"HTTP/1.2":           "POST /v1/chat/completions HTTP/1.2\r\nHost: r\r\nContent-Length: " + n + "\r\n\r\n" + plainBody,
		"two hosts":          "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nHost: s\r\nContent-Length: " + n + "\r\n\r\n" + plainBody,
		"two content types":  "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: r\r\nContent-Type: multipart/form-data; boundary=a\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: " + n + "\r\n\r\n" + plainBody,
		"no host":            "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: " + n + "\r\n\r\n" + plainBody,
		"host with user":     "POST /v1/chat/completions HTTP/1.1\r\nHost: a@b\r\nContent-Length: " + n + "\r\n\r\n" + plainBody,
		"URL with user":      "POST http://a@x/v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Length: " + n + "\r\n\r\n" + plainBody,
		"URL without host":   "POST http:///v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Length: " + n + "\r\n\r\n" + plainBody,
		"URL of a file":      "POST file://x/v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Length: " + n + "\r\n\r\n" + plainBody,
		"URL with fragment":  "POST http://x#/v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Length: " + n + "\r\n\r\n" + plainBody,
		"no path":            "POST v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Length: " + n + "\r\n\r\n" + plainBody,
		"CONNECT":            "CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n",
		"TRACE":              "TRACE /v1/models HTTP/1.1\r\nHost: r\r\n\r\n",
		"garbage":            "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
		"broken chunk":       "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			c := g.dial()
			defer c.Close()
			_, _ = io.WriteString(c, raw)
			br := bufio.NewReader(c)
			a, err := readAnswer(br, false)
			if err != nil {
				t.Fatal(err)
			}
			if a.status < 400 || a.status > 499 || !strings.Contains(a.body, `"error":{`) || a.headers.Get("X-Request-Id") == "" || !a.close {
				t.Errorf("%d close=%v %v %s", a.status, a.close, a.headers, a.body)
			}
			if rest, _ := io.ReadAll(br); len(rest) != 0 {
				t.Errorf("more came: %q", rest)
			}
		})
	}
	if n := len(r.requests()); n != 0 {
		t.Errorf("%d of them reached the replica", n)
	}
	g.settled()
}

func TestRefusalsHaveTheAPIsShape(t *testing.T) {
	r := newFakeReplica(t, ok)
	g := newRig(t, []*fakeReplica{r}, func(o *Options, _ *admission.Config) {
		o.MaxBody = 1 << 20
		o.Auth = func(c Credentials) (Identity, *wire.Error) {
			if c.Authorization == "Bearer bad" {
				return Identity{}, wire.NewError(wire.CodeInvalidAPIKey, "no such key")
			}
			return Identity{Tenant: "t"}, nil
		}
	})
	huge := strings.Repeat("x", 1<<20+1)
	for _, tc := range []struct {
		name, raw string
		status    int
		code      string
	}{
		{"malformed JSON", chat(`{"model":`), 400, "invalid_request"},
		{"missing model", chat(`{"messages":[]}`), 400, "invalid_request"},
		{"unknown model", chat(`{"model":"nope","messages":[]}`), 404, "model_not_found"},
		{"unknown path", post("/v1/other", plainBody), 404, "not_found"},
		{"encoded path", post("/v1/chat%2fcompletions", plainBody), 404, "not_found"},
		{"dotted path", post("/v1/x/../chat/completions", plainBody), 404, "not_found"},
		{"wrong method", "GET /v1/chat/completions HTTP/1.1\r\nHost: r\r\n\r\n", 404, "not_found"},
		{"models by POST", post("/v1/models", "{}"), 404, "not_found"},
		{"bad key", chat(plainBody, "Authorization: Bearer bad"), 401, "invalid_api_key"},
		{"large body", chat(huge), 413, "request_too_large"},
		{"large chunked body", fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", len(huge), huge), 413, "request_too_large"},
		{"large head", "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nX: " + strings.Repeat("x", 40000) + "\r\n\r\n", 431, "invalid_request"},
	} {
		a := g.do(tc.raw)
		if a.status != tc.status || !strings.Contains(a.body, `"code":"`+tc.code+`"`) || a.headers.Get("Content-Type") != "application/json" {
			t.Errorf("%s: %d %v %s", tc.name, a.status, a.headers, a.body)
		}
		if a.headers.Get("X-Request-Id") == "" || a.headers.Get("Traceparent") == "" {
			t.Errorf("%s: no identity in %v", tc.name, a.headers)
		}
	}
	if a := g.do(post("/v1/messages", `{"model":"nope","messages":[]}`)); !strings.HasPrefix(a.body, `{"type":"error","error":{`) {
		t.Errorf("not the Anthropic shape: %s", a.body)
	}
	if n := len(r.requests()); n != 0 {
		t.Errorf("%d reached the replica", n)
	}
	g.settled()
}

// The error of one request does not cost the connection, where it need not.
func TestKeepAliveAndPipelining(t *testing.T) {
	r := newFakeReplica(t, ok)
	g := newRig(t, []*fakeReplica{r})
	c := g.dial()
	defer c.Close()
	br := bufio.NewReader(c)
	raw := chat(plainBody) + chat(`{"model":"nope","messages":[]}`) + "GET /v1/models HTTP/1.1\r\nHost: r\r\n\r\n" + chat(sseBody) + "HEAD /v1/models HTTP/1.1\r\nHost: r\r\n\r\n" + chat(plainBody)
	_, _ = io.WriteString(c, raw)
	for i, want := range []int{200, 404, 200, 200, 200, 200} {
		a, err := readAnswer(br, i == 4)
		if err != nil || a.status != want || a.err != nil {
			t.Fatalf("answer %d: %d %v %v %s", i, a.status, err, a.err, a.body)
		}
	}
	// And drip-fed, a byte at a time.
	for _, b := range []byte(chat(plainBody)) {
		_, _ = c.Write([]byte{b})
	}
	if a, err := readAnswer(br, false); err != nil || a.body != answerOK {
		t.Fatalf("%v %s", err, a.body)
	}
	g.settled()
}

func TestExpectContinue(t *testing.T) {
	r := newFakeReplica(t, ok)
	g := newRig(t, []*fakeReplica{r}, func(o *Options, _ *admission.Config) { o.MaxBody = 1000 })
	head := "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
	c := g.dial()
	defer c.Close()
	br := bufio.NewReader(c)
	for range 2 {
		_, _ = fmt.Fprintf(c, head, len(plainBody))
		if l, err := br.ReadString('\n'); err != nil || !strings.HasPrefix(l, "HTTP/1.1 100") {
			t.Fatalf("%q %v", l, err)
		}
		_, _ = br.ReadString('\n')
		_, _ = io.WriteString(c, plainBody)
		if a, err := readAnswer(br, false); err != nil || a.body != answerOK {
			t.Fatalf("%v %d %s", err, a.status, a.body)
		}
	}
	// Too large: refused before a byte of the body is sent.
	_, _ = fmt.Fprintf(c, head, 5000)
	a, err := readAnswer(br, false)
	if err != nil || a.status != 413 || !a.close || !strings.Contains(a.body, "request_too_large") {
		t.Fatalf("%v %d %s", err, a.status, a.body)
	}
	g.settled()
}

// HTTP/1.0 clients get no chunked body.
func TestHTTP10(t *testing.T) {
	r := newFakeReplica(t, ok)
	g := newRig(t, []*fakeReplica{r})
	c := g.dial()
	defer c.Close()
	_, _ = fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s", len(sseBody), sseBody)
	all, err := io.ReadAll(c)
	if err != nil {
		t.Fatal(err)
	}
	head, body, _ := strings.Cut(string(all), "\r\n\r\n")
	if strings.Contains(strings.ToLower(head), "transfer-encoding") || body != frameD(1)+frameD(2)+frameD(3)+frameFin+frameUse+frameDone {
		t.Fatalf("%s\n%q", head, body)
	}
	g.settled()
}

// A client that sends its head a byte now and then is not waited for without end.
func TestDripFedHeadIsBounded(t *testing.T) {
	g := newRig(t, nil, func(o *Options, _ *admission.Config) { o.HeaderTimeout = 100 * time.Millisecond })
	c := g.dial()
	defer c.Close()
	ended := make(chan error, 1)
	go func() {
		_, err := readAnswer(bufio.NewReader(c), false)
		ended <- err
	}()
	_, _ = io.WriteString(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\n")
	for {
		select {
		case <-ended:
			g.settled()
			return
		case <-time.After(10 * time.Millisecond):
			_, _ = io.WriteString(c, "X")
		}
	}
}

// A client that does not read does not hold its replica for ever.
func TestClientThatDoesNotRead(t *testing.T) {
	r := newFakeReplica(t, func(c *fakeConn) {
		c.sseHead()
		c.chunk(frameD(1))
		big := `data: {"choices":[{"index":0,"delta":{"content":"` + strings.Repeat("x", 60000) + `"}}]}` + "\n\n"
		for {
			c.chunk(big)
		}
	})
	g := newRig(t, []*fakeReplica{r}, func(o *Options, _ *admission.Config) { o.WriteTimeout = 200 * time.Millisecond })
	c := g.dial()
	defer c.Close()
	_ = c.(*net.TCPConn).SetReadBuffer(4096)
	_, _ = io.WriteString(c, chat(sseBody))
	eventually(t, "the stream begun", func() bool { return g.inPhase(phaseStreaming) })
	g.settled()
	if v := g.metric(`penstock_requests_total{path="chat",code="499"}`); v != 1 {
		t.Errorf("counted as 499: %v", v)
	}
}

func TestInFlightLimit(t *testing.T) {
	release := make(chan struct{})
	r := newFakeReplica(t, func(c *fakeConn) { <-release; ok(c) })
	g := newRig(t, []*fakeReplica{r}, func(o *Options, _ *admission.Config) { o.MaxInFlight = 1 })
	first := make(chan answer, 1)
	go func() { first <- g.do(chat(plainBody)) }()
	eventually(t, "the first placed", func() bool { return len(r.requests()) == 1 })
	a := g.do(chat(plainBody))
	if a.status != 503 || a.headers.Get("Retry-After") != "1" || !strings.Contains(a.body, `"code":"concurrency_limit"`) {
		t.Errorf("%d %v %s", a.status, a.headers, a.body)
	}
	if a := g.do("GET /healthz HTTP/1.1\r\nHost: r\r\n\r\n"); a.status != 200 {
		t.Errorf("liveness under load: %d", a.status)
	}
	close(release)
	<-first
	g.settled()
}

func TestDeadlines(t *testing.T) {
	r := newFakeReplica(t, func(c *fakeConn) { c.waitClose() })
	g := newRig(t, []*fakeReplica{r})
	for _, h := range []string{"X-Request-Timeout-Ms: 80", "X-Stainless-Read-Timeout: 0.08"} {
		a := g.do(chat(plainBody, h))
		if a.status != 504 || !strings.Contains(a.body, `"code":"deadline_exceeded"`) || a.headers.Get("X-Should-Retry") != "false" {
			t.Errorf("%s: %d %v %s", h, a.status, a.headers, a.body)
		}
	}
	for _, v := range g.replicas() {
		if v.Health.Fails != 0 {
			t.Errorf("the replica was blamed for the client's deadline: %+v", v.Health)
		}
	}
	g.settled()
}

func TestModels(t *testing.T) {
	asked := func(c *fakeConn) {
		if strings.Contains(string(c.req.body), "lora-a") {
			c.json(200, strings.Replace(answerOK, `"m1"`, `"lora-a"`, 1), "")
			return
		}
		ok(c)
	}
	r1, r2 := newFakeReplica(t, asked), newFakeReplica(t, asked)
	g := newRig(t, []*fakeReplica{r1, r2})
	g.p.SetModels(1, []ModelInfo{{ID: "m1", Created: 5, OwnedBy: "vllm", Root: "/models/m1", MaxModelLen: 2048}, {ID: "lora-a", Parent: "m1"}})
	g.p.SetModels(2, []ModelInfo{{ID: "m1", Created: 6, OwnedBy: "vllm", Root: "/models/m1", MaxModelLen: 2048}})
	a := g.do("GET /v1/models HTTP/1.1\r\nHost: r\r\n\r\n")
	for _, want := range []string{`"id":"m1"`, `"id":"chat"`, `"id":"lora-a"`, `"parent":"m1"`, `"max_model_len":2048`} {
		if strings.Count(a.body, want) < 1 {
			t.Errorf("no %s in %s", want, a.body)
		}
	}
	if strings.Count(a.body, `"id":"m1"`) != 1 {
		t.Errorf("not each once: %s", a.body)
	}
	// The adapter is at replica 1 only.
	for range 5 {
		if a := g.do(chat(strings.Replace(plainBody, "m1", "lora-a", 1))); a.status != 200 {
			t.Fatalf("%d %s", a.status, a.body)
		}
	}
	if n := len(r2.requests()); n != 0 {
		t.Errorf("%d requests for the adapter at a replica without it", n)
	}
	g.p.RemoveReplica(1)
	if a := g.do("GET /v1/models HTTP/1.1\r\nHost: r\r\n\r\n"); strings.Contains(a.body, "lora-a") {
		t.Errorf("the adapter outlived its replica: %s", a.body)
	}
	if v := g.metric(`penstock_attempts_total{replica="` + r1.addr() + `"}`); v != -1 {
		t.Errorf("the series of a replica that left is still there: %v", v)
	}
	g.settled()
}

func TestPanicGivesEverythingBack(t *testing.T) {
	r := newFakeReplica(t, ok)
	g := newRig(t, []*fakeReplica{r}, func(o *Options, _ *admission.Config) { o.Pools[0].Budget = panickyBudget{} })
	a := g.do(chat(plainBody))
	if a.status != 500 || !strings.Contains(a.body, `"code":"internal_error"`) || !a.close {
		t.Errorf("%d %s", a.status, a.body)
	}
	g.settled()
}

type panickyBudget struct{}

func (panickyBudget) Request(float64)    { panic("test") }
func (panickyBudget) Retry(float64) bool { return true }

func (panickyBudget) Repeated(float64) {}

func (panickyBudget) Unused() {}

func (panickyBudget) Later(float64) (float64, bool) { return 1, true }

func TestDecisionLog(t *testing.T) {
	r := newFakeReplica(t, ok)
	g := newRig(t, []*fakeReplica{r})
	g.do(chat(plainBody, "X-Request-ID: find-me"))
	log := g.p.DecisionLog()
	if len(log) != 1 || log[0].Request != "find-me" || log[0].Verdict != "placed" || log[0].Replica != r.addr() || log[0].TTFT <= 0 {
		t.Errorf("%+v", log)
	}
}

// A decision about a request that was held, placed or shed, tells for how long.
func TestDecisionLogTellsTheTimeHeld(t *testing.T) {
	free := make(chan struct{})
	r := newFakeReplica(t, func(c *fakeConn) { <-free; ok(c) })
	g := newRig(t, []*fakeReplica{r}, func(o *Options, cfg *admission.Config) {
		o.Classes = []ClassOptions{{Name: "a"}, {Name: "b"}}
		cfg.Cap, cfg.MaxHeld, cfg.Classes = 1, 1, []admission.Class{{Name: "a", Wait: 60}, {Name: "b", Wait: 60}}
	})
	done, low := make(chan answer, 2), make(chan answer, 1)
	go func() { done <- g.do(chat(plainBody)) }()
	eventually(t, "the first at the replica", func() bool { return len(r.requests()) == 1 })
	go func() { low <- g.do(chat(plainBody, "X-Request-ID: shed", "X-Request-Class: b")) }()
	eventually(t, "the second held", func() bool { return g.metric(`penstock_held_requests{pool="p"}`) == 1 })
	go func() { done <- g.do(chat(plainBody, "X-Request-ID: placed")) }()
	if a := <-low; a.status != 503 { // one may be held: the less important one has to go
		t.Errorf("%d %s", a.status, a.body)
	}
	close(free)
	<-done
	<-done
	for _, id := range []string{"shed", "placed"} {
		var held, then *DecisionRecord
		for _, d := range g.p.DecisionLog() {
			if d.Request == id && d.Verdict == "held" {
				held = &d
			} else if d.Request == id {
				then = &d
			}
		}
		if held == nil || then == nil || then.Verdict != id || held.HeldFor != 0 || then.HeldFor <= 0 || then.HeldFor > then.At-held.At {
			t.Errorf("%s: held %+v, then %+v", id, held, then)
		}
	}
	g.settled()
}

// Requests with images, which take far more tokens than their text has, do not
// make the router refuse text prompts as too long.
func TestImagesDoNotMakeTextTooLong(t *testing.T) {
	r := newFakeReplica(t, func(c *fakeConn) {
		tokens := len(c.req.body) / 4
		if strings.Contains(string(c.req.body), "image_url") {
			tokens = 1500
		}
		c.json(200, strings.Replace(answerOK, `"prompt_tokens":7`, fmt.Sprintf(`"prompt_tokens":%d`, tokens), 1), "")
	})
	g := newRig(t, []*fakeReplica{r})
	g.p.SetModels(1, []ModelInfo{{ID: "m1", MaxModelLen: 8192}})
	text := strings.Repeat("lorem ipsum dolor sit amet ", 1000)
	for range 40 {
		body := `{"model":"m1","messages":[{"role":"user","content":[{"type":"text","text":"` + text[:200] +
			`"},{"type":"image_url","image_url":{"url":"data:image/png;base64,` + strings.Repeat("iVBORw0K", 1000) + `"}}]}]}`
		if a := g.do(chat(body)); a.status != 200 {
			t.Fatalf("%d %s", a.status, a.body)
		}
	}
	estimate := func(body string) int {
		if a := g.do(chat(body)); a.status != 200 {
			t.Errorf("%d %s", a.status, a.body)
		}
		return g.p.DecisionLog()[0].Prompt
	}
	if n := estimate(`{"model":"m1","messages":[{"role":"user","content":"` + text + `"}]}`); n < 5000 || n > 9000 {
		t.Errorf("27,000 bytes of text are estimated as %d tokens", n)
	}
	if n := estimate(`{"model":"m1","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://a/b.png"}}]}]}`); n < 1200 || n > 1800 {
		t.Errorf("an image is estimated as %d tokens", n)
	}
	g.settled()
}
