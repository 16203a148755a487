// Command penstock is a work-aware load-balancing router for LLM inference
// replicas. This package holds wiring and subcommands only.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/penstock/penstock/bench"
	"github.com/penstock/penstock/drill"
	"github.com/penstock/penstock/internal/cli"
)

// version is set by the linker (-X main.version=...); "" = as the build says.
var version string

// command is one subcommand. run returns the exit status: 0 good, 1 failed, 2
// wrong usage.
type command struct {
	name, summary string
	run           func(ctx context.Context, args []string, stdout, stderr io.Writer) int
}

// commands are shown by --help in this order.
func commands() []command {
	return []command{
		{"serve", "run the router", serve},
		{"check", "check a configuration file and tell everything that is wrong", check},
		{"peers", "which other routers a running router knows", showPeers},
		{"drill", "failure drills on a real router process; see penstock drill list", drill.Main},
		{"demo", "the router, three emulated replicas and light traffic, all on the loopback", demo},
		{"bench", "emulated replica, load, simulator and comparisons; see penstock bench", func(_ context.Context, args []string, out, err io.Writer) int { return bench.Main(args, out, err) }},
		{"validate-fallbacks", "try every fallback tier and record which ones passed", validateFallbacks},
		{"version", "version, Go version, policies and profiles", showVersion},
		{"docs", "write the generated pages of docs/", docs},
	}
}

func main() {
	os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	if len(args) == 0 {
		usage(stderr)
		return 2
	}
	switch args[0] {
	case "-h", "-help", "--help", "help":
		usage(stdout)
		return 0
	case "-v", "-version", "--version":
		return showVersion(ctx, nil, stdout, stderr)
	}
	var names []string
	for _, c := range commands() {
		if c.name == args[0] {
			return c.run(ctx, args[1:], stdout, stderr)
		}
		names = append(names, c.name)
	}
	fmt.Fprintf(stderr, "penstock: unknown command %q; there are: %s\n", args[0], strings.Join(names, ", "))
	return 2
}

func usage(w io.Writer) {
	fmt.Fprint(w, `penstock is a work-aware load-balancing router for LLM inference replicas (vLLM first).

usage: penstock COMMAND [flags]

`)
	for _, c := range commands() {
		fmt.Fprintf(w, "  %-19s %s\n", c.name, c.summary)
	}
	fmt.Fprint(w, `
Examples:
  penstock serve --replica http://10.0.0.1:8000 --replica http://10.0.0.2:8000
  penstock check penstock.yaml && penstock serve --config penstock.yaml
  penstock COMMAND --help
`)
}

// versionText is the version of this build.
func versionText() string {
	if version != "" {
		return version
	}
	if bi, ok := debug.ReadBuildInfo(); ok {
		if v := bi.Main.Version; v != "" && v != "(devel)" {
			return v
		}
		for _, s := range bi.Settings {
			if s.Key == "vcs.revision" && len(s.Value) >= 12 {
				return "tip-" + s.Value[:12]
			}
		}
	}
	return "tip"
}

func showVersion(_ context.Context, args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("version", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.Usage = func() {
		fmt.Fprint(stderr, "usage: penstock version\n\nTells the version, and which policies and profiles this build has.\n")
	}
	if code := cli.Parse(fs, args, 0); code >= 0 {
		return code
	}
	fmt.Fprintf(stdout, "penstock %s\n%s %s/%s\npolicies: %s\nprofiles: %s\n", versionText(), runtime.Version(), runtime.GOOS, runtime.GOARCH,
		strings.Join(policyNames(), ", "), strings.Join(profileNames(), ", "))
	return 0
}
