package proxy

import (
	"go.uber.org/zap"
)

// logLine writes the access line: one for every request that ended. It has no
// credential and no prompt in it, and leaves out what is not known: a 0 would
// be taken for a measurement.
func (f *flight) logLine(status int, now float64) {
	ce := f.p.access.Check(zap.InfoLevel, "request")
	if ce == nil {
		return
	}
	q := &f.req
	replicaName := ""
	if f.replica != nil {
		replicaName = f.replica.spec.Name
	}
	var room [28]zap.Field
	fields := append(room[:0],
		zap.String("request_id", string(q.id)),
		zap.String("trace_id", string(q.trace[3:35])),
		zap.String("path", q.path),
		zap.String("tenant", string(q.tenant)),
		zap.String("client", f.conn.remoteIP()),
		zap.Int("status", status),
		zap.String("outcome", outcomeWords[f.outcome]),
		zap.String("code", f.errCode),
		zap.String("integrity", f.mark.String()),
		zap.String("model", f.body.Model),
		zap.String("replica", replicaName),
		zap.Int("attempts", f.attempts),
		zap.Float64("held_s", round6(f.heldFor)),
	)
	if q.unknownClass {
		fields = append(fields, zap.String("unknown_class", string(q.class[:min(len(q.class), 64)])), zap.String("class", f.p.opt.Classes[q.classIndex].Name))
	}
	if c := &f.climb; c.lr != nil {
		if fields = append(fields, zap.Int("tier", c.tier)); c.tier > 0 {
			fields = append(fields, zap.String("degraded_reason", c.reason), zap.String("degraded_kind", c.kind))
		}
		if c.trial {
			fields = append(fields, zap.Bool("trial", true))
		}
	}
	if ttft, ok := f.ttft(); ok {
		fields = append(fields, zap.Float64("ttft_predicted_s", round6(f.predicted)), zap.Float64("ttft_s", round6(ttft)))
	}
	fields = append(fields, zap.Float64("seconds", round6(now-q.arrived)))
	if t := f.tokens(); t.known {
		fields = append(fields, zap.Int("prompt_tokens", t.prompt))
		if t.outputKnown {
			fields = append(fields, zap.Int("output_tokens", t.output))
		}
		if t.estimated {
			fields = append(fields, zap.Bool("tokens_estimated", true))
		}
	}
	ce.Write(append(fields, zap.Int64("bytes", f.sent))...)
}

// tokens are the sizes of a request and its answer.
type tokens struct {
	prompt, output     int
	known, outputKnown bool
	estimated          bool // not from usage: the prompt by the core's estimate, the output by events counted
}

// tokens tells what is known of the sizes: from usage, or estimated when the
// answer had none, or was cut before it.
func (f *flight) tokens() tokens {
	switch {
	case f.usage.Seen:
		return tokens{prompt: f.usage.Prompt, output: f.usage.Completion, known: true, outputKnown: true}
	case f.attempts == 0 || !f.req.kind.Generates() || !f.wrote || f.head.status != 200 || f.firstAt == 0:
		return tokens{}
	}
	_, streamed := f.ttft()
	return tokens{prompt: f.ticket.Work.Prompt, output: f.obs.Content, known: true, outputKnown: streamed, estimated: true}
}

// ttft is the time to the first content event. Of an answer in one piece
// nobody sees when its first token was made.
func (f *flight) ttft() (seconds float64, ok bool) {
	if f.firstAt == 0 || !f.head.sse || f.head.status != 200 {
		return 0, false
	}
	return f.firstAt - f.req.arrived, true
}

func round6(v float64) float64 { return float64(int64(v*1e6+0.5)) / 1e6 }
