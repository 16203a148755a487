//go:build mutant

// Package mutant lets a test-only build (go build -tags mutant) put a known
// fault back into the router, so that a drill is shown to catch it.
package mutant

import "os"

// Built tells whether this binary carries the faults.
const Built = true

var name = os.Getenv("PENSTOCK_MUTANT")

// On tells whether the named fault is switched on (PENSTOCK_MUTANT=NAME).
func On(n string) bool { return n == name }
