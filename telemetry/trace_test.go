package telemetry

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
)

type fakeExporter struct {
	mu    sync.Mutex
	err   error
	block chan struct{}
	got   []sdktrace.ReadOnlySpan
}

func (f *fakeExporter) ExportSpans(_ context.Context, s []sdktrace.ReadOnlySpan) error {
	if f.block != nil {
		<-f.block
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.got = append(f.got, s...)
	return f.err
}
func (f *fakeExporter) Shutdown(context.Context) error { return nil }

func TestSpansArriveWithTheirIdentity(t *testing.T) {
	f := &fakeExporter{}
	tr := newTracer(f, "test", func(int) { t.Error("a span was dropped") })
	tr.Record(Span{TraceID: [16]byte{1}, SpanID: [8]byte{2}, Parent: [8]byte{3}, Name: "request", Start: time.Unix(1, 0), End: time.Unix(2, 0), Error: "x"})
	tr.Close(t.Context())
	if len(f.got) != 1 {
		t.Fatalf("%d spans", len(f.got))
	}
	s := f.got[0]
	if s.SpanContext().TraceID() != [16]byte{1} || s.Parent().SpanID() != [8]byte{3} || s.Name() != "request" || s.Status().Description != "x" {
		t.Fatalf("%+v", s)
	}
}

func TestADeadCollectorDropsAndCountsButNeverBlocks(t *testing.T) {
	f := &fakeExporter{err: errors.New("gone"), block: make(chan struct{})}
	lost := 0
	var mu sync.Mutex
	tr := newTracer(f, "test", func(n int) { mu.Lock(); lost += n; mu.Unlock() })
	const sent = 3 * traceQueue
	for range sent { // returns although nothing takes them
		tr.Record(Span{Name: "x"})
	}
	close(f.block)
	tr.Close(t.Context())
	mu.Lock()
	defer mu.Unlock()
	if lost != sent {
		t.Fatalf("%d of %d lost spans were counted", lost, sent)
	}
}
