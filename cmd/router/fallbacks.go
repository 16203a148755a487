package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/penstock/penstock/config"
	"github.com/penstock/penstock/internal/cli"
	"github.com/penstock/penstock/ladder"
)

// validateFallbacks runs the validation of every tier that is a smaller model
// and records what it has shown.
func validateFallbacks(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("validate-fallbacks", flag.ContinueOnError)
	fs.SetOutput(stderr)
	timeout := fs.Duration("timeout", time.Minute, "of one prompt; a replica that takes longer is left, and the next one is asked")
	due := fs.Bool("due", false, "only tiers that are out of use, or whose last pass is older than validate.every: for a timer that runs often")
	quiet := fs.Bool("quiet", false, "no progress")
	fs.Usage = func() {
		fmt.Fprint(stderr, `usage: penstock validate-fallbacks [flags] CONFIG

Tries every fallback tier that is a smaller model with its prompts, on one of its replicas, and records the result
in state_dir. A tier is used while its last result is a pass of the last 24 h; a fail takes it out of use at once,
in a running router too. Where no replica answers there is no result, and the last one stays as it was. penstock
check refuses a tier that may not be used. Exit status 0 when all passed. Nothing runs this by itself: use a timer,
with --due an hourly one.

The file of prompts (validate.prompts) has one JSON object a line: {"prompt": "2+2? Only the number.", "contains": "4"},
or "messages" (as in a chat request) in place of "prompt". An answer without the text of "contains" is a fail.

`)
		fs.PrintDefaults()
	}
	if code := cli.Parse(fs, args, 1); code >= 0 {
		return code
	}
	if *timeout <= 0 {
		fmt.Fprintf(stderr, "penstock validate-fallbacks: --timeout: %s is not over 0s\n", *timeout)
		return 2
	}
	cfg, err := load(config.Source{File: fs.Arg(0), Environ: os.Environ()})
	if err != nil {
		fmt.Fprintln(stderr, err)
		return 1
	}
	if cfg.StateDir == "" {
		fmt.Fprintln(stderr, "penstock validate-fallbacks: state_dir is not set: there is no place for the record")
		return 1
	}
	file := ladder.RecordFile(cfg.StateDir)
	rec, err := ladder.LoadRecord(file)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(file), 0o700)
	}
	if err != nil {
		fmt.Fprintln(stderr, "penstock validate-fallbacks:", err)
		return 1
	}
	if *quiet {
		stderr = io.Discard
	}
	r := fallbackRun{cfg: cfg, rec: rec, file: file, timeout: *timeout, stdout: stdout, progress: stderr}
	list := downgrades(cfg)
	for _, v := range list {
		if now := time.Now(); *due && !rec.Due(v.Validation, now) {
			r.young++
			fmt.Fprintf(stdout, "not due %s: it passed %s ago, and is tried every %s\n", v.Key(), now.Sub(rec[v.Key()].At).Round(time.Second), v.Every)
			continue
		}
		if err := r.try(ctx, v.Validation); err != nil {
			fmt.Fprintln(stdout, "penstock validate-fallbacks:", err)
			return 1
		}
	}
	fmt.Fprintf(stdout, "%d fallback tiers, %d failed, %d could not be tried", len(list), r.failed, r.untried)
	if *due {
		fmt.Fprintf(stdout, ", %d were not due", r.young)
	}
	fmt.Fprintln(stdout)
	if r.failed+r.untried > 0 {
		return 1
	}
	return 0
}

// fallbackRun is one run over the tiers, and what has become of them.
type fallbackRun struct {
	cfg                    *config.Config
	rec                    ladder.Record
	file                   string // where rec is
	timeout                time.Duration
	stdout, progress       io.Writer
	failed, untried, young int
}

// try validates one tier and records what it has shown; an error says that it
// cannot be recorded.
func (r *fallbackRun) try(ctx context.Context, v *ladder.Validation) error {
	res, err := runValidation(ctx, r.cfg, v, r.timeout, r.progress)
	if err != nil {
		r.untried++
		fmt.Fprintf(r.stdout, "UNTRIED %s: %v; %s\n", v.Key(), err, standing(r.rec, v))
		return nil
	}
	r.rec[v.Key()] = res
	if err := r.rec.Save(r.file); err != nil {
		return err
	}
	if res.Failed != "" {
		r.failed++
		fmt.Fprintf(r.stdout, "FAILED  %s: %s; it is not used until it passes\n", v.Key(), res.Failed)
		return nil
	}
	fmt.Fprintf(r.stdout, "passed  %s: %.0f %% of its prompts\n", v.Key(), res.Share*100)
	return nil
}

// standing tells what is in force of a tier that could not be tried.
func standing(rec ladder.Record, v *ladder.Validation) string {
	now := time.Now()
	if why := rec.Why(v, now); why != "" {
		return "it stays out of use: it " + why
	}
	return fmt.Sprintf("its last pass holds for %s more", (ladder.MaxValidationAge - now.Sub(rec[v.Key()].At)).Round(time.Minute))
}

// runValidation asks the pool's replicas until one answers. What that one
// answers is the result, good or bad: any of them may be used.
func runValidation(ctx context.Context, cfg *config.Config, v *ladder.Validation, timeout time.Duration, progress io.Writer) (ladder.Result, error) {
	if v.Prompts == "" {
		return ladder.Result{}, fmt.Errorf("declares no validate.prompts: a smaller model that nobody tried is not used")
	}
	if err := ladder.CheckPrompts(v.Prompts); err != nil { // no replica's fault
		return ladder.Result{}, fmt.Errorf("validate.prompts: %w", err)
	}
	for i := range cfg.Pools {
		p := &cfg.Pools[i]
		if p.Name != v.Pool {
			continue
		}
		var last error
		for _, url := range p.Replicas.Static {
			var sent time.Time
			res, err := v.Validate(ctx, ladder.Run{Replica: url, APIKey: string(p.APIKey), Timeout: timeout,
				Asking: func(n, of int) {
					sent = time.Now()
					fmt.Fprintf(progress, "%s at %s: prompt %d of %d ... ", v.Key(), url, n, of)
				},
				Answered: func(_, _ int, err error) {
					said := "good"
					if err != nil {
						said = err.Error()
					}
					fmt.Fprintf(progress, "%s (%.1f s)\n", said, time.Since(sent).Seconds())
				}})
			if err == nil {
				return res, nil
			}
			last = fmt.Errorf("%s: %w", url, err)
		}
		if last == nil {
			last = fmt.Errorf("pool %s has no static replica to try", p.Name)
		}
		return ladder.Result{}, last
	}
	return ladder.Result{}, fmt.Errorf("there is no pool %q", v.Pool)
}
