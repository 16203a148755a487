package scraper

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/penstock/penstock/fleet"
)

// answers serves the given raw answers, one per request, over real sockets;
// an empty one closes the connection without an answer.
func answers(t *testing.T, raw ...string) (addr string, conns *atomic.Int32) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	conns = new(atomic.Int32)
	go func() {
		defer close(done)
		next := 0
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			conns.Add(1)
			r := bufio.NewReader(c)
			for next < len(raw) {
				if _, err := http.ReadRequest(r); err != nil {
					break
				}
				a := raw[next]
				next++
				if a == "" {
					break
				}
				_, _ = c.Write([]byte(a))
				if strings.Contains(a, "close") || strings.HasPrefix(a, "HTTP/1.0") {
					break
				}
			}
			_ = c.Close()
		}
	}()
	t.Cleanup(func() { _ = l.Close(); <-done })
	return l.Addr().String(), conns
}

func testClient(addr string, keep bool) *client {
	o := Options{Dial: (&net.Dialer{}).DialContext}
	return newClient(&o, Replica{Addr: addr, Host: "h:1"}, "/metrics", 1<<20, keep)
}

func TestEveryFramingOfABody(t *testing.T) {
	addr, conns := answers(t,
		"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n",
		"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
		"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello",
		"HTTP/1.0 200 OK\r\n\r\nhello",
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
	)
	c := testClient(addr, true)
	defer c.close()
	for i := range 6 {
		status, body, err := c.get(context.Background(), time.Minute)
		if err != nil || status != 200 || string(body) != "hello" {
			t.Errorf("answer %d: %d %q %v", i, status, body, err)
		}
	}
	if n := conns.Load(); n != 3 {
		t.Errorf("%d connections, want 3: one kept for four answers, then one for each that was closed", n)
	}
}

// vLLM closes a connection that was idle for 5 s, perhaps just as it is used.
func TestClosedIdleConnectionIsReplacedOnce(t *testing.T) {
	const ok = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
	addr, conns := answers(t, ok, "", ok, "", "")
	c := testClient(addr, true)
	defer c.close()
	for i := range 2 {
		if _, body, err := c.get(context.Background(), time.Minute); err != nil || string(body) != "hello" {
			t.Fatalf("get %d: %q %v", i, body, err)
		}
	}
	var lost *lostError
	if _, _, err := c.get(context.Background(), time.Minute); !errors.As(err, &lost) {
		t.Errorf("lost twice: %v", err)
	}
	if n := conns.Load(); n != 3 {
		t.Errorf("%d connections", n)
	}
}

func TestRefusedConnectionIsTold(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	_ = l.Close()
	_, _, err = testClient(addr, true).get(context.Background(), time.Minute)
	if resultOf(err) != scrapeRefused {
		t.Errorf("%v", err)
	}
}

func TestGetOverTLS(t *testing.T) {
	srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, r.Host, r.URL.Path)
	}))
	defer srv.Close()
	o := Options{Dial: (&net.Dialer{}).DialContext, TLS: srv.Client().Transport.(*http.Transport).TLSClientConfig}
	c := newClient(&o, Replica{Addr: srv.Listener.Addr().String(), Host: "example.com:443", TLS: true, BasePath: "/b"}, "/metrics", 1<<20, true)
	defer c.close()
	for range 2 {
		if _, body, err := c.get(context.Background(), time.Minute); err != nil || string(body) != "example.com:443/b/metrics" {
			t.Errorf("%q %v", body, err)
		}
	}
}

// oneByteConn hands out what it reads one byte at a time.
type oneByteConn struct {
	net.Conn
	r interface{ Read([]byte) (int, error) }
}

func (c oneByteConn) Read(b []byte) (int, error) { return c.r.Read(b) }

func TestAnswerCutAnywhereIsReadTheSame(t *testing.T) {
	addr, _ := answers(t, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
	c := testClient(addr, true)
	defer c.close()
	c.dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return oneByteConn{conn, iotest.OneByteReader(conn)}, nil
	}
	for range 2 {
		if _, body, err := c.get(context.Background(), time.Minute); err != nil || string(body) != "hello" {
			t.Errorf("%q %v", body, err)
		}
	}
}

// BenchmarkScrape is one scrape of a 75 KB page over the loopback: the client,
// the kernel, the scan (and the test's server).
func BenchmarkScrape(b *testing.B) {
	page := body(b, "testdata/metrics_loaded.http")
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = w.Write(page) }))
	defer srv.Close()
	c := testClient(srv.Listener.Addr().String(), true)
	defer c.close()
	b.ReportAllocs()
	var s fleet.Sample
	for b.Loop() {
		_, got, err := c.get(context.Background(), time.Minute)
		if err == nil {
			_, err = Parse(got, &s)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}
