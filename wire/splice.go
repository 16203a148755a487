package wire

import "strconv"

// Splice appends body with the span [start,end) replaced by val as a JSON string.
func Splice(dst, body []byte, start, end int, val string) []byte {
	dst = append(dst, body[:start]...)
	dst = appendQuoted(dst, val)
	return append(dst, body[end:]...)
}

// SpliceRaw appends body with the span [start,end) replaced by raw as it is.
func SpliceRaw(dst, body []byte, start, end int, raw string) []byte {
	dst = append(dst, body[:start]...)
	dst = append(dst, raw...)
	return append(dst, body[end:]...)
}

// SpliceInsert appends body with the member `"key":raw` put in first. b must
// have scanned this very body, which therefore has another member.
func (b *Body) SpliceInsert(dst, body []byte, key, raw string) []byte {
	dst = append(dst, body[:b.open]...)
	dst = appendQuoted(dst, key)
	dst = append(dst, ':')
	dst = append(dst, raw...)
	dst = append(dst, ',')
	return append(dst, body[b.open:]...)
}

// Rewrite is what the configuration asks to change in a request's body.
type Rewrite struct {
	Model  string // the served name, "" = leave it
	MaxOut int    // the bound on output tokens, 0 = leave it
}

// Rewrite appends body with the asked values put in and every other byte as it
// was. b must have scanned this very body.
func (b *Body) Rewrite(dst, body []byte, r Rewrite) []byte {
	type edit struct {
		start, end int
		kind       uint8 // 0 none, 1 model, 2 bound, 3 bound that is not there yet
	}
	var first, second edit
	if r.Model != "" {
		second = edit{b.ModelStart, b.ModelEnd, 1}
	}
	if r.MaxOut > 0 && !b.Multipart {
		first = edit{b.open, b.open, 3}
		if b.MaxOutEnd > b.MaxOutStart {
			first = edit{b.MaxOutStart, b.MaxOutEnd, 2}
		}
	}
	if first.kind != 0 && second.kind != 0 && second.start < first.start {
		first, second = second, first
	}
	at := 0
	for _, e := range [...]edit{first, second} {
		if e.kind == 0 {
			continue
		}
		dst = append(dst, body[at:e.start]...)
		at = e.end
		switch {
		case e.kind == 1 && b.Multipart:
			dst = append(dst, r.Model...)
		case e.kind == 1:
			dst = appendQuoted(dst, r.Model)
		case e.kind == 2:
			dst = strconv.AppendInt(dst, int64(r.MaxOut), 10)
		default:
			dst = appendQuoted(dst, maxOutKey(b.Kind))
			dst = append(dst, ':')
			dst = strconv.AppendInt(dst, int64(r.MaxOut), 10)
			dst = append(dst, ',')
		}
	}
	return append(dst, body[at:]...)
}

// maxOutKey is the API's own name for the bound on output tokens. max_tokens
// is what every version of vLLM's chat API takes.
func maxOutKey(k Kind) string {
	if k == KindResponses {
		return "max_output_tokens"
	}
	return "max_tokens"
}
