package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/signal"
	"sort"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/penstock/penstock/bench/model"
	"github.com/penstock/penstock/bench/replica"
	"github.com/penstock/penstock/config"
	"github.com/penstock/penstock/internal/cli"
)

// demoModel is the model that the demo's replicas serve.
const demoModel = "demo-8b"

// demo is `penstock demo` and `make run`: emulated replicas, the router as in
// production and light traffic, in one process on the loopback.
func demo(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	var o demoOptions
	fs := flag.NewFlagSet("demo", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.IntVar(&o.replicas, "replicas", 3, "emulated replicas")
	fs.StringVar(&o.profile, "profile", "l40s-8b", "hardware that they emulate: "+strings.Join(model.Names(), ", "))
	fs.Float64Var(&o.rate, "rate", 3, "requests per second of the light traffic, 0 = none")
	fs.StringVar(&o.policy, "policy", "", "policy of the pool")
	fs.StringVar(&o.listen, "listen", "", "address of the API (default 127.0.0.1:8080, or a free port when that is taken)")
	fs.StringVar(&o.admin, "admin", "", "address of console and metrics (default 127.0.0.1:9090, or a free port when that is taken)")
	fs.BoolVar(&o.verbose, "v", false, "show the router's log, a line for each request")
	fs.Usage = func() {
		fmt.Fprint(stderr, "usage: penstock demo [flags]\n\nThe router, emulated vLLM replicas and light traffic, all on the loopback. Ctrl-C ends all of it.\n\n")
		fs.PrintDefaults()
	}
	if code := cli.Parse(fs, args, 0); code >= 0 {
		return code
	}
	if o.replicas < 1 || o.replicas > 64 {
		fmt.Fprintf(stderr, "penstock demo: --replicas: %d is not from 1 to 64\n", o.replicas)
		return 2
	}
	if err := o.run(ctx, stdout); err != nil {
		fmt.Fprintln(stderr, "penstock demo:", err)
		return 1
	}
	return 0
}

type demoOptions struct {
	replicas              int
	profile, policy       string
	rate                  float64
	listen, admin         string
	verbose               bool
	listenNote, adminNote string
}

func (o *demoOptions) run(ctx context.Context, stdout io.Writer) error {
	prof, ok := model.ByName(o.profile)
	if !ok {
		return fmt.Errorf("--profile: %q is unknown; known: %s", o.profile, strings.Join(model.Names(), ", "))
	}
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGTERM, os.Interrupt)
	defer signal.Stop(signals)

	src := config.Source{Policies: policyNames(), Profiles: profileNames(), Policy: o.policy, ModelAliases: []config.Alias{{Name: "chat", Model: demoModel}}}
	for range o.replicas {
		s, err := replica.Start(replica.Options{Model: demoModel, Profile: &prof})
		if err != nil {
			return err
		}
		defer s.Close()
		src.Replicas = append(src.Replicas, s.URL())
	}
	o.listen, o.listenNote = freeOr(o.listen, "127.0.0.1:8080", "listen")
	o.admin, o.adminNote = freeOr(o.admin, "127.0.0.1:9090", "admin")
	level := "warn"
	if o.verbose {
		level = "info"
	}
	src.Set = append(src.Set, []config.Setting{{Flag: "--listen", Path: "listen", Value: o.listen}, {Flag: "--admin", Path: "admin", Value: o.admin},
		{Path: "log.level", Value: level}, {Path: "log.format", Value: "console"}, {Path: "forward.show_replica", Value: "true"},
		{Path: "timeouts.drain_delay", Value: "0s"}, {Path: "timeouts.drain_timeout", Value: demoDrain.String()}}...)
	cfg, err := load(src)
	if err != nil {
		return err
	}
	logs, err := newLoggers(cfg.Log)
	if err != nil {
		return err
	}
	a, err := newApp(src, cfg, logs)
	if err != nil {
		return err
	}
	if err := a.listen(); err != nil {
		a.close()
		return err
	}
	if err := a.start(); err != nil {
		a.shutdown(0)
		return err
	}
	o.tell(stdout, a, src.Replicas)
	tctx, stop := context.WithCancel(ctx)
	t := &traffic{url: baseURL("http", a.public.Addr()), rate: o.rate, log: logs.log, first: map[string]int{}}
	var wg sync.WaitGroup
	if o.rate > 0 {
		wg.Go(func() { t.run(tctx) })
		wg.Go(func() { t.report(tctx, stdout) })
	}
	one := make(chan os.Signal, 4)
	wg.Go(func() { demoEnd(ctx, a, signals, one, stop, stdout) })
	code := a.run(ctx, one)
	stop()
	wg.Wait()
	if code != 0 {
		return errors.New("a listener failed")
	}
	return nil
}

// demoDrain is how long requests that others sent to the demo are answered yet
// when it ends.
const demoDrain = 3 * time.Second

// demoEnd passes signals on to a's run. The own traffic is stopped first, so
// that nothing of it is in the drain.
func demoEnd(ctx context.Context, a *app, signals <-chan os.Signal, to chan<- os.Signal, stopTraffic func(), stdout io.Writer) {
	select {
	case s := <-signals:
		fmt.Fprintf(stdout, "\nending; what you have sent is answered for %s more at most, Ctrl-C again ends now\n", demoDrain)
		stopTraffic()
		to <- s
	case <-ctx.Done():
		return
	case <-a.ended:
		return
	}
	for {
		select {
		case s := <-signals:
			select {
			case to <- s:
			default: // nobody looks at a fifth one
			}
		case <-a.ended:
			return
		}
	}
}

// freeOr returns want, or def when want is not given, or a free port when
// somebody else has def; note says so.
func freeOr(want, def, flagName string) (addr, note string) {
	if want != "" {
		return want, ""
	}
	ln, err := net.Listen("tcp", def)
	if err == nil {
		ln.Close()
		return def, ""
	}
	return "127.0.0.1:0", fmt.Sprintf("  (%s is taken; --%s chooses)", def, flagName)
}

func (o *demoOptions) tell(w io.Writer, a *app, replicas []string) {
	api, admin := baseURL("http", a.public.Addr()), baseURL("http", a.adminLn.Addr())
	fmt.Fprintf(w, `
  API       %s%s
  Console   %s%s
  Metrics   %s/metrics
  Replicas  %s
            emulated vLLM, %s

Paste this into another terminal:

  curl -N %s/v1/chat/completions -H 'Content-Type: application/json' \
    -d '{"model":"%s","stream":true,"max_tokens":48,"messages":[{"role":"user","content":"Say hello to the penstock"}]}'

Ctrl-C ends all of it.

`, api, o.listenNote, admin, o.adminNote, admin, strings.Join(replicas, " "), o.profile, api, demoModel)
}

// traffic is the demo's load: conversations of a few families that share
// their first words, as real ones share a system prompt.
type traffic struct {
	url  string
	rate float64
	log  *zap.Logger

	mu     sync.Mutex
	sent   int
	good   int
	bad    int
	shed   int
	ttft   []float64
	first  map[string]int // answers by replica
	reason string
}

func (t *traffic) run(ctx context.Context) {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64, Proxy: nil}}
	defer client.CloseIdleConnections()
	var wg sync.WaitGroup
	defer wg.Wait()
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Duration(rand.ExpFloat64() / t.rate * float64(time.Second))):
		}
		wg.Go(func() { t.one(ctx, client, i) })
	}
}

func (t *traffic) one(ctx context.Context, client *http.Client, i int) {
	family := i % 4
	system := strings.Repeat(fmt.Sprintf("You are assistant number %d and answer in short sentences. ", family), 20)
	body, err := json.Marshal(map[string]any{"model": demoModel, "stream": true, "max_tokens": 20 + rand.IntN(100),
		"messages": []map[string]string{{"role": "system", "content": system}, {"role": "user", "content": fmt.Sprintf("Question %d of the light traffic", i)}}})
	if err != nil {
		panic("BUG: " + err.Error())
	}
	began := time.Now()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, t.url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		t.end(0, "", "failed", err.Error())
		return
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Sandbox-ID", fmt.Sprintf("demo-%d", family))
	resp, err := client.Do(req)
	if err != nil {
		if ctx.Err() == nil {
			t.end(0, "", "failed", err.Error())
		}
		return
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		kind := "failed"
		if resp.StatusCode == http.StatusTooManyRequests || resp.StatusCode == http.StatusServiceUnavailable {
			kind = "shed"
		}
		t.end(0, "", kind, resp.Status)
		return
	}
	ttft, done := 0.0, false
	for sc := bufio.NewScanner(resp.Body); sc.Scan(); {
		line := sc.Text()
		if ttft == 0 && strings.Contains(line, `"content":"`) && !strings.Contains(line, `"content":""`) {
			ttft = time.Since(began).Seconds()
		}
		done = done || line == "data: [DONE]"
	}
	switch {
	case done:
		t.end(ttft, resp.Header.Get("X-Penstock-Replica"), "good", "")
	case ctx.Err() == nil:
		t.end(0, "", "failed", "a stream ended early")
	}
}

func (t *traffic) end(ttft float64, rep, kind, reason string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sent++
	switch kind {
	case "good":
		t.good++
		t.ttft = append(t.ttft, ttft)
		t.first[rep]++
	case "shed":
		t.shed++
	default:
		t.bad++
	}
	if reason != "" {
		t.reason = reason
	}
}

// report prints a line of what the traffic saw, every five seconds.
func (t *traffic) report(ctx context.Context, w io.Writer) {
	tick := time.NewTicker(5 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		t.mu.Lock()
		sort.Float64s(t.ttft)
		var median, p95 float64
		if n := len(t.ttft); n > 0 {
			median, p95 = t.ttft[n/2], t.ttft[n*95/100]
		}
		var by []string
		for _, name := range sortedNames(t.first) {
			by = append(by, fmt.Sprintf("%s %d", name, t.first[name]))
		}
		line := fmt.Sprintf("%s  traffic: %d answered, %d shed, %d failed; TTFT p50 %.0f ms, p95 %.0f ms; %s", time.Now().Format("15:04:05"),
			t.good, t.shed, t.bad, median*1e3, p95*1e3, strings.Join(by, ", "))
		if t.reason != "" {
			line += "; last refusal: " + t.reason
		}
		t.sent, t.good, t.shed, t.bad, t.ttft, t.reason = 0, 0, 0, 0, t.ttft[:0], ""
		clear(t.first)
		t.mu.Unlock()
		fmt.Fprintln(w, line)
	}
}

func sortedNames(m map[string]int) []string {
	names := make([]string, 0, len(m))
	for k := range m {
		names = append(names, k)
	}
	sort.Strings(names)
	return names
}
