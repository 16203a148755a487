//go:build !mutant

// Package mutant lets a test-only build (go build -tags mutant) put a known
// fault back into the router, so that a drill is shown to catch it. In a
// normal build On is the constant false and the faults are compiled out.
package mutant

// Built tells whether this binary carries the faults.
const Built = false

// On tells whether the named fault is switched on.
func On(string) bool { return false }
