package config

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sort"
	"strings"
)

// Source is everything a configuration is made from. Flag > environment >
// file > default.
type Source struct {
	File string // "" = none
	Data []byte // the file's content when not nil (tests)
	// Environ is as os.Environ; nil = the process's own.
	Environ []string
	// Set are flags: schema path (listen, log.level) and value, in order.
	Set []Setting
	// Replicas are --replica flags: they make a pool named default.
	Replicas []string
	// ModelAliases are --model-alias flags, alias and model; for the pool named default.
	ModelAliases []Alias
	// APIKeyFile is --api-key-file, for the pool named default.
	APIKeyFile string
	// Policy and Shadow, when given, are the policies of all pools.
	Policy, Shadow string
	// Policies and Profiles are the names that exist.
	Policies, Profiles []string
}

// Setting is one override.
type Setting struct {
	Flag  string // as the user wrote it, for errors
	Path  string
	Value string
}

// DefaultPool is the name of the pool that --replica makes.
const DefaultPool = "default"

// Load reads and checks a configuration. The error is of type Errors and
// holds everything that is wrong.
func Load(src Source) (*Config, error) {
	if src.Environ == nil {
		src.Environ = os.Environ()
	}
	env := map[string]string{}
	for _, kv := range src.Environ {
		if k, v, ok := strings.Cut(kv, "="); ok {
			env[k] = v
		}
	}
	c := &Config{File: src.File, lines: map[string]int{}}
	d := &decoder{source: src.File, dir: filepath.Dir(src.File), lines: c.lines,
		env: func(k string) (string, bool) { v, ok := env[k]; return v, ok }}
	data := src.Data
	if data == nil && src.File != "" {
		var err error
		if data, err = os.ReadFile(src.File); err != nil {
			return nil, Errors{{Source: src.File, Msg: "cannot read the configuration: " + strings.TrimPrefix(err.Error(), "open "+src.File+": ")}}
		}
	}
	if data != nil {
		d.document(data, c)
	} else {
		d.defaults(reflect.ValueOf(c).Elem(), "")
	}
	if d.broken { // nothing was read, so that nothing else can be said of it
		return nil, d.errs
	}
	d.environment(c, env)
	d.flags(c, src)
	v := &validator{c: c, source: src, bad: map[string]bool{}, unread: map[string]bool{}}
	for _, p := range d.errs {
		v.bad[p.Key], v.unread[p.Key] = true, true
	}
	for _, path := range d.unset {
		v.unread[path] = true
	}
	for _, path := range d.meant {
		if d.lines[path] == 0 { // else it is judged by the value that it has
			v.unread[path] = true
		}
	}
	v.all()
	errs := slices.Concat(d.errs, v.errs)
	if len(errs) > 0 {
		sort.SliceStable(errs, func(i, j int) bool { return errs[i].Line < errs[j].Line })
		return nil, errs
	}
	return c, nil
}

// EnvName is the environment variable that overrides a setting; "" for those
// in lists.
func EnvName(path string) string {
	if strings.Contains(path, "[]") {
		return ""
	}
	return "PENSTOCK_" + strings.ToUpper(strings.ReplaceAll(path, ".", "_"))
}

// environment applies PENSTOCK_... variables. Others of that prefix are left
// alone (Kubernetes sets PENSTOCK_PORT and more for a Service of this name),
// unless they look like a misspelt one: then there is a warning.
func (d *decoder) environment(c *Config, env map[string]string) {
	names := map[string]string{}
	var known []string
	for _, o := range Options {
		if n := EnvName(o.Path); n != "" && !o.Pending {
			names[n] = o.Path
			known = append(known, n)
		}
	}
	var keys []string
	for k := range env {
		if strings.HasPrefix(k, "PENSTOCK_") {
			keys = append(keys, k)
		}
	}
	sort.Strings(keys)
	for _, k := range keys {
		if path, ok := names[k]; ok {
			if err := set(c, path, env[k]); err != nil {
				d.errs = append(d.errs, Problem{Source: "environment", Key: k, Msg: err.Error()})
				d.unset = append(d.unset, path)
			}
		} else if near := nearest(k, known); near != "" && distance(k, near) <= 2 {
			c.Warnings = append(c.Warnings, fmt.Sprintf("environment variable %s is not a setting; did you mean %s?", k, near))
		}
	}
}

func (d *decoder) flags(c *Config, src Source) {
	for _, s := range src.Set {
		if err := set(c, s.Path, s.Value); err != nil {
			d.errs = append(d.errs, Problem{Source: "flag", Key: s.Flag, Msg: err.Error()})
			d.unset = append(d.unset, s.Path)
		}
	}
	fail := func(key, format string, args ...any) {
		d.errs = append(d.errs, Problem{Source: "flag", Key: key, Msg: fmt.Sprintf(format, args...)})
	}
	if len(src.Replicas) > 0 {
		if len(c.Pools) > 0 {
			fail("--replica", "the file already has pools; put the replica into one of them")
		} else {
			p := Pool{Name: DefaultPool}
			d.defaults(reflect.ValueOf(&p).Elem(), "pools[]")
			p.Replicas.Static = src.Replicas
			c.Pools = []Pool{p}
		}
	}
	var pool *Pool
	for i := range c.Pools {
		if c.Pools[i].Name == DefaultPool || len(c.Pools) == 1 {
			pool = &c.Pools[i]
		}
		if src.Policy != "" {
			c.Pools[i].Policy = src.Policy
		}
		if src.Shadow != "" {
			c.Pools[i].Shadow = src.Shadow
		}
	}
	if len(src.ModelAliases) > 0 {
		if pool == nil {
			fail("--model-alias", "there are several pools or none; put the alias into the file")
		} else {
			pool.Aliases = append(pool.Aliases, src.ModelAliases...)
		}
	}
	if src.APIKeyFile != "" {
		if pool == nil {
			fail("--api-key-file", "there are several pools or none; put it into the file")
			return
		}
		data, err := os.ReadFile(src.APIKeyFile)
		key := strings.TrimRight(string(data), "\r\n")
		switch {
		case err != nil:
			fail("--api-key-file", "cannot read the secret: %s", err)
		case key == "" || strings.ContainsAny(key, "\r\n\x00"):
			fail("--api-key-file", "%s must hold one line", src.APIKeyFile)
		default:
			pool.APIKey = Secret(key)
		}
	}
}

// set gives the setting at a schema path a value.
func set(c *Config, path, value string) error {
	o := option(path)
	if o == nil {
		var known []string
		for _, o := range Options {
			if !strings.Contains(o.Path, "[]") {
				known = append(known, o.Path)
			}
		}
		if near := nearest(path, known); near != "" {
			return fmt.Errorf("unknown setting %q; did you mean %q?", path, near)
		}
		return fmt.Errorf("unknown setting %q; see docs/configuration.md", path)
	}
	if strings.Contains(path, "[]") {
		return fmt.Errorf("%s is in a list and can only be set in the file", path)
	}
	if o.Pending {
		return fmt.Errorf("%s is not supported yet by this version", path)
	}
	v := reflect.ValueOf(c).Elem()
	for _, key := range strings.Split(path, ".") {
		for i := 0; i < v.NumField(); i++ {
			if tagOf(v.Type().Field(i)) == key {
				v = v.Field(i)
				if v.Kind() == reflect.Pointer {
					if v.IsNil() {
						v.Set(reflect.New(v.Type().Elem()))
						(&decoder{}).defaults(v.Elem(), key)
					}
					v = v.Elem()
				}
				break
			}
		}
	}
	if v.Type() == reflect.TypeOf([]string(nil)) {
		v.Set(reflect.ValueOf(commaList(value)))
		return nil
	}
	if !isScalar(v.Type()) {
		return fmt.Errorf("%s can only be set in the file", path)
	}
	return setScalar(v, value)
}

// commaList is how a list of texts is written in a flag or variable.
func commaList(s string) (out []string) {
	for _, part := range strings.Split(s, ",") {
		if part = strings.TrimSpace(part); part != "" {
			out = append(out, part)
		}
	}
	return out
}

func (p *Profile) short(s string) error {
	p.Base = s
	return nil
}

func (t *Tier) short(s string) error {
	if s != "defer" {
		return fmt.Errorf("%q is not a tier; only defer is written as one word", s)
	}
	t.Defer = true
	return nil
}
