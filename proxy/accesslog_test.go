package proxy

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/ladder"
)

// lines are the access lines so far, decoded.
func (m *syncBuffer) lines(t *testing.T) (out []map[string]any) {
	t.Helper()
	for _, l := range bytes.Split([]byte(m.String()), []byte("\n")) {
		var line map[string]any
		if len(l) > 0 {
			if err := json.Unmarshal(l, &line); err != nil {
				t.Fatalf("%v in %s", err, l)
			}
		}
		if line["msg"] == "request" {
			out = append(out, line)
		}
	}
	return out
}

// A figure in the access log was measured, or is marked as estimated; what is
// not known is left out.
func TestTheAccessLogSaysOnlyWhatIsKnown(t *testing.T) {
	noUsage := strings.Replace(plainAnswerForHostile, `"hi"`, `"hi there"`, 1)
	for name, c := range map[string]struct {
		request string
		answer  func(c *fakeConn)
		has     map[string]any // nil = any value
		hasNot  string
	}{
		"stream with usage": {sseBody, ok, map[string]any{"prompt_tokens": 7.0, "output_tokens": 3.0, "ttft_s": nil, "ttft_predicted_s": nil}, "tokens_estimated"},
		"stream without usage": {sseBody, func(c *fakeConn) {
			c.sseHead()
			c.chunk(frameD(1) + frameD(2) + frameFin + frameDone)
			c.end()
		}, map[string]any{"prompt_tokens": nil, "output_tokens": 2.0, "tokens_estimated": true, "ttft_s": nil}, ""},
		"stream that breaks": {sseBody, func(c *fakeConn) { c.sseHead(); c.chunk(frameD(1)); c.rst() },
			map[string]any{"output_tokens": 1.0, "tokens_estimated": true, "outcome": "failed"}, ""},
		"one piece":               {plainBody, ok, map[string]any{"prompt_tokens": 7.0, "output_tokens": 3.0}, "ttft_s ttft_predicted_s tokens_estimated"},
		"one piece without usage": {plainBody, func(c *fakeConn) { c.json(200, noUsage, "") }, map[string]any{"prompt_tokens": nil, "tokens_estimated": true}, "ttft_s output_tokens"},
		"the client's own fault":  {sseBody, func(c *fakeConn) { c.json(400, `{"error":{"message":"no"}}`, "") }, nil, "ttft_s prompt_tokens output_tokens"},
		"refused here":            {`{"model":"nobody"}`, ok, nil, "ttft_s prompt_tokens output_tokens ttft_predicted_s"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newFakeReplica(t, c.answer)
			g := newRig(t, []*fakeReplica{r})
			g.do(chat(c.request))
			g.settled()
			eventually(t, "the line is there", func() bool { return len(g.logs.lines(t)) == 1 })
			l := g.logs.lines(t)[0]
			for k, v := range c.has {
				if got, ok := l[k]; !ok || v != nil && got != v || v == nil && got == 0.0 {
					t.Errorf("%s is %v, want %v (nil = over 0)", k, got, v)
				}
			}
			for _, k := range strings.Fields(c.hasNot) {
				if got, ok := l[k]; ok {
					t.Errorf("%s is there: %v", k, got)
				}
			}
			if t.Failed() {
				t.Log(l)
			}
		})
	}
}

// The line of a request whose model has a route tells the tier that answered, and of a lower one why.
func TestTheAccessLogTellsTheTier(t *testing.T) {
	for name, c := range map[string]struct {
		request string
		primary func(c *fakeConn)
		has     map[string]any
		hasNot  string
	}{
		"primary":        {chatBody, ok, map[string]any{"tier": 0.0}, "degraded_reason degraded_kind trial"},
		"lower tier":     {chatBody, bad, map[string]any{"tier": 2.0, "degraded_reason": "primary_failed", "degraded_kind": "downgraded"}, "trial"},
		"without ladder": {plainBody, ok, nil, "tier degraded_reason degraded_kind trial"},
	} {
		g := climbRig(t, []*fakeReplica{newFakeReplica(t, c.primary)}, []*fakeReplica{newFakeReplica(t, ok)},
			ladder.Route{Tiers: []ladder.Tier{poolTier("p", 0), poolTier("s", 2)}})
		a := g.do(chat(c.request))
		g.settled()
		eventually(t, "the line is there", func() bool { return len(g.logs.lines(t)) == 1 })
		l := g.logs.lines(t)[0]
		for k, v := range c.has {
			if l[k] != v {
				t.Errorf("%s: %s is %v, want %v", name, k, l[k], v)
			}
		}
		for _, k := range strings.Fields(c.hasNot) {
			if v, ok := l[k]; ok {
				t.Errorf("%s: %s is there: %v", name, k, v)
			}
		}
		if a.status != 200 || t.Failed() {
			t.Fatal(name, a.status, l)
		}
	}
}

// A slip in X-Request-Class is served, and can be found.
func TestAnUnknownClassIsCountedAndLogged(t *testing.T) {
	for header, c := range map[string]struct{ class, unknown any }{
		"X-Request-Class: bulk":                        {nil, nil},
		"X-Request-Class: intractiv":                   {"interactive", "intractiv"},
		"X-Request-Class: " + strings.Repeat("x", 100): {"interactive", strings.Repeat("x", 64)},
		"X-None: 1": {nil, nil},
	} {
		g := newRig(t, []*fakeReplica{newFakeReplica(t, ok)}, func(o *Options, _ *admission.Config) {
			o.Classes = []ClassOptions{{Name: "interactive"}, {Name: "bulk"}}
		})
		a := g.do(chat(plainBody, header))
		g.settled()
		eventually(t, "the line is there", func() bool { return len(g.logs.lines(t)) == 1 })
		l := g.logs.lines(t)[0]
		counted := g.metric("penstock_unknown_class_total")
		if a.status != 200 || l["unknown_class"] != c.unknown || l["class"] != c.class || counted != map[bool]float64{true: 1}[c.unknown != nil] {
			t.Errorf("%s: %d, counted %v, %v", header, a.status, counted, l)
		}
	}
}

// The class's deadline covers the answer; an SDK's read timeout is about the
// wait for bytes, so it does not cut an answer that runs.
func TestDeadlinesOfAnAnswerThatRuns(t *testing.T) {
	endless := func(c *fakeConn) {
		c.sseHead()
		for i := 0; ; i++ {
			c.chunk(frameD(i)) // ends by a panic when nobody reads any more
			time.Sleep(5 * time.Millisecond)
		}
	}
	for name, c := range map[string]struct {
		class  time.Duration
		header string
	}{
		"class":                              {3 * time.Second, "X-None: 1"},
		"the client's own":                   {time.Hour, "X-Request-Timeout-Ms: 3000"},
		"the client's own, over the class's": {time.Millisecond, "X-Request-Timeout-Ms: 3000"},
		"read timeout, then the class's":     {6 * time.Second, "X-Stainless-Read-Timeout: 3"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newFakeReplica(t, endless)
			g := newRig(t, []*fakeReplica{r}, func(o *Options, _ *admission.Config) { o.Classes = []ClassOptions{{Name: "only", Deadline: c.class}} })
			began := time.Now()
			a := g.do(chat(sseBody, c.header))
			took := time.Since(began)
			if a.status != 200 || !strings.HasSuffix(strings.TrimSpace(a.body), "}") || !strings.Contains(a.body, `"code":"deadline_exceeded"`) || strings.Contains(a.body, "[DONE]") || a.err == nil {
				t.Errorf("%d, error %v, %s", a.status, a.err, a.body[max(0, len(a.body)-300):])
			}
			if strings.Contains(name, "read timeout") && took < 5900*time.Millisecond {
				t.Errorf("it was cut after %v, by the read timeout", took)
			}
			if n := strings.Count(a.body, "data:"); n < 2 {
				t.Errorf("%d events", n)
			}
			g.settled()
		})
	}
}
