package ladder

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// Run is how a validation is run.
type Run struct {
	Replica string        // URL of one of the tier's replicas
	APIKey  string        // that it asks for; "" = none
	Timeout time.Duration // of each prompt
	// Asking is told of each prompt (from 1) before it is asked, Answered when
	// its answer is there: err is what was wrong with it.
	Asking   func(n, of int)
	Answered func(n, of int, err error)
}

// unasked is a prompt that got no answer to judge: the replica cannot be
// reached, is too slow, or is too busy or too broken for any answer.
type unasked struct{ error }

// Validate tries the tier on one of its replicas. What the replica answers is judged
// in the result; an error means that there is nothing to judge: the prompts
// cannot be read, or the replica does not answer. It ends at the first prompt
// that gets no answer, so that a replica that hangs costs one time-out, and is
// then a fail only if the answers until then were too bad for any rest to mend.
func (v *Validation) Validate(ctx context.Context, r Run) (Result, error) {
	prompts, err := readPrompts(v.Prompts)
	if err != nil {
		return Result{}, err
	}
	good, n := 0, len(prompts)
	var first error
	for i, p := range prompts {
		r.Asking(i+1, n)
		err := v.try(ctx, &r, p)
		r.Answered(i+1, n, err)
		if err == nil {
			good++
			continue
		}
		var no unasked
		if errors.As(err, &no) {
			if float64(good+n-i)/float64(n) >= v.Pass { // all the rest may be good
				return Result{}, fmt.Errorf("prompt %d of %d: %w", i+1, n, err)
			}
			break
		}
		if first == nil {
			first = fmt.Errorf("prompt %d: %w", i+1, err)
		}
	}
	res := Result{At: time.Now(), Share: float64(good) / float64(n)}
	if res.Share < v.Pass {
		res.Failed = fmt.Sprintf("%d of %d prompts passed, %.0f %% are needed; %s", good, n, v.Pass*100, first)
	}
	return res, nil
}

func (v *Validation) try(ctx context.Context, r *Run, p prompt) error {
	msgs := p.Messages
	if p.Prompt != "" {
		m, err := json.Marshal(map[string]string{"role": "user", "content": p.Prompt})
		if err != nil {
			return err
		}
		msgs = []json.RawMessage{m}
	}
	body, err := json.Marshal(map[string]any{"model": v.Model, "messages": msgs, "max_tokens": 256, "temperature": 0})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, r.Timeout, fmt.Errorf("no answer within %s", r.Timeout))
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimSuffix(r.Replica, "/")+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return unasked{err}
	}
	req.Header.Set("Content-Type", "application/json")
	if r.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+r.APIKey)
	}
	resp, err := http.DefaultClient.Do(req)
	var b []byte
	if err == nil {
		defer resp.Body.Close()
		b, err = io.ReadAll(io.LimitReader(resp.Body, 4<<20))
	}
	switch {
	case err != nil && ctx.Err() != nil:
		return unasked{context.Cause(ctx)}
	case err != nil:
		return unasked{err}
	case resp.StatusCode >= 500 || resp.StatusCode == http.StatusTooManyRequests || resp.StatusCode == http.StatusRequestTimeout:
		return unasked{fmt.Errorf("status %d", resp.StatusCode)}
	case resp.StatusCode != http.StatusOK: // it answers, and would not do this work
		return fmt.Errorf("status %d", resp.StatusCode)
	}
	return p.judge(b)
}

// judge tells what is wrong with an answer.
func (p *prompt) judge(answer []byte) error {
	var a struct {
		Choices []struct {
			Message struct {
				Content string `json:"content"`
			} `json:"message"`
		} `json:"choices"`
	}
	if err := json.Unmarshal(answer, &a); err != nil || len(a.Choices) == 0 {
		return errors.New("answer is not a chat completion")
	}
	if !strings.Contains(strings.ToLower(a.Choices[0].Message.Content), strings.ToLower(p.Contains)) {
		return fmt.Errorf("answer does not contain %q", p.Contains)
	}
	return nil
}
