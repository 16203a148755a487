package load

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/penstock/penstock/bench/workload"
	"github.com/penstock/penstock/internal/cli"
)

// Main is `penstock bench load`. The result is the exit status: 0 when every
// request was answered or refused in order, 1 when not, 2 for wrong usage.
func Main(args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("bench load", flag.ContinueOnError)
	fs.SetOutput(stderr)
	var o Options
	s := &o.Spec
	fs.StringVar(&o.URL, "url", "http://127.0.0.1:8080", "base URL of the server")
	fs.StringVar(&o.Model, "model", "", "model to ask for (default: the first one that the server lists)")
	fs.StringVar(&o.API, "api", "chat", "chat or completions")
	fs.BoolVar(&o.Whole, "no-stream", false, "ask for whole answers")
	fs.StringVar(&o.APIKey, "api-key", "", "bearer token")
	fs.Func("header", "header of each request, as 'X-Request-Class: background' (may be given several times)", o.addHeader)
	arrival := fs.String("arrival", "poisson", "poisson, constant, gamma or ramp")
	fs.Float64Var(&s.Rate, "rate", 10, "requests per second")
	fs.Float64Var(&s.RateEnd, "rate-end", 0, "rate at the end of a ramp")
	fs.Float64Var(&s.CV, "cv", 1, "burstiness of gamma arrivals (coefficient of variation)")
	duration := fs.Duration("duration", 30*time.Second, "how long to send")
	fs.DurationVar(&o.Warmup, "warmup", 0, "first part of it that is not counted")
	fs.IntVar(&s.Max, "requests", 0, "most requests (0 = by rate and duration)")
	fs.IntVar(&o.Concurrency, "concurrency", 0, "closed loop: so many at a time (0 = open loop)")
	fs.Float64Var(&s.Prompt.Mean, "prompt", 300, "mean own prompt tokens")
	fs.Float64Var(&s.Prompt.CV, "prompt-cv", 0.5, "their coefficient of variation")
	fs.Float64Var(&s.Out.Mean, "out", 100, "mean output tokens")
	fs.Float64Var(&s.Out.CV, "out-cv", 0.5, "their coefficient of variation")
	fs.IntVar(&s.Families, "families", 0, "shared prefixes (0 = none)")
	fs.IntVar(&s.PrefixTokens, "prefix", 1000, "tokens of a shared prefix")
	fs.Float64Var(&s.Zipf, "zipf", 0, "skew of the prefixes' popularity")
	fs.IntVar(&s.Turns, "turns", 1, "turns of a conversation")
	fs.Float64Var(&s.Gap, "gap", 10, "mean seconds between two turns")
	trace := fs.String("trace", "", "replay a trace file (Mooncake .jsonl or Azure .csv) for --duration")
	speed := fs.Float64("trace-speed", 1, "replay so many times as fast")
	jitter := fs.Float64("trace-jitter", 0, "spread arrivals over so many seconds (Mooncake: 3)")
	fs.Uint64Var(&s.Seed, "seed", 1, "seed of the stream")
	fs.DurationVar(&o.Timeout, "timeout", 120*time.Second, "of one request")
	fs.IntVar(&o.Retries, "retries", 0, "send a 429 or 503 again after its Retry-After, so often")
	fs.DurationVar(&o.TTFT, "ttft", 0, "objective for goodput")
	fs.DurationVar(&o.TTFTPer1K, "ttft-per-1k", 0, "added to --ttft for each 1,000 prompt tokens, as objective.ttft_per_1k")
	fs.DurationVar(&o.TPOT, "tpot", 0, "objective for goodput")
	fs.BoolVar(&o.AllowRemote, "allow-remote", false, "allow a target that is not on loopback")
	out := fs.String("json", "", "write the report to this file (- = standard output)")
	quiet := fs.Bool("quiet", false, "no progress")
	if code := cli.Parse(fs, args, 0); code >= 0 {
		return code
	}
	s.Arrival, s.Duration = workload.Arrival(*arrival), duration.Seconds()
	if *trace != "" {
		whole, err := workload.ReadTrace(*trace, workload.TraceOptions{})
		if err != nil {
			fmt.Fprintln(stderr, "bench load: --trace:", err)
			return 2
		}
		o.Requests = workload.Cut(whole, workload.TraceOptions{Speed: *speed, Duration: duration.Seconds() * *speed, Jitter: *jitter, Max: s.Max, Seed: s.Seed})
		if n := len(o.Requests); n < len(whole) {
			fmt.Fprintf(stderr, "%d of the trace's %d requests are sent (--duration %v, --requests %d)\n", n, len(whole), *duration, s.Max)
		}
	}
	if !*quiet {
		o.OnProgress = func(d time.Duration, sent, ended int) {
			fmt.Fprintf(stderr, "%4.0f s  sent %d  ended %d  out %d\n", d.Seconds(), sent, ended, sent-ended)
		}
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer cancel()
	rep, err := Run(ctx, o)
	if err != nil {
		fmt.Fprintln(stderr, "bench load:", err)
		return 2
	}
	rep.Table(stdout)
	if *out != "" {
		b, _ := json.MarshalIndent(rep, "", "  ")
		if *out == "-" {
			fmt.Fprintln(stdout, string(b))
		} else if err := os.WriteFile(*out, append(b, '\n'), 0o644); err != nil {
			fmt.Fprintln(stderr, "bench load: --json:", err)
			return 1
		}
	}
	if rep.OK+rep.Refused < rep.Offered {
		return 1
	}
	return 0
}
