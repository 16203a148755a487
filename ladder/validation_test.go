package ladder

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A slip in a prompts file is told; read past, it would let any answer pass.
func TestPromptsAreReadStrictly(t *testing.T) {
	file := filepath.Join(t.TempDir(), "checks.jsonl")
	for text, want := range map[string]string{
		`{"prompt":"hello","contains":"hello"}`:        "",
		`{"messages":[{"role":"user","content":"x"}]}`: "",
		"\n" + `{"prompt":"hello","contain":"hello"}`:  `checks.jsonl:2: json: unknown field "contain"`,
		`{"prompt":"a"} {"prompt":"b"}`:                "more than one value",
		`{"contains":"x"}`:                             `needs "prompt" or "messages"`,
		"\n":                                           "holds no prompt",
		`[]`:                                           "checks.jsonl:1: ",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		list, err := readPrompts(file)
		if want == "" && (err != nil || len(list) != 1) || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %d prompts, %v; want %q", text, len(list), err, want)
		}
	}
}
