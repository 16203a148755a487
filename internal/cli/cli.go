// Package cli is how all subcommands read their flags.
package cli

import (
	"errors"
	"flag"
	"fmt"
)

// Any is for a subcommand that takes any number of arguments.
const Any = -1

// Parse reads the flags of the subcommand that fs is named after, which takes
// n arguments beside them; code >= 0 means that the command ends with it.
// Flags may stand before, between and behind the arguments, up to a "--".
func Parse(fs *flag.FlagSet, args []string, n int) (code int) {
	switch err := parse(fs, args); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return 2
	case n == Any:
		return -1
	case fs.NArg() > n:
		fmt.Fprintf(fs.Output(), "penstock %s: unexpected argument %q; see penstock %s --help\n", fs.Name(), fs.Arg(n), fs.Name())
		return 2
	case fs.NArg() < n:
		fs.Usage()
		return 2
	}
	return -1
}

// parse leaves the arguments alone in fs.Args. The flag package stops at the
// first of them, so it is called again behind each.
func parse(fs *flag.FlagSet, args []string) error {
	var plain []string
	for {
		if err := fs.Parse(args); err != nil {
			return err
		}
		if fs.NArg() == 0 {
			break
		}
		if read := len(args) - fs.NArg(); read > 0 && args[read-1] == "--" {
			plain = append(plain, fs.Args()...)
			break
		}
		plain, args = append(plain, fs.Arg(0)), fs.Args()[1:]
	}
	return fs.Parse(append([]string{"--"}, plain...))
}
