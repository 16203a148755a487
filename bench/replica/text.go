package replica

import (
	"encoding/json"
	"strings"

	"github.com/penstock/penstock/bench/model"
)

// bytesPerToken of the emulated tokenizer: a token is four bytes of the
// canonical prompt.
const bytesPerToken = 4

func tokensOf(bytes int) int { return max(1, (bytes+bytesPerToken-1)/bytesPerToken) }

// quote is s as a JSON string, without HTML escapes.
func quote(s string) string { return string(appendQuoted(nil, s)) }

const hexDigits = "0123456789abcdef"

func appendQuoted(b []byte, s string) []byte {
	b = append(b, '"')
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
		case c == '\n':
			b = append(b, '\\', 'n')
		case c == '\r':
			b = append(b, '\\', 'r')
		case c == '\t':
			b = append(b, '\\', 't')
		case c < 0x20:
			b = append(b, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
		default:
			b = append(b, c)
		}
	}
	return append(b, '"')
}

// segments hashes the canonical prompt block by block, chained, as vLLM's
// prefix cache does. salt covers model, adapter and cache_salt.
func segments(canon []byte, salt uint64, block int) []model.Seg {
	size := block * bytesPerToken
	out := make([]model.Seg, 0, len(canon)/size+1)
	h := salt ^ 14695981039346656037
	for i := 0; i+size <= len(canon); i += size {
		for _, c := range canon[i : i+size] {
			h = (h ^ uint64(c)) * 1099511628211
		}
		out = append(out, model.Seg{Hash: h ^ h>>29, Tokens: block})
	}
	return out
}

func hashString(h uint64, s string) uint64 {
	h ^= 14695981039346656037
	for i := 0; i < len(s); i++ {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return (h ^ 0xff) * 1099511628211
}

// echo makes the answer's tokens: the words of text, cycling, each with a
// leading space but the first. choice turns the cycle, so that the n answers
// of one request differ.
type echo struct {
	words []string
	at    int
	first bool
}

func newEcho(text string, choice int) echo {
	w := strings.Fields(text)
	if len(w) == 0 {
		w = []string{"ok"}
	}
	return echo{words: w, at: choice % len(w), first: true}
}

func (e *echo) next() (space bool, word string) {
	space, word = !e.first, e.words[e.at]
	e.first = false
	e.at = (e.at + 1) % len(e.words)
	return space, word
}

// toolArguments makes arguments for a function from its JSON schema: each
// required property a word of the prompt (or a number, true, an empty list).
func toolArguments(schema json.RawMessage, e echo) string {
	var s struct {
		Properties map[string]struct {
			Type string   `json:"type"`
			Enum []string `json:"enum"`
		} `json:"properties"`
		Required []string `json:"required"`
	}
	_ = json.Unmarshal(schema, &s)
	var b []byte
	b = append(b, '{')
	for i, name := range s.Required {
		if i > 0 {
			b = append(b, ", "...)
		}
		b = appendQuoted(b, name)
		b = append(b, ": "...)
		p := s.Properties[name]
		switch _, w := e.next(); {
		case len(p.Enum) > 0:
			b = appendQuoted(b, p.Enum[0])
		case p.Type == "integer" || p.Type == "number":
			b = append(b, '7')
		case p.Type == "boolean":
			b = append(b, "true"...)
		case p.Type == "array":
			b = append(b, "[]"...)
		case p.Type == "object":
			b = append(b, "{}"...)
		default:
			b = appendQuoted(b, w)
		}
	}
	return string(append(b, '}'))
}
