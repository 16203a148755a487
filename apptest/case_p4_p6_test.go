package apptest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/freeport"
)

// shortWaits makes a replica that never answers cost 2 s, as the cases ask.
const shortWaits = "timeouts: {first_token: 2s, answer: 2s}\n"

// someWaits is for tests in which another replica has to answer in that time on
// a machine that does other work too.
const someWaits = "timeouts: {first_token: 6s, answer: 6s}\n"

// refusing returns the URL of a port where nothing listens.
func refusing(t *testing.T) string {
	return "http://" + freeport.Addr(t)
}

// TestCaseP4FailoverBeforeFirstByte: whatever is wrong with one replica before
// an answer began, the other gives the answer, and attempts stay bounded.
func TestCaseP4FailoverBeforeFirstByte(t *testing.T) {
	t.Parallel()
	big := `{"model":"m1","messages":[{"role":"user","content":"` + strings.Repeat("lorem ipsum ", 25000) + `"}]}`
	for name, handle := range map[string]func(*conn){
		"never answers": func(c *conn) { c.waitClose(time.Minute) },
		"503":           func(c *conn) { c.json(503, `{"error":{"message":"overloaded"}}`, "") },
		"502":           func(c *conn) { c.json(502, `{"error":{"message":"bad"}}`, "") },
		"500":           func(c *conn) { c.json(500, `{"error":{"message":"boom"}}`, "") },
		"reset":         (*conn).rst,
		"headers, no body": func(c *conn) {
			c.send(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", len(bodyOK)))
			c.waitClose(time.Minute)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// The replica that is asked first is the bad one from then on.
			var bad atomic.Pointer[mock]
			h := func(c *conn) {
				if bad.CompareAndSwap(nil, c.m) || bad.Load() == c.m {
					handle(c)
					return
				}
				c.ok()
			}
			us := []*mock{replica(t, h), replica(t, h)}
			r := start(t, someWaits, us...)
			for i := range 20 {
				wantOK(t, r.post(chat, big, "X-Request-ID", fmt.Sprintf("r-%d", i)))
			}
			for _, u := range us {
				if u != bad.Load() {
					checkGoodReplica(t, u, big)
					continue
				}
				seen := map[string]int{}
				for _, c := range u.reqs() {
					seen[c.header("X-Request-ID")]++
				}
				for id, n := range seen {
					if n > 1 {
						t.Errorf("request %s went to the bad replica %d times", id, n)
					}
				}
			}
		})
	}
	t.Run("refused port", func(t *testing.T) {
		t.Parallel()
		u2 := replica(t, (*conn).ok)
		r := startConfig(t, poolYAML("main", refusing(t), u2.url())+someWaits)
		for range 20 {
			wantOK(t, r.post(chat, big))
		}
		checkGoodReplica(t, u2, big)
	})
}

// checkGoodReplica: it got all 20 bodies, once and whole.
func checkGoodReplica(t *testing.T, u *mock, body string) {
	t.Helper()
	if n := u.count(); n != 20 {
		t.Errorf("the good replica saw %d requests of 20", n)
	}
	for _, c := range u.reqs() {
		if sha256.Sum256(c.Body) != sha256.Sum256([]byte(body)) {
			t.Errorf("request %s arrived changed", c.header("X-Request-ID"))
		}
	}
}

// TestCaseP4StreamFailover is the same for streams whose headers came and
// then nothing: vLLM sends these before it queues.
func TestCaseP4StreamFailover(t *testing.T) {
	t.Parallel()
	for name, bad := range map[string]func(*conn){
		"headers only": func(c *conn) { c.sseHead(); c.waitClose(time.Minute) },
		"role only": func(c *conn) {
			c.sseHead()
			c.chunk(`data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n")
			c.waitClose(time.Minute)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			u1, u2 := once(t, bad)
			r := start(t, someWaits, u1, u2)
			a := r.post(chat, reqStream)
			wantOK(t, a)
			if want := frame(1) + frame(2) + frame(3) + frameFin + frameUse + frameDone; string(a.Body) != want {
				t.Errorf("the client got %q, want the second replica's stream alone", a.Body)
			}
			// The abandoned attempt is cancelled, so its replica stops generating.
			r.eventually(4*time.Second, "the abandoned attempt is closed", func() bool {
				return len(u1.peerCloses())+len(u2.peerCloses()) == 1
			})
		})
	}
}

// TestCaseP4OthersUndisturbed: while one replica hangs, requests that go
// elsewhere do not wait for it.
func TestCaseP4OthersUndisturbed(t *testing.T) {
	t.Parallel()
	u1 := replica(t, func(c *conn) { c.waitClose(time.Minute) })
	u2 := newMock(t, mockOpts{Handle: (*conn).ok, Models: []string{"m2"}})
	r := start(t, "timeouts: {first_token: 60s, answer: 60s}\nhealth: {hang_after: 60s}\n", u1, u2)
	ctx, stop := context.WithCancel(context.Background())
	hung := make(chan struct{})
	go func() {
		parallel(20, func(int) error { _, err := r.try(ctx, chat, reqBody); return err })
		close(hung)
	}()
	r.eventually(30*time.Second, "requests hang at U1", func() bool { return u1.count() > 0 })
	for _, a := range parallel(10, func(int) answer { return r.post(chat, strings.Replace(reqBody, "m1", "m2", 1)) }) {
		wantOK(t, a)
		if a.Took > 20*time.Second { // a third of what the hung ones take
			t.Errorf("a request for the healthy model took %v", a.Took)
		}
	}
	stop()
	<-hung
}

// TestCaseP4AllDown: with nobody left there is one honest error, soon.
func TestCaseP4AllDown(t *testing.T) {
	t.Parallel()
	for name, handle := range map[string]func(*conn){
		"502":           func(c *conn) { c.json(502, `{"error":{"message":"bad"}}`, "") },
		"never answers": func(c *conn) { c.waitClose(time.Minute) },
		"both stopped":  nil,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := handle
			if h == nil {
				h = (*conn).ok
			}
			u1, u2 := replica(t, h), replica(t, h)
			r := start(t, shortWaits, u1, u2)
			if handle == nil {
				u1.stop()
				u2.stop()
			}
			a := r.post(chat, reqBody, "X-Request-Timeout-Ms", "6000")
			if a.Status != 502 && a.Status != 503 && a.Status != 504 {
				t.Errorf("status %d, want 502, 503 or 504", a.Status)
			}
			if a.code() == "" {
				t.Errorf("no error envelope: %q", a.Body)
			}
			if a.Took > 12*time.Second {
				t.Errorf("it took %v: past the deadline of 6 s (x2)", a.Took)
			}
			if n := u1.count() + u2.count(); n > 2 {
				t.Errorf("%d attempts, want at most 2", n)
			}
		})
	}
}

// TestCaseP5ClientErrorsAreNotReplicaFailures: a replica's 4xx goes back as it
// is, once, and blames nobody.
func TestCaseP5ClientErrorsAreNotReplicaFailures(t *testing.T) {
	t.Parallel()
	for _, status := range []int{400, 401, 404, 413, 422} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			t.Parallel()
			verbatim := fmt.Sprintf(`{"object": "error",  "message":"max context length","code":%d}`, status)
			handle := func(c *conn) {
				if bytes.Contains(c.Body, []byte("toolong")) {
					c.json(status, verbatim, "")
					return
				}
				c.ok()
			}
			u1, u2 := replica(t, handle), replica(t, handle)
			r := start(t, "", u1, u2)
			for range 60 {
				a := r.post(chat, strings.Replace(reqBody, "hi", "toolong", 1))
				if a.Status != status || string(a.Body) != verbatim {
					t.Fatalf("answer %d %q, want %d and the replica's own body", a.Status, a.Body, status)
				}
			}
			for range 10 {
				wantOK(t, r.post(chat, reqBody))
			}
			if n := u1.count() + u2.count(); n != 70 {
				t.Errorf("replicas saw %d requests, want 70: a client error is never repeated", n)
			}
			r.wantMetric(0, "penstock_replica_ejections_total")
			r.wantMetric(0, "penstock_failovers_total")
			for _, u := range []*mock{u1, u2} {
				if s := r.stateOf(u); s != "up" {
					t.Errorf("replica is %q, want up", s)
				}
			}
		})
	}
}

// exactBody is P6's: order, gaps, escapes, a big integer, floats, decoys and
// a trailing newline.
const exactBody = `{"zz":1,"model":"m1", "seed":9007199254740993,"temperature":1.0,"top_p":1e-7,"stop":["\u00e9\ud83d\ude00","</s>"],"chat_template_kwargs":{"enable_thinking":false},"cache_salt":"t1","messages":[{"content":"a\/b","role":"user","x_y":null}],"Model":"decoy","metadata":{"model":"inner"}}` + "\n"

// TestCaseP6BodyByteForByte: what the client wrote is what the replica reads.
func TestCaseP6BodyByteForByte(t *testing.T) {
	t.Parallel()
	u1 := replica(t, (*conn).ok)
	r := startConfig(t, strings.Replace(poolYAML("main", u1.url()), "    replicas", "    models: [m1]\n    aliases: [chat, m1-long-alias]\n    replicas", 1))
	last := func() []byte { c := u1.reqs(); return c[len(c)-1].Body }
	long := `{"messages":[{"role":"user","content":"` + strings.Repeat("x", 2<<20) + `"}],"model":"m1"}`
	for name, v := range map[string]struct{ sent, want string }{
		"exact":                {exactBody, exactBody},
		"alias":                {strings.Replace(exactBody, `"model":"m1"`, `"model":"chat"`, 1), exactBody},
		"alias, longer":        {strings.Replace(exactBody, `"model":"m1"`, `"model":"m1-long-alias"`, 1), exactBody},
		"alias with escapes":   {strings.Replace(exactBody, `"model":"m1"`, `"model" : "\u0063hat"`, 1), strings.Replace(exactBody, `"model":"m1"`, `"model" : "m1"`, 1)},
		"model last after 2MB": {long, long},
		"alias last after 2MB": {strings.Replace(long, `"model":"m1"`, `"model":"chat"`, 1), long},
		"decoy in a string":    {`{"messages":[{"role":"user","content":"\"model\":\"x\" {\"model\":\"y\"}"}],"model":"m1"}`, ``},
	} {
		if v.want == "" {
			v.want = v.sent
		}
		a := r.post(chat, v.sent)
		wantOK(t, a)
		if a.Status == 200 && !bytes.Equal(last(), []byte(v.want)) {
			t.Errorf("%s: the replica read %.400q, want %.400q", name, last(), v.want)
		}
		if c := u1.reqs(); a.Status == 200 && c[len(c)-1].header("Content-Length") != fmt.Sprint(len(v.want)) {
			t.Errorf("%s: Content-Length %s, want %d", name, c[len(c)-1].header("Content-Length"), len(v.want))
		}
	}
	// The same, uploaded in chunks that cut keys and escapes.
	c := r.dial()
	c.send("POST " + chat + " HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
	for b := exactBody; b != ""; {
		n := min(7, len(b))
		c.send(fmt.Sprintf("%x;ext=1\r\n%s\r\n", n, b[:n]))
		b = b[n:]
	}
	c.send("0\r\n\r\n")
	if got := c.until("\r\n\r\n", 5*time.Second); !strings.HasPrefix(got, "HTTP/1.1 200") {
		t.Errorf("chunked upload: %q", got)
	}
	if string(last()) != exactBody {
		t.Errorf("chunked upload: the replica read %q", last())
	}
}

// TestCaseP6DuplicateModel: two models in one body are refused, so routing and
// forwarding can never differ about them.
func TestCaseP6DuplicateModel(t *testing.T) {
	t.Parallel()
	u1 := newMock(t, mockOpts{Handle: (*conn).ok, Models: []string{"m1", "m2"}})
	r := start(t, "", u1)
	a := r.post(chat, `{"model":"m2","messages":[],"model":"m1"}`)
	wantError(t, a, 400, "invalid_request")
	if u1.count() != 0 {
		t.Errorf("a refused body reached the replica")
	}
	wantOK(t, r.post(chat, reqBody))
}
