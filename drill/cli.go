package drill

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/penstock/penstock/internal/cli"
)

// Main runs `penstock drill ARGS` and returns the exit status.
func Main(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("drill", flag.ContinueOnError)
	fs.SetOutput(stderr)
	jsonFile := fs.String("json", "", "write the reports as JSON into this file")
	htmlFile := fs.String("html", "", "write the reports as one HTML page into this file")
	binary := fs.String("binary", "", "the router binary to drill (default: this program)")
	file := fs.String("file", "", "play a scenario file of your own instead of a shipped one")
	fs.Usage = func() {
		fmt.Fprint(stderr, "usage: penstock drill [flags] list | all | NAME...\n\nPlays failure scenarios on the loopback against a real router process and emulated replicas.\nExit status 0 only when every assertion held.\n\n")
		fs.PrintDefaults()
	}
	if code := cli.Parse(fs, args, cli.Any); code >= 0 {
		return code
	}
	list, err := selected(fs.Args(), *file)
	if err != nil {
		fmt.Fprintln(stderr, "penstock drill:", err)
		return 2
	}
	if fs.Arg(0) == "list" {
		for _, s := range list {
			fmt.Fprintf(stdout, "%-24s %s\n", s.Name, s.Title)
		}
		return 0
	}
	if len(list) == 0 {
		fs.Usage()
		return 2
	}
	// Ctrl-C ends the drill, its router and its folder, and reports what was played.
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	if *binary == "" {
		if *binary, err = os.Executable(); err != nil {
			fmt.Fprintln(stderr, "penstock drill:", err)
			return 2
		}
	}
	return playAll(ctx, list, *binary, *jsonFile, *htmlFile, stdout, stderr)
}

func selected(args []string, file string) ([]*Scenario, error) {
	if file != "" {
		if len(args) > 0 {
			return nil, fmt.Errorf("--file plays that file; leave %q out", args[0])
		}
		data, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		s, err := Parse(file, data)
		return []*Scenario{s}, err
	}
	if len(args) == 1 && (args[0] == "all" || args[0] == "list") {
		return All()
	}
	var list []*Scenario
	for _, n := range args {
		if n == "all" || n == "list" {
			return nil, fmt.Errorf("%s stands alone: it is every drill", n)
		}
		s, err := Find(n)
		if err != nil {
			return nil, err
		}
		list = append(list, s)
	}
	return list, nil
}

func playAll(ctx context.Context, list []*Scenario, binary, jsonFile, htmlFile string, stdout, stderr io.Writer) int {
	var reps []*Report
	failed := 0
	for _, s := range list {
		if ctx.Err() != nil {
			break
		}
		rep := Run(ctx, s, Options{Binary: binary})
		rep.Text(stdout)
		reps = append(reps, rep)
		if !rep.OK {
			failed++
		}
	}
	fmt.Fprintf(stdout, "%d drills, %d failed\n", len(reps), failed)
	write := func(file string, f func(io.Writer, []*Report) error) {
		if file == "" {
			return
		}
		w, err := os.Create(file)
		if err == nil {
			if err = f(w, reps); err == nil {
				err = w.Close()
			}
		}
		if err != nil {
			fmt.Fprintln(stderr, "penstock drill:", err)
			failed++
		}
	}
	write(jsonFile, JSON)
	write(htmlFile, HTML)
	if failed > 0 || len(reps) < len(list) {
		return 1
	}
	return 0
}
