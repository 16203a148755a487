//go:build linux

// Command proxybench measures what a proxy in front of vLLM costs, with
// several products side by side on the same machine in the same run: nginx and
// haproxy as the floor, vllm-router as the peer, and Penstock with its
// work-aware policy on.
//
// The proxy has core 0 to itself; a very cheap replica and the load share core
// 1, so that neither takes time from what is measured. Rounds are interleaved
// (every product once per round) because a shared machine drifts; the table
// gives medians over rounds and their spread.
//
//	proxybench run     [-rounds 5] [-products a,b] [-penstock bin/penstock] [-doc docs/performance.md] [-json out.json]
//	proxybench replica -ports 7101,7102,7103
//	proxybench load    -url 127.0.0.1:8080 -mode closed|rate|streams ...
package main

import (
	"fmt"
	"os"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: proxybench run|replica|load [flags]")
		os.Exit(2)
	}
	var err error
	switch os.Args[1] {
	case "run":
		err = runCommand(os.Args[2:])
	case "replica":
		err = replicaCommand(os.Args[2:])
	case "load":
		err = loadCommand(os.Args[2:])
	default:
		err = fmt.Errorf("unknown command %q", os.Args[1])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "proxybench:", err)
		os.Exit(1)
	}
}
