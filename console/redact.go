package console

import (
	"fmt"
	"net/url"
	"reflect"
	"regexp"
	"strings"
)

// secret is shown in place of what must not be.
const secret = "[secret]"

// A setting of plain text with such a name is not shown either, so that one
// secret with the wrong type does not get out. Paths to files with secrets are.
var secretName = regexp.MustCompile(`(?i)(^|_)(key|secret|password|passwd|token|credential)s?$`)

// Redacted turns a configuration into what may be shown as JSON: structs by
// their yaml names, values that have a String method by that (durations,
// sizes, secrets, which say "[secret]"), fields tagged "-" and unexported ones
// left out, user and password of URLs hidden.
func Redacted(v any) any { return redact(reflect.ValueOf(v), "") }

func redact(v reflect.Value, name string) any {
	if !v.IsValid() {
		return nil
	}
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		if v.IsNil() {
			return nil
		}
	case reflect.Map, reflect.Slice:
		if v.IsNil() {
			return nil
		}
	}
	if v.Kind() == reflect.String && v.Len() == 0 {
		return ""
	}
	if s, ok := stringer(v); ok {
		return text(s, "") // a url.URL would show its password
	}
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		return redact(v.Elem(), name)
	case reflect.Struct:
		out := map[string]any{}
		for i := range v.NumField() {
			f := v.Type().Field(i)
			key, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
			if !f.IsExported() || key == "-" {
				continue
			}
			if key == "" {
				key = strings.ToLower(f.Name)
			}
			out[key] = redact(v.Field(i), key)
		}
		return out
	case reflect.Map:
		out := map[string]any{}
		for _, k := range v.MapKeys() {
			key := fmt.Sprint(k.Interface())
			out[key] = redact(v.MapIndex(k), key)
		}
		return out
	case reflect.Slice, reflect.Array:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			return secret // keys, and nothing else, are bytes in a configuration
		}
		out := make([]any, v.Len())
		for i := range out {
			out[i] = redact(v.Index(i), name)
		}
		return out
	case reflect.String:
		return text(v.String(), name)
	case reflect.Float32, reflect.Float64:
		return num(v.Float())
	case reflect.Func, reflect.Chan, reflect.UnsafePointer:
		return nil
	}
	return v.Interface()
}

// stringer is the text of a value that knows how to show itself.
func stringer(v reflect.Value) (string, bool) {
	if !v.CanInterface() {
		return "", false
	}
	if s, ok := v.Interface().(fmt.Stringer); ok {
		return s.String(), true
	}
	if v.CanAddr() {
		if s, ok := v.Addr().Interface().(fmt.Stringer); ok {
			return s.String(), true
		}
	}
	return "", false
}

func text(s, name string) string {
	if s == "" {
		return s
	}
	if secretName.MatchString(name) {
		return secret
	}
	if strings.Contains(s, "@") && strings.Contains(s, "://") {
		u, err := url.Parse(s)
		if err != nil {
			return secret
		}
		if u.User != nil {
			u.User = nil
			return strings.Replace(u.String(), "://", "://"+secret+"@", 1)
		}
	}
	return s
}
