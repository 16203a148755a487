package wire

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"math/bits"
	"math/rand/v2"
	"testing"
)

// The word-at-a-time search finds the very byte that a plain loop finds.
func TestPlainFindsTheFirstSpecialByte(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 3))
	slow := func(b []byte, i int) int {
		for i < len(b) && b[i] != '"' && b[i] != '\\' && b[i] >= 0x20 {
			i++
		}
		return i
	}
	near := []byte{0, 1, 0x1f, 0x20, 0x21, 0x22, 0x23, 0x5b, 0x5c, 0x5d, 0x7f, 0x80, 0x9f, 0xa0, 0xa2, 0xdc, 0xff, 'a'}
	for range 200_000 {
		var w [8]byte
		for i := range w {
			w[i] = near[r.IntN(len(near))]
		}
		got := bits.TrailingZeros64(special(binary.LittleEndian.Uint64(w[:]))) / 8
		if want := slow(w[:], 0); got != want {
			t.Fatalf("% x: %d, want %d", w, got, want)
		}
	}
	for range 20_000 {
		b := bytes.Repeat([]byte{'x', 0xe5}, 40)[:r.IntN(80)]
		b = append([]byte(nil), b...)
		for range r.IntN(3) {
			if len(b) > 0 {
				b[r.IntN(len(b))] = near[r.IntN(len(near))]
			}
		}
		i := r.IntN(len(b) + 1)
		if got, want := plain(b, i), slow(b, i); got != want {
			t.Fatalf("%q from %d: %d, want %d", b, i, got, want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, s := range []string{`"a\u00e9\ud83d\ude00\ud83dx\n\/"`, "\"\xff\xc3\"", `"\udc00\ud800"`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if valid := validJSON(b); valid != json.Valid(b) && bytes.Count(b, []byte("["))+bytes.Count(b, []byte("{")) <= maxDepth {
			t.Fatalf("valid %v", valid)
		}
		var want string
		if len(b) < 2 || b[0] != '"' || json.Unmarshal(b, &want) != nil {
			return
		}
		if b = bytes.TrimRight(b, " \t\r\n"); string(appendDecoded(nil, b[1:len(b)-1])) != want {
			t.Fatalf("%q: got %q, want %q", b, appendDecoded(nil, b[1:len(b)-1]), want)
		}
	})
}
