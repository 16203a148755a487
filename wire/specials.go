package wire

import (
	"encoding/binary"
	"math/bits"
)

// specialsOf writes to bits where in b, by a bit each, bytes stand that end
// the plain part of a JSON string: quote, backslash, control. bits has a word
// for each 64 bytes, also for a last few. high tells whether any byte is not
// ASCII.
func specialsOf(bits []uint64, b []byte) (high bool) {
	or := uint64(0)
	if n := len(b) / 64; n > 0 {
		_ = bits[n-1]
		or = specialWords(&bits[0], &b[0], n)
	}
	if rest := b[len(b)&^63:]; len(rest) > 0 {
		var last [64]byte
		for i := copy(last[:], rest); i < len(last); i++ {
			last[i] = ' '
		}
		or |= specialWords(&bits[len(b)/64], &last[0], 1)
	}
	return or&swarHigh != 0
}

// specialWordsGo is specialWords in Go, eight bytes at a time.
func specialWordsGo(dst []uint64, src []byte) (or uint64) {
	for k := range dst {
		c := (*[64]byte)(src[64*k:])
		all := uint64(0)
		for i := 0; i < 64; i += 8 {
			w := binary.LittleEndian.Uint64(c[i : i+8])
			or |= w
			if m := marks(w); m != 0 {
				all |= gather(m) << i
			}
		}
		dst[k] = all
	}
	return or
}

// marks marks exactly those bytes of w that special finds, by their high bits.
func marks(w uint64) uint64 {
	y := (w ^ swarLow*2) | swarHigh
	z := (w ^ swarSlash) | swarHigh
	return ^((y - swarLow*0x21) & (z - swarLow)) &^ w & swarHigh
}

// gather makes the eight high bits of m one byte, the lowest byte's first.
func gather(m uint64) uint64 { return (m >> 7) * 0x0102040810204080 >> 56 }

// countOther counts the bytes of p that are not ASCII.
func countOther(p []byte) (n int) {
	if k := len(p) / 64; k > 0 {
		n = highWords(&p[0], k)
		p = p[64*k:]
	}
	return n + highWordsGo(p)
}

// highWordsGo is highWords in Go, of any length.
func highWordsGo(p []byte) (n int) {
	for len(p) >= 8 {
		n += bits.OnesCount64(binary.LittleEndian.Uint64(p) & swarHigh)
		p = p[8:]
	}
	for _, c := range p {
		n += int(c >> 7)
	}
	return n
}
