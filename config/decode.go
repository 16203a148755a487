package config

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"sort"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// Problem is one thing wrong with a configuration.
type Problem struct {
	Source string // the file, "environment", or "flag"
	Line   int    // 0 = none
	Key    string // dotted path, as pools[0].replicas.static[1]
	Msg    string
}

func (p Problem) String() string {
	s := p.Source
	if p.Line > 0 {
		s += ":" + strconv.Itoa(p.Line)
	}
	if p.Key != "" {
		s += ":" + p.Key
	}
	return s + ": " + p.Msg
}

// Errors is all that is wrong with a configuration, in the file's order.
type Errors []Problem

func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, p := range e {
		lines[i] = p.String()
	}
	return strings.Join(lines, "\n")
}

// parser is a scalar type that reads itself.
type parser interface{ parse(string) error }

// shorthand is a struct that may also be written as one scalar.
type shorthand interface{ short(string) error }

// maxNodes bounds how much a file may expand to through YAML aliases.
const maxNodes = 100_000

// decoder fills Config from YAML nodes, remembering each key's line.
type decoder struct {
	source string
	dir    string // relative *_file paths start here
	env    func(string) (string, bool)
	lines  map[string]int
	errs   Errors
	nodes  int
	broken bool     // the file could not be read as YAML
	unset  []string // settings whose flag or variable is wrong
	meant  []string // keys that misspelt ones were probably meant to be
}

func (d *decoder) fail(line int, key, format string, args ...any) {
	d.errs = append(d.errs, Problem{d.source, line, key, fmt.Sprintf(format, args...)})
}

// document parses a whole file into c.
func (d *decoder) document(data []byte, c *Config) {
	dec := yaml.NewDecoder(strings.NewReader(string(data)))
	var doc, more yaml.Node
	if err := dec.Decode(&doc); err != nil {
		if err.Error() != "EOF" {
			d.syntax(err)
			return
		}
		d.defaults(reflect.ValueOf(c).Elem(), "")
		return
	}
	if err := dec.Decode(&more); err == nil {
		d.fail(more.Line, "", "a second YAML document; the configuration is one")
	} else if err.Error() != "EOF" {
		d.syntax(err)
	}
	root := doc.Content[0]
	d.value(root, reflect.ValueOf(c).Elem(), "", "")
	d.broken = root.Kind != yaml.MappingNode
}

// syntax reports yaml's own error, whose text is "yaml: line N: what".
func (d *decoder) syntax(err error) {
	msg := strings.TrimPrefix(err.Error(), "yaml: ")
	line := 1 // yaml names no other first line
	if rest, ok := strings.CutPrefix(msg, "line "); ok {
		if num, what, ok := strings.Cut(rest, ": "); ok {
			line, _ = strconv.Atoi(num)
			msg = what
			if strings.HasPrefix(what, "did not find expected") {
				line++ // its parser counts from 0, its scanner from 1
			}
		}
	}
	if strings.HasPrefix(msg, "did not find expected") {
		msg += ": look from this line on for indentation, brackets and quotes that do not match"
	}
	if strings.HasSuffix(msg, "cannot start any token") {
		msg += ": indent with spaces, not tabs, and put a text that begins with @, % or ` in quotes"
	}
	d.broken = true
	d.fail(line, "", "not YAML: %s", msg)
}

// defaults sets v, a struct, and the structs in it from the table.
func (d *decoder) defaults(v reflect.Value, schema string) {
	t := v.Type()
	for i := 0; i < t.NumField(); i++ {
		key := tagOf(t.Field(i))
		if key == "" {
			continue
		}
		sub := join(schema, key)
		if f := v.Field(i); f.Kind() == reflect.Struct && !isScalar(f.Type()) {
			d.defaults(f, sub)
		} else if o := option(sub); o != nil && o.Default != "" {
			if err := setScalar(f, o.Default); err != nil {
				panic("BUG: default of " + sub + ": " + err.Error())
			}
		}
	}
}

// value decodes n into v. path is where it is in the file, schema where it is
// in the table.
func (d *decoder) value(n *yaml.Node, v reflect.Value, path, schema string) {
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if d.nodes++; d.nodes > maxNodes {
		if d.nodes == maxNodes+1 {
			d.fail(n.Line, path, "the file expands to more than %d values", maxNodes)
		}
		return
	}
	if d.lines[path] == 0 {
		d.lines[path] = n.Line
	}
	if n.Kind == yaml.ScalarNode && n.Tag == "!!null" {
		d.fail(n.Line, path, "has no value; leave the key out to get its default")
		return
	}
	switch {
	case v.Kind() == reflect.Pointer:
		if v.IsNil() {
			v.Set(reflect.New(v.Type().Elem()))
		}
		d.value(n, v.Elem(), path, schema)
	case v.Type() == reflect.TypeOf(Aliases(nil)):
		d.aliases(n, v.Addr().Interface().(*Aliases), path)
	case isScalar(v.Type()):
		d.scalar(n, v, path)
	case v.Kind() == reflect.Slice:
		d.list(n, v, path, schema)
	case v.Kind() == reflect.Map:
		d.stringMap(n, v, path)
	default:
		d.mapping(n, v, path, schema)
	}
}

func (d *decoder) scalar(n *yaml.Node, v reflect.Value, path string) {
	if n.Kind != yaml.ScalarNode {
		d.fail(n.Line, path, "is %s, must be %s", kindName(n), typeName(v.Type()))
		return
	}
	s, ok := d.expand(n, path)
	if !ok {
		return
	}
	if err := setScalar(v, s); err != nil {
		d.fail(n.Line, path, "%s", err)
	}
}

func (d *decoder) list(n *yaml.Node, v reflect.Value, path, schema string) {
	if n.Kind != yaml.SequenceNode {
		d.fail(n.Line, path, "is %s, must be %s", kindName(n), typeName(v.Type()))
		return
	}
	v.Set(reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content)))
	for i, item := range n.Content {
		d.value(item, v.Index(i), fmt.Sprintf("%s[%d]", path, i), schema+"[]")
	}
}

// pairs calls f for each key of a mapping; a key that is there twice is told
// and only its first value used.
func (d *decoder) pairs(n *yaml.Node, path string, f func(key *yaml.Node, value *yaml.Node)) {
	first := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k := n.Content[i]
		switch line, dup := first[k.Value]; {
		case k.Kind != yaml.ScalarNode:
			d.fail(k.Line, path, "a key is %s, must be text", kindName(k))
		case k.Value == "<<":
			d.fail(k.Line, join(path, "<<"), "merge keys are not supported; repeat the keys or use an anchor for a whole value")
		case dup:
			d.fail(k.Line, join(path, k.Value), "is there twice, first in line %d", line)
		default:
			first[k.Value] = k.Line
			f(k, n.Content[i+1])
		}
	}
}

func (d *decoder) mapping(n *yaml.Node, v reflect.Value, path, schema string) {
	if n.Kind == yaml.ScalarNode {
		if sh, ok := v.Addr().Interface().(shorthand); ok {
			d.defaults(v, schema)
			if s, ok := d.expand(n, path); ok {
				if err := sh.short(s); err != nil {
					d.fail(n.Line, path, "%s", err)
				}
			}
			return
		}
	}
	if n.Kind != yaml.MappingNode {
		d.fail(n.Line, path, "is %s, must be a mapping", kindName(n))
		return
	}
	d.defaults(v, schema)
	fields := map[string]reflect.Value{}
	known := []string{}
	for i := 0; i < v.NumField(); i++ {
		f := v.Type().Field(i)
		if key := tagOf(f); key != "" {
			fields[key] = v.Field(i)
			known = append(known, key)
			if f.Type == reflect.TypeOf(Secret("")) {
				known = append(known, key+"_file")
			}
		}
	}
	d.pairs(n, path, func(k, val *yaml.Node) {
		key := join(path, k.Value)
		sub := join(schema, k.Value)
		d.lines[key] = k.Line
		o := option(sub)
		if o != nil && o.Pending && !(isFalse(val)) {
			d.fail(k.Line, key, "is not supported yet by this version; leave it out")
		}
		if f, ok := fields[k.Value]; ok {
			d.value(val, f, key, sub)
			return
		}
		if base, ok := strings.CutSuffix(k.Value, "_file"); ok && fields[base].IsValid() && fields[base].Type() == reflect.TypeOf(Secret("")) {
			d.secretFile(val, fields[base], key)
			return
		}
		if o != nil && o.Pending {
			return
		}
		d.unknown(k, path, k.Value, append(known, pendingUnder(schema)...))
	})
	for key, f := range fields {
		if line := d.lines[join(path, key+"_file")]; f.Type() == reflect.TypeOf(Secret("")) && line > 0 && d.lines[join(path, key)] > 0 {
			d.fail(line, join(path, key+"_file"), "%s is given too; one of them", key)
		}
	}
}

// unknown tells that path has no key of this name.
func (d *decoder) unknown(n *yaml.Node, path, name string, known []string) {
	if near := nearest(name, known); near != "" {
		d.fail(n.Line, join(path, name), "unknown key; did you mean %q?", near)
		d.meant = append(d.meant, join(path, near))
		return
	}
	sort.Strings(known)
	d.fail(n.Line, join(path, name), "unknown key; known here: %s", strings.Join(known, ", "))
}

func (d *decoder) stringMap(n *yaml.Node, v reflect.Value, path string) {
	if n.Kind != yaml.MappingNode {
		d.fail(n.Line, path, "is %s, must be a mapping of names to texts", kindName(n))
		return
	}
	m := reflect.MakeMap(v.Type())
	d.pairs(n, path, func(k, val *yaml.Node) {
		key := join(path, k.Value)
		d.lines[key] = k.Line
		elem := reflect.New(v.Type().Elem()).Elem()
		d.value(val, elem, key, "")
		m.SetMapIndex(reflect.ValueOf(k.Value), elem)
	})
	v.Set(m)
}

func (d *decoder) aliases(n *yaml.Node, a *Aliases, path string) {
	switch n.Kind {
	case yaml.SequenceNode:
		for i, item := range n.Content {
			var s string
			d.value(item, reflect.ValueOf(&s).Elem(), fmt.Sprintf("%s[%d]", path, i), "")
			*a = append(*a, Alias{Name: s})
		}
	case yaml.MappingNode:
		d.pairs(n, path, func(k, val *yaml.Node) {
			var s string
			d.lines[fmt.Sprintf("%s[%d]", path, len(*a))] = k.Line
			d.value(val, reflect.ValueOf(&s).Elem(), join(path, k.Value), "")
			*a = append(*a, Alias{Name: k.Value, Model: s})
		})
	default:
		d.fail(n.Line, path, "is %s, must be a list of names, or a mapping from alias to model", kindName(n))
	}
}

// secretFile reads the secret named by a *_file key.
func (d *decoder) secretFile(n *yaml.Node, v reflect.Value, key string) {
	if n.Kind != yaml.ScalarNode || n.Tag == "!!null" {
		d.fail(n.Line, key, "is %s, must be the path of a file", kindName(n))
		return
	}
	file, ok := d.expand(n, key)
	if !ok {
		return
	}
	if !filepath.IsAbs(file) {
		file = filepath.Join(d.dir, file)
	}
	data, err := os.ReadFile(file)
	if err != nil {
		d.fail(n.Line, key, "cannot read the secret: %s", err)
		return
	}
	s := strings.TrimRight(string(data), "\r\n")
	switch {
	case s == "":
		d.fail(n.Line, key, "%s is empty", file)
	case strings.ContainsAny(s, "\r\n\x00"):
		d.fail(n.Line, key, "%s has more than one line; a secret is one", file)
	default:
		v.SetString(s)
	}
}

// expand replaces ${NAME} by the environment's value; $$ is one dollar. It
// works on values after parsing, so a value cannot bring in structure.
func (d *decoder) expand(n *yaml.Node, path string) (string, bool) {
	s := n.Value
	if !strings.Contains(s, "$") {
		return s, true
	}
	var b strings.Builder
	ok := true
	for i := 0; i < len(s); i++ {
		if s[i] != '$' || i+1 == len(s) || (s[i+1] != '{' && s[i+1] != '$') {
			b.WriteByte(s[i])
			continue
		}
		if s[i+1] == '$' {
			b.WriteByte('$')
			i++
			continue
		}
		end := strings.IndexByte(s[i:], '}')
		if end < 0 {
			d.fail(n.Line, path, "${ without }; write $$ for a dollar sign")
			return "", false
		}
		name := s[i+2 : i+end]
		val, found := d.env(name)
		if !found {
			d.fail(n.Line, path, "environment variable %s is not set", name)
			ok = false
		}
		b.WriteString(val)
		i += end
	}
	return b.String(), ok
}

// setScalar parses s into v, whose type isScalar.
func setScalar(v reflect.Value, s string) error {
	if p, ok := v.Addr().Interface().(parser); ok {
		return p.parse(s)
	}
	switch {
	case v.Type() == reflect.TypeOf(time.Duration(0)):
		dur, err := ParseDuration(s)
		v.SetInt(int64(dur))
		return err
	case v.Kind() == reflect.String:
		v.SetString(s)
	case v.Kind() == reflect.Bool:
		if s != "true" && s != "false" {
			return fmt.Errorf("%q is not true or false", s)
		}
		v.SetBool(s == "true")
	case v.Kind() == reflect.Int:
		i, err := strconv.Atoi(s)
		if err != nil {
			return fmt.Errorf("%q is not a whole number", s)
		}
		if i < 0 {
			return fmt.Errorf("%d is negative", i)
		}
		v.SetInt(int64(i))
	case v.Kind() == reflect.Float64:
		f, err := strconv.ParseFloat(s, 64)
		if err != nil || f < 0 || f > 1e12 { // NaN fails no comparison, but ParseFloat's words for it are excluded next
			return fmt.Errorf("%q is not a number from 0", s)
		}
		if f != f {
			return fmt.Errorf("%q is not a number", s)
		}
		v.SetFloat(f)
	default:
		panic("BUG: no scalar: " + v.Type().String())
	}
	return nil
}

func isScalar(t reflect.Type) bool {
	if reflect.PointerTo(t).Implements(reflect.TypeOf((*parser)(nil)).Elem()) {
		return true
	}
	switch t.Kind() {
	case reflect.String, reflect.Bool, reflect.Int, reflect.Int64, reflect.Float64:
		return true
	}
	return false
}

// typeName says in words what a setting takes.
func typeName(t reflect.Type) string {
	switch t {
	case reflect.TypeOf(time.Duration(0)):
		return "a duration (250ms, 5s)"
	case reflect.TypeOf(Size(0)):
		return "a size (32MiB)"
	case reflect.TypeOf(Ratio(0)):
		return "a share (20%)"
	case reflect.TypeOf(Seconds(0)):
		return "a time (6.4ms, 16.8us)"
	case reflect.TypeOf(Rate(0)):
		return "a rate (20/s)"
	case reflect.TypeOf(Headroom{}):
		return "n-1 or a share (20%)"
	case reflect.TypeOf(Secret("")):
		return "a secret"
	case reflect.TypeOf(Aliases(nil)):
		return "a list of names, or a mapping"
	}
	switch t.Kind() {
	case reflect.String:
		return "text"
	case reflect.Bool:
		return "true or false"
	case reflect.Int:
		return "a whole number"
	case reflect.Float64:
		return "a number"
	case reflect.Slice:
		if t.Elem().Kind() == reflect.String {
			return "a list of texts"
		}
		return "a list"
	case reflect.Map:
		return "a mapping of names to texts"
	}
	return "a mapping"
}

func kindName(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.AliasNode:
		return kindName(n.Alias)
	}
	if n.Tag == "!!null" {
		return "nothing"
	}
	return "the single value " + strconv.Quote(n.Value)
}

func tagOf(f reflect.StructField) string {
	if t := f.Tag.Get("yaml"); t != "-" {
		return t
	}
	return ""
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

func isFalse(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Value == "false" }

// pendingUnder lists pending keys below a schema path that have no field.
func pendingUnder(schema string) (keys []string) {
	for _, o := range Options {
		if o.Pending {
			if rest, ok := strings.CutPrefix(o.Path, schema+"."); ok && !strings.Contains(rest, ".") {
				keys = append(keys, rest)
			} else if schema == "" && !strings.ContainsAny(o.Path, ".[") {
				keys = append(keys, o.Path)
			}
		}
	}
	return keys
}
