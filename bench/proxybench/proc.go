//go:build linux

package main

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// clockTicks is USER_HZ, which Linux fixes at 100 for user space on all the
// platforms that Go runs on.
const clockTicks = 100

// cpuOf sums user and system time of processes, seconds. The kernel scales the
// sum to the scheduler's own count, so it is exact to one tick (10 ms).
func cpuOf(pids []int) float64 {
	total := 0.0
	for _, pid := range pids {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue
		}
		f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
		if len(f) < 13 {
			continue
		}
		for _, i := range []int{11, 12} { // utime, stime: fields 14 and 15 of the page, of which two are cut off
			n, _ := strconv.ParseFloat(f[i], 64)
			total += n / clockTicks
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
