package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/penstock/penstock/admission"
)

// Clients that declare large bodies and do not send them take a bounded part of
// the memory, and nothing from those that send small ones.
func TestLargeBodiesThatDoNotComeAreBounded(t *testing.T) {
	r := newFakeReplica(t, ok)
	g := newRig(t, []*fakeReplica{r}, func(o *Options, _ *admission.Config) {
		o.MaxBody, o.ReceiveBytes, o.BodyTimeout = 256<<10, 600<<10, 6*time.Second // what is looked at takes less
	})
	open := func(head string) net.Conn {
		c, err := net.Dial("tcp", g.addr)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\n"+head+"\r\n\r\n")
		return c
	}
	sum := func(want int64) func() bool {
		return func() bool {
			return g.p.receiving.Load() == want
		}
	}
	large := strings.Replace(plainBody, "hi", strings.Repeat("x", 200<<10), 1)
	for name, heads := range map[string][2]string{
		"by length":  {fmt.Sprintf("Content-Length: %d", 250<<10), fmt.Sprintf("Content-Length: %d", 256<<10)},
		"in chunks":  {"Transfer-Encoding: chunked", "Transfer-Encoding: chunked"},
		"with 100":   {"Expect: 100-continue\r\nContent-Length: 250000", "Expect: 100-continue\r\nContent-Length: 250000"},
		"then bad":   {"Content-Length: 250000\r\nX Y: 1", "Content-Length: 250000"},
		"then close": {"Content-Length: 250000", "Content-Length: 250000"},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := open(heads[0]), open(heads[1])
			eventually(t, "both are counted", func() bool { return !sum(0)() && !sum(256<<10)() && !sum(250000)() && !sum(250<<10)() })
			for _, expect := range []string{"X-None: 1", "Expect: 100-continue"} {
				if x := g.do(chat(large, expect)); x.status != 503 || !strings.Contains(x.body, "concurrency_limit") || x.headers.Get("Retry-After") != "1" || !x.close {
					t.Errorf("a third large one (%s): %d %v %s", expect, x.status, x.headers, x.body)
				}
			}
			if x := g.do(chat(plainBody)); x.status != 200 {
				t.Errorf("a small one: %d %s", x.status, x.body)
			}
			if !strings.HasPrefix(name, "by") { // only there its end by the time-out is waited for
				_ = a.Close()
				_ = b.Close()
			} else if x, err := readAnswer(bufio.NewReader(b), false); err != nil || x.status != 408 && x.status != 100 {
				t.Errorf("the one that waits: %v %d %s", err, x.status, x.body)
			}
			eventually(t, "none is counted", sum(0))
			if x := g.do(chat(large)); x.status != 200 {
				t.Errorf("a large one after it: %d %s", x.status, x.body)
			}
			_ = a.Close()
			_ = b.Close()
			eventually(t, "none is counted", sum(0))
		})
	}
	g.settled()
}

// What a body that fails is answered carries the request's identity, in the
// shape of its path.
func TestABodyThatFailsIsAnsweredWithTheRequestsIdentity(t *testing.T) {
	r := newFakeReplica(t, ok)
	g := newRig(t, []*fakeReplica{r}, func(o *Options, _ *admission.Config) { o.MaxBody, o.BodyTimeout = 64<<10, 3*time.Second })
	chunks := strings.Repeat(fmt.Sprintf("%x\r\n%s\r\n", 32<<10, strings.Repeat("x", 32<<10)), 4)
	for name, c := range map[string]struct {
		framing, body string
		status        int
		code          string
	}{
		"too slow":           {"Content-Length: 1000", "x", 408, "invalid_request"},
		"too large":          {"Content-Length: 100000", "", 413, "request_too_large"},
		"too large, chunked": {"Transfer-Encoding: chunked", chunks, 413, "request_too_large"},
		"broken chunk":       {"Transfer-Encoding: chunked", "zz\r\n\r\n", 400, "invalid_request"},
	} {
		a := g.do("POST /v1/messages HTTP/1.1\r\nHost: r\r\nX-Request-ID: id-7\r\nX-Sandbox-ID: box\r\n" +
			"traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\n" + c.framing + "\r\n\r\n" + c.body)
		if a.status != c.status || !strings.Contains(a.body, c.code) || !strings.HasPrefix(a.body, `{"type":"error"`) || !a.close {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		}
		if a.headers.Get("X-Request-ID") != "id-7" || a.headers.Get("X-Sandbox-ID") != "box" || !strings.Contains(a.headers.Get("traceparent"), "4bf92f3577b34da6a3ce929d0e0e4736") {
			t.Errorf("%s: the identity is not echoed: %v", name, a.headers)
		}
	}
	// What is wrong with a head that cannot be read is told as that.
	for _, head := range []string{"X-A: a\x01b", "no colon", "Content-Length: 1 0", ": empty"} {
		if a := g.do("POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\n" + head + "\r\n\r\n"); a.status != 400 || !strings.Contains(a.body, "not valid HTTP") {
			t.Errorf("%q: %d %s", head, a.status, a.body)
		}
	}
	if g.p.receiving.Load() != 0 {
		t.Error("a body is still counted")
	}
	g.settled()
}

// connOf rests on the layout of fasthttp's RequestCtx.
func TestConnOf(t *testing.T) {
	c := &clientConn{}
	var ctx fasthttp.RequestCtx
	ctx.Init2(c, nil, false)
	if connOf(&ctx.Request.Header) != c {
		t.Error("another connection")
	}
}
