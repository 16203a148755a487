package config

import (
	"fmt"
	"hash/fnv"
	"reflect"
	"regexp"
	"sort"
	"strings"
)

// Diff lists the settings in which b differs from a: those that a reload
// applies (Live in the table), and those that need a restart. A pool, class or
// route is known by its name, so that a changed order of pools is no change.
func Diff(a, b *Config) (live, restart []string) {
	was, is := map[string]string{}, map[string]string{}
	flatten(reflect.ValueOf(a).Elem(), "", was)
	flatten(reflect.ValueOf(b).Elem(), "", is)
	keys := map[string]bool{}
	for k, v := range was {
		if w, ok := is[k]; !ok || w != v {
			keys[k] = true
		}
	}
	for k := range is {
		if _, ok := was[k]; !ok {
			keys[k] = true
		}
	}
	for k := range keys {
		if o := option(index.ReplaceAllString(k, "[]")); o != nil && o.Live {
			live = append(live, k)
		} else {
			restart = append(restart, k)
		}
	}
	sort.Strings(live)
	sort.Strings(restart)
	return live, restart
}

// Hash is one number for what the routers of a fleet have to agree on: the
// settings without secrets, without what is each router's own (addresses,
// paths, log, peers), and without the order of pools.
func (c *Config) Hash() uint64 {
	all := map[string]string{}
	flatten(reflect.ValueOf(c).Elem(), "", all)
	keys := make([]string, 0, len(all))
	for k := range all {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	h := fnv.New64a()
	for _, k := range keys {
		switch top, _, _ := strings.Cut(k, "."); {
		case top == "listen", top == "admin", top == "admin_hosts", top == "state_dir", top == "log", top == "peers", top == "tls", strings.HasSuffix(k, ".api_key"):
			continue
		}
		fmt.Fprintf(h, "%q=%q\n", k, all[k])
	}
	return h.Sum64()
}

var index = regexp.MustCompile(`\[[^\]]*\]`)

// flatten writes each setting's value as text under its path.
func flatten(v reflect.Value, path string, out map[string]string) {
	t := v.Type()
	for i := 0; i < t.NumField(); i++ {
		key := tagOf(t.Field(i))
		if key == "" {
			continue
		}
		f, sub := v.Field(i), join(path, key)
		if f.Kind() == reflect.Pointer {
			if f.IsNil() {
				continue
			}
			f = f.Elem()
		}
		switch {
		case isScalar(f.Type()) || f.Type() == reflect.TypeOf(Aliases(nil)):
			out[sub] = raw(f)
		case f.Kind() == reflect.Struct:
			flatten(f, sub, out)
		case f.Kind() == reflect.Slice && f.Type().Elem().Kind() == reflect.Struct:
			for j := 0; j < f.Len(); j++ {
				id := fmt.Sprint(j)
				if n := f.Index(j).FieldByName("Name"); n.IsValid() {
					id = n.String()
				}
				flatten(f.Index(j), sub+"["+id+"]", out)
			}
			if f.Len() > 0 && f.Type().Elem() != reflect.TypeOf(Pool{}) {
				out[sub] = order(f) // the order of classes and tiers is their meaning
			}
		default:
			out[sub] = fmt.Sprint(f.Interface())
		}
	}
}

func order(v reflect.Value) (s string) {
	for i := 0; i < v.Len(); i++ {
		if n := v.Index(i).FieldByName("Name"); n.IsValid() {
			s += n.String() + "\n"
		}
	}
	return s
}

// raw is a scalar as text; secrets compare by value and are never shown, as
// only paths leave Diff.
func raw(v reflect.Value) string {
	if s, ok := v.Interface().(Secret); ok {
		return s.Value()
	}
	return fmt.Sprint(v.Interface())
}
