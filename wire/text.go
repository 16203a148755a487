package wire

import (
	"encoding/binary"
	"math/bits"
	"sync"
	"unicode/utf16"
	"unicode/utf8"
)

// texts is what the scan keeps of a body's strings, so that the prompt's need
// not be searched and decoded a second time. It is lent by a pool: it can be
// as large as the body, and an idle connection must not hold that.
type texts struct {
	list []text
	buf  []byte // decoded texts of strings with escapes, each behind its length
	wide bool   // some byte of the body, or some text decoded, is not ASCII

	bits [window]uint64 // special bits of one page of the body: of words page*window on
	page int
	end  int // the word behind the last one worked out
}

// text is one string of the body.
type text struct {
	end int32 // index of its closing quote
	dec int32 // where in buf its decoded text begins; 0 = it has no escape
}

// textHead is the length that stands before a decoded text in buf.
const textHead = 4

// Bounds of what goes back to the pool.
const (
	maxTexts   = 64 << 10
	maxDecoded = 1 << 20
)

var textsPool = sync.Pool{New: func() any { return &texts{page: -1} }}

func getTexts() *texts { return textsPool.Get().(*texts) }

func putTexts(t *texts) {
	if cap(t.list) > maxTexts || cap(t.buf) > maxDecoded {
		return
	}
	t.list, t.buf, t.wide, t.page = t.list[:0], t.buf[:0], false, -1
	textsPool.Put(t)
}

// decoded returns the text of the string that begins behind the quote at i-1.
func (t *texts) decoded(b []byte, x text, i int) []byte {
	if x.dec == 0 {
		return b[i:x.end]
	}
	n := binary.LittleEndian.Uint32(t.buf[x.dec-textHead:])
	return t.buf[x.dec : int(x.dec)+int(n)]
}

// begin makes room in buf for the decoded text of a string of which at most
// left bytes are to come, and returns where it begins. A decoded text is never
// longer than its spelling; the slack is for copies in whole words.
func (t *texts) begin(left int) int {
	at := len(t.buf) + textHead
	if need := at + left + 2*32; need > cap(t.buf) {
		b := make([]byte, len(t.buf), max(need, 2*cap(t.buf)))
		copy(b, t.buf)
		t.buf = b
	}
	return at
}

// window is how many words of special bits are worked out at a time, a page:
// few enough to stay in the nearest cache.
const window = 1 << 6

// word returns the special bits of the 64 bytes from b[64*w] on. The scan goes
// forward only, so that each page is worked out once.
func (t *texts) word(b []byte, w int) uint64 {
	if w>>6 != t.page {
		t.look(b, w)
	}
	return t.bits[w%window]
}

func (t *texts) look(b []byte, w int) {
	t.page = w / window
	from := t.page * window * 64
	to := min(from+window*64, len(b))
	t.end = (to + 63) / 64
	if specialsOf(t.bits[:], b[from:to]) {
		t.wide = true
	}
}

// note scans a string as str does, and takes note of it and of its decoded
// text; i is behind its opening quote.
func (s *scanner) note(i int) int {
	b, t := s.b, s.texts
	w := i >> 6
	if i >= len(b) {
		return s.fail(len(b), "end of string")
	}
	m := t.word(b, w) >> (i & 63) << (i & 63)
	for m == 0 {
		if w++; w<<6 >= len(b) {
			return s.fail(len(b), "end of string")
		}
		m = t.word(b, w)
	}
	p := w<<6 + bits.TrailingZeros64(m)
	switch b[p] {
	case '"':
		t.list = append(t.list, text{end: int32(p)})
		return p + 1
	case '\\':
		return s.decode(i, cursor{m: m, w: w, from: i})
	}
	return s.fail(p, "escaped control character")
}

// cursor is how far a string with escapes is decoded.
type cursor struct {
	m       uint64 // special bits of word w that are not looked at yet
	w       int
	from, o int // what comes next in the body, and where its text goes
}

// decode is note for a string whose first escape is next at c.
func (s *scanner) decode(i int, c cursor) int {
	b, t := s.b, s.texts
	at := t.begin(len(b) - i)
	dec := t.buf[:cap(t.buf)]
	c.o = at
	for {
		p := c.run(b, dec, t)
		if p < 0 { // the window is used up
			if c.w<<6 >= len(b) {
				return s.fail(len(b), "end of string")
			}
			c.m = t.word(b, c.w)
			continue
		}
		c.o += copy(dec[c.o:], b[c.from:p])
		switch {
		case b[p] == '"':
			t.buf = dec[:c.o]
			binary.LittleEndian.PutUint32(dec[at-textHead:], uint32(c.o-at))
			t.list = append(t.list, text{int32(p), int32(at)})
			return p + 1
		case b[p] != '\\':
			return s.fail(p, "escaped control character")
		case p+1 >= len(b):
			return s.fail(p+1, "escape")
		}
		c.from = p + 2
		if r := plainEscapes[b[p+1]]; r != 0 {
			dec[c.o] = r
			c.o++
		} else if c.from, c.o = s.unicode(p, dec, c.o); c.from < 0 {
			return -1
		}
		if c.w = c.from >> 6; c.w<<6 >= len(b) {
			return s.fail(len(b), "end of string")
		}
		c.m = t.word(b, c.w) >> (c.from & 63) << (c.from & 63)
	}
}

// run decodes simple escapes, which are nearly all: source code has one for
// every 15 bytes. It returns the index of the first special byte that is none
// of them, or that is too near to the end of something; -1 = the window ends.
// It calls nothing, so that all it works with stays in registers, and copies
// 32 bytes whatever the length: that needs no branch for most pieces.
func (c *cursor) run(b, dec []byte, t *texts) (p int) {
	m, w, from, o := c.m, c.w, c.from, c.o
	end := t.end
	for {
		for m == 0 {
			if w++; w >= end {
				c.w, c.from, c.o = w, from, o
				return -1
			}
			m = t.bits[w%window]
		}
		k := bits.TrailingZeros64(m)
		p = w<<6 + k
		if p+2 > len(b) || b[p] != '\\' || k == 63 {
			break
		}
		r := plainEscapes[b[p+1]]
		if r == 0 {
			break
		}
		for from+32 < p && from+32 <= len(b) && o+32 <= len(dec) {
			copy32(dec[o:o+32], b[from:from+32])
			from += 32
			o += 32
		}
		if from+32 > len(b) || o+33 > len(dec) {
			break
		}
		copy32(dec[o:o+32], b[from:from+32])
		o += p - from
		dec[o] = r
		o++
		from = p + 2
		m &^= 3 << (k & 63)
	}
	c.w, c.from, c.o = w, from, o
	return p
}

func copy32(to, from []byte) {
	_, _ = to[31], from[31]
	a, b := binary.LittleEndian.Uint64(from), binary.LittleEndian.Uint64(from[8:])
	c, d := binary.LittleEndian.Uint64(from[16:]), binary.LittleEndian.Uint64(from[24:])
	binary.LittleEndian.PutUint64(to, a)
	binary.LittleEndian.PutUint64(to[8:], b)
	binary.LittleEndian.PutUint64(to[16:], c)
	binary.LittleEndian.PutUint64(to[24:], d)
}

// unicode decodes the \u escapes that stand one behind the other from p on
// into dec at o. It returns the indexes behind them in both.
func (s *scanner) unicode(p int, dec []byte, o int) (from, end int) {
	b := s.b
	for {
		r, ok := s.hex(p)
		if !ok {
			return -1, o
		}
		p += 6
		if utf16.IsSurrogate(r) {
			r = s.pair(r, p)
			if r != utf8.RuneError {
				p += 6
			}
		}
		switch {
		case r < utf8.RuneSelf:
			dec[o] = byte(r)
			o++
		default:
			s.texts.wide = true
			o += utf8.EncodeRune(dec[o:o+utf8.UTFMax], r)
		}
		if p+1 >= len(b) || b[p] != '\\' || b[p+1] != 'u' {
			return p, o
		}
	}
}

// pair joins the surrogate r and the escape at p behind it; what is no pair
// becomes U+FFFD, and what stands at p is looked at on its own.
func (s *scanner) pair(r rune, p int) rune {
	if p+6 > len(s.b) || s.b[p] != '\\' || s.b[p+1] != 'u' {
		return utf8.RuneError
	}
	for _, c := range s.b[p+2 : p+6] {
		if !isHex(c) {
			return utf8.RuneError
		}
	}
	return utf16.DecodeRune(r, hex4(s.b[p+2:]))
}

// hex reads the digits of the \u escape at p.
func (s *scanner) hex(p int) (rune, bool) {
	if p+6 <= len(s.b) {
		c := s.b[p+1 : p+6 : p+6]
		v := hexDigit[c[1]]<<12 | hexDigit[c[2]]<<8 | hexDigit[c[3]]<<4 | hexDigit[c[4]]
		if c[0] == 'u' && v <= 0xffff {
			return rune(v), true
		}
	}
	if s.b[p+1] != 'u' {
		s.fail(p+1, "escape")
		return 0, false
	}
	for j := p + 2; ; j++ {
		if j >= len(s.b) || !isHex(s.b[j]) {
			s.fail(j, "hexadecimal digit")
			return 0, false
		}
	}
}

// hexDigit is the value of a hexadecimal digit; others have high bits set.
var hexDigit = func() (t [256]uint32) {
	for i := range t {
		t[i] = 1 << 16
	}
	for i := range 10 {
		t['0'+i] = uint32(i)
	}
	for i := range 6 {
		t['a'+i], t['A'+i] = uint32(10+i), uint32(10+i)
	}
	return t
}()
