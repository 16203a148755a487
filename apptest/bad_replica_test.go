package apptest

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"
)

// TestGarbageFromReplica: answers that break HTTP are the replica's failure:
// the other one answers, alone it is an honest 502, and nothing hangs.
func TestGarbageFromReplica(t *testing.T) {
	t.Parallel()
	say := func(s string) func(*conn) {
		return func(c *conn) { c.send(s); time.Sleep(20 * time.Millisecond); c.close() }
	}
	cl := fmt.Sprintf("Content-Length: %d\r\n", len(bodyOK))
	for name, bad := range map[string]func(*conn){
		"not HTTP":            say("hello world\r\n\r\n"),
		"binary":              say("\x00\x01\x02\xff\xfe\r\n\r\n"),
		"no status":           say("HTTP/1.1\r\n\r\n"),
		"status 99":           say("HTTP/1.1 99 Low\r\nContent-Length: 0\r\n\r\n"),
		"status abc":          say("HTTP/1.1 abc OK\r\nContent-Length: 0\r\n\r\n"),
		"switching protocols": say("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"),
		"huge head":           say("HTTP/1.1 200 OK\r\nX-Big: " + strings.Repeat("a", 1<<20) + "\r\n" + cl + "\r\n" + bodyOK),
		"CL negative":         say("HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n" + bodyOK),
		"two CL":              say("HTTP/1.1 200 OK\r\n" + cl + "Content-Length: 3\r\n\r\n" + bodyOK),
		"CL and TE":           say("HTTP/1.1 200 OK\r\n" + cl + "Transfer-Encoding: chunked\r\n\r\n" + bodyOK),
		"TE unknown":          say("HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n" + bodyOK),
		"chunk size garbage":  say("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nqq\r\n{}\r\n0\r\n\r\n"),
		"half a head":         say("HTTP/1.1 200 OK\r\nContent-Type: appl"),
		"CL too long":         say(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(bodyOK)+50, bodyOK)),
		"CL too short":        say(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(bodyOK)-50, bodyOK)),
		"CL beyond all":       say("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 999999999999999999\r\n\r\n" + bodyOK),
		"CL 0":                say("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 0\r\n\r\n"),
		"null":                say("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 4\r\n\r\nnull"),
		"a list":              say("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n[]"),
		"a page":              say("HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 15\r\n\r\n<html>hi</html>"),
		"deep nesting":        say(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 200000\r\n\r\n%s%s", strings.Repeat("[", 100000), strings.Repeat("]", 100000))),
		"bare CR in a header": say("HTTP/1.1 200 OK\r\nX-A: a\rb\r\n" + cl + "\r\n" + bodyOK),
		"bare LF":             say(strings.ReplaceAll("HTTP/1.1 200 OK\r\n"+cl+"\r\n", "\r\n", "\n") + bodyOK),
		"status 600":          say("HTTP/1.1 600 What\r\n" + cl + "\r\n" + bodyOK),
		"endless trailers":    say("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n" + fmt.Sprintf("%x\r\n%s\r\n0\r\n", len(bodyOK), bodyOK) + strings.Repeat("X-T: 1\r\n", 20000)),
		"closes at once":      (*conn).close,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			u1, u2 := once(t, bad)
			r := start(t, "", u1, u2)
			a := r.post(chat, reqBody)
			wantOK(t, a)
			if string(a.Body) != bodyOK {
				t.Errorf("got %.300q", a.Body)
			}
			wantOK(t, r.post(chat, reqBody))
			alone := start(t, "", replica(t, bad))
			a = alone.post(chat, reqBody)
			wantError(t, a, 502, "upstream_error")
		})
	}
}

// TestRedirectIsNotPassedOn: a replica's redirect names its own address, which
// is nothing for clients.
func TestRedirectIsNotPassedOn(t *testing.T) {
	t.Parallel()
	u1 := replica(t, func(c *conn) {
		c.send("HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:1/secret\r\nContent-Length: 0\r\n\r\n")
	})
	r := start(t, "", u1)
	a := r.post(chat, reqBody)
	if a.Status < 400 || a.code() == "" || strings.Contains(string(a.Body)+fmt.Sprint(a.Header), "127.0.0.1:1/secret") {
		t.Errorf("answer %d %v %q, want an error without the replica's address", a.Status, a.Header, a.Body)
	}
}

// TestEndlessInterim: a replica that sends 100 Continue for ever is given up.
func TestEndlessInterim(t *testing.T) {
	t.Parallel()
	u1, u2 := once(t, func(c *conn) {
		for range 5000 {
			c.send("HTTP/1.1 100 Continue\r\n\r\n")
			time.Sleep(time.Millisecond)
			if c.dead {
				return
			}
		}
		c.close()
	})
	r := start(t, shortWaits, u1, u2)
	wantOK(t, r.post(chat, reqBody))
}

// TestAnswerSplitting: bytes behind a whole answer are never the next one's.
func TestAnswerSplitting(t *testing.T) {
	t.Parallel()
	evil := `{"evil":true}`
	u1 := replica(t, func(c *conn) {
		tail := fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(evil), evil)
		c.send(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s%s", len(bodyOK), bodyOK, tail))
	})
	r := start(t, "", u1)
	for range 10 {
		a := r.post(chat, reqBody)
		wantOK(t, a)
		if string(a.Body) != bodyOK {
			t.Fatalf("the client got %q", a.Body)
		}
	}
}

// TestGarbageInStream: a stream that breaks its framing after it began ends in
// the error event.
func TestGarbageInStream(t *testing.T) {
	t.Parallel()
	for name, garbage := range map[string]string{
		"chunk size":    "zzzz\r\nhello\r\n",
		"chunk end":     "5\r\nhelloXX",
		"chunk too big": "ffffffffffffffffff\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			begun := make(gate)
			u1 := replica(t, func(c *conn) {
				c.sseHead()
				c.chunk(frame(1))
				begun.wait(c)
				c.send(garbage)
				c.waitClose(20 * time.Second)
			})
			r := start(t, "", u1)
			a := r.postGate(begun, `"t1"`, chat, reqStream)
			if !bytes.HasPrefix(a.Body, []byte(frame(1))) || bytes.Contains(a.Body, []byte("[DONE]")) {
				t.Errorf("the client got %q", a.Body)
			}
			if _, ok := errorEvent(a.Body); !ok {
				t.Errorf("no error event: %q", a.Body)
			}
			r.wantMetric(1, "penstock_requests_total", label("code", "502"))
		})
	}
}

// TestErrorEventAfterPartialLine: the error event is an event of its own even
// when the replica died inside a line.
func TestErrorEventAfterPartialLine(t *testing.T) {
	t.Parallel()
	begun := make(gate)
	u1 := replica(t, func(c *conn) {
		c.sseHead()
		c.chunk(frame(1))
		begun.wait(c)
		c.chunk(`data: {"id":"c","cho`)
		c.close()
	})
	r := start(t, "", u1)
	a := r.postGate(begun, `"t1"`, chat, reqStream)
	events := bytes.Split(bytes.TrimRight(a.Body, "\n"), []byte("\n\n"))
	last := events[len(events)-1]
	if !bytes.HasPrefix(last, []byte(`data: {"error":{`)) || bytes.Contains(last, []byte("\n")) {
		t.Errorf("the last event is %q, want the error alone", last)
	}
	if !bytes.HasSuffix(a.Body, []byte("\n\n")) {
		t.Errorf("the error event is not ended: %q", a.Body)
	}
}

// TestModelsMerged: GET /v1/models is the union of what live replicas serve,
// with aliases, each once.
func TestModelsMerged(t *testing.T) {
	t.Parallel()
	u1 := newMock(t, mockOpts{Handle: (*conn).ok, Models: []string{"m1", "lora-a"}})
	u2 := newMock(t, mockOpts{Handle: (*conn).ok, Models: []string{"m1", "m2"}})
	r := start(t, "", u1, u2)
	r.eventually(10*time.Second, "both replicas' models are known", func() bool {
		b := string(r.get("/v1/models").Body)
		return strings.Contains(b, `"m2"`) && strings.Contains(b, `"lora-a"`)
	})
	a := r.get("/v1/models")
	for _, id := range []string{"m1", "m2", "lora-a"} {
		if n := strings.Count(string(a.Body), fmt.Sprintf(`"id":%q`, id)); n != 1 {
			t.Errorf("%s is there %d times: %s", id, n, a.Body)
		}
	}
	// and each goes where it is served
	for range 5 {
		wantOK(t, r.post(chat, strings.Replace(reqBody, "m1", "m2", 1)))
		wantOK(t, r.post(chat, strings.Replace(reqBody, "m1", "lora-a", 1)))
	}
	for _, c := range u1.reqs() {
		if bytes.Contains(c.Body, []byte(`"m2"`)) {
			t.Errorf("m2 went to a replica that does not serve it")
		}
	}
}
