package load

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/penstock/penstock/bench/workload"
)

type chatMessage struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// body makes the request's bytes: a shared prefix as the system message, then
// the conversation.
func (r *runner) body(q *workload.Request) []byte {
	m := map[string]any{"model": r.opt.Model, "max_tokens": q.Out, "ignore_eos": true, "temperature": 0, "stream": !r.opt.Whole}
	if !r.opt.Whole {
		m["stream_options"] = map[string]bool{"include_usage": true}
	}
	if r.opt.API == "completions" {
		var b strings.Builder
		for _, s := range q.Segs {
			b.WriteString(workload.Text(s.ID, s.Tokens))
		}
		m["prompt"] = b.String()
	} else {
		m["messages"] = messages(q)
	}
	b, err := json.Marshal(m)
	if err != nil {
		panic("BUG: load: " + err.Error())
	}
	return b
}

// messages: the last run is the user's; before it, runs alternate back through
// the turns; what is left in front is the system's.
func messages(q *workload.Request) []chatMessage {
	n := len(q.Segs)
	first := n - 1 - 2*q.Turn
	if first < 0 {
		first = 0
	}
	var out []chatMessage
	var sys strings.Builder
	for _, s := range q.Segs[:first] {
		sys.WriteString(workload.Text(s.ID, s.Tokens))
	}
	if first > 0 {
		out = append(out, chatMessage{"system", sys.String()})
	}
	for i := first; i < n; i++ {
		role := "user"
		if (n-1-i)%2 == 1 {
			role = "assistant"
		}
		out = append(out, chatMessage{role, workload.Text(q.Segs[i].ID, q.Segs[i].Tokens)})
	}
	return out
}

// request is one to a path of the server.
func (r *runner) request(ctx context.Context, method, path string, body []byte) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(r.opt.URL, "/")+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if r.opt.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+r.opt.APIKey)
	}
	for k, v := range r.opt.Headers {
		req.Header.Set(k, v)
	}
	return req, nil
}

// attempt sends once and reads the answer into rec.
func (r *runner) attempt(ctx context.Context, body []byte, rec *Record) {
	path := "/v1/chat/completions"
	if r.opt.API == "completions" {
		path = "/v1/completions"
	}
	req, err := r.request(ctx, http.MethodPost, path, body)
	if err != nil {
		rec.Outcome, rec.Error = Connection, err.Error()
		return
	}
	req.Header.Set("Content-Type", "application/json")
	now := r.now()
	if rec.Attempts == 1 {
		rec.Sent = now
	}
	*rec = Record{Index: rec.Index, At: rec.At, Request: rec.Request, Attempts: rec.Attempts, Sent: rec.Sent, Last: now}
	resp, err := r.client.Do(req)
	if err != nil {
		rec.Outcome, rec.Error = Connection, err.Error()
		return
	}
	defer func() { _ = resp.Body.Close() }()
	rec.Status = resp.StatusCode
	if resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
		rec.Outcome, rec.Error = Status, string(b)
		if resp.StatusCode == 429 || resp.StatusCode == 503 {
			rec.Outcome = Refused
			rec.RetryAfter = retryAfter(resp.Header)
		}
		return
	}
	rec.Prompt, rec.Out = rec.Request.Prompt, 0
	if strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		r.stream(resp.Body, rec)
		return
	}
	r.whole(resp.Body, rec)
}

func retryAfter(h http.Header) float64 {
	if ms, err := strconv.ParseFloat(h.Get("Retry-After-Ms"), 64); err == nil {
		return ms / 1e3
	}
	s, _ := strconv.ParseFloat(h.Get("Retry-After"), 64)
	return s
}

type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Details    *struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

func (u *usage) into(rec *Record) {
	if u == nil {
		return
	}
	rec.Prompt, rec.Out = u.Prompt, u.Completion
	if u.Details != nil {
		rec.Cached = u.Details.Cached
	}
}

func (r *runner) whole(body io.Reader, rec *Record) {
	var a struct {
		Choices []struct {
			Text    string      `json:"text"`
			Message chatMessage `json:"message"`
			Finish  *string     `json:"finish_reason"`
		} `json:"choices"`
		Usage *usage `json:"usage"`
	}
	err := json.NewDecoder(body).Decode(&a)
	rec.First = r.now()
	switch {
	case err != nil:
		rec.Outcome, rec.Error = Broken, err.Error()
	case len(a.Choices) == 0 || a.Choices[0].Finish == nil || *a.Choices[0].Finish == "abort":
		rec.Outcome, rec.Error = Broken, "an answer without finish_reason"
	default:
		rec.Outcome = OK
		a.Usage.into(rec)
		if r.opt.OnRecord != nil {
			rec.Text = a.Choices[0].Text + a.Choices[0].Message.Content
		}
	}
}

// stream reads server-sent events. Only events that may matter are parsed.
func (r *runner) stream(body io.Reader, rec *Record) {
	sc := bufio.NewScanner(body)
	sc.Buffer(make([]byte, 0, 4096), 1<<20)
	var last float64
	var text strings.Builder
	finished, done, events := false, false, 0
	for sc.Scan() {
		data, ok := bytes.CutPrefix(sc.Bytes(), []byte("data:"))
		if !ok {
			continue
		}
		data = bytes.TrimSpace(data)
		if string(data) == "[DONE]" {
			done = true
			break
		}
		if bytes.HasPrefix(data, []byte(`{"error"`)) {
			rec.Outcome, rec.Error = Broken, string(data)
			_, _ = io.Copy(io.Discard, body)
			return
		}
		if content, ok := contentOf(data); ok {
			now := r.now()
			if events == 0 {
				rec.First = now
			} else {
				rec.Gaps = append(rec.Gaps, now-last)
			}
			last = now
			events++
			if r.opt.OnRecord != nil {
				var s string
				if json.Unmarshal(content, &s) == nil {
					text.WriteString(s)
				}
			}
		}
		if f := field(data, `"finish_reason":`); len(f) > 0 && f[0] == '"' {
			finished = !bytes.HasPrefix(f, []byte(`"abort"`))
		}
		if f := field(data, `"usage":`); len(f) > 0 && f[0] == '{' {
			var u struct {
				Usage *usage `json:"usage"`
			}
			if json.Unmarshal(data, &u) == nil {
				u.Usage.into(rec)
			}
		}
	}
	rec.Text = text.String()
	if rec.Out == 0 {
		rec.Out = events
	}
	if done { // read to the end, so that the connection can be used again
		_, _ = io.Copy(io.Discard, body)
	}
	switch {
	case finished && done:
		rec.Outcome = OK
	case sc.Err() != nil:
		rec.Outcome, rec.Error = Broken, sc.Err().Error()
	default:
		rec.Outcome, rec.Error = Broken, fmt.Sprintf("the stream ended after %d content events without its finish", events)
	}
}

// field is what follows name in data, nil when it is not there.
func field(data []byte, name string) []byte {
	i := bytes.Index(data, []byte(name))
	if i < 0 {
		return nil
	}
	return bytes.TrimLeft(data[i+len(name):], " ")
}

// contentOf finds the content of an event: a JSON string that is not empty, or
// a tool call's part.
func contentOf(data []byte) ([]byte, bool) {
	for _, name := range []string{`"content":`, `"text":`, `"tool_calls":`} {
		f := field(data, name)
		if len(f) < 2 {
			continue
		}
		if f[0] == '[' && name == `"tool_calls":` {
			return nil, true
		}
		if f[0] != '"' || f[1] == '"' {
			continue
		}
		for i := 1; i < len(f); i++ {
			switch f[i] {
			case '\\':
				i++
			case '"':
				return f[:i+1], true
			}
		}
	}
	return nil, false
}
