package wire

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"unicode/utf16"
	"unicode/utf8"
)

// maxDepth bounds the nesting of objects and arrays. Real requests (tool
// schemas are the deepest part) stay under 40; the bound keeps a hostile body
// from making the stack grow.
const maxDepth = 512

const (
	swarLow   = 0x0101010101010101
	swarHigh  = 0x8080808080808080
	swarSlash = swarLow * '\\'
)

// special marks, by the high bit of each byte, those bytes of w that end the
// plain part of a JSON string: quote, backslash, control. Only the lowest mark
// is exact (a borrow may set higher ones), and that is the one used. Flipping
// bit 1 puts the quote (0x22) beside the controls, so that one test of
// "below 0x21" finds both.
func special(w uint64) uint64 {
	return (((w ^ swarLow*2) - swarLow*0x21) | ((w ^ swarSlash) - swarLow)) &^ w & swarHigh
}

// plain returns the index of the first quote, backslash or control byte at or
// after i, or len(b).
func plain(b []byte, i int) int {
	for i+32 <= len(b) {
		c := b[i : i+32 : i+32]
		m0 := special(binary.LittleEndian.Uint64(c[0:8]))
		m1 := special(binary.LittleEndian.Uint64(c[8:16]))
		m2 := special(binary.LittleEndian.Uint64(c[16:24]))
		m3 := special(binary.LittleEndian.Uint64(c[24:32]))
		if m0|m1|m2|m3 != 0 {
			switch {
			case m0 != 0:
				return i + bits.TrailingZeros64(m0)>>3
			case m1 != 0:
				return i + 8 + bits.TrailingZeros64(m1)>>3
			case m2 != 0:
				return i + 16 + bits.TrailingZeros64(m2)>>3
			}
			return i + 24 + bits.TrailingZeros64(m3)>>3
		}
		i += 32
	}
	for i+8 <= len(b) {
		if m := special(binary.LittleEndian.Uint64(b[i:])); m != 0 {
			return i + bits.TrailingZeros64(m)>>3
		}
		i += 8
	}
	for i < len(b) && b[i] != '"' && b[i] != '\\' && b[i] >= 0x20 {
		i++
	}
	return i
}

// scanner checks JSON by the grammar that encoding/json accepts, and nothing
// more. Every method takes an index and returns the next one, or -1 after
// noting what was wrong and where.
type scanner struct {
	b    []byte
	at   int    // byte offset of the fault
	want string // what was expected there

	texts *texts // when set, takes note of every string
}

func (s *scanner) fail(at int, want string) int {
	s.at, s.want = at, want
	return -1
}

// fault describes what fail noted, with the byte that was found.
func (s *scanner) fault() string {
	switch {
	case s.at >= len(s.b):
		return fmt.Sprintf("%s expected at byte %d, but the body ends", s.want, s.at)
	case s.b[s.at] < 0x20 || s.b[s.at] >= 0x7f:
		return fmt.Sprintf("%s expected at byte %d, found byte 0x%02x", s.want, s.at, s.b[s.at])
	}
	return fmt.Sprintf("%s expected at byte %d, found %q", s.want, s.at, s.b[s.at:s.at+1])
}

func (s *scanner) space(i int) int {
	for i < len(s.b) && s.b[i] <= ' ' && (s.b[i] == ' ' || s.b[i] == '\n' || s.b[i] == '\r' || s.b[i] == '\t') {
		i++
	}
	return i
}

// str scans a string; i is behind its opening quote.
func (s *scanner) str(i int) int {
	if s.texts != nil {
		return s.note(i)
	}
	for {
		i = plain(s.b, i)
		if i >= len(s.b) {
			return s.fail(i, "end of string")
		}
		switch c := s.b[i]; {
		case c == '"':
			return i + 1
		case c != '\\':
			return s.fail(i, "escaped control character")
		case i+1 >= len(s.b):
			return s.fail(i+1, "escape")
		}
		switch s.b[i+1] {
		case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
			i += 2
		case 'u':
			for j := i + 2; j < i+6; j++ {
				if j >= len(s.b) || !isHex(s.b[j]) {
					return s.fail(j, "hexadecimal digit")
				}
			}
			i += 6
		default:
			return s.fail(i+1, "escape")
		}
	}
}

func isHex(c byte) bool {
	return c-'0' <= 9 || (c|0x20)-'a' <= 5
}

func (s *scanner) digits(i int) int {
	for i < len(s.b) && s.b[i]-'0' <= 9 {
		i++
	}
	return i
}

func (s *scanner) number(i int) int {
	if s.b[i] == '-' {
		i++
	}
	j := s.digits(i)
	if j == i {
		return s.fail(i, "digit")
	}
	if s.b[i] == '0' {
		j = i + 1 // a leading zero stands alone; what follows is judged by the caller
	}
	i = j
	if i < len(s.b) && s.b[i] == '.' {
		if j = s.digits(i + 1); j == i+1 {
			return s.fail(j, "digit")
		}
		i = j
	}
	if i < len(s.b) && s.b[i]|0x20 == 'e' {
		i++
		if i < len(s.b) && (s.b[i] == '+' || s.b[i] == '-') {
			i++
		}
		if j = s.digits(i); j == i {
			return s.fail(j, "digit")
		}
		i = j
	}
	return i
}

func (s *scanner) word(i int, w string) int {
	for j := 0; j < len(w); j++ {
		if i+j >= len(s.b) || s.b[i+j] != w[j] {
			return s.fail(i+j, w)
		}
	}
	return i + len(w)
}

// value scans one value; i is at its first byte.
func (s *scanner) value(i, depth int) int {
	if i >= len(s.b) {
		return s.fail(i, "a value")
	}
	switch c := s.b[i]; {
	case c == '"':
		return s.str(i + 1)
	case c == '{':
		return s.object(i+1, depth+1)
	case c == '[':
		return s.array(i+1, depth+1)
	case c == '-' || c-'0' <= 9:
		return s.number(i)
	case c == 't':
		return s.word(i, "true")
	case c == 'f':
		return s.word(i, "false")
	case c == 'n':
		return s.word(i, "null")
	}
	return s.fail(i, "a value")
}

func (s *scanner) object(i, depth int) int {
	if depth > maxDepth {
		return s.fail(i-1, "nesting of at most 512 levels")
	}
	return s.members(i, depth, nil)
}

// members scans an object from behind its '{', depth levels deep, and tells f,
// if there is one, of each member.
func (s *scanner) members(i, depth int, f func(key []byte, v val)) int {
	i = s.space(i)
	if i < len(s.b) && s.b[i] == '}' {
		return i + 1
	}
	for {
		start, end, at := s.key(i)
		if at < 0 {
			return -1
		}
		if i = s.value(at, depth); i < 0 {
			return -1
		}
		if f != nil {
			f(s.b[start:end], val{at, i})
		}
		i = s.space(i)
		if i >= len(s.b) || s.b[i] != ',' {
			break
		}
		i = s.space(i + 1)
	}
	if i >= len(s.b) || s.b[i] != '}' {
		return s.fail(i, "',' or '}'")
	}
	return i + 1
}

// key scans `"key" :`; i is at the quote. It returns the span between the
// quotes and the index of the value's first byte.
func (s *scanner) key(i int) (start, end, next int) {
	if i >= len(s.b) || s.b[i] != '"' {
		return 0, 0, s.fail(i, "a key in double quotes")
	}
	start = i + 1
	if i = s.str(start); i < 0 {
		return 0, 0, -1
	}
	end = i - 1
	i = s.space(i)
	if i >= len(s.b) || s.b[i] != ':' {
		return 0, 0, s.fail(i, "':'")
	}
	return start, end, s.space(i + 1)
}

func (s *scanner) array(i, depth int) int {
	if depth > maxDepth {
		return s.fail(i-1, "nesting of at most 512 levels")
	}
	i = s.space(i)
	if i < len(s.b) && s.b[i] == ']' {
		return i + 1
	}
	for {
		if i = s.value(i, depth); i < 0 {
			return -1
		}
		i = s.space(i)
		if i >= len(s.b) || s.b[i] != ',' {
			break
		}
		i = s.space(i + 1)
	}
	if i >= len(s.b) || s.b[i] != ']' {
		return s.fail(i, "',' or ']'")
	}
	return i + 1
}

// appendDecoded appends the text of a valid JSON string (raw is what stands
// between its quotes) as encoding/json decodes it: what is not UTF-8, and lone
// surrogates, become U+FFFD.
func appendDecoded(dst, raw []byte) []byte {
	for i := 0; i < len(raw); {
		c := raw[i]
		switch {
		case c == '\\':
			var r rune
			r, i = escape(raw, i)
			dst = utf8.AppendRune(dst, r)
		case c < utf8.RuneSelf:
			dst = append(dst, c)
			i++
		default:
			r, n := utf8.DecodeRune(raw[i:])
			dst = utf8.AppendRune(dst, r)
			i += n
		}
	}
	return dst
}

// escape decodes the valid escape at raw[i] (a surrogate pair as one) and
// returns the index behind it.
func escape(raw []byte, i int) (rune, int) {
	switch c := raw[i+1]; c {
	case 'b':
		return '\b', i + 2
	case 'f':
		return '\f', i + 2
	case 'n':
		return '\n', i + 2
	case 'r':
		return '\r', i + 2
	case 't':
		return '\t', i + 2
	case 'u':
		r := hex4(raw[i+2:])
		i += 6
		if utf16.IsSurrogate(r) {
			if i+6 <= len(raw) && raw[i] == '\\' && raw[i+1] == 'u' {
				if p := utf16.DecodeRune(r, hex4(raw[i+2:])); p != utf8.RuneError {
					return p, i + 6
				}
			}
			return utf8.RuneError, i
		}
		return r, i
	default:
		return rune(c), i + 2
	}
}

func hex4(b []byte) (r rune) {
	for _, c := range b[:4] {
		d := c - '0'
		if d > 9 {
			d = (c | 0x20) - 'a' + 10
		}
		r = r<<4 | rune(d)
	}
	return r
}
