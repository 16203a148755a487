package apptest

import (
	"bytes"
	"context"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestCaseP1ClientLeavesBeforeFirstByte: the upstream is closed, nothing is
// repeated, every account returns, and the replica is not blamed.
func TestCaseP1ClientLeavesBeforeFirstByte(t *testing.T) {
	t.Parallel()
	// All leave when all are at a replica, which seen counts.
	leaveBy := func(body string, n int) func(*testing.T, *router, func() int) {
		return func(t *testing.T, r *router, seen func() int) {
			ctx, cancel := context.WithCancel(context.Background())
			var all sync.WaitGroup
			defer all.Wait()
			defer cancel()
			for range n {
				all.Go(func() {
					if _, err := r.try(ctx, chat, body); err == nil {
						t.Error("an answer came from a replica that gives none")
					}
				})
			}
			r.eventually(10*time.Second, "all are at a replica", func() bool { return seen() == n })
		}
	}
	halfThenReset := func(t *testing.T, r *router, seen func() int) {
		c := r.dial()
		c.send(request(chat, reqBody))
		r.eventually(10*time.Second, "it is at a replica", func() bool { return seen() == 1 })
		c.k.CloseWrite()
		time.Sleep(100 * time.Millisecond)
		c.reset()
	}
	for name, v := range map[string]struct {
		n     int
		leave func(*testing.T, *router, func() int)
	}{
		"body":              {1, leaveBy(reqBody, 1)},
		"stream":            {1, leaveBy(reqStream, 1)},
		"half-close, reset": {1, halfThenReset},
		"50 at once":        {50, leaveBy(reqBody, 50)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			u1 := replica(t, func(c *conn) { c.waitClose(time.Minute) })
			u2 := replica(t, func(c *conn) { c.waitClose(time.Minute) })
			r := start(t, "log: {level: debug}\n", u1, u2)
			v.leave(t, r, func() int { return u1.count() + u2.count() })
			r.zeroAccounts(20 * time.Second)
			var closes []peerClose
			r.eventually(20*time.Second, "all upstream connections are closed", func() bool {
				closes = append(u1.peerCloses(), u2.peerCloses()...)
				return len(closes) >= v.n
			})
			for _, c := range closes {
				if !c.Closed || c.After > 20*time.Second { // how fast it is: TestClientGoneLatency
					t.Errorf("request %d: upstream closed %v after %v", c.N, c.Closed, c.After)
				}
			}
			if n := u1.count() + u2.count(); n != v.n || len(closes) != v.n {
				t.Errorf("replicas saw %d requests and %d closes, want %d of each: nothing may be repeated", n, len(closes), v.n)
			}
			r.wantMetric(float64(v.n), "penstock_requests_total", label("code", "499"))
			r.wantMetric(float64(v.n), "penstock_request_outcomes_total", label("outcome", "cancelled"))
			r.wantMetric(0, "penstock_request_outcomes_total", label("outcome", "failed"))
			r.wantMetric(0, "penstock_failovers_total")
			r.wantMetric(0, "penstock_replica_ejections_total")
			for _, u := range []*mock{u1, u2} {
				if s := r.stateOf(u); s != "up" {
					t.Errorf("replica is %q after clients left, want up", s)
				}
			}
			if n := strings.Count(r.log.String(), "499"); n < v.n {
				t.Errorf("the log names a client-closed outcome (499) %d times, want %d", n, v.n)
			}
		})
	}
}

// TestCaseP1HalfCloseNeverHangs: a client that shuts its write side and waits
// is served or treated as gone, and never left hanging.
func TestCaseP1HalfCloseNeverHangs(t *testing.T) {
	t.Parallel()
	u1 := replica(t, func(c *conn) { time.Sleep(300 * time.Millisecond); c.ok() })
	r := start(t, "", u1)
	for _, body := range []string{reqBody, reqStream} {
		c := r.dial()
		c.send(request(chat, body))
		time.Sleep(50 * time.Millisecond)
		c.k.CloseWrite()
		got, closed := c.rest(6 * time.Second)
		if !closed {
			t.Errorf("a half-closed client hangs; it got %q", got)
		}
		if got != "" && !strings.HasPrefix(got, "HTTP/1.1 200") {
			t.Errorf("a half-closed client got %q", got)
		}
	}
}

// TestCaseP2ReplicaDiesMidStream: what came is passed on as it came, the end
// is explicit, and nothing is invented.
func TestCaseP2ReplicaDiesMidStream(t *testing.T) {
	t.Parallel()
	three := frame(1) + frame(2) + frame(3)
	send3 := func(c *conn, begun gate) {
		c.sseHead()
		for i := 1; i <= 3; i++ {
			c.chunk(frame(i))
		}
		begun.wait(c)
	}
	for name, v := range map[string]struct {
		end  func(*conn)
		sent string
	}{
		"reset":         {(*conn).rst, three},
		"close":         {(*conn).close, three},
		"inside a line": {func(c *conn) { c.chunk(`data: {"id":"c","cho`); c.rst() }, three},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			begun := make(gate)
			handle := func(c *conn) { send3(c, begun); v.end(c) }
			u1, u2 := replica(t, handle), replica(t, handle)
			r := start(t, "", u1, u2)
			a := r.postGate(begun, `"t3"`, chat, reqStream)
			if !bytes.HasPrefix(a.Body, []byte(v.sent)) {
				t.Errorf("what came before the cut is not byte-exact: %q", a.Body)
			}
			code, ok := errorEvent(a.Body)
			if !ok || (code != "upstream_stream_failed" && code != "stream_integrity") {
				t.Errorf("no terminal error event (code %q): %q", code, a.Body)
			}
			rest := string(a.Body[min(len(v.sent), len(a.Body)):])
			if strings.Contains(rest, "[DONE]") || strings.Contains(rest, `"finish_reason":"`) {
				t.Errorf("an end was invented: %q", rest)
			}
			if n := u1.count() + u2.count(); n != 1 {
				t.Errorf("replicas saw %d requests, want 1: a stream that began is never restarted", n)
			}
			r.wantMetric(1, "penstock_requests_total", label("code", "502"))
			r.wantMetric(1, "penstock_request_outcomes_total", label("outcome", "failed"))
		})
	}
}

// TestCaseP2ZeroEvents: headers alone commit nothing, so the other replica answers.
func TestCaseP2ZeroEvents(t *testing.T) {
	t.Parallel()
	dies := func(c *conn) { c.sseHead(); time.Sleep(50 * time.Millisecond); c.rst() }
	u1, u2 := once(t, dies)
	r := start(t, "", u1, u2)
	a := r.post(chat, reqStream)
	wantOK(t, a)
	if want := frame(1) + frame(2) + frame(3) + frameFin + frameUse + frameDone; string(a.Body) != want {
		t.Errorf("after the failover the client got %q, want %q", a.Body, want)
	}
	if n := u1.count() + u2.count(); n != 2 {
		t.Errorf("replicas saw %d requests, want 2", n)
	}
	r.wantMetric(1, "penstock_failovers_total")
}

// TestCaseP2CutJSON: an answer in one piece that is cut is never passed as whole.
func TestCaseP2CutJSON(t *testing.T) {
	t.Parallel()
	cut := func(c *conn) {
		c.send("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n" + bodyOK[:100])
		time.Sleep(50 * time.Millisecond)
		c.close()
	}
	for name, body := range map[string]string{"body": reqBody, "stream": reqStream} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			u1, u2 := replica(t, cut), replica(t, cut)
			r := start(t, "", u1, u2)
			a := r.post(chat, body)
			if a.Status == 200 && a.ReadErr == nil {
				t.Errorf("a cut answer ended cleanly as 200: %q", a.Body)
			}
			if a.Status != 200 {
				wantError(t, a, 502, "upstream_error")
			}
			if n := u1.count() + u2.count(); n > 2 {
				t.Errorf("replicas saw %d requests, want at most 2", n)
			}
			r.wantMetric(1, "penstock_requests_total", label("code", "502"))
		})
	}
}

// TestCaseP2HealthyControls: whole streams pass unchanged, with and without DONE.
func TestCaseP2HealthyControls(t *testing.T) {
	t.Parallel()
	completed := "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"r\",\"usage\":{\"input_tokens\":7,\"output_tokens\":3,\"total_tokens\":10}}}\n\n"
	u1 := replica(t, func(c *conn) {
		if strings.Contains(c.Head, "/v1/responses") {
			c.sseHead()
			c.chunk(completed)
			c.end()
			return
		}
		c.stream()
	})
	r := start(t, "", u1)
	a := r.post(chat, reqStream)
	wantOK(t, a)
	if want := frame(1) + frame(2) + frame(3) + frameFin + frameUse + frameDone; string(a.Body) != want {
		t.Errorf("a healthy stream was changed: %q", a.Body)
	}
	a = r.post("/v1/responses", `{"model":"m1","input":"hi","stream":true}`)
	wantOK(t, a)
	if string(a.Body) != completed {
		t.Errorf("a Responses stream without DONE was changed: %q", a.Body)
	}
	r.wantMetric(2, "penstock_request_outcomes_total", label("outcome", "finished"))
	r.wantMetric(0, "penstock_stream_integrity_total")
}

// TestTruncatedStreamIsCounted: a clean end without a finish reason and DONE is
// not taken for a whole answer.
func TestTruncatedStreamIsCounted(t *testing.T) {
	t.Parallel()
	begun := make(gate)
	u1 := replica(t, func(c *conn) {
		c.sseHead()
		c.chunk(frame(1))
		begun.wait(c) // else the router may well try another replica
		c.chunk(frame(2))
		c.end()
	})
	r := start(t, "", u1)
	a := r.postGate(begun, `"t1"`, chat, reqStream)
	if !bytes.HasPrefix(a.Body, []byte(frame(1)+frame(2))) || bytes.Contains(a.Body, []byte("[DONE]")) {
		t.Errorf("the client got %q", a.Body)
	}
	r.wantMetric(1, "penstock_stream_integrity_total")
}

// once gives two replicas of which the first request, wherever it goes, is
// handled by bad, and every later one answered.
func once(t *testing.T, bad func(*conn)) (*mock, *mock) {
	first := make(chan struct{}, 1)
	first <- struct{}{}
	h := func(c *conn) {
		select {
		case <-first:
			bad(c)
		default:
			c.ok()
		}
	}
	return replica(t, h), replica(t, h)
}

// TestCaseP3KeepAliveRace: a replica that closes an idle connection just as it
// is used again costs no request, and no request runs twice.
func TestCaseP3KeepAliveRace(t *testing.T) {
	t.Parallel()
	for name, after := range map[string]func(*conn){"close": (*conn).close, "reset": (*conn).rst} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			u1 := replica(t, func(c *conn) { c.ok(); time.Sleep(30 * time.Millisecond); after(c) })
			r := start(t, "", u1)
			for range 30 {
				wantOK(t, r.post(chat, reqBody))
				time.Sleep(150 * time.Millisecond)
			}
			if n := u1.count(); n != 30 {
				t.Errorf("the replica saw %d requests of 30: something ran twice", n)
			}
			r.wantMetric(0, "penstock_replica_ejections_total")
		})
	}
	t.Run("close at the router's idle time-out", func(t *testing.T) {
		t.Parallel()
		const idle = time.Second
		// Only an idle connection is closed: the wait for the next request is ended,
		// and what was read by then is served.
		var mu sync.Mutex
		turn := map[net.Conn]int{}
		u1 := replica(t, func(c *conn) {
			mu.Lock()
			turn[c.k]++
			mine := turn[c.k]
			_ = c.k.SetReadDeadline(time.Time{})
			mu.Unlock()
			c.ok()
			time.AfterFunc(idle, func() {
				mu.Lock()
				defer mu.Unlock()
				if turn[c.k] == mine {
					_ = c.k.SetReadDeadline(time.Now())
				}
			})
		})
		r := start(t, "timeouts: {upstream_idle: 1s}\n", u1)
		for round := range 3 {
			parallel(10, func(i int) bool {
				time.Sleep(time.Duration(i-5) * 2 * time.Millisecond) // around the very moment
				wantOK(t, r.post(chat, reqBody))
				return true
			})
			if round < 2 {
				time.Sleep(idle - 10*time.Millisecond)
			}
		}
		if n := u1.count(); n != 30 {
			t.Errorf("the replica saw %d requests of 30: something ran twice", n)
		}
	})
}

// TestCaseP3ReadThenClose: a request that was read and not answered is not
// repeated at the same replica beyond the attempt budget, and fails over once.
func TestCaseP3ReadThenClose(t *testing.T) {
	t.Parallel()
	t.Run("one replica", func(t *testing.T) {
		t.Parallel()
		u1 := replica(t, func(c *conn) { c.close() })
		r := start(t, "", u1)
		wantError(t, r.post(chat, reqBody), 502, "upstream_error")
		if n := u1.count(); n > 2 {
			t.Errorf("the replica saw the request %d times, want at most 2", n)
		}
	})
	t.Run("failover", func(t *testing.T) {
		t.Parallel()
		u1, u2 := once(t, (*conn).close)
		r := start(t, "", u1, u2)
		wantOK(t, r.post(chat, reqBody))
		if u1.count() != 1 || u2.count() != 1 {
			t.Errorf("replicas saw %d and %d requests, want one each", u1.count(), u2.count())
		}
	})
}
