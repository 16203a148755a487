//go:build unix

package main

import "syscall"

// openFiles is how many files the process may have open at a time; 0 = not
// known. Go has raised it to the hard limit at the start.
func openFiles() uint64 {
	var l syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l) != nil {
		return 0
	}
	return uint64(l.Cur) //nolint:unconvert // signed on some systems
}
