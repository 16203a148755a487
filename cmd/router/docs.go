package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/penstock/penstock/config"
	"github.com/penstock/penstock/drill"
	"github.com/penstock/penstock/internal/cli"
	"github.com/penstock/penstock/telemetry"
	"github.com/penstock/penstock/wire"
)

// pages are the files of docs/ that come from tables in the code.
func pages() map[string]string {
	return map[string]string{
		"configuration.md": config.Markdown(),
		"metrics.md":       metricsPage(),
		"errors.md":        errorsPage(),
		"failures.md":      failuresPage(),
	}
}

// docs writes the generated pages.
func docs(_ context.Context, args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("docs", flag.ContinueOnError)
	fs.SetOutput(stderr)
	dir := fs.String("dir", "docs", "`folder` to write to")
	if code := cli.Parse(fs, args, 0); code >= 0 {
		return code
	}
	for name, text := range pages() {
		if err := os.WriteFile(filepath.Join(*dir, name), []byte(text), 0o644); err != nil {
			fmt.Fprintln(stderr, "penstock docs:", err)
			return 1
		}
	}
	fmt.Fprintln(stdout, "wrote configuration.md, metrics.md, errors.md, failures.md in", *dir)
	return 0
}

func failuresPage() string {
	all, err := drill.All()
	if err != nil {
		panic("BUG: a shipped drill is not valid: " + err.Error())
	}
	var b strings.Builder
	drill.Failures(&b, all)
	return b.String()
}

func metricsPage() string {
	var b strings.Builder
	b.WriteString(`# Metrics

<!-- Generated from telemetry/defs.go by "make docs". Do not edit. -->

GET /metrics on the admin listener, Prometheus text format. A label with a closed set of values says so; replica is host:port. Beside these there are the
Go runtime's and the process's own (go_*, process_*).

| metric | type | labels | |
|---|---|---|---|
`)
	for _, d := range telemetry.Defs {
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", d.Name, d.Kind, strings.Join(d.Labels, ", "), strings.ReplaceAll(d.Help, "|", "\\|"))
	}
	b.WriteString(`
## What to look at

- **Are clients served?** ` + "`rate(penstock_requests_total{code=~\"5..\"}[5m])`" + `; sheds by reason in penstock_shed_total.
- **Is the answer in time?** ` + "`histogram_quantile(0.95, sum by (le) (rate(penstock_ttft_seconds_bucket[5m])))`" + `, penstock_slo_requests_total.
- **Is the fleet full?** penstock_held_requests, penstock_held_tokens; per replica penstock_replica_prefill_tokens and penstock_replica_kv_tokens.
- **Is one replica ill?** penstock_replica_state, penstock_replica_ejections_total by reason.
- **Is the model of a replica wrong?** penstock_ttft_observed_over_predicted_ratio far from 1.

deploy/alerts.yaml has rules for these.
`)
	return b.String()
}

func errorsPage() string {
	var b strings.Builder
	b.WriteString(`# Errors

<!-- Generated from wire/errors.go by "make docs". Do not edit. -->

Every answer of the router itself has the body ` + "`{\"error\":{\"message\":…,\"type\":…,\"param\":…,\"code\":…}}`" + `; on /v1/messages the Anthropic shape with the code beside its type.
A replica's own 4xx goes back as it is. Each 429 and 503 carries Retry-After (whole seconds) and retry-after-ms (exact); every error carries x-should-retry.
Where the column says *event*, the code comes inside a stream that already began: one ` + "`data:`" + ` event, no [DONE], then the end.

| code | status | type | x-should-retry | Retry-After | when |
|---|---|---|---|---|---|
`)
	for _, e := range wire.ErrorTable() {
		status := fmt.Sprint(e.Status)
		if e.EventOnly {
			status = "event"
		}
		after := ""
		if e.RetryAfter > 0 {
			after = fmt.Sprintf("%g s, or forecast", e.RetryAfter)
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %v | %s | %s |\n", e.Code, status, e.Type, e.Retry, after, strings.ReplaceAll(e.When, "|", "\\|"))
	}
	b.WriteString(`
"Or forecast": where the router can tell when room will be there (a held queue's drain, a tenant's next allowance), it says that instead, with ±20 % jitter
so that those who were shed do not return together.
`)
	return b.String()
}
