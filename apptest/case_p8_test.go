package apptest

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"
)

// p8Chunk is a chunk with n choices, and more members behind them.
func p8Chunk(choices, more string) string {
	return `data: {"id":"c","object":"chat.completion.chunk","choices":[` + choices + `]` + more + `}` + "\n\n"
}

const p8Usage = `,"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}`

// p8Streams are the shapes in which usage comes (or does not): three content
// events, then what the name says. asked tells whether the body that reached
// the replica has include_usage.
var p8Streams = map[string]func(asked bool) []string{
	"behind the last choice": func(bool) []string {
		return []string{frame(1), frame(2), frame(3), frameFin, frameUse}
	},
	"on the last choice": func(bool) []string {
		return []string{frame(1), frame(2), frame(3), p8Chunk(`{"index":0,"delta":{},"finish_reason":"stop"}`, p8Usage)}
	},
	"last choice without delta": func(bool) []string {
		return []string{frame(1), frame(2), frame(3), p8Chunk(`{"index":0,"finish_reason":"stop"}`, p8Usage)}
	},
	"in every chunk": func(bool) []string {
		var out []string
		for i := 1; i <= 3; i++ {
			out = append(out, p8Chunk(fmt.Sprintf(`{"index":0,"delta":{"content":"t%d"},"finish_reason":null}`, i),
				fmt.Sprintf(`,"usage":{"prompt_tokens":7,"completion_tokens":%d,"total_tokens":%d}`, i, 7+i)))
		}
		return append(out, p8Chunk(`{"index":0,"delta":{},"finish_reason":"stop"}`, p8Usage))
	},
	"never": func(bool) []string { return []string{frame(1), frame(2), frame(3), frameFin} },
	"if asked": func(asked bool) []string {
		if asked {
			return []string{frame(1), frame(2), frame(3), frameFin, frameUse}
		}
		return []string{frame(1), frame(2), frame(3), frameFin}
	},
	"two choices": func(bool) []string {
		two := func(rest string) string {
			return p8Chunk(`{"index":0,`+rest+`},{"index":1,`+rest+`}`, "")
		}
		return []string{p8Chunk(`{"index":0,"delta":{"content":"t1"},"finish_reason":null}`, ""),
			p8Chunk(`{"index":1,"delta":{"content":"t1"},"finish_reason":null}`, ""), two(`"delta":{"content":"t2"},"finish_reason":null`),
			two(`"delta":{},"finish_reason":"stop"`), frameUse}
	},
}

// p8Asks are the client's three ways to ask for usage.
var p8Asks = map[string]string{
	"nothing said":  reqStream,
	"usage wanted":  strings.TrimSuffix(reqStream, "}") + `,"stream_options":{"include_usage":true}}`,
	"usage refused": strings.TrimSuffix(reqStream, "}") + `,"stream_options":{"include_usage":false}}`,
}

// TestCaseP8UsageInEveryShape: usage is counted once, whatever shape it comes
// in; an answer without it is estimated and marked as such. The router asks for
// nothing that the client did not ask for, so nothing has to be taken out
// again: the replica gets the client's bytes, and the client the replica's.
func TestCaseP8UsageInEveryShape(t *testing.T) {
	t.Parallel()
	for shape, events := range p8Streams {
		for ask, body := range p8Asks {
			t.Run(shape+", "+ask, func(t *testing.T) {
				t.Parallel()
				u1 := replica(t, func(c *conn) {
					c.sseHead()
					for _, e := range events(strings.Contains(string(c.Body), `"include_usage":true`)) {
						c.chunk(e)
					}
					c.chunk(frameDone)
					c.end()
				})
				r := start(t, "", u1)
				a := r.post(chat, body)
				wantOK(t, a)
				want := strings.Join(events(ask == "usage wanted"), "") + frameDone
				if string(a.Body) != want {
					t.Errorf("the client got  %q\nthe replica sent %q", a.Body, want)
				}
				if got := string(u1.reqs()[0].Body); got != body {
					t.Errorf("the replica got %s\nthe client sent %s", got, body)
				}
				p8Counted(t, r, strings.Contains(want, `"usage"`))
			})
		}
	}
}

func p8Counted(t *testing.T, r *router, usage bool) {
	t.Helper()
	if usage {
		r.wantMetric(7, "penstock_prompt_tokens_total")
		r.wantMetric(3, "penstock_output_tokens_total")
		r.wantMetric(0, "penstock_usage_estimated_total")
		return
	}
	r.wantMetric(1, "penstock_usage_estimated_total")
	r.wantMetric(3, "penstock_output_tokens_total") // the events that came
	if n := r.sum("penstock_prompt_tokens_total"); n < 1 || n > 20 {
		t.Errorf("the prompt of an answer without usage counts as %v tokens", n)
	}
}

// TestCaseP8WholeAnswer: usage of an answer in one piece, and of one without.
func TestCaseP8WholeAnswer(t *testing.T) {
	t.Parallel()
	u1 := replica(t, (*conn).ok)
	r := start(t, "", u1)
	wantOK(t, r.post(chat, reqBody))
	p8Counted(t, r, true)

	none := strings.Split(bodyOK, `,"usage"`)[0] + "}"
	u2 := replica(t, func(c *conn) { c.json(200, none, "") })
	r2 := start(t, "", u2)
	wantOK(t, r2.post(chat, reqBody))
	r2.wantMetric(1, "penstock_usage_estimated_total")
	if n := r2.sum("penstock_prompt_tokens_total"); n < 1 || n > 20 {
		t.Errorf("the prompt counts as %v tokens", n)
	}
}

// TestCaseP8CutStream: of a stream that is cut after two events, by the replica
// or by the client, these two are charged, as an estimate, once.
func TestCaseP8CutStream(t *testing.T) {
	t.Parallel()
	t.Run("the replica resets", func(t *testing.T) {
		t.Parallel()
		begun := make(gate)
		u1 := replica(t, func(c *conn) {
			c.sseHead()
			c.chunk(frame(1))
			c.chunk(frame(2))
			begun.wait(c)
			c.rst()
		})
		r := start(t, "", u1)
		a := r.postGate(begun, `"t2"`, chat, reqStream)
		if code, ok := errorEvent(a.Body); !ok || code != "upstream_stream_failed" {
			t.Errorf("the stream ended with %q", a.Body)
		}
		p8Cut(t, r)
	})
	t.Run("the client leaves", func(t *testing.T) {
		t.Parallel()
		u1 := replica(t, func(c *conn) {
			c.sseHead()
			c.chunk(frame(1))
			c.chunk(frame(2))
			c.waitClose(10 * time.Second)
		})
		r := start(t, "", u1)
		c := r.dial()
		c.send(request(chat, reqStream))
		c.until("t2", 10*time.Second)
		c.reset()
		p8Cut(t, r)
	})
	t.Run("before it began", func(t *testing.T) {
		t.Parallel()
		u1 := replica(t, func(c *conn) { c.waitClose(time.Minute) })
		r := start(t, "", u1)
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		go func() { // leaves when the replica has it; at the latest the client's own limit ends it
			for u1.count() == 0 && ctx.Err() == nil {
				time.Sleep(5 * time.Millisecond)
			}
			cancel()
		}()
		if a, err := r.try(ctx, chat, reqStream); err == nil {
			t.Errorf("an answer: %d", a.Status)
		}
		r.wantMetric(1, "penstock_request_outcomes_total", label("outcome", "cancelled"))
		r.wantMetric(0, "penstock_output_tokens_total")
		r.wantMetric(0, "penstock_usage_estimated_total")
	})
}

func p8Cut(t *testing.T, r *router) {
	t.Helper()
	r.wantMetric(2, "penstock_output_tokens_total")
	r.wantMetric(1, "penstock_usage_estimated_total")
	if n := r.sum("penstock_prompt_tokens_total"); n < 1 || n > 20 {
		t.Errorf("the prompt counts as %v tokens", n)
	}
}
