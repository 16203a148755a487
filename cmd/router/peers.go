package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/config"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/proxy"
	"github.com/penstock/penstock/ring"
)

// joinPeers makes this router one of several.
func (a *app) joinPeers() error {
	p := a.config().Peers
	if p == nil {
		return nil
	}
	n, err := ring.New(ring.Options{Name: p.Name, Bind: p.Bind, Advertise: p.Advertise, Join: p.Join, KeyFile: p.KeyFile, Allow: p.Allow,
		Interval: p.Interval, Bandwidth: p.Bandwidth, HoldShare: p.HoldShare,
		Snapshot: a.snapshot, OnPeers: a.heardPeers, Now: a.now, Log: a.log, Metrics: a.metrics})
	if err != nil {
		return err
	}
	a.peers.Store(n)
	return nil
}

// leavePeers tells the peers that this router's account is void. It is called
// when the last request has ended.
func (a *app) leavePeers() {
	if n := a.peers.Load(); n != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		if err := n.Leave(ctx); err != nil {
			a.log.Warn("leaving the peers", zap.Error(err))
		}
	}
}

// snapshot is what this router says of itself: its own account of each
// replica, with the health that it sees there.
func (a *app) snapshot(s *ring.Snapshot) {
	cfg := a.config()
	s.ConfigHash = a.hash.Load()
	for i := range cfg.Pools {
		name := cfg.Pools[i].Name
		a.proxy.WithCore(name, func(core proxy.Core, now float64) {
			for j := range core.View().Replicas {
				r := &core.View().Replicas[j]
				s.Replicas = append(s.Replicas, ring.Account{Name: r.Name, Load: r.Own, State: r.Health.State, Reason: r.Health.Reason, Since: r.Health.Since})
			}
			if b := a.budgets[name]; b != nil {
				requests, extra, _ := b.Totals(now)
				s.Budgets = append(s.Budgets, ring.Budget{Pool: name, Requests: int(requests), Attempts: int(requests + extra)})
			}
		})
	}
}

// heardPeers takes what other routers said into the accounts. What they saw
// of a replica's health is a hint and ejects nothing.
func (a *app) heardPeers(peers []ring.PeerView) {
	cfg := a.config()
	node := a.peers.Load()
	for i := range cfg.Pools {
		name := cfg.Pools[i].Name
		a.proxy.WithCore(name, func(core proxy.Core, now float64) {
			pool, ok := core.(*admission.Pool)
			if !ok {
				return
			}
			ids := map[string]fleet.ID{}
			for j := range core.View().Replicas {
				r := &core.View().Replicas[j]
				ids[r.Name] = r.ID
			}
			for j := range peers {
				pool.Peers(now, peers[j].Router, loadsOf(&peers[j], ids))
			}
			if b := a.budgets[name]; b != nil && node != nil {
				requests, attempts := node.PeerBudget(name)
				b.SetPeers(float64(requests), float64(max(0, attempts-requests)))
			}
		})
	}
}

// loadsOf are a peer's accounts of the replicas in ids; nil when it is gone.
func loadsOf(p *ring.PeerView, ids map[string]fleet.ID) map[fleet.ID]fleet.Load {
	if p.Gone {
		return nil
	}
	loads := make(map[fleet.ID]fleet.Load, len(ids))
	for i := range p.Loads {
		if id, ok := ids[p.Loads[i].Name]; ok {
			loads[id] = p.Loads[i].Load
		}
	}
	return loads
}

// peersAPI answers GET /admin/v1/peers.
func (a *app) peersAPI(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	n := a.peers.Load()
	if n == nil {
		w.WriteHeader(http.StatusNotFound)
		_, _ = io.WriteString(w, `{"error":{"code":"not_found","message":"this router has no peers configured"}}`+"\n")
		return
	}
	s := n.Members()
	_ = json.NewEncoder(w).Encode(&s)
}

// showPeers is `penstock peers`.
func showPeers(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("peers", flag.ContinueOnError)
	fs.SetOutput(stderr)
	admin := fs.String("admin", envOr("PENSTOCK_ADMIN", "127.0.0.1:9090"), "`address` of the router's admin listener")
	asJSON := fs.Bool("json", false, "print JSON")
	fs.Usage = func() {
		fmt.Fprint(stderr, "usage: penstock peers [flags]\n\nAsks a running router which other routers it knows, how old what it knows is, and what they have placed where.\n\n")
		fs.PrintDefaults()
	}
	switch err := fs.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return 2
	}
	s, err := askPeers(ctx, *admin)
	if err == nil && *asJSON {
		enc := json.NewEncoder(stdout)
		enc.SetIndent("", "  ")
		err = enc.Encode(s)
	} else if err == nil {
		err = s.Write(stdout)
	}
	if err != nil {
		fmt.Fprintln(stderr, "penstock peers:", err)
		return 1
	}
	return 0
}

func askPeers(ctx context.Context, admin string) (*ring.Status, error) {
	if !strings.Contains(admin, "://") {
		if strings.HasPrefix(admin, ":") {
			admin = "127.0.0.1" + admin
		}
		admin = "http://" + admin
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(admin, "/")+"/admin/v1/peers", nil)
	if err != nil {
		return nil, fmt.Errorf("--admin: %w", err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("no router answers there (--admin chooses another): %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(io.LimitReader(resp.Body, 1000))
		return nil, fmt.Errorf("%s: %s", resp.Status, strings.TrimSpace(string(b)))
	}
	var s ring.Status
	if err := json.NewDecoder(resp.Body).Decode(&s); err != nil {
		return nil, fmt.Errorf("the answer is not what a router says: %w", err)
	}
	return &s, nil
}

func envOr(name, def string) string {
	if v := os.Getenv(name); v != "" && v != "off" {
		return v
	}
	return def
}

// budgetsOf makes the attempt budget of each pool.
func budgetsOf(c *config.Config) map[string]*admission.AttemptBudget {
	out := map[string]*admission.AttemptBudget{}
	for i := range c.Pools {
		out[c.Pools[i].Name] = admission.NewAttemptBudget(admission.BudgetConfig{PerRequest: c.Attempts.PerRequest, Extra: float64(c.Attempts.Budget), Floor: c.Attempts.MinPerSecond})
	}
	return out
}
