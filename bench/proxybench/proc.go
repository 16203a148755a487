//go:build linux

package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// cpuOf sums the time that processes had on a processor, seconds. The
// scheduler's own count by thread is exact; the process's times are rounded to
// 10 ms, which is 4 % of what a product uses for 400 prompts of 100 KB.
func cpuOf(pids []int) float64 {
	total := 0.0
	for _, pid := range pids {
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
		for _, name := range threads {
			b, err := os.ReadFile(name)
			if f := bytes.Fields(b); err == nil && len(f) > 0 {
				ns, _ := strconv.ParseFloat(string(f[0]), 64)
				total += ns / 1e9
			}
		}
	}
	return total
}

// rssOf sums the resident memory of processes, bytes.
func rssOf(pids []int) int {
	total := 0
	for _, pid := range pids {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			continue
		}
		for _, line := range strings.Split(string(b), "\n") {
			if v, ok := strings.CutPrefix(line, "VmRSS:"); ok {
				n, _ := strconv.Atoi(strings.Fields(v)[0])
				total += n << 10
			}
		}
	}
	return total
}

// family lists a process and its children, which a master process may have.
func family(pid int) []int {
	out := []int{pid}
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	for _, f := range strings.Fields(string(b)) {
		if n, err := strconv.Atoi(f); err == nil {
			out = append(out, family(n)...)
		}
	}
	return out
}
