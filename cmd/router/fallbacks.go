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
	"github.com/penstock/penstock/ladder"
	"github.com/penstock/penstock/telemetry"
)

// validateFallbacks runs the validation of every tier that is a smaller model
// and records when it passed.
func validateFallbacks(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("validate-fallbacks", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.Usage = func() {
		fmt.Fprint(stderr, "usage: penstock validate-fallbacks CONFIG\n\nTries every fallback tier that is a smaller model with its prompts, on one of its replicas, and records in\nstate_dir when it passed. A tier that did not pass within 24 h is not used, and penstock check refuses it.\n")
	}
	if code := parseFlags(fs, args, 1); code >= 0 {
		return code
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
	list := downgrades(cfg)
	file := ladder.RecordFile(cfg.StateDir)
	rec, err := ladder.LoadRecord(file)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(file), 0o700)
	}
	if err != nil {
		fmt.Fprintln(stderr, "penstock validate-fallbacks:", err)
		return 1
	}
	failed := 0
	for _, v := range list {
		passed, err := runValidation(ctx, cfg, v.Validation)
		if err != nil {
			failed++
			fmt.Fprintf(stdout, "FAILED  %s: %v\n", v.Key(), err)
			continue
		}
		rec[v.Key()] = passed
		if err := rec.Save(file); err != nil {
			fmt.Fprintln(stderr, "penstock validate-fallbacks:", err)
			return 1
		}
		fmt.Fprintf(stdout, "passed  %s: %.0f %% of its prompts\n", v.Key(), passed.Share*100)
	}
	fmt.Fprintf(stdout, "%d fallback tiers, %d failed\n", len(list), failed)
	if failed > 0 {
		return 1
	}
	return 0
}

// runValidation tries the pool's replicas until one can be asked.
func runValidation(ctx context.Context, cfg *config.Config, v *ladder.Validation) (ladder.Passed, error) {
	if v.Prompts == "" {
		return ladder.Passed{}, fmt.Errorf("declares no validate.prompts: a smaller model that nobody tried is not used")
	}
	for i := range cfg.Pools {
		p := &cfg.Pools[i]
		if p.Name != v.Pool {
			continue
		}
		var last error
		for _, url := range p.Replicas.Static {
			passed, err := v.Run(ctx, url, string(p.APIKey), time.Now())
			if err == nil {
				return passed, nil
			}
			last = fmt.Errorf("%s: %w", url, err)
		}
		if last == nil {
			last = fmt.Errorf("pool %s has no static replica to try", p.Name)
		}
		return ladder.Passed{}, last
	}
	return ladder.Passed{}, fmt.Errorf("there is no pool %q", v.Pool)
}

func closeTracer(t *telemetry.Tracer) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	t.Close(ctx)
}
