package wire

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// reference is the slow reading of a body: encoding/json for validity, its
// token decoder for the root's keys.
type reference struct {
	valid, object bool
	depth         int
	models        []string // values of the root's "model" keys
	oddModel      bool     // one of them is not a string
}

func refer(body []byte) (r reference) {
	r.valid = json.Valid(body)
	if !r.valid {
		return r
	}
	d := json.NewDecoder(bytes.NewReader(body))
	depth, expectKey, key := 0, false, ""
	for {
		tok, err := d.Token()
		if err != nil {
			return r
		}
		delim, isDelim := tok.(json.Delim)
		if isDelim && (delim == '{' || delim == '[') {
			if depth == 0 {
				r.object = delim == '{'
				expectKey = r.object
			} else if depth == 1 && key == "model" && !expectKey {
				r.oddModel = true
			}
			if depth++; depth > r.depth {
				r.depth = depth
			}
			continue
		}
		if isDelim {
			depth--
		}
		if depth != 1 || !r.object {
			continue
		}
		if isDelim { // a nested value ended
			expectKey = true
			continue
		}
		if expectKey {
			key, expectKey = tok.(string), false
			continue
		}
		expectKey = true
		if key == "model" {
			s, ok := tok.(string)
			if !ok {
				r.oddModel = true
			}
			r.models = append(r.models, s)
		}
	}
}

func checkAgainstReference(t *testing.T, body []byte) {
	var b Body
	e := b.Scan(KindChat, jsonType, body)
	r := refer(body)
	if r.depth > maxDepth {
		if e == nil {
			t.Fatalf("accepted %d levels", r.depth)
		}
		return
	}
	syntax := e != nil && (strings.Contains(e.Message, "not valid JSON") || strings.Contains(e.Message, "body is empty"))
	if syntax == r.valid {
		t.Fatalf("json.Valid says %v, Scan says %v for %q", r.valid, e, body)
	}
	if !r.valid || !r.object {
		if e == nil {
			t.Fatalf("accepted %q", body)
		}
		return
	}
	good := len(r.models) == 1 && !r.oddModel && r.models[0] != ""
	if e == nil && (!good || b.Model != r.models[0]) {
		t.Fatalf("model %q, the decoder found %q (odd %v) in %q", b.Model, r.models, r.oddModel, body)
	}
	if good && e != nil && (e.Param == "model" || e.Param == "") {
		t.Fatalf("refused %q: %v", body, e)
	}
	if e != nil {
		return
	}
	checkPrompt(t, &b, body)
	var back string
	if err := json.Unmarshal(body[b.ModelStart:b.ModelEnd], &back); err != nil || back != b.Model {
		t.Fatalf("span %q is not the model %q", body[b.ModelStart:b.ModelEnd], b.Model)
	}
	// A rewrite changes the one value, every other byte stays.
	out := b.Rewrite(nil, body, Rewrite{Model: "\"new\u2028"})
	if !bytes.HasPrefix(out, body[:b.ModelStart]) || !bytes.HasSuffix(out, body[b.ModelEnd:]) {
		t.Fatalf("rewrite touched other bytes: %q -> %q", body, out)
	}
	if rr := refer(out); !rr.valid || len(rr.models) != 1 || rr.models[0] != "\"new\u2028" {
		t.Fatalf("rewrite broke %q -> %q", body, out)
	}
	both := b.Rewrite(nil, body, Rewrite{Model: "n", MaxOut: 77})
	var c Body
	if e := c.Scan(KindChat, jsonType, both); e == nil && (c.MaxOut != 77 || c.Model != "n") {
		t.Fatalf("rewrite of both: %q -> %q gives %d", body, both, c.MaxOut)
	}
}

func scanSeeds() []string {
	return []string{p6, ``, `{}`, `[]`, `{"model":"m"}`, `{"model":"m","model":"m"}`, `{"mod\u0065l":"\ud83d\ude00\ud83d x\udc00"}`,
		`{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"\u0041"}},{"type":"text","text":"\ud83d\ude00\ud83dab"}],"cache_control":{"a":"\""}}]}`,
		`{"model":"m","tools":[{"a":[1,2,{"b":"\\\""}]}],"prompt":[1,2,-3.5e+7]}`, `{"model":"m","max_tokens":5,"stream":false}`,
		`{"a":-0,"b":0.5,"c":1E5,"d":-1.5e-9,"model":"x"}`, `{"a":01}`, `{"a":1.}`, `{"a":.5}`, `{"a":1e}`, `{"a":-}`, "{\"a\":\"\x00\"}",
		"{\"model\":\"\xff\xfe\"}", "\xef\xbb\xbf{\"model\":\"m\"}", `{"model":"m"}{}`, `{"model":"m"} `, `nul`, `tru e`, `{"model":{"model":"x"}}`,
		strings.Repeat(`{"a":`, 600), strings.Repeat(`[`, 20000)}
}

func FuzzScan(f *testing.F) {
	for _, s := range scanSeeds() {
		f.Add([]byte(s))
	}
	files, _ := filepath.Glob("testdata/vllm/*.req")
	for _, name := range files {
		if b, err := os.ReadFile(name); err == nil {
			if i := bytes.Index(b, []byte("\r\n\r\n")); i >= 0 {
				f.Add(b[i+4:])
			}
		}
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		checkAgainstReference(t, body)
		// The other kinds walk the prompt by other keys; none may panic.
		for k := KindChat; k < KindModels; k++ {
			var b Body
			b.Scan(k, "multipart/form-data; boundary=xx", body)
		}
		s := append([]byte(`{"model":"m","prompt":`), body...)
		s = append(s, '}')
		checkAgainstReference(t, s)
		for _, k := range []Kind{KindCompletions, KindChat, KindResponses, KindMessages, KindRerank, KindDetokenize} {
			for _, key := range []string{"prompt", "messages", "input", "system", "documents", "tokens", "tools"} {
				s = append(append(append(s[:0], `{"model":"m","`+key+`":`...), body...), '}')
				var b Body
				b.Scan(k, "", s)
			}
		}
	})
}

// Every request that was recorded against a real vLLM and is valid JSON scans.
func TestScanRecordedRequests(t *testing.T) {
	files, err := filepath.Glob("testdata/vllm/*.req")
	if err != nil || len(files) < 10 {
		t.Fatal(err, len(files))
	}
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		head, body, _ := bytes.Cut(b, []byte("\r\n\r\n"))
		path := strings.Fields(string(head))[1]
		k, ok := KindOf(path)
		if !ok {
			t.Errorf("%s: path %s", name, path)
			continue
		}
		var s Body
		if e := s.Scan(k, jsonType, body); e != nil || s.Model != "tiny" || s.ASCII+s.TokenIDs == 0 {
			t.Errorf("%s: %v %+v", name, e, s)
		}
		checkAgainstReference(t, body)
	}
}
