package wire

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"mime/multipart"
	"strings"
	"testing"
)

const jsonType = "application/json"

func mustScan(t testing.TB, k Kind, body string) *Body {
	t.Helper()
	var b Body
	if e := b.Scan(k, jsonType, []byte(body)); e != nil {
		t.Fatalf("%.200s: %v", body, e)
	}
	return &b
}

// p6 is the body of case P6, decoys and odd spellings included.
const p6 = `{"zz":1,"model":"m1", "seed":9007199254740993,"temperature":1.0,"top_p":1e-7,"stop":["\u00e9\ud83d\ude00","</s>"],` +
	`"chat_template_kwargs":{"enable_thinking":false},"cache_salt":"t1","messages":[{"content":"a\/b","role":"user","x_y":null}],` +
	`"Model":"decoy","metadata":{"model":"inner"}}` + "\n"

func TestScanReadsRootKeysOnly(t *testing.T) {
	b := mustScan(t, KindChat, p6)
	if b.Model != "m1" || p6[b.ModelStart:b.ModelEnd] != `"m1"` || b.Stream || b.N != 1 || b.HasTools {
		t.Errorf("%+v", b)
	}
	for _, body := range []string{
		`{"messages":[{"content":"\"model\":\"x\"","model":"y"}],"mod\u0065l":"m1"}`,
		`{"metadata":{"model":"a","stream":true,"n":9},"\u006dodel" : "\u006d1" }`,
		` {"a":"{\"model\":\"z\"","model":"m1","MODEL":"q"}`,
	} {
		if b := mustScan(t, KindChat, body); b.Model != "m1" || b.Stream || b.N != 1 {
			t.Errorf("%s: %+v", body, b)
		}
	}
	b = mustScan(t, KindChat, `{"model":"a/b","stream":true,"stream_options":{"x":{"include_usage":false},"include_usage":true},
		"max_tokens":7,"max_completion_tokens":9,"n":3,"service_tier":"flex","temperature":-0.00e5,"ignore_eos":true,"min_tokens":4,
		"tools":[{"type":"function"}],"messages":[{"role":"user","content":[{"type":"text","text":"h\u00e9\n"},
		{"type":"image_url","image_url":{"url":"data:AAAA"}},{"type":"input_audio","input_audio":{"data":"QQ"}}]}]}`)
	if !b.Stream || !b.IncludeUsage || b.MaxOut != 9 || b.N != 3 || b.ServiceTier != "flex" || !b.ZeroTemperature ||
		!b.IgnoreEOS || b.MinOut != 4 || !b.HasTools || !b.HasImages || !b.HasAudio || b.HasVideo || b.MediaParts != 2 || b.Other != 2 {
		t.Errorf("%+v", b)
	}
	b = mustScan(t, KindChat, `{"model":"a","stream":null,"max_tokens":null,"n":null,"stream_options":null,"tools":[ ],"messages":[]}`)
	if b.Stream || b.MaxOut != 0 || b.MaxOutEnd != 0 || b.N != 1 || b.HasTools {
		t.Errorf("%+v", b)
	}
}

func TestScanMaxOutIsTheAPIsOwnKey(t *testing.T) {
	for _, c := range []struct {
		k    Kind
		body string
		want int
	}{
		{KindChat, `"max_completion_tokens":5,"max_tokens":6`, 5},
		{KindChat, `"max_tokens":6,"max_completion_tokens":null`, 6},
		{KindCompletions, `"max_completion_tokens":5,"max_tokens":6`, 6},
		{KindResponses, `"max_output_tokens":8,"max_tokens":6`, 8},
		{KindMessages, `"max_tokens":1e3`, 1000},
		{KindMessages, `"max_tokens":16.0`, 16},
		{KindMessages, `"max_tokens":-1`, 0},
		{KindMessages, `"max_tokens":99999999999999999999999`, 1 << 30},
		{KindMessages, `"max_tokens":1e999`, 1 << 30},
	} {
		if b := mustScan(t, c.k, `{"model":"m",`+c.body+`}`); b.MaxOut != c.want {
			t.Errorf("%v %s: %d", c.k, c.body, b.MaxOut)
		}
	}
}

func TestScanRefuses(t *testing.T) {
	deep := strings.Repeat("[", 600) + strings.Repeat("]", 600)
	for _, c := range []struct{ body, param, text string }{
		{``, "", "empty"},
		{" \n", "", "empty"},
		{`[]`, "", "must be a JSON object"},
		{`"x`, "", "end of string expected at byte 2, but the body ends"},
		{`{}`, "model", "missing"},
		{`{"a":1}`, "model", "missing"},
		{`{"Model":"x"}`, "model", "missing"},
		{`{"model":"a","model":"a"}`, "model", "twice"},
		{`{"model":"a","m\u006fdel":"b"}`, "model", "twice"},
		{`{"model":"a","max_tokens":1,"max_tokens":1}`, "max_tokens", "twice"},
		{`{"model":"a","stream":true,"stream":false}`, "stream", "twice"},
		{`{"model":1}`, "model", "string"},
		{`{"model":null}`, "model", "string"},
		{`{"model":""}`, "model", "empty"},
		{`{"model":"a","stream":"true"}`, "stream", "true or false"},
		{`{"model":"a","max_tokens":"5"}`, "max_tokens", "whole number"},
		{`{"model":"a","max_tokens":1.5}`, "max_tokens", "whole number"},
		{`{"model":"a","n":[1]}`, "n", "whole number"},
		{`{"model":"a","stream_options":[]}`, "stream_options", "object"},
		{`{"model":"a","stream_options":{"include_usage":1}}`, "stream_options.include_usage", "true or false"},
		{`{"model":"a","messages":[}`, "", "a value expected at byte 25, found \"}\""},
		{`{"model":"a",}`, "", "a key in double quotes expected at byte 13, found \"}\""},
		{`{"model":"a"} x`, "", "the end of the body expected at byte 14"},
		{`{"model":"a","x":01}`, "", "',' or '}' expected at byte 18"},
		{`{"model":"a","x":"` + "\n" + `"}`, "", "control character expected at byte 18, found byte 0x0a"},
		{`{"model":"a","x":"\x"}`, "", "escape expected at byte 19"},
		{`{"model":"a","x":"\u12g4"}`, "", "hexadecimal digit expected at byte 22"},
		{`{"model":"a","x":tru}`, "", "true expected at byte 20"},
		{`{"model":"a","x":` + deep + `}`, "", "nesting"},
		{`{"model":1,"x":}`, "", "a value expected at byte 15"}, // syntax comes before meaning
		{`{"model":"a"`, "", "but the body ends"},
	} {
		var b Body
		e := b.Scan(KindChat, jsonType, []byte(c.body))
		if e == nil {
			t.Errorf("%.60q: accepted", c.body)
			continue
		}
		if e.Code != CodeInvalidRequest || e.Status != 400 || e.Param != c.param || !strings.Contains(e.Message, c.text) {
			t.Errorf("%.60q: %+v", c.body, e)
		}
	}
}

// Whatever was scanned before must not show through.
func TestScanReuse(t *testing.T) {
	var b Body
	first := `{"model":"secret","stream":true,"n":4,"max_tokens":3,"service_tier":"flex","tools":[1],"messages":[{"role":"user","content":"` +
		strings.Repeat("tenant a ", 200) + `"}]}`
	buf := []byte(first)
	if e := b.Scan(KindChat, jsonType, buf); e != nil || len(b.Blocks) == 0 {
		t.Fatal(e, len(b.Blocks))
	}
	for i := range buf {
		buf[i] = '!' // the request's buffer is used again by the server
	}
	if b.Model != "secret" || b.ServiceTier != "flex" {
		t.Errorf("a name aliases the body: %q %q", b.Model, b.ServiceTier)
	}
	if e := b.Scan(KindChat, jsonType, []byte(`{"model":"m"}`)); e != nil {
		t.Fatal(e)
	}
	if b.Model != "m" || b.Stream || b.N != 1 || b.MaxOut != 0 || b.ServiceTier != "" || b.HasTools || len(b.Blocks) != 0 || b.ASCII != 0 {
		t.Errorf("%+v", b)
	}
	if e := b.Scan(KindChat, jsonType, []byte(`{`)); e == nil || len(b.Blocks) != 0 || b.Model != "" {
		t.Errorf("%v %+v", e, b)
	}
}

func chatBody(model, extra string, turns ...string) string {
	var m []string
	for i, s := range turns {
		q, _ := json.Marshal(s)
		m = append(m, fmt.Sprintf(`{"role":%q,"content":%s}`, []string{"user", "assistant"}[i%2], q))
	}
	return fmt.Sprintf(`{"model":%q,%s"messages":[%s]}`, model, extra, strings.Join(m, ","))
}

func shared(a, b []uint64) (n int) {
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

func TestFingerprintsChain(t *testing.T) {
	long := func(seed uint64, n int) string {
		r := rand.New(rand.NewPCG(seed, 1))
		var s strings.Builder
		for s.Len() < n {
			fmt.Fprintf(&s, "w%d\n\"é\" ", r.IntN(1e6))
		}
		return s.String()
	}
	sys, q1, q2 := long(1, 5000), long(2, 3000), long(3, 3000)
	one := mustScan(t, KindChat, chatBody("m", "", sys, q1))
	two := mustScan(t, KindChat, chatBody("m", "", sys, q1, q2))
	// The next turn keeps every full block of the one before.
	if n := shared(one.Blocks, two.Blocks); n != len(one.Blocks) || n < 30 {
		t.Errorf("shared %d of %d", n, len(one.Blocks))
	}
	// Another question shares the system prompt's blocks and no more.
	other := mustScan(t, KindChat, chatBody("m", "", sys, q2))
	if n := shared(one.Blocks, other.Blocks); n < 5000/256-1 || n > 5400/256+6 {
		t.Errorf("shared %d blocks of a system prompt of %d bytes", n, len(sys))
	}
	for what, body := range map[string]string{
		"model": chatBody("m2", "", sys, q1),
		"salt":  chatBody("m", `"cache_salt":"t1",`, sys, q1),
		"tools": chatBody("m", `"tools":[{"type":"function","function":{"name":"f"}}],`, sys, q1),
	} {
		if n := shared(one.Blocks, mustScan(t, KindChat, body).Blocks); n != 0 {
			t.Errorf("another %s shares %d blocks", what, n)
		}
	}
	// Spelling does not matter: white space, escapes, place of the tools, sampling, cache_control.
	var indented bytes.Buffer
	withTools := chatBody("m", `"tools":[{"type":"function","function":{"name":"f"}}],`, sys, q1)
	if err := json.Indent(&indented, []byte(withTools), "", "  "); err != nil {
		t.Fatal(err)
	}
	a := mustScan(t, KindChat, withTools)
	last := strings.TrimSuffix(chatBody("m", "", sys, q1), "}") + `,"temperature":0.3,"tools":[{"type":"function","function":{"name":"f"}}]}`
	ascii := strings.ReplaceAll(withTools, "é", `\u00e9`)
	cached := strings.Replace(withTools, `"role":"user"`, `"cache_control":{"type":"ephemeral"},"role":"user"`, 1)
	for what, body := range map[string]string{"white space": indented.String(), "tools last": last, "escapes": ascii, "cache_control": cached} {
		b := mustScan(t, KindChat, body)
		if n := shared(a.Blocks, b.Blocks); n != len(a.Blocks) || len(b.Blocks) != n || b.CanonBytes != a.CanonBytes || b.ASCII != a.ASCII || b.Other != a.Other {
			t.Errorf("%s: %d of %d blocks, canon %d/%d ascii %d/%d other %d/%d", what, n, len(a.Blocks), b.CanonBytes, a.CanonBytes, b.ASCII, a.ASCII, b.Other, a.Other)
		}
	}
	// An alias that resolves to the model shares its fingerprints.
	al := Body{Resolve: func(m string) string { return map[string]string{"chat": "m"}[m] }}
	if e := al.Scan(KindChat, jsonType, []byte(chatBody("chat", "", sys, q1))); e != nil || shared(al.Blocks, one.Blocks) != len(one.Blocks) || al.Model != "chat" {
		t.Error("alias", e)
	}
	// Images go in by what they are.
	img := func(u string) string {
		return fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":%q}},{"type":"text","text":%q}]}]}`, u, q1[:300]+"x")
	}
	i1, i2 := mustScan(t, KindChat, img("data:"+strings.Repeat("A", 50000))), mustScan(t, KindChat, img("data:"+strings.Repeat("B", 50000)))
	if len(i1.Blocks) == 0 || shared(i1.Blocks, i2.Blocks) != 0 || i1.ASCII > 500 || i1.MediaBytes < 50000 {
		t.Errorf("images: %d blocks, %d shared, ascii %d", len(i1.Blocks), shared(i1.Blocks, i2.Blocks), i1.ASCII)
	}
}

func TestPromptShapes(t *testing.T) {
	text := strings.Repeat("0123456789", 60)
	for _, c := range []struct {
		k                  Kind
		body               string
		minText, ids, prom int
	}{
		{KindCompletions, `{"model":"m","prompt":"` + text + `"}`, 600, 0, 1},
		{KindCompletions, `{"model":"m","prompt":["` + text + `","b"]}`, 601, 0, 2},
		{KindCompletions, `{"model":"m","prompt":[1, 22 ,333]}`, 0, 3, 1},
		{KindCompletions, `{"model":"m","prompt":[[1,2],[3 ]]}`, 0, 3, 2},
		{KindCompletions, `{"model":"m","prompt":[]}`, 0, 0, 1},
		{KindCompletions, `{"model":"m","prompt":[1,"a",{"b":[2]}]}`, 1, 4, 1},
		{KindCompletions, `{"model":"m","prompt":null}`, 0, 0, 1},
		{KindMessages, `{"model":"m","max_tokens":4,"messages":[{"role":"user","content":"b"}],"system":[{"type":"text","text":"` + text + `"}]}`, 600, 0, 1},
		{KindResponses, `{"model":"m","instructions":"` + text + `","input":[{"role":"user","content":[{"type":"input_text","text":"x"}]}]}`, 600, 0, 1},
		{KindResponses, `{"model":"m","input":"` + text + `"}`, 600, 0, 1},
		{KindEmbeddings, `{"model":"m","input":["` + text + `","` + text + `"]}`, 1200, 0, 2},
		{KindRerank, `{"model":"m","query":"q","documents":["` + text + `",{"text":"z"}]}`, 602, 0, 1},
		{KindScore, `{"model":"m","text_1":"q","text_2":["` + text + `"]}`, 601, 0, 1},
		{KindTokenize, `{"model":"m","messages":[{"role":"user","content":"` + text + `"}]}`, 600, 0, 1},
		{KindDetokenize, `{"model":"m","tokens":[5,6]}`, 0, 2, 1},
	} {
		b := mustScan(t, c.k, c.body)
		if b.ASCII < c.minText || b.ASCII > c.minText+60 || b.Other != 0 || b.TokenIDs != c.ids || b.Prompts != c.prom {
			t.Errorf("%v %.80s: ascii %d ids %d prompts %d", c.k, c.body, b.ASCII, b.TokenIDs, b.Prompts)
		}
		if c.minText >= 600 && len(b.Blocks) < 2 {
			t.Errorf("%v %.80s: %d blocks", c.k, c.body, len(b.Blocks))
		}
	}
	// The Anthropic shape has its media one level down in tool results.
	b := mustScan(t, KindMessages, `{"model":"m","messages":[{"role":"user","content":[{"type":"tool_result","content":[{"type":"image","source":{"data":"AA"}}]}]}]}`)
	if !b.HasImages {
		t.Error("an image in a tool result was missed")
	}
	if b = mustScan(t, KindChat, `{"model":"m","messages":[{"role":"user","content":"x","meta":{"type":"image_url"}}],"tools":[{"type":"image_url"}]}`); b.HasImages {
		t.Error("an image was seen where none is")
	}
}

// A prompt of many megabytes keeps a bounded number of fingerprints, on the
// same chain as a shorter one.
func TestFingerprintsOfHugePromptsAreBounded(t *testing.T) {
	mk := func(n int) *Body {
		return mustScan(t, KindCompletions, `{"model":"m","prompt":"`+strings.Repeat("abcdefgh", n/8)+`"}`)
	}
	small, huge := mk(900_000), mk(5_000_000)
	if len(huge.Blocks) > maxBlocks || len(huge.Blocks) < maxBlocks/2 || huge.BlockBytes != 2048 || small.BlockBytes != 256 {
		t.Fatalf("%d blocks of %d bytes", len(huge.Blocks), huge.BlockBytes)
	}
	in := map[uint64]bool{}
	for _, f := range small.Blocks {
		in[f] = true
	}
	if n := shared(huge.Blocks, small.Blocks); n != 0 { // different grain
		t.Logf("%d equal places", n)
	}
	found := 0
	for _, f := range huge.Blocks {
		if in[f] {
			found++
		}
	}
	if found < 900_000/2048-1 {
		t.Errorf("only %d links of the shorter prompt are found again", found)
	}
	if got := huge.TokensPerBlock(1_250_000); got < 500 || got > 525 {
		t.Errorf("tokens per block %v", got)
	}
}

func TestRewriteTouchesOnlyItsBytes(t *testing.T) {
	b := mustScan(t, KindChat, p6)
	got := string(Splice(nil, []byte(p6), b.ModelStart, b.ModelEnd, `s"1`))
	if want := strings.Replace(p6, `"m1"`, `"s\"1"`, 1); got != want {
		t.Errorf("got %s", got)
	}
	if got := string(b.Rewrite(nil, []byte(p6), Rewrite{Model: "srv", MaxOut: 9})); got != `{"max_tokens":9,`+strings.Replace(p6, `"m1"`, `"srv"`, 1)[1:] {
		t.Errorf("got %s", got)
	}
	if got := string(b.SpliceInsert(nil, []byte(p6), "k", `{"a":1}`)); got != `{"k":{"a":1},`+p6[1:] {
		t.Errorf("got %s", got)
	}
	for _, body := range []string{`{ "max_tokens": 100 ,"model":"m"}`, `{"model":"m","max_tokens":100}`} {
		b = mustScan(t, KindChat, body)
		want := strings.Replace(strings.Replace(body, `"m"`, `"longer name"`, 1), "100", "64", 1)
		if got := string(b.Rewrite(nil, []byte(body), Rewrite{Model: "longer name", MaxOut: 64})); got != want {
			t.Errorf("got %s", got)
		}
		if got := string(b.Rewrite(nil, []byte(body), Rewrite{})); got != body {
			t.Errorf("nothing asked, got %s", got)
		}
	}
	b = mustScan(t, KindResponses, `{"model":"m"}`)
	if got := string(b.Rewrite(nil, []byte(`{"model":"m"}`), Rewrite{MaxOut: 3})); got != `{"max_output_tokens":3,"model":"m"}` {
		t.Errorf("got %s", got)
	}
}

func TestFormData(t *testing.T) {
	build := func(fields ...[2]string) (string, []byte) {
		var buf bytes.Buffer
		w := multipart.NewWriter(&buf)
		for _, f := range fields {
			if f[0] == "file" {
				p, _ := w.CreateFormFile("file", `a";name=model.wav`)
				io.WriteString(p, f[1])
			} else {
				w.WriteField(f[0], f[1])
			}
		}
		w.Close()
		return w.FormDataContentType(), buf.Bytes()
	}
	audio := "RIFF\r\n--not the boundary\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\ndecoy\r\n"
	ct, body := build([2]string{"file", audio}, [2]string{"model", "whisper"}, [2]string{"stream", "true"})
	var b Body
	if e := b.Scan(KindAudio, ct, body); e != nil {
		t.Fatal(e)
	}
	if b.Model != "whisper" || !b.Stream || string(body[b.ModelStart:b.ModelEnd]) != "whisper" || !b.HasAudio || b.MediaBytes != len(audio) {
		t.Errorf("%+v", b)
	}
	want := bytes.Replace(body, []byte("\r\nwhisper\r\n"), []byte("\r\nw2\r\n"), 1)
	if got := b.Rewrite(nil, body, Rewrite{Model: "w2", MaxOut: 5}); !bytes.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	for what, c := range map[string]struct {
		ct   string
		body []byte
	}{
		"no type":       {"", body},
		"json":          {jsonType, body},
		"no boundary":   {"multipart/form-data", body},
		"other":         {"multipart/form-data; boundary=x", body},
		"cut":           {ct, body[:len(body)-40]},
		"empty":         {ct, nil},
		"cut in header": {ct, body[:90]},
	} {
		if e := b.Scan(KindAudio, c.ct, c.body); e == nil || e.Status != 400 {
			t.Errorf("%s: %v", what, e)
		}
	}
	ct, body = build([2]string{"file", audio})
	if e := b.Scan(KindAudio, ct, body); e == nil || e.Param != "model" {
		t.Errorf("no model: %v", e)
	}
	ct, body = build([2]string{"model", "a"}, [2]string{"model", "b"})
	if e := b.Scan(KindAudio, ct, body); e == nil || e.Param != "model" {
		t.Errorf("two models: %v", e)
	}
}

func TestBodyKey(t *testing.T) {
	k := BodyKey(KindChat, "ab", []byte("c"))
	if k != BodyKey(KindChat, "ab", []byte("c")) || k == BodyKey(KindChat, "a", []byte("bc")) || k == BodyKey(KindCompletions, "ab", []byte("c")) {
		t.Error("key")
	}
	if BodyHash(KindChat, "a", []byte("x")) == BodyHash(KindChat, "b", []byte("x")) {
		t.Error("hash")
	}
}

// big100KB is a request of a long conversation: 100 KB of text. dense has an
// escape for every 14 bytes, as source code has; the other, like prose, for
// every 60.
func big100KB(dense bool) []byte {
	r := rand.New(rand.NewPCG(7, 7))
	words := []string{"the ", "quick ", "brown ", "\"fox\" ", "jumps.\n", "naïve ", "context ", "window ", "def f(x):\n    return x\n"}
	var turns []string
	for i := range 10 {
		var s strings.Builder
		for s.Len() < 10_000 {
			w := words[r.IntN(len(words))]
			if !dense && r.IntN(5) > 0 {
				w = "something "
			}
			s.WriteString(w)
		}
		turns = append(turns, fmt.Sprint(i)+s.String())
	}
	return []byte(chatBody("m", `"stream":true,"max_tokens":200,`, turns...))
}

func TestScanDoesNotAllocate(t *testing.T) {
	if raceOn {
		t.Skip("the race detector makes sync.Pool forget things")
	}
	body := big100KB(true)
	var b Body
	b.Scan(KindChat, jsonType, body)
	if n := testing.AllocsPerRun(20, func() {
		if e := b.Scan(KindChat, jsonType, body); e != nil {
			t.Fatal(e)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkScan100KB(b *testing.B)      { benchScan(b, big100KB(false)) }
func BenchmarkScan100KBDense(b *testing.B) { benchScan(b, big100KB(true)) }
func BenchmarkScanSmall(b *testing.B)      { benchScan(b, []byte(p6)) }

// Chinese as many clients spell it, six bytes for each character.
func BenchmarkScan100KBUnicode(b *testing.B) {
	benchScan(b, []byte(`{"model":"m","messages":[{"role":"user","content":"`+strings.Repeat(`\u4f60\u597d\uff0c\u4e16\u754c\n`, 3125)+`"}]}`))
}

func benchScan(b *testing.B, body []byte) {
	var s Body
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if e := s.Scan(KindChat, jsonType, body); e != nil {
			b.Fatal(e)
		}
	}
}

func BenchmarkJSONValid100KB(b *testing.B) { // for scale
	body := big100KB(false)
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		json.Valid(body)
	}
}
