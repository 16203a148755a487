// Package ladder holds what a route may fall back to when its primary pool
// cannot answer in time: the declared tiers, the answer cache, static answers
// and the record of when each tier was last shown to work. Which tier is
// taken when is proxy's; every tier has to be declared, none is implied.
package ladder

import (
	"encoding/json"
	"fmt"
	"time"
)

// Kind of a tier.
type Kind uint8

// The kinds, in the words of degradation.md.
const (
	KindPool   Kind = iota + 1 // another pool: tier 0 when it serves the same model, tier 2 when a smaller one
	KindReduce                 // the pool before it, asked for less: tier 1
	KindCached                 // an earlier answer to the very same request
	KindStatic                 // an operator's fixed answer
	KindDefer                  // a durable job: tier 3
)

// Tier is one rung, in the order of the configuration.
type Tier struct {
	Kind   Kind
	Number int // what X-Degraded-Tier says; 0 = not degraded
	Name   string

	Pool  string        // KindPool: the pool's name
	Model string        // KindPool: the model asked of it; "" = as the request says
	Limit time.Duration // its own time limit for an answer to begin; 0 = what is left of the budget

	MaxTokens int  // KindReduce: at most so many output tokens; 0 = as the request says
	DropTools bool // KindReduce: optional tools are dropped

	Shared    bool          // KindCached: answers may cross tenants
	Staleness time.Duration // KindCached: at most 4 h for a tenant's own, 24 h for shared

	Static *Static // KindStatic

	Validate *Validation // KindPool with a smaller model: nil = none declared
}

// Route is the ladder of one model name.
type Route struct {
	Model   string
	Budget  time.Duration // until an answer begins, whole ladder included; 0 = the request's deadline
	Regions uint64        // permitted regions (bits); 0 = any
	Tiers   []Tier
	State   *State // nil when the route has one tier
}

// Static is an operator's fixed answer, held in memory as the two forms that
// a client may ask for.
type Static struct {
	JSON   []byte
	Stream []byte
}

// NewStatic checks the operator's file (an OpenAI chat completion) and makes
// the streamed form of it. name is for errors.
func NewStatic(name string, data []byte) (*Static, error) {
	var c struct {
		ID      string `json:"id"`
		Object  string `json:"object"`
		Created int64  `json:"created"`
		Model   string `json:"model"`
		Choices []struct {
			Index        int    `json:"index"`
			FinishReason string `json:"finish_reason"`
			Message      struct {
				Role    string `json:"role"`
				Content string `json:"content"`
			} `json:"message"`
		} `json:"choices"`
	}
	if err := json.Unmarshal(data, &c); err != nil {
		return nil, fmt.Errorf("%s: a static answer is one chat completion in JSON: %w", name, err)
	}
	if c.Object != "chat.completion" || len(c.Choices) == 0 || c.Choices[0].Message.Content == "" || c.Choices[0].FinishReason == "" {
		return nil, fmt.Errorf(`%s: a static answer needs "object":"chat.completion" and a choice with message.content and finish_reason`, name)
	}
	event := func(delta map[string]string, finish any) []byte {
		b, err := json.Marshal(map[string]any{"id": c.ID, "object": "chat.completion.chunk", "created": c.Created, "model": c.Model,
			"choices": []any{map[string]any{"index": 0, "delta": delta, "finish_reason": finish}}})
		if err != nil {
			panic("BUG: " + err.Error())
		}
		return append(append([]byte("data: "), b...), "\n\n"...)
	}
	ch := c.Choices[0]
	s := event(map[string]string{"role": "assistant", "content": ""}, nil)
	s = append(s, event(map[string]string{"content": ch.Message.Content}, nil)...)
	s = append(s, event(map[string]string{}, ch.FinishReason)...)
	s = append(s, "data: [DONE]\n\n"...)
	return &Static{JSON: data, Stream: s}, nil
}
