package config

import (
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
)

func flatText(c *Config) []string { return []string{fmt.Sprintf("%v %+v %#v", *c, *c, *c)} }

// leaves lists the schema paths of all settings that Config has.
func leaves(t reflect.Type, path string, out map[string]bool) {
	for i := 0; i < t.NumField(); i++ {
		key := tagOf(t.Field(i))
		if key == "" {
			continue
		}
		f, sub := t.Field(i).Type, join(path, key)
		if f.Kind() == reflect.Pointer {
			f = f.Elem()
		}
		switch {
		case isScalar(f) || f == reflect.TypeOf(Aliases(nil)):
			out[sub] = true
		case f.Kind() == reflect.Struct:
			leaves(f, sub, out)
		case f.Kind() == reflect.Slice && f.Elem().Kind() == reflect.Struct:
			leaves(f.Elem(), sub+"[]", out)
		default:
			out[sub] = true
		}
	}
}

func TestTableAndFieldsAgree(t *testing.T) {
	fields := map[string]bool{}
	leaves(reflect.TypeOf(Config{}), "", fields)
	rows := map[string]bool{}
	for _, o := range Options {
		if rows[o.Path] {
			t.Errorf("%s is in the table twice", o.Path)
		}
		rows[o.Path] = true
		if !fields[o.Path] && !o.Pending {
			t.Errorf("%s is in the table and no field of Config", o.Path)
		}
		if o.Doc == "" || !strings.HasSuffix(o.Doc, ".") {
			t.Errorf("%s: what it does has to be said, in sentences", o.Path)
		}
	}
	for f := range fields {
		if !rows[f] {
			t.Errorf("%s is a field of Config and not in the table", f)
		}
	}
}

func TestTheExampleIsValid(t *testing.T) {
	if _, err := Load(Source{File: "example.yaml", Data: []byte(Example), Environ: []string{}, Profiles: profiles}); err != nil {
		t.Fatal(err)
	}
}

func TestTheDesignsExampleIsParsedAndOnlyRefusesWhatIsNotSupportedYet(t *testing.T) {
	data, err := os.ReadFile("testdata/design.yaml")
	if err != nil {
		t.Fatal(err)
	}
	_, err = Load(Source{File: "design.yaml", Data: data, Environ: []string{}, Profiles: profiles})
	for _, p := range err.(Errors) {
		if !strings.Contains(p.Msg, "not supported yet") && p.Key != "pools[0].api_key_file" && p.Key != "peers.key_file" && !strings.Contains(p.Msg, "llama-8b") {
			t.Errorf("%s", p)
		}
	}
}

func TestThePageIsTheGeneratedOne(t *testing.T) {
	page, err := os.ReadFile("../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	if string(page) != Markdown() {
		t.Error("docs/configuration.md is not what config generates: run make docs")
	}
}

func TestDiff(t *testing.T) {
	a, err := load(t, minimal+"classes: [{name: x}, {name: y}]\n")
	if err != nil {
		t.Fatal(err)
	}
	b, err := load(t, strings.Replace(minimal, "8000\"", "8000\", \"http://10.0.0.2:8000\"", 1)+"classes: [{name: y}, {name: x}]\nlog: {level: debug}\nscrape: {interval: 1s}\n")
	if err != nil {
		t.Fatal(err)
	}
	live, restart := Diff(a, b)
	if want := []string{"log.level", "pools[a].replicas.static"}; !reflect.DeepEqual(live, want) {
		t.Errorf("live %q, want %q", live, want)
	}
	if want := []string{"classes", "scrape.interval"}; !reflect.DeepEqual(restart, want) {
		t.Errorf("restart %q, want %q", restart, want)
	}
	if live, restart = Diff(a, a); live != nil || restart != nil {
		t.Errorf("the same differs: %q %q", live, restart)
	}
}

func TestHashIsOfWhatRoutersHaveToAgreeOn(t *testing.T) {
	hash := func(yaml string) uint64 {
		t.Helper()
		c, err := load(t, yaml)
		if err != nil {
			t.Fatal(err)
		}
		return c.Hash()
	}
	a := hash(minimal)
	if hash("listen: \":1\"\nlog: {level: debug}\n"+minimal) != a || hash(strings.Replace(minimal, "name: a", "name: a\n    api_key: x", 1)) != a {
		t.Error("it changes with what is each router's own, or secret")
	}
	if hash(strings.Replace(minimal, "8000", "8001", 1)) == a || hash("scrape: {interval: 1s}\n"+minimal) == a {
		t.Error("it does not change with what matters")
	}
}
