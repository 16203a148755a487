package proxy

import (
	"encoding/hex"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/penstock/penstock/telemetry"
)

// span records the request as one span, the parent being the client's.
func (f *flight) span(status int) {
	q := &f.req
	s := telemetry.Span{Name: q.method + " " + q.path, End: time.Now()}
	s.Start = s.End.Add(-time.Duration((f.p.now() - q.arrived) * float64(time.Second)))
	_, _ = hex.Decode(s.TraceID[:], q.trace[3:35])
	_, _ = hex.Decode(s.SpanID[:], q.trace[36:52])
	s.Parent = q.parent
	if status >= 500 {
		s.Error = f.errCode
	}
	name := ""
	if f.replica != nil {
		name = f.replica.spec.Name
	}
	s.Attrs = []attribute.KeyValue{
		attribute.Int("http.response.status_code", status),
		attribute.String("gen_ai.request.model", f.body.Model),
		attribute.String("penstock.replica", name),
		attribute.String("penstock.outcome", outcomeWords[f.outcome]),
		attribute.Int("penstock.attempts", f.attempts),
		attribute.Int("penstock.tier", f.climb.tier),
		attribute.Float64("penstock.held_seconds", f.heldFor),
	}
	if ttft, ok := f.ttft(); ok {
		s.Attrs = append(s.Attrs, attribute.Float64("penstock.ttft_seconds", ttft))
	}
	if f.usage.Seen {
		s.Attrs = append(s.Attrs, attribute.Int("gen_ai.usage.input_tokens", f.usage.Prompt), attribute.Int("gen_ai.usage.output_tokens", f.usage.Completion))
	}
	f.p.opt.Tracer.Record(s)
}
