package main

import (
	"context"
	"fmt"
	"io"
)

func demo(_ context.Context, _ []string, _, stderr io.Writer) int {
	fmt.Fprintln(stderr, "penstock demo: the emulated replica is not there yet")
	return 1
}
