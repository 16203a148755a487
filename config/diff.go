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
// route is known by its name, so that a changed order of pools is no change. Of
// one that is new or gone only its own path is told.
func Diff(a, b *Config) (live, restart []string) {
	was, is := map[string]string{}, map[string]string{}
	flatten(reflect.ValueOf(a).Elem(), "", was)
	flatten(reflect.ValueOf(b).Elem(), "", is)
	keys := map[string]bool{}
	note := func(k string) {
		for _, other := range []map[string]string{was, is} {
			if e := element(k, other); e != "" {
				k = e
				break
			}
		}
		keys[k] = true
	}
	for k, v := range was {
		if w, ok := is[k]; !ok || w != v {
			note(k)
		}
	}
	for k := range is {
		if _, ok := was[k]; !ok {
			note(k)
		}
	}
	for k := range keys {
		if isLive(k, a, b) {
			live = append(live, k)
		} else {
			restart = append(restart, k)
		}
	}
	sort.Strings(live)
	sort.Strings(restart)
	return live, restart
}

// element is the path of the first pool, class ... around key k that is not in
// the configuration flattened in all; "" when all are.
func element(k string, all map[string]string) string {
	for _, at := range index.FindAllStringIndex(k, -1) {
		path := k[:at[1]]
		found := false
		for o := range all {
			found = found || strings.HasPrefix(o, path)
		}
		if !found {
			return path
		}
	}
	return ""
}

// isLive tells whether a reload from a to b applies the setting with path k.
func isLive(k string, a, b *Config) bool {
	o := option(index.ReplaceAllString(k, "[]"))
	if o == nil || !o.Live {
		return false
	}
	switch {
	case strings.HasPrefix(k, "tls."):
		return a.TLS.CertFile != "" && b.TLS.CertFile != "" // plain or TLS is the listener's nature
	case o.Path == "pools[].models":
		return !inLadder(a, strings.TrimSuffix(strings.TrimPrefix(k, "pools["), "].models"))
	}
	return true
}

// inLadder tells whether a route has a tier of the pool: what the tier is to
// the route (an equal or a smaller model) was found by the models at the start.
func inLadder(c *Config, pool string) bool {
	for i := range c.Routes {
		for j := range c.Routes[i].Tiers {
			if c.Routes[i].Tiers[j].Pool == pool {
				return true
			}
		}
	}
	return false
}

// Merge is the configuration in force after a reload: what runs, with the live
// settings of next.
func Merge(now, next *Config) *Config {
	c := *now
	merge(reflect.ValueOf(&c).Elem(), reflect.ValueOf(next).Elem(), "", "", now, next)
	c.Warnings = next.Warnings
	return &c
}

// merge puts the live settings of next into dst, a struct at path. What dst
// shares with the configuration that it was copied from is copied first.
func merge(dst, next reflect.Value, path, schema string, a, b *Config) {
	t := dst.Type()
	for i := 0; i < t.NumField(); i++ {
		key := tagOf(t.Field(i))
		if key == "" {
			continue
		}
		d, n, p, sch := dst.Field(i), next.Field(i), join(path, key), join(schema, key)
		switch {
		case option(sch) != nil:
			if isLive(p, a, b) {
				d.Set(n)
			}
		case d.Kind() == reflect.Struct:
			merge(d, n, p, sch, a, b)
		case d.Kind() == reflect.Pointer && d.Type().Elem().Kind() == reflect.Struct:
			if liveUnder(sch) {
				d.Set(n) // an objective is live as a whole, also when it is new or gone
			}
		case d.Kind() == reflect.Slice && d.Type().Elem().Kind() == reflect.Struct:
			list := reflect.MakeSlice(d.Type(), d.Len(), d.Len())
			reflect.Copy(list, d)
			d.Set(list)
			for j := 0; j < list.Len(); j++ {
				name := list.Index(j).FieldByName("Name")
				if !name.IsValid() {
					continue
				}
				for k := 0; k < n.Len(); k++ {
					if n.Index(k).FieldByName("Name").String() == name.String() {
						merge(list.Index(j), n.Index(k), p+"["+name.String()+"]", sch+"[]", a, b)
					}
				}
			}
		}
	}
}

// liveUnder tells whether all settings below a schema path are live.
func liveUnder(schema string) bool {
	any, all := false, true
	for i := range Options {
		if strings.HasPrefix(Options[i].Path, schema+".") {
			any, all = true, all && Options[i].Live
		}
	}
	return any && all
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
