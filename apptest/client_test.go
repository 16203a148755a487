package apptest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// answer is what a client saw of one request.
type answer struct {
	Status  int
	Header  http.Header
	Body    []byte
	ReadErr error // how the body ended; nil = cleanly
	Took    time.Duration
}

// post sends one request and reads the answer to its end. hdr are name, value pairs.
func (r *router) post(path, body string, hdr ...string) answer {
	r.t.Helper()
	a, err := r.try(context.Background(), path, body, hdr...)
	if err != nil {
		r.t.Errorf("POST %s: %v", path, err)
	}
	return a
}

// gate lets a replica go on when the client has what was sent so far. A fixed
// wait would not do: a router that stood still meanwhile reads what came before
// and after it at once, and then no answer has begun yet.
type gate chan struct{}

// wait is the replica's.
func (g gate) wait(c *conn) {
	select {
	case <-g:
	case <-time.After(time.Minute): // the client got nothing, and its test fails
		c.close()
	}
}

// postGate is post; it opens g when mark has come.
func (r *router) postGate(g gate, mark, path, body string) answer {
	r.t.Helper()
	open := sync.OnceFunc(func() { close(g) })
	a, err := r.ask(context.Background(), func(got []byte) {
		if bytes.Contains(got, []byte(mark)) {
			open()
		}
	}, path, body)
	if err != nil {
		r.t.Errorf("POST %s: %v", path, err)
	}
	return a
}

// try is post for a request that may fail.
func (r *router) try(ctx context.Context, path, body string, hdr ...string) (answer, error) {
	return r.ask(ctx, func([]byte) {}, path, body, hdr...)
}

// ask is try; seen is given all of the body that came, whenever more did.
func (r *router) ask(ctx context.Context, seen func(got []byte), path, body string, hdr ...string) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, 60*time.Second) // a hang has to fail, not stop the suite
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "POST", r.URL+path, strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(hdr); i += 2 {
		req.Header.Set(hdr[i], hdr[i+1])
	}
	t0 := time.Now()
	resp, err := r.client.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	a := answer{Status: resp.StatusCode, Header: resp.Header}
	buf := make([]byte, 32<<10)
	for a.ReadErr == nil {
		var n int
		n, a.ReadErr = resp.Body.Read(buf)
		a.Body = append(a.Body, buf[:n]...)
		seen(a.Body)
	}
	if a.ReadErr == io.EOF {
		a.ReadErr = nil
	}
	a.Took = time.Since(t0)
	return a, nil
}

func (r *router) get(path string) answer {
	r.t.Helper()
	resp, err := r.client.Get(r.URL + path)
	if err != nil {
		r.t.Fatalf("GET %s: %v", path, err)
	}
	defer resp.Body.Close()
	a := answer{Status: resp.StatusCode, Header: resp.Header}
	a.Body, a.ReadErr = io.ReadAll(resp.Body)
	return a
}

// envelope is the error shape of contract.md.
type envelope struct {
	Error *struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    any     `json:"code"`
	} `json:"error"`
}

// code returns error.code, "" when the body is not in the error shape.
func (a answer) code() string {
	var e envelope
	if json.Unmarshal(a.Body, &e) != nil || e.Error == nil || e.Error.Message == "" || e.Error.Type == "" {
		return ""
	}
	s, _ := e.Error.Code.(string)
	return s
}

// wantError checks that the answer is the router's own error with this status and code.
func wantError(t testing.TB, a answer, status int, code string) {
	t.Helper()
	if a.Status != status || a.code() != code {
		t.Errorf("answer %d %q (%.300s), want %d %q", a.Status, a.code(), a.Body, status, code)
		return
	}
	if ct := a.Header.Get("Content-Type"); !strings.HasPrefix(ct, "application/json") {
		t.Errorf("an error's Content-Type is %q", ct)
	}
	if a.Header.Get("X-Request-ID") == "" {
		t.Errorf("%d %s: no X-Request-ID", status, code)
	}
	if status == 429 || status == 503 {
		wantRetryAfter(t, a)
	}
}

// wantRetryAfter checks what every 429 and 503 of the router carries.
func wantRetryAfter(t testing.TB, a answer) {
	t.Helper()
	if n, err := strconv.Atoi(a.Header.Get("Retry-After")); err != nil || n < 1 {
		t.Errorf("%d with Retry-After %q, want a whole number >= 1", a.Status, a.Header.Get("Retry-After"))
	}
	if _, err := strconv.ParseFloat(a.Header.Get("Retry-After-Ms"), 64); err != nil {
		t.Errorf("%d with retry-after-ms %q", a.Status, a.Header.Get("Retry-After-Ms"))
	}
	if v := a.Header.Get("X-Should-Retry"); v != "true" && v != "false" {
		t.Errorf("%d with x-should-retry %q", a.Status, v)
	}
}

// wantOK checks a whole 200.
func wantOK(t testing.TB, a answer) {
	t.Helper()
	if a.Status != 200 || a.ReadErr != nil {
		t.Errorf("answer %d (%.300s) %v, want a whole 200", a.Status, a.Body, a.ReadErr)
	}
}

// errorEvent returns the code of a terminal error event in an SSE body, and
// whether there was one.
func errorEvent(body []byte) (code string, ok bool) {
	for _, line := range bytes.Split(body, []byte("\n")) {
		data, isData := bytes.CutPrefix(line, []byte("data: "))
		if !isData || !bytes.HasPrefix(bytes.TrimSpace(data), []byte(`{"error"`)) {
			continue
		}
		a := answer{Body: data}
		return a.code(), true
	}
	return "", false
}

// raw is a client that writes its own bytes.
type raw struct {
	t testing.TB
	k *net.TCPConn
}

func (r *router) dial() *raw {
	r.t.Helper()
	k, err := net.DialTimeout("tcp", r.Addr, 5*time.Second)
	if err != nil {
		r.t.Fatalf("dial: %v", err)
	}
	r.t.Cleanup(func() { k.Close() })
	return &raw{r.t, k.(*net.TCPConn)}
}

func (c *raw) send(s string) error {
	c.k.SetWriteDeadline(time.Now().Add(20 * time.Second))
	_, err := io.WriteString(c.k, s)
	return err
}

// rest reads until the peer closes or limit is over.
func (c *raw) rest(limit time.Duration) (data string, closed bool) {
	c.k.SetReadDeadline(time.Now().Add(limit))
	b, err := io.ReadAll(c.k)
	var ne net.Error
	return string(b), !(errors.As(err, &ne) && ne.Timeout())
}

// until reads until the bytes so far contain mark.
func (c *raw) until(mark string, limit time.Duration) string {
	c.t.Helper()
	c.k.SetReadDeadline(time.Now().Add(limit))
	var got []byte
	buf := make([]byte, 4096)
	for !bytes.Contains(got, []byte(mark)) {
		n, err := c.k.Read(buf)
		got = append(got, buf[:n]...)
		if err != nil {
			c.t.Errorf("waiting for %q: %v; got %q", mark, err, got)
			break
		}
	}
	return string(got)
}

// reset closes so that the peer sees a reset.
func (c *raw) reset() { c.k.SetLinger(0); c.k.Close() }

// request writes out a POST with its length.
func request(path, body string, headers ...string) string {
	h := "POST " + path + " HTTP/1.1\r\nHost: router.test\r\nContent-Type: application/json\r\nContent-Length: " + strconv.Itoa(len(body)) + "\r\n"
	for _, l := range headers {
		h += l + "\r\n"
	}
	return h + "\r\n" + body
}

// parallel runs n calls at once and returns their results in order.
func parallel[T any](n int, call func(i int) T) []T {
	out := make([]T, n)
	done := make(chan struct{})
	for i := range n {
		go func() { out[i] = call(i); done <- struct{}{} }()
	}
	for range n {
		<-done
	}
	return out
}
