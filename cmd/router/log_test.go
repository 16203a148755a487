package main

import (
	"strings"
	"sync"
	"testing"

	"go.uber.org/zap"

	"github.com/penstock/penstock/config"
)

// An access log that leaves lines out under load is no access log.
func TestTheAccessLogIsComplete(t *testing.T) {
	s := emulated(t, "")
	p := startServe(t, "--replica", s.URL())
	p.until("ready", p.ready)
	const clients, each = 4, 150
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for range each {
				if code, body := p.chat("nobody"); code != 404 {
					t.Errorf("%d %s", code, body)
				}
			}
		})
	}
	wg.Wait()
	p.until("each has its line", func() bool { return strings.Count(p.log.String(), `"msg":"request"`) >= clients*each })
	p.stop()
	if n := strings.Count(p.log.String(), `"msg":"request"`); n != clients*each {
		t.Errorf("%d lines for %d requests", n, clients*each)
	}
}

// All other lines that repeat are thinned.
func TestOtherLinesThatRepeatAreThinned(t *testing.T) {
	l, err := newLoggers(config.Log{Level: "info", Format: "json"})
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for range 1000 {
		if l.log.Check(zap.ErrorLevel, "again") != nil {
			n++
		}
	}
	if n < 100 || n > 300 {
		t.Errorf("%d of 1000 equal lines are written", n)
	}
	for range 1000 {
		if l.access.Check(zap.InfoLevel, "request") == nil {
			t.Fatal("the access log is thinned")
		}
	}
}

func TestConnectionsFitTheOpenFiles(t *testing.T) {
	for _, c := range []struct {
		configured int
		files      uint64
		want       int
	}{{262144, 0, 262144}, {262144, 1 << 20, 262144}, {262144, 20000, 9936}, {100, 1024, 100}, {1000, 1024, 448}, {262144, 64, 16}, {262144, 1<<64 - 1, 262144}} {
		if got := connectionsFor(c.configured, c.files); got != c.want {
			t.Errorf("%d connections with %d files: %d, want %d", c.configured, c.files, got, c.want)
		}
	}
}
