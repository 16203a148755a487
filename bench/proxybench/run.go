//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// scenario is one measurement, of which each product gets one per round.
type scenario struct {
	name string
	args []string
	long bool // only in the last round and with -long
}

// scenarios are the columns of the table. window is how long each counts.
func scenarios(window time.Duration) []scenario {
	w := window.String()
	return []scenario{
		{name: "saturate", args: []string{"-mode", "closed", "-conns", "64", "-warm", "1s", "-for", w}},
		{name: "rate500", args: []string{"-mode", "rate", "-rate", "500", "-warm", "1s", "-for", w}},
		{name: "prompt100k", args: []string{"-mode", "rate", "-rate", "100", "-prompt", "100000", "-warm", "1s", "-for", w}},
		{name: "streams", args: []string{"-mode", "streams", "-conns", "200", "-tokens", "128", "-stagger", "1s", "-warm", "2s", "-for", w}},
		{name: "streams500", args: []string{"-mode", "streams", "-conns", "500", "-tokens", "10000", "-stagger", "1s", "-warm", "2s", "-for", "1s"}},
		{name: "streamsmany", long: true, args: []string{"-mode", "streams", "-conns", strconv.Itoa(manyStreams()), "-tokens", "10000", "-stagger", "6s", "-warm", "10s", "-for", "2s"}},
	}
}

// gaps: the many-streams scenarios use a slower replica, so that what is
// measured is memory and not the machine's limit.
func gapOf(s string) time.Duration {
	switch s {
	case "streams500":
		return 100 * time.Millisecond
	case "streamsmany":
		return 2 * time.Second
	}
	return 20 * time.Millisecond
}

// sample is one measurement of one product in one round.
type sample struct {
	Product  string     `json:"product"`
	Scenario string     `json:"scenario"`
	Round    int        `json:"round"`
	Result   loadResult `json:"result"`
	Err      string     `json:"error,omitempty"`
}

// bench holds a whole run.
type bench struct {
	self    string
	dir     string
	rounds  int
	window  time.Duration
	long    bool
	Samples []sample
	Names   []string          // in the table's order; "direct" first
	Version map[string]string // by product
	Notes   []string          // by product; what was skipped
}

func runCommand(args []string) error {
	fs := flag.NewFlagSet("run", flag.ExitOnError)
	b := &bench{Version: map[string]string{}}
	var t tools
	home, _ := os.UserHomeDir()
	fs.IntVar(&b.rounds, "rounds", 5, "rounds; each product is measured once in each")
	fs.DurationVar(&b.window, "window", 4*time.Second, "counted time of each measurement")
	fs.BoolVar(&b.long, "long", true, "10,000 streams too, once per product")
	only := fs.String("products", "", "only these, by name, comma-separated")
	scen := fs.String("scenarios", "", "only these, comma-separated")
	doc := fs.String("doc", "", "file whose part between the proxybench marks is rewritten")
	out := fs.String("json", "", "file for all samples")
	fs.StringVar(&t.penstock, "penstock", "bin/penstock", "the router")
	fs.StringVar(&t.nginx, "nginx", "/usr/sbin/nginx", "nginx")
	fs.StringVar(&t.haproxy, "haproxy", "/usr/sbin/haproxy", "haproxy")
	fs.StringVar(&t.vllmRouter, "vllm-router", filepath.Join(home, ".cache/penstock-bench/venv/bin/vllm-router"), "vllm-router, with pip beside it")
	_ = fs.Parse(args) // exits by itself
	if err := raiseFiles(); err != nil {
		return err
	}
	if abs, err := filepath.Abs(t.penstock); err == nil {
		t.penstock = abs
	}
	var err error
	if b.self, err = os.Executable(); err != nil {
		return fmt.Errorf("own path: %w", err)
	}
	if b.dir, err = os.MkdirTemp("", "proxybench-"); err != nil {
		return fmt.Errorf("temp dir: %w", err)
	}
	defer func() { _ = os.RemoveAll(b.dir) }()
	list := b.choose(products(t), *only)
	if err := b.all(list, *scen); err != nil {
		return err
	}
	return b.write(*doc, *out)
}

// choose keeps the products that are wanted and installed.
func (b *bench) choose(all []product, only string) []product {
	var list []product
	b.Names = []string{"direct"}
	for _, p := range all {
		if only != "" && !slices.Contains(strings.Split(only, ","), p.name) {
			continue
		}
		v, err := p.version()
		if err != nil {
			b.Notes = append(b.Notes, fmt.Sprintf("%s: skipped, not installed (%v)", p.name, err))
			fmt.Fprintln(os.Stderr, b.Notes[len(b.Notes)-1])
			continue
		}
		b.Version[p.name] = v
		b.Names = append(b.Names, p.name)
		b.Notes = append(b.Notes, fmt.Sprintf("%s (%s): %s", p.name, v, p.note))
		list = append(list, p)
	}
	return list
}

func (b *bench) all(list []product, only string) error {
	var wanted []scenario
	for _, s := range scenarios(b.window) {
		if only == "" || slices.Contains(strings.Split(only, ","), s.name) {
			wanted = append(wanted, s)
		}
	}
	for round := 1; round <= b.rounds; round++ {
		for _, s := range wanted {
			if s.long && (!b.long || round < b.rounds) {
				continue
			}
			if err := b.measure(round, s, list); err != nil {
				return err
			}
		}
	}
	return nil
}

// measure runs one scenario over all products, directly first; the start of
// the order moves with the round.
func (b *bench) measure(round int, s scenario, list []product) error {
	if !strings.HasPrefix(s.name, "streams") {
		rep, err := b.replica(s)
		if err != nil {
			return err
		}
		b.one(round, s, "direct", "127.0.0.1:7101", []int{rep.Process.Pid})
		stopChild(rep)
	}
	for i := range list {
		p := list[(i+round)%len(list)]
		rep, err := b.replica(s)
		if err != nil {
			return err
		}
		dir := filepath.Join(b.dir, fmt.Sprintf("%d-%s-%d", round, s.name, i))
		must(os.MkdirAll(dir, 0o700))
		r, err := launch(p, dir, 7200, []string{"127.0.0.1:7101", "127.0.0.1:7102", "127.0.0.1:7103"})
		if err != nil {
			b.Samples = append(b.Samples, sample{Product: p.name, Scenario: s.name, Round: round, Err: err.Error()})
			fmt.Fprintln(os.Stderr, err)
		} else {
			b.one(round, s, p.name, "127.0.0.1:7200", r.pids)
			r.stop()
		}
		stopChild(rep)
	}
	return nil
}

func (b *bench) replica(s scenario) (*exec.Cmd, error) {
	cmd := exec.Command("taskset", "-c", "1", b.self, "replica", "-gap", gapOf(s.name).String())
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("replica: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("replica: %w", err)
	}
	if _, err := out.Read(make([]byte, 16)); err != nil { // "ready"
		_ = cmd.Wait()
		return nil, fmt.Errorf("replica: %w", err)
	}
	return cmd, nil
}

func stopChild(cmd *exec.Cmd) {
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
}

// one runs the load once and records what it saw.
func (b *bench) one(round int, s scenario, name, addr string, pids []int) {
	var ids []string
	for _, p := range pids {
		ids = append(ids, strconv.Itoa(p))
	}
	args := append([]string{"-c", "1", b.self, "load", "-url", addr, "-pids", strings.Join(ids, ",")}, s.args...)
	cmd := exec.Command("taskset", args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	sm := sample{Product: name, Scenario: s.name, Round: round}
	out, err := cmd.Output()
	if err == nil {
		err = json.Unmarshal(out, &sm.Result)
	}
	if err != nil {
		sm.Err = fmt.Sprintf("%v %s", err, stderr.String())
	} else if sm.Result.Seconds < 0.5*b.window.Seconds() && !strings.HasPrefix(s.name, "streams") || sm.Result.Seconds <= 0 {
		sm.Err = "the load could not keep its times: the machine is busy with something else"
	} else if sm.Result.Errors > 0 {
		sm.Err = fmt.Sprintf("%d errors; %s", sm.Result.Errors, stderr.String())
	}
	b.Samples = append(b.Samples, sm)
	fmt.Fprintf(os.Stderr, "round %d %-12s %-24s %s\n", round, s.name, name, sm.line())
}

func (s sample) line() string {
	if s.Err != "" {
		return "FAILED " + s.Err
	}
	r := s.Result
	return fmt.Sprintf("%6.0f req/s, cpu %.2f s of %.2f, p50 %.3f ms, p99 %.3f ms, %d chunks, %d streams, rss %.0f MiB, load's own cpu %.2f",
		float64(r.Requests)/r.Seconds, r.CPU, r.Seconds, r.P50*1e3, r.P99*1e3, r.Chunks, r.Streams, float64(r.RSS)/(1<<20), r.OwnCPU)
}
