package wire

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/zeebo/xxh3"
)

// plainPrompt is the canonical prompt of a body worked out the plain way: one
// byte after the other, all of it in memory. It is what the scan is held
// against.
type plainPrompt struct {
	b            []byte
	out          []byte
	ascii, other int
}

func (w *plainPrompt) space(i int) int {
	for w.b[i] <= ' ' {
		i++
	}
	return i
}

// ends returns the index of the closing quote of the string at i.
func (w *plainPrompt) ends(i int) int {
	for i++; w.b[i] != '"'; i++ {
		if w.b[i] == '\\' {
			i++
		}
	}
	return i
}

func (w *plainPrompt) count(p []byte, counts bool) {
	if !counts {
		return
	}
	for _, c := range p {
		if c < utf8.RuneSelf {
			w.ascii++
		} else {
			w.other++
		}
	}
}

func (w *plainPrompt) text(p []byte, counts bool) {
	w.out = append(w.out, p...)
	w.count(p, counts)
}

func (w *plainPrompt) value(i int, in where) int {
	switch w.b[i] {
	case '"':
		end := w.ends(i)
		var text []byte
		for j := i + 1; j < end; {
			if w.b[j] != '\\' {
				text = append(text, w.b[j])
				j++
				continue
			}
			var r rune
			r, j = escape(w.b, j)
			text = utf8.AppendRune(text, r)
		}
		w.out = append(w.out, 0x03)
		w.text(text, true)
		return end + 1
	case '{':
		return w.object(i, in)
	case '[':
		return w.array(i, in)
	}
	j := i
	for w.b[j] > ' ' && !bytes.ContainsRune([]byte(",}]"), rune(w.b[j])) {
		j++
	}
	w.out = append(w.out, 0x04)
	w.text(w.b[i:j], in != inMessages)
	return j
}

func (w *plainPrompt) array(i int, in where) int {
	w.out = append(w.out, '[')
	if i = w.space(i + 1); w.b[i] == ']' {
		return i + 1
	}
	if in == inText && (w.b[i] == '-' || w.b[i] >= '0' && w.b[i] <= '9') {
		return -1 // token ids have tests of their own
	}
	inner := in
	switch in {
	case inMessages:
		inner = inMessage
	case inContent:
		inner = inPart
	}
	for {
		if i = w.value(i, inner); i < 0 {
			return -1
		}
		if i = w.space(i); w.b[i] == ']' {
			return i + 1
		}
		i = w.space(i + 1)
	}
}

func (w *plainPrompt) object(i int, in where) int {
	w.out = append(w.out, '{')
	if i = w.space(i + 1); w.b[i] == '}' {
		return i + 1
	}
	for {
		end := w.ends(i)
		key := w.b[i+1 : end]
		i = w.space(w.space(end+1) + 1)
		s := scanner{b: w.b}
		behind := s.value(i, 0)
		switch inner := inOther; {
		case in == inPart && slices.Contains(strings.Fields("image_url image video_url video audio_url audio input_audio source file file_data"), string(key)):
			w.out = append(w.out, 0x05)
			w.out = binary.LittleEndian.AppendUint64(w.out, xxh3.Hash(w.b[i:behind]))
		case string(key) == "cache_control" && in != inText:
		default:
			if in == inText || in == inTools {
				inner = in
			} else if (in == inMessage || in == inPart) && string(key) == "content" {
				inner = inContent
			}
			w.out = append(w.out, 0x02)
			w.text(key, in == inTools)
			if w.value(i, inner) < 0 {
				return -1
			}
		}
		if i = w.space(behind); w.b[i] == '}' {
			return i + 1
		}
		i = w.space(i + 1)
	}
}

// checkPrompt holds what Scan found in a chat body, which b is of, against the
// plain way. It does not look at lists of token ids.
func checkPrompt(t *testing.T, b *Body, body []byte) {
	t.Helper()
	w := plainPrompt{b: body}
	for slot, sp := range b.spans[:slotSalt] {
		if sp.end == 0 || body[sp.start] == 'n' {
			continue
		}
		w.out = append(w.out, byte(0x10+slot))
		in := inText
		switch slot {
		case slotTools:
			in = inTools
		case slotMain:
			s := scanner{b: body}
			if body[sp.start] == '[' && body[s.space(sp.start+1)] == '{' {
				in = inMessages
			}
		}
		if w.value(sp.start, in) < 0 {
			return
		}
	}
	if b.ASCII != w.ascii || b.Other != w.other || b.CanonBytes != len(w.out) {
		t.Fatalf("%d ASCII, %d other, %d canonical; the plain way finds %d, %d, %d in %.300q", b.ASCII, b.Other, b.CanonBytes, w.ascii, w.other, len(w.out), body)
	}
	salt := b.spans[slotSalt]
	prev := mix64(xxh3.HashString(b.Model), xxh3.Hash(body[salt.start:salt.end]))
	for i := 0; i+linkBytes <= len(w.out) && b.BlockBytes == linkBytes; i += linkBytes {
		prev = mix64(prev, xxh3.Hash(w.out[i:i+linkBytes]))
		if b.Blocks[i/linkBytes] != prev {
			t.Fatalf("fingerprint %d differs from the plain way's in %.300q", i/linkBytes, body)
		}
	}
}

// randomText is the spelling of a JSON string's text: long and short plain
// stretches, escapes of all kinds alone and in rows, halves of pairs, bytes
// that are no UTF-8.
func randomText(r *rand.Rand, s *strings.Builder, n int) {
	some := []string{`\n`, `\"`, `\\`, `\/`, `\t`, `\b`, `\f`, `\r`, `\u0041`, `\u00e9`, `\u20AC`, `\ud83d\ude00`, `\ud83d`, `\ude00`, `\ud83d\u0041`, `\ud83d\n`,
		"é", "€", "😀", "\xff", "\xc3", "a", " ", "def f(x): return x", "\x7f"}
	for s.Len() < n {
		switch r.IntN(4) {
		case 0:
			s.WriteString(strings.Repeat("x", r.IntN(200)))
		case 1:
			s.WriteString(strings.Repeat(some[r.IntN(len(some))], r.IntN(5)))
		default:
			s.WriteString(some[r.IntN(len(some))])
		}
	}
}

// However a prompt's strings are spelt and wherever they stand, the scan makes
// of them what the plain way makes of them.
func TestPromptsAgainstThePlainWay(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 9))
	var b Body
	for range 2000 {
		var body strings.Builder
		body.WriteString(strings.Repeat(" ", r.IntN(70)) + `{"model":"m",`)
		if r.IntN(3) == 0 {
			var text strings.Builder
			randomText(r, &text, r.IntN(300))
			fmt.Fprintf(&body, `"tools":[{"type":"function","k\n":"%s"}],`, text.String())
		}
		body.WriteString(`"messages":[`)
		for i := range 1 + r.IntN(4) {
			var text strings.Builder
			randomText(r, &text, []int{0, 10, 64, 300, 5000}[r.IntN(5)])
			if i > 0 {
				body.WriteString(",\n")
			}
			fmt.Fprintf(&body, `{"role":"user", "content":[{"type":"text","text":"%s"},{"type":"image_url","image_url":{"url":"%s"}}]}`, text.String(), strings.Repeat("A\\n", r.IntN(30)))
		}
		body.WriteString(`]}` + strings.Repeat("\n", r.IntN(70)))
		p := []byte(body.String())
		if e := b.Scan(KindChat, jsonType, p); e != nil {
			t.Fatalf("%v in %.500q", e, p)
		}
		checkPrompt(t, &b, p)
		// Cut anywhere it is no body any more, and says where.
		if e := b.Scan(KindChat, jsonType, bytes.TrimRight(p, "\n")[:r.IntN(len(bytes.TrimRight(p, "\n")))]); e == nil {
			t.Fatal("a cut body was taken")
		}
	}
}

// The fingerprints of recorded logs and of older routers among the peers stay
// what they were.
func TestFingerprintsStayTheSame(t *testing.T) {
	for i, want := range []uint64{0x78cab8b5cb47ceda, 0x174c400df78ae1da, 0x82ff6ee0383b3947} {
		var b Body
		body := [][]byte{big100KB(false), big100KB(true), []byte(chatBody("m", "", strings.Repeat(`\u00e9\ud83d\ude00x`, 300)))}[i]
		if e := b.Scan(KindChat, jsonType, body); e != nil {
			t.Fatal(e)
		}
		sum := uint64(0)
		for _, x := range b.Blocks {
			sum = mix64(sum, x)
		}
		if sum != want {
			t.Errorf("body %d: %#x, was %#x", i, sum, want)
		}
	}
}

// The assembly finds what the Go code finds, and that what a plain loop finds.
func TestSpecialsAgainstAPlainLoop(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 4))
	near := []byte{0, 1, 0x1f, 0x20, 0x21, 0x22, 0x23, 0x5b, 0x5c, 0x5d, 0x7f, 0x80, 0x9f, 0xa0, 0xa2, 0xdc, 0xff, 'a'}
	for range 20_000 {
		b := make([]byte, r.IntN(400))
		ascii := r.IntN(2) == 0
		for i := range b {
			if b[i] = near[r.IntN(len(near))]; ascii {
				b[i] &= 0x7f
			}
		}
		got, plainly := make([]uint64, (len(b)+63)/64), make([]uint64, (len(b)+63)/64)
		high, others := specialsOf(got, b), 0
		for i, c := range b {
			if c == '"' || c == '\\' || c < 0x20 {
				plainly[i/64] |= 1 << (i % 64)
			}
			if c >= utf8.RuneSelf {
				others++
			}
		}
		if !slices.Equal(got, plainly) || high != (others > 0) || countOther(b) != others || highWordsGo(b) != others {
			t.Fatalf("% x: got %x, want %x; high %v, %d not ASCII, counted %d and %d", b, got, plainly, high, others, countOther(b), highWordsGo(b))
		}
		whole := len(b) / 64
		inGo := make([]uint64, whole)
		or := specialWordsGo(inGo, b)
		if !slices.Equal(inGo, plainly[:whole]) {
			t.Fatalf("% x: Go finds %x, want %x", b, inGo, plainly[:whole])
		}
		if rest := others - highWordsGo(b[64*whole:]); (or&swarHigh != 0) != (rest > 0) {
			t.Fatalf("% x: or %x with %d not ASCII", b, or, rest)
		}
	}
}
