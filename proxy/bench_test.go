package proxy

import (
	"bytes"
	"fmt"
	"net"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
)

// echoReplica answers each request with the same bytes, without allocating.
// All requests have to be of length size.
func echoReplica(b *testing.B, answer []byte) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				buf := make([]byte, 256<<10)
				n, want := 0, 0
				for {
					k, err := c.Read(buf[n:])
					if err != nil {
						return
					}
					n += k
					if want == 0 {
						if i := bytes.Index(buf[:n], headEnd); i >= 0 {
							l := bytes.Index(buf[:i], []byte("Content-Length: "))
							v, _ := parseDigits(buf[l+16 : l+16+bytes.IndexByte(buf[l+16:], '\r')])
							want = i + 4 + int(v)
						}
					}
					if want > 0 && n >= want {
						n, want = 0, 0
						if _, err := c.Write(answer); err != nil {
							return
						}
					}
				}
			}()
		}
	}()
	return ln.Addr().String()
}

func benchProxy(b *testing.B, addr string) string {
	p, err := New(Options{Pools: []PoolOptions{{Name: "p", Core: admission.New(admission.Config{}), Models: []string{"m1"}}}})
	if err != nil {
		b.Fatal(err)
	}
	roomy := fleet.Generic()
	roomy.KVTokens, roomy.MaxSeqs = 100_000_000, 100_000
	if err := p.AddReplica("p", ReplicaSpec{ID: 1, Addr: addr, Warm: true, Profile: &roomy}); err != nil {
		b.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	go func() { _ = p.Serve(ln) }()
	b.Cleanup(func() { _ = p.Shutdown(b.Context()) })
	return ln.Addr().String()
}

// BenchmarkRequest is one request on a kept connection, client, proxy and
// replica in this process; the allocations are the proxy's.
func BenchmarkRequest(b *testing.B) {
	sse := "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
	for i := range 10 {
		sse += fmt.Sprintf("%x\r\n%s\r\n", len(frameD(i)), frameD(i))
	}
	sse += fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(frameFin+frameDone), frameFin+frameDone)
	plain := fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(answerOK), answerOK)
	for _, tc := range []struct{ name, request, answer, end string }{
		{"plain", chat(plainBody), plain, answerOK[len(answerOK)-20:]},
		{"stream", chat(sseBody), sse, lastChunk},
		{"prompt100KB", chat(strings.Replace(plainBody, "hi", strings.Repeat("some words ", 9300), 1)), plain, answerOK[len(answerOK)-20:]},
	} {
		b.Run(tc.name, func(b *testing.B) {
			c, err := net.Dial("tcp", benchProxy(b, echoReplica(b, []byte(tc.answer))))
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			req, end := []byte(tc.request), []byte(tc.end)
			buf := make([]byte, 64<<10)
			once := func() {
				if _, err := c.Write(req); err != nil {
					b.Fatal(err)
				}
				for n := 0; ; {
					k, err := c.Read(buf[n:])
					if err != nil {
						b.Fatal(err)
					}
					if n += k; bytes.HasSuffix(buf[:n], end) {
						return
					}
				}
			}
			for range 300 {
				once()
			}
			b.ReportAllocs()
			b.ResetTimer()
			for range b.N {
				once()
			}
		})
	}
}

// BenchmarkClientLeaves measures from a client's close to the end of its
// connection at the replica, in each phase.
func BenchmarkClientLeaves(b *testing.B) {
	for _, ph := range []struct {
		name, begin, wait string
	}{
		{"headers", "", ""},
		{"first_token", "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n", ""},
		{"streaming", "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" +
			fmt.Sprintf("%x\r\n%s\r\n", len(frameD(1)), frameD(1)), `"t1"`},
	} {
		b.Run(ph.name, func(b *testing.B) {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				b.Fatal(err)
			}
			defer ln.Close()
			began, ended := make(chan struct{}), make(chan time.Time)
			go func() {
				for {
					c, err := ln.Accept()
					if err != nil {
						return
					}
					buf := make([]byte, 64<<10)
					_, _ = c.Read(buf)
					_, _ = c.Write([]byte(ph.begin))
					began <- struct{}{}
					_, _ = c.Read(buf)
					ended <- time.Now()
					_ = c.Close()
				}
			}()
			addr := benchProxy(b, ln.Addr().String())
			var took []float64
			buf := make([]byte, 64<<10)
			for range b.N {
				c, err := net.Dial("tcp", addr)
				if err != nil {
					b.Fatal(err)
				}
				_, _ = c.Write([]byte(chat(sseBody)))
				<-began
				for n := 0; ph.wait != "" && !bytes.Contains(buf[:n], []byte(ph.wait)); {
					k, err := c.Read(buf[n:])
					if err != nil {
						b.Fatal(err)
					}
					n += k
				}
				time.Sleep(2 * time.Millisecond)
				at := time.Now()
				_ = c.Close()
				took = append(took, (<-ended).Sub(at).Seconds()*1000)
			}
			sort.Float64s(took)
			b.ReportMetric(took[len(took)/2], "p50-ms")
			b.ReportMetric(took[len(took)*99/100], "p99-ms")
		})
	}
}
