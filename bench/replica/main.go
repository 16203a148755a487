package replica

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/penstock/penstock/bench/model"
	"github.com/penstock/penstock/internal/cli"
)

// Main is `penstock bench replica`: it serves until SIGINT or SIGTERM, which
// it answers as vLLM does. The result is the process's exit status.
func Main(args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("bench replica", flag.ContinueOnError)
	fs.SetOutput(stderr)
	var o Options
	fs.StringVar(&o.Listen, "listen", "127.0.0.1:9001", "loopback address; with --count, the first of consecutive ports")
	count := fs.Int("count", 1, "how many replicas to run, on consecutive ports")
	profile := fs.String("profile", "h100-8b", "hardware profile: "+strings.Join(model.Names(), ", "))
	fs.StringVar(&o.Model, "model", "tiny", "served model name")
	alias := fs.String("alias", "", "further model names, separated by commas")
	fs.Float64Var(&o.Speed, "speed", 1, "how many times as fast as the profile")
	fs.IntVar(&o.MaxModelLen, "max-model-len", 0, "longest prompt + output, tokens (0 = the profile's)")
	fs.StringVar(&o.APIKey, "api-key", "", "ask for this key under /v1")
	fs.IntVar(&o.MaxQueued, "max-num-queued-reqs", 0, "answer 503 with so many waiting (0 = no limit)")
	fs.IntVar(&o.DefaultOut, "default-out", 64, "output tokens of a request without a limit")
	fs.BoolVar(&o.Pooling, "pooling", false, "serve embeddings, rerank and score")
	fs.BoolVar(&o.Dev, "dev", false, "serve the developer paths (/sleep ...)")
	kv := fs.Int("kv-tokens", 0, "KV cache size, tokens (0 = the profile's)")
	seqs := fs.Int("max-num-seqs", 0, "sequences at once (0 = the profile's)")
	timeout := fs.Duration("shutdown-timeout", 0, "on SIGTERM let running requests finish for so long (0 = abort them)")
	if code := cli.Parse(fs, args, 0); code >= 0 {
		return code
	}
	switch {
	case *count < 1:
		fmt.Fprintf(stderr, "bench replica: --count: %d is less than 1\n", *count)
		return 2
	case !(o.Speed > 0):
		fmt.Fprintf(stderr, "bench replica: --speed: %g is not over 0\n", o.Speed)
		return 2
	}
	p, ok := model.ByName(*profile)
	if !ok {
		fmt.Fprintf(stderr, "bench replica: --profile: unknown profile %q (known: %s)\n", *profile, strings.Join(model.Names(), ", "))
		return 2
	}
	if *kv > 0 {
		p.KVTokens = *kv
	}
	if *seqs > 0 {
		p.MaxSeqs = *seqs
	}
	o.Profile = &p
	if *alias != "" {
		o.Aliases = strings.Split(*alias, ",")
	}
	var all []*Server
	defer func() {
		for _, s := range all {
			_ = s.Close()
		}
	}()
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer cancel()
	for i := 0; i < *count; i++ {
		s, err := Start(o)
		if err != nil {
			fmt.Fprintf(stderr, "bench replica: --listen: %v\n", err)
			return 1
		}
		all = append(all, s)
		fmt.Fprintf(stdout, "%s model=%s profile=%s speed=%g\n", s.URL(), o.Model, p.Name, o.Speed)
		host, port, _ := net.SplitHostPort(s.Addr())
		n, _ := strconv.Atoi(port)
		o.Listen = net.JoinHostPort(host, strconv.Itoa(n+1))
	}
	<-ctx.Done()
	shutdown(all, *timeout)
	return 0
}

// shutdown ends as vLLM does on SIGTERM.
func shutdown(all []*Server, timeout time.Duration) {
	mode, until := Drain, time.Now().Add(timeout)
	if timeout <= 0 {
		mode, until = Abort, time.Now().Add(300*time.Millisecond)
	}
	for _, s := range all {
		_ = s.Fault(Fault{Mode: mode})
	}
	for time.Now().Before(until) {
		running := 0
		for _, s := range all {
			running += s.Counts().Running
		}
		if running == 0 && mode == Drain {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}
