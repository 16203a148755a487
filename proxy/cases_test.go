package proxy

import (
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
)

// The cases of cases/README.md, at the level of the package. apptest drives
// the whole binary through them.

func TestMidStreamFailureEndsInOneErrorEvent(t *testing.T) {
	first3 := frameD(1) + frameD(2) + frameD(3)
	for _, tc := range []struct {
		name string
		end  func(c *fakeConn)
		got  string // payload before the error event
	}{
		{"reset", func(c *fakeConn) { c.rst() }, first3},
		{"fin", func(c *fakeConn) { c.fin() }, first3},
		{"inside a line", func(c *fakeConn) { c.chunk(`data: {"id":"c","cho`); c.fin() }, first3 + `data: {"id":"c","cho` + "\n\n"},
		{"inside a chunk", func(c *fakeConn) { c.send("50\r\ndata: {\"id\""); c.fin() }, first3 + `data: {"id"` + "\n\n"},
		{"clean end without finish", func(c *fakeConn) { c.end() }, first3},
		{"engine death", func(c *fakeConn) {
			c.chunk(`data: {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "param": null, "code": 500}}` + "\n\n")
			c.chunk(frameDone)
			c.end()
		}, first3},
		{"abort as success", func(c *fakeConn) {
			c.chunk(strings.Replace(frameFin, `"stop"`, `"abort"`, 1) + frameDone)
			c.end()
		}, first3},
		{"broken framing", func(c *fakeConn) { c.send("zz\r\n"); c.waitClose() }, first3},
	} {
		t.Run(tc.name, func(t *testing.T) {
			begun := make(chan struct{})
			h := func(c *fakeConn) {
				c.sseHead()
				for i := 1; i <= 3; i++ {
					c.chunk(frameD(i))
				}
				<-begun
				tc.end(c)
			}
			r1, r2 := newFakeReplica(t, h), newFakeReplica(t, h)
			g := newRig(t, []*fakeReplica{r1, r2})
			got := make(chan answer, 1)
			go func() { got <- g.do(chat(sseBody)) }()
			g.streaming(begun)
			a := <-got
			rest, found := strings.CutPrefix(a.body, tc.got)
			if !found || !strings.HasPrefix(rest, `data: {"error":{"message":`) || !strings.HasSuffix(rest, "}}\n\n") ||
				strings.Count(rest, "data:") != 1 || !strings.Contains(rest, `"code":"upstream_stream_failed"`) {
				t.Fatalf("client got %q", a.body)
			}
			if a.err != io.ErrUnexpectedEOF {
				t.Errorf("the stream has a last chunk: %v", a.err)
			}
			if n := len(r1.requests()) + len(r2.requests()); n != 1 {
				t.Errorf("%d requests at replicas, want 1", n)
			}
			g.settled()
			if v := g.metric(`penstock_requests_total{path="chat",code="502"}`); v != 1 {
				t.Errorf("counted as 502: %v", v)
			}
		})
	}
}

func TestFailureBeforeContentFailsOver(t *testing.T) {
	for name, h := range map[string]func(c *fakeConn){
		"refused after accept": func(c *fakeConn) { c.rst() },
		"502":                  func(c *fakeConn) { c.json(502, `{"error":{"message":"x"}}`, "") },
		"503":                  func(c *fakeConn) { c.json(503, `{"error":{"message":"x"}}`, "") },
		"429":                  func(c *fakeConn) { c.json(429, `{"error":{"message":"x"}}`, "") },
		"draining": func(c *fakeConn) {
			c.json(500, `{"error":{"message":"cannot schedule new futures after shutdown","code":500}}`, "")
		},
		"never answers": func(c *fakeConn) { c.waitClose() },
		"headers only":  func(c *fakeConn) { c.sseHead(); c.waitClose() },
		"headers, then reset": func(c *fakeConn) {
			c.sseHead()
			c.chunk(": ping\n\n")
			c.chunk(frameRole)
			time.Sleep(10 * time.Millisecond)
			c.rst()
		},
		"only DONE": func(c *fakeConn) { c.sseHead(); c.chunk(frameDone); c.end() },
		"abort at once": func(c *fakeConn) {
			c.sseHead()
			c.chunk(frameRole + strings.Replace(frameFin, `"stop"`, `"abort"`, 1))
			c.chunk(frameDone)
			c.end()
		},
		"error event first": func(c *fakeConn) {
			c.sseHead()
			c.chunk(`data: {"error": {"message": "x", "code": 500}}` + "\n\n")
			c.chunk(frameDone)
			c.end()
		},
		"garbage": func(c *fakeConn) { c.send("\x16\x03\x01\x02garbage\r\n\r\n"); c.fin() },
		"huge head": func(c *fakeConn) {
			c.send("HTTP/1.1 200 OK\r\nX: " + strings.Repeat("y", 40000) + "\r\n\r\n")
			c.waitClose()
		},
		"two framings": func(c *fakeConn) {
			c.send("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
			c.waitClose()
		},
		"body cut": func(c *fakeConn) {
			c.send("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n" + answerOK[:50])
			c.fin()
		},
		"not JSON": func(c *fakeConn) { c.json(200, "{not json", "") },
		"HTML": func(c *fakeConn) {
			c.send("HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>")
		},
	} {
		for _, body := range []string{plainBody, sseBody} {
			kind := "plain"
			if body == sseBody {
				kind = "stream"
			}
			t.Run(name+"/"+kind, func(t *testing.T) {
				if kind == "plain" && (strings.HasPrefix(name, "headers") || strings.Contains(name, "DONE") || strings.Contains(name, "abort") || strings.Contains(name, "event")) {
					t.Skip("streams only")
				}
				t.Parallel()
				big := strings.Replace(body, "hi", strings.Repeat("hello ", 50000), 1)
				bad, good := newFakeReplica(t, h), newFakeReplica(t, ok)
				g := newRig(t, []*fakeReplica{bad, good}, func(o *Options, _ *admission.Config) {
					o.FirstToken, o.AnswerTimeout, o.FirstTokenFactor = 20*time.Second, 20*time.Second, 0.001
					if name == "never answers" || name == "headers only" {
						o.FirstToken, o.AnswerTimeout = 3*time.Second, 3*time.Second // the good one has to answer in that time
					}
				})
				for i := 0; i < 6; i++ {
					a := g.do(chat(big))
					if a.status != 200 || strings.Contains(a.body, `"error"`) || a.err != nil {
						t.Fatalf("request %d: %d %.300q %v", i, a.status, a.body, a.err)
					}
				}
				want := sha256.Sum256([]byte(big))
				for _, q := range good.requests() {
					if q.sum != want {
						t.Error("the body changed on its way")
					}
				}
				if n := len(good.requests()); n != 6 {
					t.Errorf("%d requests at the good replica, want 6", n)
				}
				g.settled()
			})
		}
	}
}

func TestBothDownGivesOneError(t *testing.T) {
	down := func(c *fakeConn) { c.rst() }
	r1, r2 := newFakeReplica(t, down), newFakeReplica(t, down)
	g := newRig(t, []*fakeReplica{r1, r2})
	a := g.do(chat(plainBody))
	if a.status != 502 || !strings.Contains(a.body, `"code":"upstream_error"`) || a.headers.Get("X-Should-Retry") != "false" {
		t.Fatalf("%d %s %v", a.status, a.body, a.headers)
	}
	if n := len(r1.requests()) + len(r2.requests()); n != 2 {
		t.Errorf("%d attempts, want 2", n)
	}
	g.settled()
}

func TestRefusedConnectionsDoNotUseUpAttempts(t *testing.T) {
	r1, r2, r3 := newFakeReplica(t, ok), newFakeReplica(t, ok), newFakeReplica(t, ok)
	g := newRig(t, []*fakeReplica{r1, r2, r3})
	r1.close()
	r2.close()
	for i := 0; i < 5; i++ {
		if a := g.do(chat(plainBody)); a.status != 200 {
			t.Fatalf("%d %s", a.status, a.body)
		}
	}
	g.settled()
}

// P3: a replica that closes a kept connection just as the next request comes.
func TestIdleConnectionRace(t *testing.T) {
	for name, end := range map[string]func(c *fakeConn){"fin": (*fakeConn).fin, "rst": (*fakeConn).rst} {
		t.Run(name, func(t *testing.T) {
			// Each connection serves one request and dies on the next one's arrival.
			r := newFakeReplica(t, nil)
			var mu sync.Mutex
			seen := map[net.Conn]bool{}
			r.set(func(c *fakeConn) {
				mu.Lock()
				again := seen[c.Conn]
				seen[c.Conn] = true
				mu.Unlock()
				if again {
					end(c)
				}
				c.json(200, answerOK, "")
			})
			g := newRig(t, []*fakeReplica{r})
			for i := 0; i < 10; i++ {
				if a := g.do(chat(plainBody)); a.status != 200 {
					t.Fatalf("request %d: %d %s", i, a.status, a.body)
				}
			}
			g.settled()
		})
	}
}

func TestNoBlindReplayToTheSameReplica(t *testing.T) {
	r := newFakeReplica(t, func(c *fakeConn) { c.fin() })
	g := newRig(t, []*fakeReplica{r})
	if a := g.do(chat(plainBody)); a.status != 502 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	if n := len(r.requests()); n != 1 {
		t.Errorf("a fresh connection's request was repeated: %d", n)
	}
}

// P5
func TestClientErrorsGoBackVerbatim(t *testing.T) {
	for _, status := range []int{400, 401, 404, 413, 422} {
		h := func(c *fakeConn) {
			if strings.Contains(string(c.req.body), "toolong") {
				c.json(status, `{"object":"error","message":"max context length","code":400}`, "X-Vllm: yes\r\n")
				return
			}
			ok(c)
		}
		r1, r2 := newFakeReplica(t, h), newFakeReplica(t, h)
		g := newRig(t, []*fakeReplica{r1, r2})
		for i := 0; i < 10; i++ {
			a := g.do(chat(strings.Replace([]string{plainBody, sseBody}[i%2], "hi", "toolong", 1)))
			if a.status != status || a.body != `{"object":"error","message":"max context length","code":400}` || a.headers.Get("X-Vllm") != "yes" {
				t.Fatalf("%d %q", a.status, a.body)
			}
		}
		if n := len(r1.requests()) + len(r2.requests()); n != 10 {
			t.Errorf("status %d: %d upstream requests for 10", status, n)
		}
		for i := 0; i < 4; i++ {
			if a := g.do(chat(plainBody)); a.status != 200 {
				t.Fatalf("a replica was punished for the client's fault: %d", a.status)
			}
		}
		g.settled()
	}
}

const oddBody = `{"zz":1,"model":"%s", "seed":9007199254740993,"temperature":1.0,"top_p":1e-7,"stop":["\u00e9\ud83d\ude00","</s>"],"chat_template_kwargs":{"enable_thinking":false},"cache_salt":"t1","messages":[{"content":"a\/b","role":"user","x_y":null}],"Model":"decoy","metadata":{"model":"inner"},"s":"\"model\":\"x\""}` + "\n"

// P6
func TestBodyGoesOnByteForByte(t *testing.T) {
	r := newFakeReplica(t, ok)
	g := newRig(t, nil)
	roomy := fleet.Generic()
	roomy.KVTokens = 10_000_000
	if err := g.p.AddReplica("p", ReplicaSpec{ID: 1, Addr: r.addr(), Models: []string{"m1"}, Warm: true, Profile: &roomy}); err != nil {
		t.Fatal(err)
	}
	body := fmt.Sprintf(oddBody, "m1")
	late := `{"messages":[{"role":"user","content":"` + strings.Repeat("x", 2<<20) + `"}],"model":"chat"}`
	for _, tc := range []struct{ name, raw, want string }{
		{"plain", chat(body), body},
		{"alias", chat(fmt.Sprintf(oddBody, "chat")), body},
		{"chunked", fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n%x;x=y\r\n%s\r\n0\r\n\r\n", 40, body[:40], len(body)-40, body[40:]), body},
		{"model last", chat(late), strings.Replace(late, `"model":"chat"`, `"model":"m1"`, 1)},
	} {
		if a := g.do(tc.raw); a.status != 200 {
			t.Fatalf("%s: %d %s", tc.name, a.status, a.body)
		}
		q := r.requests()
		if got := q[len(q)-1]; string(got.body) != tc.want {
			t.Errorf("%s: the body changed: %.200q", tc.name, got.body)
		}
	}
	if a := g.do(chat(`{"model":"m1","model":"m2","messages":[]}`)); a.status != 400 {
		t.Errorf("a model that is there twice: %d", a.status)
	}
	g.settled()
}

// P7
func TestStreamsAreIntactHoweverCut(t *testing.T) {
	events := []string{": ping\n\n", `data:{"choices":[{"index":0,"delta":{"content":"北京🌍"}}]}` + "\r\n\r\n",
		"event: x\nid: 7\ndata: {\"choices\":[{\"index\":0,\ndata: \"delta\":{\"content\":\"say data: [DONE] now\"}}]}\n\n", frameFin, frameUse, frameDone}
	all := strings.Join(events, "")
	for name, h := range map[string]func(c *fakeConn){
		"a byte per chunk": func(c *fakeConn) {
			c.sseHead()
			for i := range len(all) {
				c.chunk(all[i : i+1])
			}
			c.end()
		},
		"one chunk": func(c *fakeConn) { c.sseHead(); c.chunk(all); c.end() },
		"extensions and trailers": func(c *fakeConn) {
			c.sseHead()
			for _, e := range events {
				c.send(fmt.Sprintf("%X;name=\"v\"\r\n%s\r\n", len(e), e))
			}
			c.send("0;last\r\nX-Trailer: 1\r\n\r\n")
		},
		"close-delimited": func(c *fakeConn) {
			c.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
			c.send(all[:40])
			time.Sleep(10 * time.Millisecond)
			c.send(all[40:])
			c.fin()
		},
		"with length": func(c *fakeConn) {
			c.send(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%s", len(all), all))
		},
		"between the newlines": func(c *fakeConn) {
			c.sseHead()
			for _, e := range events {
				c.chunk(e[:len(e)-1])
				time.Sleep(2 * time.Millisecond)
				c.chunk(e[len(e)-1:])
			}
			c.end()
		},
		"framing cut anywhere": func(c *fakeConn) {
			raw := "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
			for _, e := range events {
				raw += fmt.Sprintf("%x\r\n%s\r\n", len(e), e)
			}
			raw += "0\r\n\r\n"
			for i := 0; i < len(raw); i += 7 {
				c.send(raw[i:min(i+7, len(raw))])
				time.Sleep(200 * time.Microsecond)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newFakeReplica(t, h)
			g := newRig(t, []*fakeReplica{r})
			a := g.do(chat(`{"model":"m1","stream":true,"stream_options":{"include_usage":true},"messages":[{"role":"user","content":"hi"}]}`))
			if a.body != all || a.err != nil {
				t.Fatalf("got %q %v\nwant %q", a.body, a.err, all)
			}
			g.settled()
			if v := g.metric(`penstock_output_tokens_total{replica="` + r.addr() + `"}`); v != 3 {
				t.Errorf("output tokens: %v, want 3", v)
			}
		})
	}
}

// An event is at the client before the replica sends the next one.
func TestEventsAreNotBatched(t *testing.T) {
	next := make(chan struct{})
	r := newFakeReplica(t, func(c *fakeConn) {
		c.sseHead()
		for i := 1; i <= 3; i++ {
			c.chunk(frameD(i))
			<-next
		}
		c.chunk(frameFin + frameDone)
		c.end()
	})
	g := newRig(t, []*fakeReplica{r})
	c, err := net.Dial("tcp", g.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	_, _ = io.WriteString(c, chat(sseBody))
	got := ""
	buf := make([]byte, 4096)
	for i := 1; i <= 3; i++ {
		for !strings.Contains(got, frameD(i)) {
			n, err := c.Read(buf)
			if err != nil {
				t.Fatalf("event %d: %v (got %q)", i, err, got)
			}
			got += string(buf[:n])
		}
		next <- struct{}{}
	}
}

// P9
func TestSaturationGoesBackAsItIs(t *testing.T) {
	busy := func(c *fakeConn) {
		c.json(429, `{"error":{"message":"queue full"}}`, "Retry-After: 7\r\nanthropic-ratelimit-unified-status: rejected\r\n")
	}
	t.Run("only one", func(t *testing.T) {
		r := newFakeReplica(t, busy)
		g := newRig(t, []*fakeReplica{r})
		a := g.do(chat(plainBody))
		if a.status != 429 || a.headers.Get("Retry-After") != "7" || a.headers.Get("Anthropic-Ratelimit-Unified-Status") != "rejected" ||
			a.body != `{"error":{"message":"queue full"}}` || a.headers.Get("X-Should-Retry") == "" || a.headers.Get("Retry-After-Ms") != "7000" {
			t.Fatalf("%d %v %s", a.status, a.headers, a.body)
		}
		if n := len(r.requests()); n != 1 {
			t.Errorf("a 429 was multiplied: %d", n)
		}
		g.settled()
	})
	t.Run("the other has room", func(t *testing.T) {
		r1, r2 := newFakeReplica(t, busy), newFakeReplica(t, ok)
		g := newRig(t, []*fakeReplica{r1, r2})
		for i := 0; i < 20; i++ {
			if a := g.do(chat(plainBody)); a.status != 200 {
				t.Fatalf("%d %s", a.status, a.body)
			}
		}
		if n := len(r1.requests()); n > 2 {
			t.Errorf("%d probes of a replica that asked for 7 s", n)
		}
		g.settled()
	})
	t.Run("both busy", func(t *testing.T) {
		h := func(c *fakeConn) { c.json(503, `{"error":{"message":"full"}}`, "Retry-After: 3\r\n") }
		r1, r2 := newFakeReplica(t, h), newFakeReplica(t, h)
		g := newRig(t, []*fakeReplica{r1, r2}, func(o *Options, c *admission.Config) {
			c.Classes = []admission.Class{{Name: "standard", Wait: 0.05}}
		})
		for i := 0; i < 10; i++ {
			a := g.do(chat(strings.Replace(plainBody, "hi", fmt.Sprint("hi ", i), 1)))
			if a.status != 503 || a.headers.Get("Retry-After") == "" || a.headers.Get("Retry-After") == "0" || !strings.Contains(a.body, `"error"`) {
				t.Fatalf("request %d: %d %v %s", i, a.status, a.headers, a.body)
			}
		}
		if n := len(r1.requests()) + len(r2.requests()); n > 20 {
			t.Errorf("%d upstream requests for 10", n)
		}
		g.settled()
	})
}

// P10
func TestHeaders(t *testing.T) {
	const key = "sk-client-secret"
	r := newFakeReplica(t, func(c *fakeConn) {
		c.json(200, answerOK, "Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nServer: uvicorn\r\nDate: Mon, 01 Jan 2024 00:00:00 GMT\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nX-Vllm: yes\r\nX-Request-ID: other\r\n")
		c.fin()
	})
	g := newRig(t, nil)
	if err := g.p.AddReplica("p", ReplicaSpec{ID: 1, Addr: r.addr(), APIKey: "backend-key", Warm: true}); err != nil {
		t.Fatal(err)
	}
	raw := "POST /v1/chat/completions?x=1 HTTP/1.1\r\nAuthorization: Bearer " + key + "\r\nx-api-key: " + key + "\r\nProxy-Authorization: Basic c2VjcmV0\r\n" +
		"Connection: keep-alive, X-Drop-Me, Content-Length\r\nX-Drop-Me: 1\r\nTE: trailers\r\nHost: evil.example\r\nX-Request-ID: abc-123\r\n" +
		"traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\nCookie: s=1\r\nX-Forwarded-For: 6.6.6.6\r\nX-Keep: yes\r\nX-Sandbox-ID: sb-1\r\n" +
		"Content-Length: " + fmt.Sprint(len(plainBody)) + "\r\n\r\n" + plainBody
	a := g.do(raw)
	if a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	q := r.requests()[0]
	if strings.Contains(q.head, key) || strings.Contains(q.line, key) {
		t.Error("the client's key went on")
	}
	if q.line != "POST /v1/chat/completions?x=1 HTTP/1.1" {
		t.Error("request line:", q.line)
	}
	for _, h := range []string{"Proxy-Authorization", "X-Drop-Me", "TE", "Keep-Alive", "Connection", "Cookie", "x-api-key"} {
		if q.header(h) != "" {
			t.Errorf("%s went on: %q", h, q.header(h))
		}
	}
	for h, want := range map[string]string{"Host": r.addr(), "Authorization": "Bearer backend-key", "X-Request-ID": "abc-123",
		"X-Forwarded-For": "127.0.0.1", "X-Keep": "yes", "Content-Length": fmt.Sprint(len(plainBody))} {
		if got := q.header(h); got != want {
			t.Errorf("%s: %q, want %q", h, got, want)
		}
	}
	tp := q.header("traceparent")
	if !strings.HasPrefix(tp, "00-4bf92f3577b34da6a3ce929d0e0e4736-") || strings.Contains(tp, "00f067aa0ba902b7") || len(tp) != 55 {
		t.Errorf("traceparent sent on: %q", tp)
	}
	if got := a.headers["Set-Cookie"]; len(got) != 2 {
		t.Errorf("cookies: %v", got)
	}
	for h, n := range map[string]int{"Server": 1, "Date": 1, "X-Vllm": 1, "X-Hop": 0, "Keep-Alive": 0, "X-Request-Id": 1, "Traceparent": 1, "X-Sandbox-Id": 1} {
		if got := len(a.headers[http.CanonicalHeaderKey(h)]); got != n {
			t.Errorf("%s: %d times, want %d", h, got, n)
		}
	}
	if a.headers.Get("X-Request-ID") != "abc-123" || a.headers.Get("X-Sandbox-ID") != "sb-1" || a.close {
		t.Errorf("answer: %v close=%v", a.headers, a.close)
	}
	g.settled()
	if strings.Contains(g.logs.String(), key) || strings.Contains(g.logs.String(), "backend-key") {
		t.Error("a key is in the log")
	}
}

func TestRedirectIsNotPassedOn(t *testing.T) {
	r := newFakeReplica(t, nil)
	r.set(func(c *fakeConn) {
		c.send("HTTP/1.1 307 Temporary Redirect\r\nLocation: http://" + r.addr() + "/v1/chat/completions\r\nContent-Length: 0\r\n\r\n")
	})
	g := newRig(t, []*fakeReplica{r})
	a := g.do(chat(plainBody))
	if a.status != 404 || a.headers.Get("Location") != "" || strings.Contains(a.body, r.addr()) {
		t.Fatalf("%d %v %s", a.status, a.headers, a.body)
	}
	if a := g.do(post("/v1/chat/completions/", plainBody)); a.status != 404 || !strings.Contains(a.body, `"code":"not_found"`) {
		t.Fatalf("trailing slash: %d %s", a.status, a.body)
	}
}

// All replicas fail for a moment under load: a request that has an attempt left
// is not spent on it. The client is told to come again, each at a time of its
// own, and does so with success.
func TestAllFailForAMoment(t *testing.T) {
	var broken atomic.Bool
	h := func(c *fakeConn) {
		if broken.Load() {
			c.json(502, `{"error":{"message":"x"}}`, "")
			return
		}
		ok(c)
	}
	r1, r2 := newFakeReplica(t, h), newFakeReplica(t, h)
	g := newRig(t, []*fakeReplica{r1, r2}, func(o *Options, _ *admission.Config) {
		o.Pools[0].Budget = admission.NewAttemptBudget(admission.BudgetConfig{})
	})
	for range 100 {
		g.do(chat(plainBody))
	}
	broken.Store(true)
	before := len(r1.requests()) + len(r2.requests())
	var wg sync.WaitGroup
	answers := make([]answer, 40)
	for i := range answers {
		wg.Go(func() { answers[i] = g.do(chat(plainBody)) })
	}
	wg.Wait()
	waits := map[string]bool{}
	told := 0
	for _, a := range answers {
		if a.status != 502 {
			t.Fatalf("%d %s", a.status, a.body)
		}
		if a.headers.Get("X-Should-Retry") == "true" {
			told++
			waits[a.headers.Get("Retry-After-Ms")] = true
			if n, err := strconv.Atoi(a.headers.Get("Retry-After")); err != nil || n < 1 {
				t.Errorf("told to come again without a time: %v", a.headers)
			}
		}
	}
	n := len(r1.requests()) + len(r2.requests()) - before
	if want := 80 - told; n > want {
		t.Errorf("%d attempts, but %d requests have one left", n, told)
	}
	if told < 20 || len(waits) < told/2 {
		t.Errorf("%d of 40 told to come again, at %d different times", told, len(waits))
	}
	broken.Store(false)
	if a := g.do(chat(plainBody, "X-Stainless-Retry-Count: 1")); a.status != 200 {
		t.Errorf("the repeat: %d %s", a.status, a.body)
	}
	g.settled()
}
