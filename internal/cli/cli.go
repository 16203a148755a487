// Package cli is how all subcommands read their flags.
package cli

import (
	"errors"
	"flag"
	"fmt"
)

// Parse reads the flags of the subcommand that fs is named after, which takes
// n arguments beside them; code >= 0 means that the command ends with it.
func Parse(fs *flag.FlagSet, args []string, n int) (code int) {
	switch err := fs.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return 2
	case fs.NArg() > n:
		fmt.Fprintf(fs.Output(), "penstock %s: unexpected argument %q; see penstock %s --help\n", fs.Name(), fs.Arg(n), fs.Name())
		return 2
	case fs.NArg() < n:
		fs.Usage()
		return 2
	}
	return -1
}
