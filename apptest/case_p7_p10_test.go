package apptest

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"
)

// oddEvents is P7's stream: a comment, CRLF and no space after the colon, an
// event of two data lines whose text looks like an end, then the usual end.
var oddEvents = []string{
	": ping\n\n",
	"data:{\"choices\":[{\"index\":0,\"delta\":{\"content\":\"北京🌍\"}}]}\r\n\r\n",
	"event: x\nid: 7\ndata: {\"choices\":[{\"index\":0,\ndata: \"delta\":{\"content\":\"say data: [DONE] now\"}}]}\n\n",
	frameFin, frameUse, frameDone,
}

const reqUsage = `{"model":"m1","messages":[{"role":"user","content":"hi"}],"stream":true,"stream_options":{"include_usage":true}}`

// TestCaseP7StreamIntactHoweverCut: the client reads the replica's bytes, and
// usage is understood, wherever the chunks are cut.
func TestCaseP7StreamIntactHoweverCut(t *testing.T) {
	t.Parallel()
	all := strings.Join(oddEvents, "")
	chunks := func(parts ...string) func(*conn) {
		return func(c *conn) {
			c.sseHead()
			for _, p := range parts {
				c.chunk(p)
			}
			c.end()
		}
	}
	var inChars []string // cut inside each multi-byte character
	var rest []byte
	for i := range len(all) {
		if all[i] >= 0x80 && all[i] < 0xC0 {
			inChars = append(inChars, string(rest))
			rest = nil
		}
		rest = append(rest, all[i])
	}
	inChars = append(inChars, string(rest))
	var betweenNewlines []string
	for _, e := range oddEvents {
		betweenNewlines = append(betweenNewlines, e[:len(e)-1], e[len(e)-1:])
	}
	for name, handle := range map[string]func(*conn){
		"one byte a chunk":     chunks(bytewise(all)...),
		"inside characters":    chunks(inChars...),
		"between the newlines": chunks(betweenNewlines...),
		"all in one chunk":     chunks(all),
		"close-delimited": func(c *conn) {
			c.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + all[:40])
			time.Sleep(100 * time.Millisecond)
			c.send(all[40:])
			c.close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			u1 := replica(t, handle)
			r := start(t, "", u1)
			a := r.post(chat, reqUsage)
			wantOK(t, a)
			if string(a.Body) != all {
				t.Errorf("got  %q\nwant %q", a.Body, all)
			}
			r.wantMetric(7, "penstock_prompt_tokens_total")
			r.wantMetric(3, "penstock_output_tokens_total")
			r.wantMetric(0, "penstock_usage_estimated_total")
			r.wantMetric(0, "penstock_stream_integrity_total")
		})
	}
}

// bytewise splits s into its bytes.
func bytewise(s string) []string {
	var out []string
	for i := range len(s) {
		out = append(out, s[i:i+1])
	}
	return out
}

// TestCaseP7NoBatching: an event is at the client before the replica sends the
// next one. The replica waits for the client's word, so no clock is involved.
func TestCaseP7NoBatching(t *testing.T) {
	t.Parallel()
	seen := make(chan struct{})
	late := make(chan int, len(oddEvents))
	events := append([]string{frame(1)}, oddEvents[1:]...) // the first commits; a comment alone need not be passed on
	u1 := replica(t, func(c *conn) {
		c.sseHead()
		for i, e := range events {
			c.chunk(e)
			select {
			case <-seen:
			case <-time.After(30 * time.Second):
				late <- i
				c.close()
				return
			}
		}
		c.end()
	})
	r := start(t, "", u1)
	resp, err := r.client.Post(r.URL+chat, "application/json", strings.NewReader(reqUsage))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var got []byte
	want, next := "", 0
	buf := make([]byte, 4096)
	for {
		n, err := resp.Body.Read(buf)
		got = append(got, buf[:n]...)
		for next < len(events) && len(got) >= len(want)+len(events[next]) {
			want += events[next]
			next++
			seen <- struct{}{}
		}
		if err != nil {
			if err != io.EOF {
				t.Errorf("the stream ended with %v", err)
			}
			break
		}
	}
	select {
	case i := <-late:
		t.Errorf("event %d was not at the client 5 s after it was sent: it is held back", i)
	default:
	}
	if string(got) != strings.Join(events, "") {
		t.Errorf("got %q", got)
	}
}

const tooMany = `{"error":{"message":"queue  full","type":"rate_limit","code":429}}`

// TestCaseP9SaturatedAlone: the only replica's 429 goes back with all that it said.
func TestCaseP9SaturatedAlone(t *testing.T) {
	t.Parallel()
	u1 := replica(t, func(c *conn) {
		c.json(429, tooMany, "Retry-After: 7\r\nanthropic-ratelimit-unified-status: rejected\r\n")
	})
	r := start(t, "", u1)
	a := r.post(chat, reqBody)
	if a.Status != 429 || string(a.Body) != tooMany {
		t.Errorf("answer %d %q, want 429 and the replica's own body", a.Status, a.Body)
	}
	if a.Header.Get("Retry-After") != "7" || a.Header.Get("Anthropic-Ratelimit-Unified-Status") != "rejected" {
		t.Errorf("the replica's headers were lost: %v", a.Header)
	}
	if n := u1.count(); n != 1 {
		t.Errorf("the replica was asked %d times, want 1: its Retry-After is 7 s", n)
	}
	r.wantMetric(0, "penstock_replica_ejections_total")
	if s := r.stateOf(u1); s != "busy" {
		t.Errorf("replica is %q, want busy", s)
	}
}

// TestCaseP9OneSaturated: the other replica answers, and the busy one is left alone.
func TestCaseP9OneSaturated(t *testing.T) {
	t.Parallel()
	u1 := replica(t, func(c *conn) { c.json(429, tooMany, "Retry-After: 7\r\n") })
	u2 := replica(t, (*conn).ok)
	r := start(t, "", u1, u2)
	for i := 0; u1.count() == 0 && i < 50; i++ {
		wantOK(t, r.post(chat, reqBody))
	}
	if u1.count() != 1 {
		t.Fatalf("the busy replica was asked %d times before it was known", u1.count())
	}
	for _, a := range parallel(40, func(int) answer { return r.post(chat, reqBody) }) {
		wantOK(t, a)
	}
	if n := u1.count(); n > 2 {
		t.Errorf("the busy replica was asked %d times within its 7 s, want one probe at most", n-1)
	}
	r.wantMetric(0, "penstock_replica_ejections_total")
}

// TestCaseP9AllSaturated: everybody is told when to return, and attempts do not multiply.
func TestCaseP9AllSaturated(t *testing.T) {
	t.Parallel()
	busy := func(c *conn) { c.json(503, `{"error":{"message":"full","type":"overloaded"}}`, "Retry-After: 3\r\n") }
	u1, u2 := replica(t, busy), replica(t, busy)
	r := start(t, "classes: [{name: standard, wait: 500ms}]\n", u1, u2)
	t0 := time.Now()
	answers := parallel(40, func(int) answer { return r.post(chat, reqBody) })
	floor := 3 * int(time.Since(t0).Seconds()+2) // attempts.min_per_second
	for _, a := range answers {
		if a.Status != 429 && a.Status != 503 {
			t.Errorf("status %d, want 429 or 503", a.Status)
			continue
		}
		if !bytes.Contains(a.Body, []byte(`"message":`)) {
			t.Errorf("no error envelope: %q", a.Body)
		}
		wantRetryAfter(t, a)
	}
	if n := u1.count() + u2.count(); n > 40*12/10+floor {
		t.Errorf("%d upstream requests for 40, want at most 40 x 1.2 + %d", n, floor)
	}
	r.wantMetric(0, "penstock_replica_ejections_total")
	for _, u := range []*mock{u1, u2} {
		if s := r.stateOf(u); s != "busy" {
			t.Errorf("replica is %q, want busy, not dead", s)
		}
	}
}

// TestCaseP10Headers: what may pass passes, and what may not does not.
func TestCaseP10Headers(t *testing.T) {
	t.Parallel()
	const key = "sk-client-very-secret"
	client := request(chat, reqBody,
		"Authorization: Bearer "+key, "x-api-key: "+key, "Proxy-Authorization: Basic c2VjcmV0",
		"Connection: keep-alive, X-Drop-Me", "X-Drop-Me: 1", "TE: trailers", "X-Request-ID: abc-123",
		"traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "Cookie: s=1", "X-Forwarded-For: 6.6.6.6")
	client = strings.Replace(client, "Host: router.test", "Host: evil.example", 1)
	for name, apiKey := range map[string]string{"no replica key": "", "replica key": "sk-replica"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			u1 := replica(t, func(c *conn) {
				c.json(200, bodyOK, "Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nServer: uvicorn\r\nDate: Mon, 30 Nov 2026 00:00:00 GMT\r\n"+
					"Connection: close, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nX-Vllm: yes\r\nX-Request-ID: of-the-replica\r\n")
				c.close()
			})
			yaml := poolYAML("main", u1.url()) + "log: {level: debug}\n"
			if apiKey != "" {
				yaml = strings.Replace(yaml, "    replicas", "    api_key: "+apiKey+"\n    replicas", 1)
			}
			r := startConfig(t, yaml)
			c := r.dial()
			c.send(client)
			resp, err := http.ReadResponse(bufio.NewReader(c.k), nil)
			if err != nil {
				t.Fatal(err)
			}
			body, _ := io.ReadAll(resp.Body)
			if resp.StatusCode != 200 || string(body) != bodyOK {
				t.Fatalf("answer %d %q", resp.StatusCode, body)
			}
			checkUpstreamHead(t, u1, apiKey, key)
			checkClientHead(t, resp.Header)
			if log := r.log.String(); strings.Contains(log, key) || (apiKey != "" && strings.Contains(log, apiKey)) {
				t.Errorf("a key is in the log")
			}
		})
	}
}

func checkUpstreamHead(t *testing.T, u1 *mock, apiKey, clientKey string) {
	t.Helper()
	up := u1.reqs()[0]
	if strings.Contains(up.Head, clientKey) || bytes.Contains(up.Body, []byte(clientKey)) {
		t.Errorf("the client's key reached the replica:\n%s", up.Head)
	}
	for _, h := range []string{"Proxy-Authorization", "X-Drop-Me", "TE", "Keep-Alive", "X-Api-Key"} {
		if up.header(h) != "" {
			t.Errorf("%s reached the replica: %q", h, up.header(h))
		}
	}
	want := map[string]string{"Host": u1.Addr, "X-Request-ID": "abc-123", "X-Forwarded-For": "127.0.0.1", "Authorization": ""}
	if apiKey != "" {
		want["Authorization"] = "Bearer " + apiKey
	}
	for h, v := range want {
		if up.header(h) != v {
			t.Errorf("upstream %s is %q, want %q", h, up.header(h), v)
		}
	}
	span := regexp.MustCompile(`^00-4bf92f3577b34da6a3ce929d0e0e4736-([0-9a-f]{16})-0[01]$`).FindStringSubmatch(up.header("traceparent"))
	if span == nil || span[1] == "00f067aa0ba902b7" {
		t.Errorf("upstream traceparent is %q, want the same trace and a new span", up.header("traceparent"))
	}
}

func checkClientHead(t *testing.T, h http.Header) {
	t.Helper()
	if got := fmt.Sprint(h["Set-Cookie"]); got != "[a=1 b=2]" {
		t.Errorf("Set-Cookie %s, want both", got)
	}
	if h.Get("X-Vllm") != "yes" || len(h["Server"]) != 1 || len(h["Date"]) != 1 {
		t.Errorf("X-Vllm %q, Server %q, Date %q, want one of each", h["X-Vllm"], h["Server"], h["Date"])
	}
	for _, name := range []string{"X-Hop", "Keep-Alive"} {
		if h.Get(name) != "" {
			t.Errorf("%s reached the client", name)
		}
	}
	if got := h["X-Request-Id"]; len(got) != 1 || got[0] != "abc-123" {
		t.Errorf("X-Request-ID %q, want abc-123 alone", got)
	}
	if !strings.Contains(h.Get("Traceparent"), "4bf92f3577b34da6a3ce929d0e0e4736") {
		t.Errorf("traceparent %q is not echoed", h.Get("Traceparent"))
	}
}
