package drill

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Call is what one client saw of one try of one request. Times are seconds
// since the drill's start; 0 = did not happen.
type Call struct {
	Load       string            `json:"load"`
	N          int               `json:"n"`   // request number in its load
	Try        int               `json:"try"` // 0 = first
	Last       bool              `json:"last"`
	Sent       float64           `json:"sent"`
	First      float64           `json:"first"` // first content event (or the whole answer)
	End        float64           `json:"end"`
	Status     int               `json:"status"`
	Code       string            `json:"code,omitempty"`        // error code of the body or the terminal event
	RetryAfter float64           `json:"retry_after,omitempty"` // seconds, exact
	Retry      string            `json:"should_retry,omitempty"`
	Header     map[string]string `json:"header,omitempty"` // the headers that drills look at
	Content    string            `json:"-"`
	Finish     string            `json:"finish,omitempty"`
	Done       bool              `json:"done"`        // [DONE], or a whole JSON answer
	ErrorEvent bool              `json:"error_event"` // a terminal error event
	Left       bool              `json:"left"`        // the client went away on purpose
	Err        string            `json:"err,omitempty"`
	Foreign    string            `json:"foreign,omitempty"` // another session's anchor word seen
	Anchored   bool              `json:"anchored"`          // its own anchor words seen
}

// OK tells whether the client got a whole answer. One that says "abort" is none:
// the engine was stopped.
func (c *Call) OK() bool {
	return c.Status == 200 && c.Done && !c.ErrorEvent && c.Err == "" && c.Finish != "abort"
}

// Honest tells whether the client was refused as contract.md says: a 429 or
// 503 that says when to return.
func (c *Call) Honest() bool {
	return (c.Status == 429 || c.Status == 503) && c.RetryAfter > 0 && c.Code != ""
}

var watched = []string{"X-Degraded", "X-Degraded-Tier", "X-Degraded-Reason", "X-Degraded-Kind", "Cache-Control", "Retry-After", "X-Request-Id", "X-Sandbox-Id", "Traceparent", "X-Should-Retry", "Age", "X-Stream-Integrity"}

// driver sends one load.
type driver struct {
	load   *Load
	base   string
	start  time.Time
	client *http.Client
	rng    *rand.Rand
	mu     sync.Mutex
	calls  []*Call
	wg     sync.WaitGroup
}

func newDriver(l *Load, base string, start time.Time, seed uint64) *driver {
	tr := &http.Transport{MaxIdleConnsPerHost: 256, MaxConnsPerHost: 0, DisableCompression: true, IdleConnTimeout: 5 * time.Second}
	return &driver{load: l, base: base, start: start, client: &http.Client{Transport: tr}, rng: rand.New(rand.NewPCG(seed, 1))}
}

func (d *driver) now() float64 { return time.Since(d.start).Seconds() }

// run sends the load until it is over or ctx ends, and waits for the answers.
func (d *driver) run(ctx context.Context) []*Call {
	defer d.client.CloseIdleConnections()
	sleep(ctx, time.Until(d.start.Add(time.Duration(d.load.From))))
	end := d.start.Add(time.Duration(d.load.From + d.load.For))
	more := func(n int) bool {
		return ctx.Err() == nil && (d.load.Count == 0 || n < d.load.Count) && (d.load.For == 0 || time.Now().Before(end))
	}
	if d.load.Rate > 0 {
		at := time.Now()
		for n := 0; more(n); n++ {
			d.spawn(ctx, n)
			at = at.Add(time.Duration(d.rng.ExpFloat64() / d.load.Rate * float64(time.Second)))
			if d.load.For > 0 && at.After(end) {
				at = end // the load is over then, also when it is a slow one
			}
			sleep(ctx, time.Until(at))
		}
	} else {
		var mu sync.Mutex
		n := 0
		for range d.load.Clients {
			d.wg.Go(func() {
				for {
					mu.Lock()
					k := n
					n++
					leave := d.rng.Float64() < d.load.Leave
					mu.Unlock()
					if !more(k) {
						return
					}
					d.request(ctx, k, leave)
				}
			})
		}
	}
	d.wg.Wait()
	return d.calls
}

func (d *driver) spawn(ctx context.Context, n int) {
	leave := d.rng.Float64() < d.load.Leave
	d.wg.Go(func() { d.request(ctx, n, leave) })
}

// request sends one request, with the SDK's retries if asked.
func (d *driver) request(ctx context.Context, n int, leave bool) {
	for try := 0; ; try++ {
		c := d.once(ctx, n, try, leave)
		wait, again := sdkRetry(c, try)
		c.Last = !d.load.Retry || !again || ctx.Err() != nil
		d.mu.Lock()
		d.calls = append(d.calls, c)
		d.mu.Unlock()
		if c.Last {
			return
		}
		sleep(ctx, wait)
	}
}

// sdkRetry is the official OpenAI SDK's rule (contract.md): x-should-retry,
// then retry-after-ms, retry-after; two retries, half a second and doubling.
func sdkRetry(c *Call, try int) (time.Duration, bool) {
	if c.OK() || c.Left || try >= 2 || c.Retry == "false" {
		return 0, false
	}
	if c.Status == 200 { // an error event in a stream is not retried by the SDK
		return 0, false
	}
	retryable := c.Status == 0 || c.Status == 408 || c.Status == 409 || c.Status == 429 || c.Status >= 500
	if !retryable && c.Retry != "true" {
		return 0, false
	}
	if c.RetryAfter > 0 && c.RetryAfter <= 120 {
		return time.Duration(c.RetryAfter * float64(time.Second)), true
	}
	return time.Duration(float64(500*time.Millisecond) * float64(int(1)<<try) * (1 - rand.Float64()/4)), true
}

// anchor returns the two words that only session s has.
func anchor(s int) string { return fmt.Sprintf("anchor%04dx zebra%04dx", s, s) }

func (d *driver) body(n int) []byte {
	l := d.load
	if l.Body != "" {
		return []byte(strings.ReplaceAll(l.Body, "${n}", strconv.Itoa(n)))
	}
	words := l.Prompt
	if words == 0 {
		words = 40
	}
	var text strings.Builder
	if l.Sessions > 0 {
		text.WriteString(anchor(n%l.Sessions) + " ")
	} else {
		k := n
		if l.SameBody {
			k = 0
		}
		fmt.Fprintf(&text, "%s request %d ", l.Name, k)
		for i := text.Len(); i < words*5; i += 5 {
			text.WriteString("word ")
		}
	}
	req := map[string]any{"model": l.Model, "max_tokens": l.MaxTokens, "messages": []map[string]string{{"role": "user", "content": text.String()}}}
	if l.Model == "" {
		req["model"] = "m1"
	}
	if l.MaxTokens == 0 {
		req["max_tokens"] = 16
	}
	if l.Streams() {
		req["stream"] = true
	}
	if l.Temperature != nil {
		req["temperature"] = *l.Temperature
	}
	if l.Tools {
		fn := func(name string) map[string]any {
			return map[string]any{"type": "function", "function": map[string]any{"name": name, "parameters": map[string]any{"type": "object", "properties": map[string]any{"q": map[string]string{"type": "string"}}}}}
		}
		req["tools"], req["tool_choice"] = []any{fn("first"), fn("second")}, "required"
	}
	b, _ := json.Marshal(req)
	return b
}

// once sends one try and reads the answer to its end.
func (d *driver) once(ctx context.Context, n, try int, leave bool) *Call {
	l := d.load
	c := &Call{Load: l.Name, N: n, Try: try, Sent: d.now(), Header: map[string]string{}}
	timeout := 60 * time.Second
	if l.Timeout > 0 {
		timeout = time.Duration(l.Timeout)
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if leave && l.LeaveAfter > 0 {
		t := time.AfterFunc(time.Duration(l.LeaveAfter), func() { cancel() })
		defer t.Stop()
	}
	defer func() { c.End = d.now() }()
	method, p := l.Method, l.Path
	if p == "" {
		p = "/v1/chat/completions"
	}
	var body io.Reader
	if method == "" || method == "POST" {
		method, body = "POST", bytes.NewReader(d.body(n))
	}
	req, err := http.NewRequestWithContext(ctx, method, d.base+p, body)
	if err != nil {
		c.Err = err.Error()
		return c
	}
	req.Header.Set("Content-Type", "application/json")
	if l.Retry {
		req.Header.Set("X-Stainless-Retry-Count", strconv.Itoa(try))
	}
	for k, v := range l.Headers {
		req.Header.Set(k, strings.ReplaceAll(v, "${n}", strconv.Itoa(n)))
	}
	resp, err := d.client.Do(req)
	if err != nil {
		c.fail(err, leave)
		return c
	}
	defer resp.Body.Close()
	c.Status = resp.StatusCode
	for _, h := range watched {
		if v := resp.Header.Get(h); v != "" {
			c.Header[h] = v
		}
	}
	c.Retry = resp.Header.Get("X-Should-Retry")
	if ms, err := strconv.ParseFloat(resp.Header.Get("Retry-After-Ms"), 64); err == nil {
		c.RetryAfter = ms / 1000
	} else if s, err := strconv.ParseFloat(resp.Header.Get("Retry-After"), 64); err == nil {
		c.RetryAfter = s
	}
	if strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		err = d.readStream(c, resp.Body, leave && l.LeaveAfter == 0)
	} else {
		err = d.readJSON(c, resp.Body)
	}
	if err != nil {
		c.fail(err, leave)
	}
	d.judgeAnchors(c)
	return c
}

func (c *Call) fail(err error, leave bool) {
	if leave && errors.Is(err, context.Canceled) {
		c.Left = true
		return
	}
	c.Err = err.Error()
}

func (d *driver) readJSON(c *Call, r io.Reader) error {
	b, err := io.ReadAll(io.LimitReader(r, 64<<20))
	if err != nil {
		return err
	}
	var a struct {
		Error *struct {
			Code any `json:"code"`
		} `json:"error"`
		Choices []struct {
			Finish  string `json:"finish_reason"`
			Text    string `json:"text"`
			Message struct {
				Content string `json:"content"`
			} `json:"message"`
		} `json:"choices"`
	}
	if c.Status == 200 {
		c.First = d.now()
	}
	if err := json.Unmarshal(b, &a); err != nil {
		if c.Status == 200 && strings.HasPrefix(d.load.Path, "/v1") {
			return fmt.Errorf("answer is not JSON: %w", err)
		}
		c.Done = true
		c.Content = string(b)
		return nil
	}
	if a.Error != nil {
		c.Code = fmt.Sprint(a.Error.Code)
	}
	for _, ch := range a.Choices {
		c.Content += ch.Text + ch.Message.Content
		c.Finish = ch.Finish
	}
	c.Done = true
	return nil
}

func (d *driver) readStream(c *Call, r io.Reader, leaveAtFirst bool) error {
	sc := bufio.NewScanner(r)
	sc.Buffer(make([]byte, 64<<10), 8<<20)
	var content strings.Builder
	defer func() { c.Content = content.String() }()
	for sc.Scan() {
		data, ok := bytes.CutPrefix(sc.Bytes(), []byte("data:"))
		if !ok {
			continue
		}
		data = bytes.TrimSpace(data)
		if string(data) == "[DONE]" {
			c.Done = true
			continue
		}
		var e struct {
			Error *struct {
				Code any `json:"code"`
			} `json:"error"`
			Choices []struct {
				Delta struct {
					Content   string            `json:"content"`
					ToolCalls []json.RawMessage `json:"tool_calls"`
				} `json:"delta"`
				Text   string `json:"text"`
				Finish string `json:"finish_reason"`
			} `json:"choices"`
		}
		if err := json.Unmarshal(data, &e); err != nil {
			return fmt.Errorf("event is not JSON: %w", err)
		}
		if e.Error != nil {
			c.ErrorEvent, c.Code = true, fmt.Sprint(e.Error.Code)
		}
		for _, ch := range e.Choices {
			if ch.Finish != "" {
				c.Finish = ch.Finish
			}
			if s := ch.Delta.Content + ch.Text; s != "" || len(ch.Delta.ToolCalls) > 0 {
				content.WriteString(s)
				if c.First == 0 {
					c.First = d.now()
				}
			}
		}
		if leaveAtFirst && c.First != 0 {
			c.Left = true
			return nil
		}
	}
	if err := sc.Err(); err != nil {
		return err
	}
	if !c.Done && !c.ErrorEvent {
		return errors.New("stream ended without [DONE] or an error event")
	}
	return nil
}

func (d *driver) judgeAnchors(c *Call) {
	if d.load.Sessions == 0 || c.Content == "" {
		return
	}
	own := fmt.Sprintf("%04dx", c.N%d.load.Sessions)
	c.Anchored = strings.Contains(c.Content, own)
	for _, w := range strings.Fields(c.Content) {
		for _, p := range []string{"anchor", "zebra"} {
			if s, ok := strings.CutPrefix(w, p); ok && len(s) >= 5 && s[:5] != own {
				c.Foreign = w
			}
		}
	}
}

func sleep(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
