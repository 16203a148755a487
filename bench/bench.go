// Package bench holds the tools of capacity planning: an emulated replica, a
// load generator, a fleet simulator and the comparison of policies.
package bench

import (
	"fmt"
	"io"

	"github.com/penstock/penstock/bench/compare"
	"github.com/penstock/penstock/bench/load"
	"github.com/penstock/penstock/bench/replica"
)

// command is one verb of `penstock bench`.
type command struct {
	name, help string
	run        func(args []string, stdout, stderr io.Writer) int
}

var commands = []command{
	{"replica", "run emulated vLLM replicas", replica.Main},
	{"load", "drive a server and measure what its clients see", load.Main},
	{"sim", "simulate one scenario with one policy, in virtual time", compare.SimMain},
	{"compare", "simulate the scenario suite with all policies", compare.Main},
}

// Main runs `penstock bench VERB ...` and returns the exit status.
func Main(args []string, stdout, stderr io.Writer) int {
	if len(args) > 0 {
		for _, c := range commands {
			if c.name == args[0] {
				return c.run(args[1:], stdout, stderr)
			}
		}
	}
	if len(args) > 0 && (args[0] == "help" || args[0] == "-h" || args[0] == "--help") {
		usage(stdout)
		return 0
	}
	if len(args) > 0 {
		fmt.Fprintf(stderr, "bench: unknown verb %q\n", args[0])
	}
	usage(stderr)
	return 2
}

func usage(w io.Writer) {
	fmt.Fprintln(w, "usage: penstock bench VERB [flags]")
	for _, c := range commands {
		fmt.Fprintf(w, "  %-9s %s\n", c.name, c.help)
	}
}
