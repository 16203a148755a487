package telemetry

import (
	"context"
	"fmt"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
)

// Span is one finished span: a request, or one attempt of it.
type Span struct {
	TraceID    [16]byte
	SpanID     [8]byte
	Parent     [8]byte // zero = root
	Name       string
	Start, End time.Time
	Error      string // "" = fine
	Attrs      []attribute.KeyValue
}

// Tracer hands finished spans to an OTLP collector. Record never waits: the
// queue is bounded, and what does not fit or cannot be delivered is dropped
// and counted (penstock_spans_dropped_total).
type Tracer struct {
	ch      chan Span
	exp     sdktrace.SpanExporter
	res     *resource.Resource
	dropped func(int)
	lost    atomic.Int64
	stop    context.CancelFunc
	wg      sync.WaitGroup
}

// The queue's length and the batch's: OpenTelemetry's own defaults.
const (
	traceQueue = 2048
	traceBatch = 512
)

// NewTracer starts a tracer that sends to the collector's base URL
// (http://host:4318). dropped is called with numbers of lost spans.
func NewTracer(endpoint, version string, dropped func(int)) (*Tracer, error) {
	u, err := url.Parse(endpoint)
	if err != nil || u.Host == "" {
		return nil, fmt.Errorf("tracing.otlp: %q is not a URL such as http://collector:4318", endpoint)
	}
	opts := []otlptracehttp.Option{otlptracehttp.WithEndpoint(u.Host), otlptracehttp.WithTimeout(5 * time.Second),
		otlptracehttp.WithRetry(otlptracehttp.RetryConfig{Enabled: false})}
	if u.Scheme != "https" {
		opts = append(opts, otlptracehttp.WithInsecure())
	}
	exp, err := otlptracehttp.New(context.Background(), opts...)
	if err != nil {
		return nil, fmt.Errorf("tracing.otlp: %w", err)
	}
	return newTracer(exp, version, dropped), nil
}

func newTracer(exp sdktrace.SpanExporter, version string, dropped func(int)) *Tracer {
	ctx, stop := context.WithCancel(context.Background())
	t := &Tracer{ch: make(chan Span, traceQueue), exp: exp, dropped: dropped, stop: stop,
		res: resource.NewSchemaless(attribute.String("service.name", "penstock"), attribute.String("service.version", version))}
	t.wg.Go(func() { t.run(ctx) })
	return t
}

// Record queues one span, or drops and counts it.
func (t *Tracer) Record(s Span) {
	select {
	case t.ch <- s:
	default:
		t.lose(1)
	}
}

func (t *Tracer) lose(n int) {
	t.lost.Add(int64(n))
	t.dropped(n)
}

// Close sends what is queued, for at most ctx, and stops.
func (t *Tracer) Close(ctx context.Context) {
	t.stop()
	t.wg.Wait()
	_ = t.exp.Shutdown(ctx) // what could not be sent is lost either way
}

func (t *Tracer) run(ctx context.Context) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var batch []Span
	flush := func() {
		if len(batch) > 0 {
			t.export(batch)
			batch = batch[:0]
		}
	}
	for {
		select {
		case s := <-t.ch:
			if batch = append(batch, s); len(batch) >= traceBatch {
				flush()
			}
		case <-tick.C:
			flush()
		case <-ctx.Done():
			for {
				select {
				case s := <-t.ch:
					batch = append(batch, s)
				default:
					flush()
					return
				}
			}
		}
	}
}

func (t *Tracer) export(batch []Span) {
	stubs := make(tracetest.SpanStubs, len(batch))
	for i, s := range batch {
		sc := trace.NewSpanContext(trace.SpanContextConfig{TraceID: s.TraceID, SpanID: s.SpanID, TraceFlags: trace.FlagsSampled})
		stub := tracetest.SpanStub{Name: s.Name, SpanContext: sc, SpanKind: trace.SpanKindServer, StartTime: s.Start, EndTime: s.End, Attributes: s.Attrs, Resource: t.res}
		if s.Parent != [8]byte{} {
			stub.Parent = trace.NewSpanContext(trace.SpanContextConfig{TraceID: s.TraceID, SpanID: s.Parent, TraceFlags: trace.FlagsSampled, Remote: true})
		}
		if s.Error != "" {
			stub.Status = sdktrace.Status{Code: codes.Error, Description: s.Error}
		}
		stubs[i] = stub
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := t.exp.ExportSpans(ctx, stubs.Snapshots()); err != nil {
		t.lose(len(batch))
	}
}
