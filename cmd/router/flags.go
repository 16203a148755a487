package main

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/penstock/penstock/bench/model"
	"github.com/penstock/penstock/config"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/internal/cli"
	"github.com/penstock/penstock/scorer"
)

// shortcuts are flags for the settings that are wanted most; each setting
// that is not in a list also has a flag of its own path.
var shortcuts = []struct{ flag, path, help string }{
	{"listen", "listen", "`address` of the inference API (default :8080)"},
	{"admin", "admin", "`address` of metrics, console and admin API; off = none (default 127.0.0.1:9090)"},
	{"log-level", "log.level", "debug, info, warn or error (default info)"},
	{"log-format", "log.format", "json or console (default json)"},
}

// serveFlags are the flags of serve, read into a configuration source.
func serveFlags(stderr io.Writer, src *config.Source) *flag.FlagSet {
	fs := flag.NewFlagSet("serve", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.StringVar(&src.File, "config", os.Getenv("PENSTOCK_CONFIG"), "YAML `file`; also PENSTOCK_CONFIG")
	fs.Func("replica", "`URL` of a replica; repeat it (comma-separated works too)", func(s string) error {
		for _, u := range strings.Split(s, ",") {
			if u = strings.TrimSpace(u); u != "" {
				src.Replicas = append(src.Replicas, u)
			}
		}
		return nil
	})
	fs.Func("model-alias", "`ALIAS=MODEL`: clients may ask for ALIAS; repeat it", func(s string) error {
		alias, to, ok := strings.Cut(s, "=")
		if !ok || alias == "" || to == "" {
			return errors.New("write it as ALIAS=MODEL")
		}
		src.ModelAliases = append(src.ModelAliases, config.Alias{Name: alias, Model: to})
		return nil
	})
	fs.StringVar(&src.APIKeyFile, "api-key-file", "", "`file` with the key that the replicas ask for")
	fs.StringVar(&src.Policy, "policy", "", "`name` of the policy of all pools (default "+scorer.DefaultPolicy+"; see penstock version)")
	fs.StringVar(&src.Shadow, "shadow", "", "`name` of a policy that decides too, and does not act; see /admin/v1/pools")
	for _, s := range shortcuts {
		fs.Func(s.flag, s.help, func(v string) error {
			src.Set = append(src.Set, config.Setting{Flag: "--" + s.flag, Path: s.path, Value: v})
			return nil
		})
	}
	main := flag.NewFlagSet("", flag.ContinueOnError)
	fs.VisitAll(func(f *flag.Flag) { main.Var(f.Value, f.Name, f.Usage) })
	main.SetOutput(stderr)
	for _, o := range config.Options {
		if config.EnvName(o.Path) != "" && fs.Lookup(o.Path) == nil {
			fs.Func(o.Path, "", func(v string) error {
				src.Set = append(src.Set, config.Setting{Flag: "--" + o.Path, Path: o.Path, Value: v})
				return nil
			})
		}
	}
	fs.Usage = func() {
		fmt.Fprint(stderr, `usage: penstock serve [flags]

Runs the router. Without a file, --replica is enough; models are asked from the replicas, which need not be up yet.

  penstock serve --replica http://10.0.0.1:8000 --replica http://10.0.0.2:8000
  penstock serve --replica 10.0.0.1:8000 --listen :80 --model-alias chat=meta-llama/Llama-3.3-70B-Instruct
  penstock serve --config /etc/penstock/penstock.yaml --log-format console

Each setting that is not in a list has a flag of its own path (--scrape.interval=1s) and an environment variable
(PENSTOCK_SCRAPE_INTERVAL). A flag is stronger than the environment, that than the file. docs/configuration.md has all.
SIGHUP reads the file again; SIGTERM drains: /readyz says 503 at once, requests are served for timeouts.drain_delay
more, running answers get timeouts.drain_timeout; a second signal ends now.

`)
		main.PrintDefaults()
	}
	return fs
}

// parseServe reads the flags; code >= 0 means that the command ends with it.
func parseServe(args []string, stderr io.Writer, getenv func(string) string) (src config.Source, code int) {
	src.Policies, src.Profiles = policyNames(), profileNames()
	fs := serveFlags(stderr, &src)
	help := fs.Usage
	fs.Usage = func() {} // not after each mistake: it would push the message off the screen
	switch err := fs.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		help()
		return src, 0
	case err != nil:
		hint := "see penstock serve --help"
		if name, ok := strings.CutPrefix(err.Error(), "flag provided but not defined: -"); ok {
			var known []string
			fs.VisitAll(func(f *flag.Flag) { known = append(known, f.Name) })
			if near := config.Nearest(strings.TrimPrefix(name, "-"), known); near != "" {
				hint = "did you mean --" + near + "? " + hint
			}
		}
		fmt.Fprintln(stderr, "penstock serve: "+hint)
		return src, 2
	case fs.NArg() > 0:
		fmt.Fprintf(stderr, "penstock serve: unexpected argument %q (a replica is given as --replica URL)\n", fs.Arg(0))
		return src, 2
	}
	if len(src.Replicas) == 0 && src.File == "" {
		for _, u := range strings.Split(getenv("PENSTOCK_REPLICAS"), ",") {
			if u = strings.TrimSpace(u); u != "" {
				src.Replicas = append(src.Replicas, u)
			}
		}
	}
	return src, -1
}

// check is `penstock check CONFIG`.
func check(_ context.Context, args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("check", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.Usage = func() {
		fmt.Fprint(stderr, "usage: penstock check CONFIG\n\nChecks a configuration file, its environment and its secrets, and tells everything that is wrong, each with\nfile:line:key. Nothing is started. Exit status 0 when it is good.\n")
	}
	if code := cli.Parse(fs, args, 1); code >= 0 {
		return code
	}
	cfg, err := load(config.Source{File: fs.Arg(0), Policies: policyNames(), Profiles: profileNames()})
	if err != nil {
		fmt.Fprintln(stderr, err)
		return 1
	}
	bad, late := untested(cfg, time.Now())
	for _, w := range slices.Concat(cfg.Warnings, late) {
		fmt.Fprintln(stderr, "warning:", w)
	}
	if len(bad) > 0 {
		fmt.Fprintln(stderr, bad)
		return 1
	}
	n := 0
	for i := range cfg.Pools {
		n += len(cfg.Pools[i].Replicas.Static)
	}
	fmt.Fprintf(stdout, "%s: good (%d pools, %d static replicas, %d classes)\n", fs.Arg(0), len(cfg.Pools), n, len(cfg.Classes))
	return 0
}

// load reads a configuration, and tries what the wiring would do with it.
func load(src config.Source) (*config.Config, error) {
	cfg, err := config.Load(src)
	if err != nil {
		return nil, err
	}
	var errs config.Errors
	for i := range cfg.Pools {
		ac := poolConfig(cfg, &cfg.Pools[i])
		ac.Defaults()
		if err := ac.Validate(); err != nil {
			errs = append(errs, cfg.Problem(fmt.Sprintf("pools[%d]", i), err))
		}
		cfg.Warnings = append(cfg.Warnings, tooTight(cfg, i)...)
	}
	for i := range cfg.Routes {
		for j := range cfg.Routes[i].Tiers {
			if _, err := tierOptions(cfg, &cfg.Routes[i], j); err != nil {
				errs = append(errs, cfg.Problem(fmt.Sprintf("routes[%d].tiers[%d]", i, j), err))
			}
		}
	}
	if cfg.Peers != nil {
		o := peerOptions(cfg.Peers)
		for _, p := range o.Problems() {
			errs = append(errs, cfg.Problem(p.Key, errors.New(p.Msg)))
		}
	}
	if cfg.TLS.CertFile != "" {
		if _, err := tls.LoadX509KeyPair(cfg.TLS.CertFile, cfg.TLS.KeyFile); err != nil {
			errs = append(errs, cfg.Problem("tls.cert_file", fmt.Errorf("%s: %w", cfg.TLS.CertFile, err)))
		}
	}
	if errs != nil {
		return nil, errs
	}
	return cfg, nil
}

// tooTight warns of objectives itl that pool i's profile leaves no room for. A
// replica that has a request is given no other one which would miss the
// objective, so that fleet would serve one request at a time.
func tooTight(cfg *config.Config, i int) (warnings []string) {
	p := &cfg.Pools[i]
	prof := profileOf(p.Profile)
	if prof == nil {
		return nil // it is learned
	}
	warn := func(key string, itl time.Duration) {
		alone := prof.Base + prof.PerSeq
		const few, context, hand = 4, 1000, 0.95 // hand: the objective but for what admission keeps in hand at first
		why := ""
		switch {
		case itl <= 0:
		case itl.Seconds() < alone:
			why = "is under what each token of a single request takes"
		case itl.Seconds()*hand < prof.Base+few*(prof.PerSeq+context*prof.PerKV):
			why = "is hardly over what each token of a single request takes"
		}
		if why != "" {
			warnings = append(warnings, fmt.Sprintf("%s: %s %s by the profile (%.1f ms), so pool %s is given one request at a time a replica, or a few", key, itl, why, alone*1e3, p.Name))
		}
	}
	warn(fmt.Sprintf("pools[%d].objective.itl", i), p.Objective.ITL)
	for k := range cfg.Classes {
		if o := cfg.Classes[k].Objective; o != nil {
			warn(fmt.Sprintf("classes[%d].objective.itl", k), o.ITL)
		}
	}
	return warnings
}

func policyNames() []string { return scorer.Names() }

func profileNames() []string { return model.Names() }

// profileOf resolves a pool's profile; nil = generic, learned.
func profileOf(p *config.Profile) *fleet.Profile {
	if p == nil {
		return nil
	}
	base := fleet.Profile{Name: "own"}
	if m, ok := model.ByName(p.Base); ok {
		base = fleetProfile(&m)
	}
	out := p.Over(base)
	return &out
}

// fleetProfile puts the replica model's step law into the decision core's
// form. The law's dense part is a maximum of a weight-bound and a
// compute-bound line; the core's sum takes the weight-bound one as its base,
// which is exact for decode steps and a little high for full prefill steps.
func fleetProfile(m *model.Profile) fleet.Profile {
	return fleet.Profile{Name: m.Name, Base: m.A + m.Overhead, PerPrefill: m.PB, PerSeq: m.C, PerKV: m.D, PerAttn: 2 * m.PQ,
		KVTokens: m.KVTokens, MaxSeqs: m.MaxSeqs, MaxBatched: m.MaxBatched, BlockTokens: m.BlockTokens, MaxModelLen: m.MaxModelLen}
}
