package config

import (
	"fmt"
	"reflect"
	"strings"
)

// Markdown is docs/configuration.md.
func Markdown() string {
	var b strings.Builder
	b.WriteString(`# Configuration

<!-- Generated from config/options.go by "make docs". Do not edit. -->

One YAML file (` + "`penstock serve --config FILE`" + `), checked strictly: an unknown or doubled key, a wrong type or a missing unit is an error
with file, line and key, and the nearest known name. ` + "`penstock check FILE`" + ` tells everything that is wrong, without starting anything.

- **Order of authority**: flag, then environment, then file, then default. Each setting that is not in a list has an environment variable
  (PENSTOCK_ and its path, as PENSTOCK_SCRAPE_INTERVAL) and a flag (` + "`--scrape.interval=1s`" + `); a list of texts is written there with commas.
- **Units** are written: durations 250ms, 5s, 10m, 24h; sizes 512KiB, 32MiB, 1GiB; shares 20% (or 0.2).
- **Environment in values**: ` + "`${NAME}`" + ` is replaced by the variable's value; a variable that is not set is an error. ` + "`$$`" + ` is one dollar sign.
- **Secrets**: a key with a ` + "`_file`" + ` sibling (api_key_file) is read from a file with one line. Secrets are never logged.
- **Relative paths** start at the folder of the configuration file.
- **Reload**: SIGHUP, or POST /admin/v1/reload. An invalid file changes nothing: the last good configuration stays, the error is logged and counted in
  ` + "`penstock_config_reloads_total{result=\"refused\"}`" + `. The column *reload* tells which settings it applies (yes); each other one that differs is named in the log, and
  waits for a restart. Requests under way are not disturbed; what is held goes by the new rules from then on. A pool or class that is new, gone or at another place,
  and ` + "`pools[].models`" + ` of a pool that stands in a route, need a restart; so does going to TLS or back.
- Settings marked *not yet* are refused by this version, never ignored.

## Example

` + "```yaml\n" + Example + "```\n")
	section := ""
	for _, o := range Options {
		top, _, _ := strings.Cut(strings.ReplaceAll(o.Path, "[]", ""), ".")
		if !strings.Contains(o.Path, ".") {
			if o.Pending {
				top = "Later"
			} else {
				top = "Listeners"
			}
		}
		if top != section {
			section = top
			fmt.Fprintf(&b, "\n## %s\n\n| setting | takes | default | reload | |\n|---|---|---|---|---|\n", section)
		}
		def := o.Default
		if def != "" {
			def = "`" + def + "`"
		}
		reload, mark := "restart", ""
		if o.Live {
			reload = "yes"
		}
		if o.Pending {
			reload, mark = "", " *not yet*"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s%s |\n", o.Path, takes(o.Path), def, reload, strings.ReplaceAll(o.Doc, "|", "\\|"), mark)
	}
	return b.String()
}

// takes says what the setting at a schema path takes.
func takes(path string) string {
	t := reflect.TypeOf(Config{})
	for _, key := range strings.Split(path, ".") {
		name, list := strings.CutSuffix(key, "[]")
		for t.Kind() == reflect.Pointer {
			t = t.Elem()
		}
		found := false
		if t.Kind() == reflect.Struct {
			for i := 0; i < t.NumField(); i++ {
				if tagOf(t.Field(i)) == name {
					t, found = t.Field(i).Type, true
					break
				}
			}
		}
		if !found {
			return ""
		}
		if list {
			t = t.Elem()
		}
	}
	return typeName(t)
}

// Example is a small, valid configuration.
const Example = `listen: ":8080"
admin: "127.0.0.1:9090"

pools:
  - name: llama-70b
    models: [meta-llama/Llama-3.3-70B-Instruct]   # asked from the replicas when left out
    aliases: [gpt-4o, chat]
    replicas:
      static: ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    labels: {region: eu-west, domain: rack-7}
    profile: h100-70b-tp4                         # learned when left out
    headroom: n-1
    objective: {ttft: 500ms, ttft_per_1k: 120ms, itl: 50ms}

classes:                                          # first is most important
  - {name: interactive, wait: 2s, deadline: 60s}
  - {name: standard, wait: 10s, deadline: 5m}
`
