package wire

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"
)

// where says what part of the prompt a value is: it decides which keys have a
// meaning and which bytes count as prompt text.
type where uint8

const (
	inText     where = iota // prompt, instructions, documents: every string counts
	inTools                 // rendered into the prompt as JSON: keys count too
	inMessages              // the array of messages or input items
	inMessage               // one of them
	inContent               // its content: a string or an array of parts
	inPart                  // one part
	inOther                 // anything else in a message
)

// walker goes over the prompt's values in a body that is known to be valid
// JSON and feeds them, decoded and without white space, to the chain. What a
// client may change between turns without changing the prompt (cache_control)
// is left out; media go in by the hash of what stands for them.
type walker struct {
	*Body
	b     []byte
	chain *chain
	texts *texts
	list  []text // the strings of the body from the next one on
}

func (w *walker) space(i int) int {
	for w.b[i] <= ' ' {
		i++
	}
	return i
}

// value feeds the value at i and returns the index behind it.
func (w *walker) value(i int, in where) int {
	switch w.b[i] {
	case '"':
		return w.str(i, true)
	case '{':
		return w.object(i, in)
	case '[':
		return w.array(i, in)
	}
	j := i
	for j < len(w.b) && w.b[j] > ' ' && w.b[j] != ',' && w.b[j] != '}' && w.b[j] != ']' {
		j++
	}
	w.chain.byte(0x04)
	w.text(w.b[i:j], in != inMessage)
	return j
}

func (w *walker) array(i int, in where) int {
	w.chain.byte('[')
	if i = w.space(i + 1); w.b[i] == ']' {
		return i + 1
	}
	if in == inText && (w.b[i] == '-' || w.b[i]-'0' <= 9) {
		return w.tokens(i)
	}
	inner := in
	switch in {
	case inMessages:
		inner = inMessage
	case inContent:
		inner = inPart
	}
	for {
		i = w.space(w.value(i, inner))
		if w.b[i] == ']' {
			return i + 1
		}
		i = w.space(i + 1)
	}
}

// tokens feeds an array of token ids, 4 bytes each; i is at the first.
func (w *walker) tokens(i int) int {
	for {
		var v uint32
		for ; w.b[i] > ' ' && w.b[i] != ',' && w.b[i] != ']'; i++ {
			if w.b[i] == '[' || w.b[i] == '{' || w.b[i] == '"' {
				// Not a list of ids after all; the replica will refuse it.
				i = w.value(i, inText) - 1
				continue
			}
			v = v*10 + uint32(w.b[i]-'0')
		}
		w.TokenIDs++
		var t [4]byte
		binary.LittleEndian.PutUint32(t[:], v)
		w.chain.feed(t[:])
		i = w.space(i)
		if w.b[i] == ']' {
			return i + 1
		}
		i = w.space(i + 1)
	}
}

func (w *walker) object(i int, in where) int {
	w.chain.byte('{')
	if i = w.space(i + 1); w.b[i] == '}' {
		return i + 1
	}
	for {
		start := i + 1
		end := w.stringEnd()
		i = w.space(w.space(end+1) + 1)
		i = w.space(w.member(w.b[start:end], i, in))
		if w.b[i] == '}' {
			return i + 1
		}
		i = w.space(i + 1)
	}
}

// member feeds one key and its value at i.
func (w *walker) member(key []byte, i int, in where) int {
	inner := inOther
	switch in {
	case inText, inTools:
		inner = in
	case inMessage:
		if string(key) == "content" {
			inner = inContent
		}
	case inPart:
		switch string(key) {
		case "content": // Anthropic's tool_result holds parts again
			inner = inContent
		case "type":
			w.partType(i)
		case "image_url", "image", "video_url", "video", "audio_url", "audio", "input_audio", "source", "file", "file_data":
			return w.media(i)
		}
	}
	if string(key) == "cache_control" && in != inText {
		return w.skip(i)
	}
	w.chain.byte(0x02)
	w.text(key, in == inTools)
	return w.value(i, inner)
}

// partType notes the modality that a content part's "type" (at i) names.
func (w *walker) partType(i int) {
	if w.b[i] != '"' {
		return
	}
	switch string(w.b[i+1 : w.list[0].end]) {
	case "image_url", "input_image", "image", "image_pil", "image_embeds":
		w.HasImages = true
		w.MediaParts++
	case "input_audio", "audio_url", "audio":
		w.HasAudio = true
		w.MediaParts++
	case "video_url", "video", "input_video":
		w.HasVideo = true
		w.MediaParts++
	}
}

// media feeds the hash of the value at i in the place of its bytes.
func (w *walker) media(i int) int {
	end := w.skip(i)
	w.MediaBytes += end - i
	w.chain.byte(0x05)
	w.chain.uint64(xxh3.Hash(w.b[i:end]))
	return end
}

// stringEnd steps over the next string and returns the index of its closing quote.
func (w *walker) stringEnd() int {
	end := w.list[0].end
	w.list = w.list[1:]
	return int(end)
}

// skip steps over the value at i without feeding it.
func (w *walker) skip(i int) int {
	s := scanner{b: w.b}
	end := s.value(i, 0)
	for len(w.list) > 0 && int(w.list[0].end) < end {
		w.list = w.list[1:]
	}
	return end
}

// str feeds a string decoded; i is at its opening quote.
func (w *walker) str(i int, count bool) int {
	w.chain.byte(0x03)
	x := w.list[0]
	w.list = w.list[1:]
	w.text(w.texts.decoded(w.b, x, i+1), count)
	return int(x.end) + 1
}

// plainEscapes maps the letter of each escape but \u to its character.
var plainEscapes = [256]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

// text feeds p and, when it is part of the prompt's text, counts it.
func (w *walker) text(p []byte, count bool) {
	if count {
		o := 0
		if w.texts.wide {
			o = countOther(p)
		}
		w.Other += o
		w.ASCII += len(p) - o
	}
	w.chain.feed(p)
}

// fingerprint feeds the canonical prompt: tools, system, then the rest.
func (b *Body) fingerprint(body []byte, t *texts) {
	model := b.Model
	if b.Resolve != nil {
		model = b.Resolve(model)
	}
	salt := b.spans[slotSalt]
	c := &b.chain
	c.blocks = b.Blocks
	c.reset(mix64(xxh3.HashString(model), xxh3.Hash(body[salt.start:salt.end])))
	w := walker{Body: b, b: body, chain: c, texts: t}
	for slot, sp := range b.spans[:slotSalt] {
		if sp.end == 0 || body[sp.start] == 'n' { // null
			continue
		}
		c.byte(byte(0x10 + slot))
		in := inText
		switch slot {
		case slotTools:
			in = inTools
		case slotSystem:
			in = inContent
		case slotMain:
			switch b.Kind {
			case KindChat, KindMessages, KindResponses, KindTokenize, KindEmbeddings:
				in = b.mainPart(body, sp)
			case KindCompletions:
				b.Prompts = countPrompts(body[sp.start:sp.end])
			}
		}
		w.list = t.list[sp.texts:]
		w.value(sp.start, in)
	}
	b.Blocks, b.BlockBytes, b.CanonBytes = c.blocks, linkBytes*c.every, c.total
	c.blocks = nil
}

// mainPart tells messages (an array of objects) from a plain prompt or a list of inputs.
func (b *Body) mainPart(body []byte, sp span) where {
	s := scanner{b: body}
	if body[sp.start] != '[' {
		return inText
	}
	if c := body[s.space(sp.start+1)]; c == '{' {
		return inMessages
	}
	b.Prompts = countPrompts(body[sp.start:sp.end])
	return inText
}

// countPrompts counts the prompts in a value that may be one string, a list of
// strings, one list of token ids or a list of such lists.
func countPrompts(val []byte) int {
	s := scanner{b: val}
	if val[0] != '[' {
		return 1
	}
	i := s.space(1)
	if val[i] != '"' && val[i] != '[' {
		return 1
	}
	n := 0
	for val[i] != ']' {
		i = s.space(s.value(i, 0))
		n++
		if val[i] == ',' {
			i = s.space(i + 1)
		}
	}
	return n
}

// TokensPerBlock is how many of promptTokens stand behind one entry of Blocks.
func (b *Body) TokensPerBlock(promptTokens int) float64 {
	if b.CanonBytes == 0 {
		return 0
	}
	return float64(promptTokens) * float64(b.BlockBytes) / float64(b.CanonBytes)
}
