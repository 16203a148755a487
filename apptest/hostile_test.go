package apptest

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// openFiles counts the router's file descriptors; -1 where it cannot be told.
func (r *router) openFiles() int {
	names, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", r.cmd.Process.Pid))
	if _, e := os.Stat("/proc/self/fd"); err != nil || e != nil {
		return -1
	}
	return len(names)
}

// filesBack waits until the router has no more files open than before.
func (r *router) filesBack(before int) {
	r.t.Helper()
	r.eventually(20*time.Second, "its files are closed again", func() bool { return r.openFiles() <= before+4 })
}

// stingy opens connections that take little and read nothing.
func (r *router) stingy(raw string) net.Conn {
	r.t.Helper()
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) { syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4096) })
	}}
	k, err := d.Dial("tcp", r.Addr)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { k.Close() })
	if _, err := k.Write([]byte(raw)); err != nil {
		r.t.Fatal(err)
	}
	return k
}

// fat streams without end, more than any buffer on the way takes.
func fat(c *conn) {
	c.sseHead()
	f := strings.Replace(frame(1), "t1", strings.Repeat("t", 4000), 1)
	for !c.dead {
		c.chunk(f)
	}
}

// TestSlowAndIdleClients: thousands that send nothing, half a head or a body
// that never comes cost the others nothing, and end at their time-outs.
func TestSlowAndIdleClients(t *testing.T) {
	t.Parallel()
	u1 := replica(t, (*conn).ok)
	r := start(t, "timeouts: {header: 3s, body: 3s, idle: 3s}\nlimits: {receive_bytes: 64MiB}\n", u1)
	wantOK(t, r.post(chat, reqBody))
	before := r.openFiles()
	var all []net.Conn
	for i := range 900 {
		k, err := net.DialTimeout("tcp", r.Addr, 10*time.Second)
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		all = append(all, k)
		switch i % 3 {
		case 1:
			fmt.Fprintf(k, "POST %s HTTP/1.1\r\nHost: x\r\n", chat)
		case 2:
			fmt.Fprintf(k, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 30000000\r\n\r\nx", chat)
		}
	}
	// The client's own connection may be idle for 3 s by now, and here and below a
	// request there would be lost when the router closes it just then.
	r.client.CloseIdleConnections()
	for range 5 {
		wantOK(t, r.post(chat, reqBody))
	}
	rss := r.memory()
	if rss > 400<<20 {
		t.Errorf("the router takes %d MiB for 300 bodies that do not come", rss>>20)
	}
	a := r.post(chat, strings.Replace(reqBody, "hi", strings.Repeat("x", 1<<20), 1))
	if a.Status != 200 {
		wantError(t, a, 503, "concurrency_limit")
	}
	r.filesBack(before)
	for _, k := range all {
		k.Close()
	}
	r.client.CloseIdleConnections()
	wantOK(t, r.post(chat, strings.Replace(reqBody, "hi", strings.Repeat("x", 1<<20), 1)))
}

// memory is the router's resident set, bytes; 0 where it cannot be told.
func (r *router) memory() int {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.cmd.Process.Pid))
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(b), "VmRSS:")
	kb := 0
	fmt.Sscan(rest, &kb)
	return kb << 10
}

// TestOutOfFiles: with all its file descriptors taken the router goes on, holds
// no replica for dead, and serves again when they are back.
func TestOutOfFiles(t *testing.T) {
	t.Parallel()
	u1, u2 := replica(t, (*conn).ok), replica(t, (*conn).ok)
	old := binary
	sh := filepath.Join(t.TempDir(), "limited")
	writeFile(t, sh, "#!/bin/sh\nulimit -n 200\nexec "+old+" \"$@\"\n")
	if err := os.Chmod(sh, 0o700); err != nil {
		t.Fatal(err)
	}
	r := startWith(t, sh, poolYAML("main", u1.url(), u2.url())+"timeouts: {header: 60s, idle: 60s}\n")
	r.knows(u1, u2)
	var all []net.Conn
	for range 300 {
		k, err := net.DialTimeout("tcp", r.Addr, 5*time.Second)
		if err != nil {
			t.Fatalf("it does not accept any more: %v", err)
		}
		all = append(all, k)
	}
	// Those that were taken are served.
	c := &raw{t, all[0].(*net.TCPConn)}
	c.send(request(chat, reqBody))
	if got := c.until("\r\n\r\n", 10*time.Second); !strings.HasPrefix(got, "HTTP/1.1 200") {
		t.Errorf("a client that was there first: %q", got)
	}
	for _, k := range all {
		k.Close()
	}
	r.eventually(10*time.Second, "it serves again", func() bool {
		a, err := r.try(t.Context(), chat, reqBody)
		return err == nil && a.Status == 200
	})
	r.wantMetric(0, "penstock_replica_ejections_total")
}

// TestShutdownWithHeldAndStuckRequests: SIGTERM with held requests, hung
// replicas and clients that read nothing: each is told, and the process leaves
// soon after drain_timeout with status 0.
func TestShutdownWithHeldAndStuckRequests(t *testing.T) {
	t.Parallel()
	var placed atomic.Int32
	u1 := replica(t, func(c *conn) {
		placed.Add(1)
		switch {
		case strings.Contains(string(c.Body), "fat"):
			fat(c)
		case c.streaming():
			c.sseHead()
			c.chunk(frame(1))
			c.waitClose(time.Minute)
		default:
			c.waitClose(time.Minute)
		}
	})
	r := startConfig(t, poolYAML("main", u1.url())+"    concurrency: 6\ntimeouts: {drain_timeout: 2s}\nclasses: [{name: only, wait: 60s}]\n")
	r.knows(u1)
	for range 2 {
		r.stingy(request(chat, strings.Replace(reqStream, "hi", "fat", 1)))
	}
	var begun, hung, held []*raw
	for i := range 8 {
		c := r.dial()
		body := []string{reqStream, reqBody}[i%2]
		c.send(request(chat, body))
		switch {
		case i >= 4:
			held = append(held, c)
		case i%2 == 0:
			begun = append(begun, c)
			c.until(`"t1"`, 10*time.Second)
		default:
			hung = append(hung, c)
			r.eventually(10*time.Second, "it is at the replica", func() bool { return int(placed.Load()) >= 3+i })
		}
	}
	r.wantMetric(4, "penstock_held_requests")
	began := time.Now()
	r.cmd.Process.Signal(syscall.SIGTERM)
	r.waitExit(25 * time.Second)
	if took := time.Since(began); took < 1900*time.Millisecond {
		t.Errorf("it left after %v, and running answers were to have 2 s", took)
	}
	if n := strings.Count(r.log.String(), `"msg":"request"`); n != 10 {
		t.Errorf("%d of 10 requests are in the access log", n)
	}
	for _, c := range append(hung, held...) {
		if got, _ := c.rest(5 * time.Second); !strings.HasPrefix(got, "HTTP/1.1 503") || !strings.Contains(got, `"not_ready"`) || !strings.Contains(got, "Retry-After:") {
			t.Errorf("a request that had no answer yet: %q", got)
		}
	}
	for _, c := range begun {
		if got, _ := c.rest(5 * time.Second); !strings.Contains(got, `"upstream_stream_failed"`) || strings.Contains(got, "[DONE]") {
			t.Errorf("a stream that ran: %q", got)
		}
	}
}

// TestAllReplicasDieAndReturn: the router needs no restart, and tells clients
// meanwhile when to come again.
func TestAllReplicasDieAndReturn(t *testing.T) {
	t.Parallel()
	u1, u2 := replica(t, (*conn).ok), replica(t, (*conn).ok)
	r := start(t, "", u1, u2)
	wantOK(t, r.post(chat, reqBody))
	u1.stop()
	u2.stop()
	n := 0
	ask := func() answer {
		n++
		return r.post(chat, strings.Replace(reqBody, "hi", fmt.Sprint("hi ", n), 1))
	}
	r.eventually(20*time.Second, "/readyz is 503", func() bool { return r.get("/readyz").Status == 503 })
	for range 5 {
		a := ask()
		if a.Status != 502 {
			wantError(t, a, 503, "capacity_exhausted")
			if after := a.Header.Get("Retry-After"); len(after) != 1 {
				t.Errorf("Retry-After %s with no replica there", after)
			}
		}
	}
	newMock(t, mockOpts{Handle: (*conn).ok, Addr: u1.Addr})
	newMock(t, mockOpts{Handle: (*conn).ok, Addr: u2.Addr})
	back := time.Now()
	r.eventually(20*time.Second, "they serve again", func() bool { return ask().Status == 200 })
	t.Logf("served %v after they were back", time.Since(back).Round(time.Millisecond))
	for range 20 {
		wantOK(t, ask())
	}
}

// TestClientsThatDoNotRead: they cost the replica nothing but their own work,
// and others nothing at all.
func TestClientsThatDoNotRead(t *testing.T) {
	t.Parallel()
	u1 := replica(t, func(c *conn) {
		if strings.Contains(string(c.Body), "fat") {
			fat(c)
			return
		}
		c.ok()
	})
	r := start(t, "timeouts: {write: 4s}\nhealth: {hang_after: 500ms}\n", u1)
	before := r.openFiles()
	for range 20 {
		r.stingy(request(chat, strings.Replace(reqStream, "hi", "fat", 1)))
	}
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		wantOK(t, r.post(chat, reqBody))
	}
	r.eventually(20*time.Second, "they are cut", func() bool { return r.sum("penstock_requests_in_flight") == 0 })
	r.wantMetric(20, "penstock_cancellations_total", label("phase", "streaming"))
	r.wantMetric(0, "penstock_replica_ejections_total")
	r.filesBack(before)
}
