package wire

import (
	"encoding/binary"
	"math/bits"
	"unicode/utf8"

	"github.com/zeebo/xxh3"
)

const (
	// linkBytes is how many canonical prompt bytes one link of the chain
	// covers: about 64 tokens of English, a small multiple of vLLM's 16-token
	// block, so that a match is seldom more than one link short.
	linkBytes = 256
	// maxBlocks bounds what one request keeps. A longer prompt (over 1 MB)
	// gets every second, fourth ... link of the same chain.
	maxBlocks = 4096
)

// chain makes the chained fingerprints of a canonical byte stream.
type chain struct {
	blocks []uint64
	prev   uint64
	every  int // links per entry of blocks
	links  int
	total  int // canonical bytes fed
	n      int // bytes in buf
	buf    [linkBytes]byte
}

func (c *chain) reset(seed uint64) {
	c.blocks, c.prev, c.every, c.links, c.total, c.n = c.blocks[:0], seed, 1, 0, 0, 0
}

// mix64 joins two hashes so that the order matters (the finaliser is rrmxmx's).
func mix64(a, b uint64) uint64 {
	h := a*0x9e3779b97f4a7c15 + b
	h ^= bits.RotateLeft64(h, 49) ^ bits.RotateLeft64(h, 24)
	h *= 0x9fb21c651e98df25
	h ^= h >> 28
	h *= 0x9fb21c651e98df25
	return h ^ h>>28
}

func (c *chain) link(block []byte) {
	c.prev = mix64(c.prev, xxh3.Hash(block))
	c.links++
	if c.links%c.every != 0 {
		return
	}
	if len(c.blocks) == maxBlocks {
		for i := range maxBlocks / 2 {
			c.blocks[i] = c.blocks[2*i+1]
		}
		c.blocks = c.blocks[:maxBlocks/2]
		c.every *= 2
		if c.links%c.every != 0 {
			return
		}
	}
	c.blocks = append(c.blocks, c.prev)
}

func (c *chain) feed(p []byte) {
	c.total += len(p)
	if c.n > 0 {
		k := copy(c.buf[c.n:], p)
		c.n += k
		p = p[k:]
		if c.n < linkBytes {
			return
		}
		c.link(c.buf[:])
		c.n = 0
	}
	for len(p) >= linkBytes {
		c.link(p[:linkBytes])
		p = p[linkBytes:]
	}
	c.n = copy(c.buf[:], p)
}

func (c *chain) byte(b byte) {
	c.total++
	c.buf[c.n] = b
	if c.n++; c.n == linkBytes {
		c.link(c.buf[:])
		c.n = 0
	}
}

func (c *chain) uint64(v uint64) {
	var t [8]byte
	binary.LittleEndian.PutUint64(t[:], v)
	c.feed(t[:])
}

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
	tape  []int32    // what the scanner noted, from the next string on
	buf   [1024]byte // decoded text on its way to the chain
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
	switch string(w.b[i+1 : w.tape[0]]) {
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
	for n, i := range w.tape {
		if w.b[i] == '"' {
			w.tape = w.tape[n+1:]
			return int(i)
		}
	}
	panic("BUG: the prompt has a string that the scan did not see")
}

// skip steps over the value at i without feeding it.
func (w *walker) skip(i int) int {
	s := scanner{b: w.b}
	end := s.value(i, 0)
	for len(w.tape) > 0 && int(w.tape[0]) < end {
		w.tape = w.tape[1:]
	}
	return end
}

// str feeds a string decoded; i is at its opening quote. Pieces between escapes
// are short, so they are gathered first: one feed costs as much as ten copies.
func (w *walker) str(i int, count bool) int {
	w.chain.byte(0x03)
	i++
	n := 0
	for t, mark := range w.tape {
		j := int(mark)
		if j < i {
			continue // the second half of a surrogate pair
		}
		if n > 0 || w.b[j] != '"' {
			if j-i > len(w.buf)-n-utf8.UTFMax {
				w.text(w.buf[:n], count)
				n = 0
			}
			if j-i <= len(w.buf)-utf8.UTFMax {
				n += copy(w.buf[n:], w.b[i:j])
				i = j
			}
		}
		if i < j { // the whole string, or a long piece of it
			w.text(w.b[i:j], count)
		}
		if w.b[j] == '"' {
			w.text(w.buf[:n], count)
			w.tape = w.tape[t+1:]
			return j + 1
		}
		if c := plainEscapes[w.b[j+1]]; c != 0 {
			w.buf[n] = c
			n++
			i = j + 2
		} else {
			var r rune
			r, i = escape(w.b, j)
			n += utf8.EncodeRune(w.buf[n:], r)
		}
	}
	panic("BUG: the prompt has a string that the scan did not see")
}

// plainEscapes maps the letter of each escape but \u to its character.
var plainEscapes = [256]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

// text feeds p and, when it is part of the prompt's text, counts it.
func (w *walker) text(p []byte, count bool) {
	if count {
		o := countOther(p)
		w.Other += o
		w.ASCII += len(p) - o
	}
	w.chain.feed(p)
}

// countOther counts the bytes of p that are not ASCII.
func countOther(p []byte) (n int) {
	for len(p) >= 32 {
		c := p[:32:32]
		w0, w1 := binary.LittleEndian.Uint64(c[0:8]), binary.LittleEndian.Uint64(c[8:16])
		w2, w3 := binary.LittleEndian.Uint64(c[16:24]), binary.LittleEndian.Uint64(c[24:32])
		if (w0|w1|w2|w3)&swarHigh != 0 { // rare in most prompts
			n += bits.OnesCount64(w0&swarHigh) + bits.OnesCount64(w1&swarHigh) + bits.OnesCount64(w2&swarHigh) + bits.OnesCount64(w3&swarHigh)
		}
		p = p[32:]
	}
	for len(p) >= 8 {
		n += bits.OnesCount64(binary.LittleEndian.Uint64(p) & swarHigh)
		p = p[8:]
	}
	for _, c := range p {
		n += int(c >> 7)
	}
	return n
}
