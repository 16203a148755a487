package proxy

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	crand "crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"math/big"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
)

// A replica that accepts and does nothing, whose own counters stand still, is
// found out by the core; its requests are taken away and answered elsewhere,
// long before any time-out of theirs.
func TestHungReplicaIsLeft(t *testing.T) {
	for _, body := range []string{plainBody, sseBody} {
		hung, good := newFakeReplica(t, func(c *fakeConn) { c.waitClose() }), newFakeReplica(t, ok)
		g := newRig(t, []*fakeReplica{hung}, func(o *Options, c *admission.Config) {
			c.HangAfter = 0.3
			o.FirstToken = time.Hour
		})
		got := make(chan answer, 1)
		go func() { got <- g.do(chat(body)) }()
		eventually(t, "the request at the hung replica", func() bool { return len(hung.requests()) == 1 })
		if err := g.p.AddReplica("p", ReplicaSpec{ID: 2, Addr: good.addr(), Models: []string{"m1"}, Warm: true}); err != nil {
			t.Fatal(err)
		}
		stop := make(chan struct{})
		done := make(chan struct{})
		go func() { // the scraper: a page that never changes
			defer close(done)
			for {
				select {
				case <-stop:
					return
				case <-time.After(20 * time.Millisecond):
					g.p.Observe(1, fleet.Sample{At: g.p.Now(), Engines: 1, Running: 1, Steps: 7, OutputTokens: 7, PromptTokens: 7})
				}
			}
		}()
		a := <-got
		close(stop)
		<-done
		if a.status != 200 || strings.Contains(a.body, `"error"`) {
			t.Errorf("%d %s", a.status, a.body)
		}
		eventually(t, "the hung attempt closed", func() bool {
			hung.mu.Lock()
			defer hung.mu.Unlock()
			return len(hung.closed) == 1
		})
		g.settled()
	}
}

// The end of a connection right behind the last bytes is seen at once, though
// both arrive together: nothing waits for a time-out.
func TestEndBehindTheLastBytesIsSeen(t *testing.T) {
	for name, end := range map[string]func(c *fakeConn){"fin": (*fakeConn).fin, "rst": (*fakeConn).rst} {
		t.Run(name, func(t *testing.T) {
			r := newFakeReplica(t, func(c *fakeConn) {
				c.sseHead()
				c.chunk(frameD(1))
				time.Sleep(time.Duration(c.n%5) * 3 * time.Millisecond)
				c.chunk(frameD(2))
				end(c)
			})
			g := newRig(t, []*fakeReplica{r}, func(o *Options, c *admission.Config) {
				o.StallTimeout = time.Hour
				c.Health.Fails = 1000
			})
			for i := range 60 {
				a := g.do(chat(sseBody))
				if a.err == nil || !strings.Contains(a.body, "upstream_stream_failed") && !strings.Contains(a.body, "upstream_error") {
					t.Fatalf("stream %d: %v %s", i, a.err, a.body)
				}
				g.p.Evidence(1, fleet.EvidenceProbeOK)
			}
			g.settled()
		})
	}
}

// An idle connection that the replica closes is given up at once, not at its
// next use.
func TestIdleConnectionsClosedByTheReplicaAreDropped(t *testing.T) {
	drop := make(chan struct{})
	r := newFakeReplica(t, func(c *fakeConn) {
		c.json(200, answerOK, "")
		<-drop
		c.fin()
	})
	var once sync.Once
	let := func() { once.Do(func() { close(drop) }) }
	g := newRig(t, []*fakeReplica{r}, func(o *Options, _ *admission.Config) { o.UpstreamIdle = time.Hour })
	t.Cleanup(let) // before the replica's own, which waits for its handlers
	if a := g.do(chat(plainBody)); a.status != 200 {
		t.Fatalf("%+v", a)
	}
	idle := func() int {
		rep := g.p.byID[1]
		rep.mu.Lock()
		defer rep.mu.Unlock()
		return len(rep.idle)
	}
	eventually(t, "the connection kept", func() bool { return idle() == 1 })
	let()
	eventually(t, "the connection dropped", func() bool { return idle() == 0 })
}

func selfSigned(t *testing.T) tls.Certificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), crand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der, err := x509.CreateCertificate(crand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// TLS on both sides: streams, kept connections, and a client that leaves.
func TestTLS(t *testing.T) {
	cert := selfSigned(t)
	inner := newFakeReplica(t, func(c *fakeConn) {
		if strings.Contains(string(c.req.body), "leave") {
			c.sseHead()
			c.chunk(frameD(1))
			c.waitClose()
		}
		ok(c)
	})
	// A TLS front of the replica.
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{cert}})
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			up, err := net.Dial("tcp", inner.addr())
			if err != nil {
				_ = c.Close()
				continue
			}
			go func() { _, _ = io.Copy(up, c); _ = up.Close() }()
			go func() { _, _ = io.Copy(c, up); _ = c.Close() }()
		}
	}()
	g := newRig(t, nil, func(o *Options, _ *admission.Config) {
		o.TLS = &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"http/1.1"}}
	})
	if err := g.p.AddReplica("p", ReplicaSpec{ID: 1, Addr: ln.Addr().String(), Warm: true, TLS: &tls.Config{InsecureSkipVerify: true}}); err != nil {
		t.Fatal(err)
	}
	c, err := tls.Dial("tcp", g.addr, &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	br := bufio.NewReader(c)
	for i := range 4 {
		_, _ = io.WriteString(c, chat([]string{plainBody, sseBody}[i%2]))
		a, err := readAnswer(br, false)
		if err != nil || a.status != 200 || a.err != nil {
			t.Fatalf("%v %d %s %v", err, a.status, a.body, a.err)
		}
	}
	_, _ = fmt.Fprint(c, chat(strings.Replace(sseBody, "hi", "leave", 1)))
	for {
		l, err := br.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(l, `"t1"`) {
			break
		}
	}
	_ = c.Close()
	eventually(t, "the upstream closed", func() bool {
		inner.mu.Lock()
		defer inner.mu.Unlock()
		return len(inner.closed) == 1
	})
	g.settled()
}
