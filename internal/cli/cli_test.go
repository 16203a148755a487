package cli

import (
	"bytes"
	"flag"
	"slices"
	"strings"
	"testing"
)

// A flag behind an argument is a flag; what stands behind "--" is none.
func TestFlagsMayStandBehindArguments(t *testing.T) {
	for _, c := range []struct {
		args string
		n    int
		code int
		left string
		json string
		loud bool
		says string
	}{
		{"--json f a b", Any, -1, "a b", "f", false, ""},
		{"a --json f b -v c", Any, -1, "a b c", "f", true, ""},
		{"a --json=f", 1, -1, "a", "f", false, ""},
		{"a -- --json f", Any, -1, "a --json f", "", false, ""},
		{"-- -v a -v", Any, -1, "-v a -v", "", false, ""},
		{"", Any, -1, "", "", false, ""},
		{"a --jsn f", Any, 2, "", "", false, "not defined: -jsn"},
		{"a --json", Any, 2, "", "", false, "needs an argument: -json"},
		{"a --help", 1, 0, "", "", false, "Usage"},
		{"a -v b", 1, 2, "a b", "", true, `penstock x: unexpected argument "b"`},
		{"-v", 1, 2, "", "", true, "Usage"},
	} {
		var out bytes.Buffer
		fs := flag.NewFlagSet("x", flag.ContinueOnError)
		fs.SetOutput(&out)
		json, loud := fs.String("json", "", ""), fs.Bool("v", false, "")
		code := Parse(fs, strings.Fields(c.args), c.n)
		if code != c.code || !strings.Contains(out.String(), c.says) {
			t.Errorf("%q: status %d, wanted %d with %q:\n%s", c.args, code, c.code, c.says, &out)
		}
		if c.code < 0 && (!slices.Equal(fs.Args(), strings.Fields(c.left)) || *json != c.json || *loud != c.loud) {
			t.Errorf("%q: arguments %q, --json %q, -v %v", c.args, fs.Args(), *json, *loud)
		}
	}
}
