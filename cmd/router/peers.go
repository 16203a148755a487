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
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/config"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/internal/cli"
	"github.com/penstock/penstock/proxy"
	"github.com/penstock/penstock/ring"
	"github.com/penstock/penstock/wire"
)

// home says where all routers send a new prefix: a consistent hash over the
// names of a pool's replicas.
type home struct {
	hash *ring.Hash
	ids  []fleet.ID // by the hash's index
}

// prefer is the first and second choice for a prompt that begins with blocks.
func (h *home) prefer(blocks []uint64) (ids [2]fleet.ID) {
	key, ok := admission.PrefixKey(blocks)
	if h == nil || !ok {
		return ids
	}
	first, second := h.hash.Lookup(key)
	if first >= 0 {
		ids[0] = h.ids[first]
	}
	if second >= 0 {
		ids[1] = h.ids[second]
	}
	return ids
}

// update makes a new home when the replicas are others than before.
func (h *home) update(v *fleet.View) *home {
	same := h != nil && h.hash.Len() == len(v.Replicas)
	for i := 0; same && i < len(v.Replicas); i++ {
		k := h.hash.Index(v.Replicas[i].Name)
		same = k >= 0 && h.ids[k] == v.Replicas[i].ID
	}
	if same {
		return h
	}
	names := make([]string, len(v.Replicas))
	for i := range v.Replicas {
		names[i] = v.Replicas[i].Name
	}
	n := &home{hash: ring.NewHash(names)}
	n.ids = make([]fleet.ID, n.hash.Len())
	for i := range v.Replicas {
		n.ids[n.hash.Index(v.Replicas[i].Name)] = v.Replicas[i].ID
	}
	return n
}

// peered makes the options of the data path those of one router among several.
func (a *app) peered(o *proxy.Options) {
	a.homes = map[string]*atomic.Pointer[home]{}
	for i := range o.Pools {
		at := new(atomic.Pointer[home])
		a.homes[o.Pools[i].Name] = at
		o.Pools[i].Prefer = func(blocks []uint64) [2]fleet.ID { return at.Load().prefer(blocks) }
	}
	o.PeerTries = func(print uint64) int {
		if n := a.peers.Load(); n != nil {
			return n.PeerRepeats(print)
		}
		return 0
	}
}

// peerOptions are what the configuration says of this router among its peers.
func peerOptions(p *config.Peers) ring.Options {
	return ring.Options{Name: p.Name, Bind: p.Bind, Advertise: p.Advertise, Join: p.Join, KeyFile: p.KeyFile, Allow: p.Allow,
		Interval: p.Interval, Bandwidth: p.Bandwidth, HoldShare: p.HoldShare}
}

// joinPeers makes this router one of several.
func (a *app) joinPeers() error {
	p := a.config().Peers
	if p == nil {
		return nil
	}
	o := peerOptions(p)
	o.Snapshot, o.OnPeers, o.Now, o.Log, o.Metrics = a.snapshot, a.heardPeers, a.now, a.log, a.metrics
	n, err := ring.New(o)
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
// replica, with the health that it sees there, its attempts, the requests that
// come again and again, and which prefixes went where.
func (a *app) snapshot(s *ring.Snapshot) {
	cfg := a.config()
	s.ConfigHash = a.hash.Load()
	a.proxy.EachStorm(func(print uint64, tries int) { s.Storms = append(s.Storms, ring.Storm{Request: print, Repeats: tries}) })
	slices.Reverse(s.Storms) // of equal ones the latest are told
	var hot []admission.HotPrefix
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
			h := a.homes[name].Load()
			if n := h.update(core.View()); n != h {
				a.homes[name].Store(n)
			}
			if pool, ok := core.(*admission.Pool); ok {
				s.Held = append(s.Held, ring.Held{Pool: name, Count: pool.Held(nil)})
				hot = pool.Hot(hot[:0])
				s.Hot = appendHot(s.Hot, hot[:min(len(hot), ring.MaxHot/len(cfg.Pools)+1)], core.View())
			}
		})
	}
}

// appendHot gives prefixes with the replicas' names.
func appendHot(dst []ring.Hot, hot []admission.HotPrefix, v *fleet.View) []ring.Hot {
	for _, h := range hot {
		for i := range v.Replicas {
			if v.Replicas[i].ID == h.Replica {
				dst = append(dst, ring.Hot{Prefix: h.Prefix, Replica: v.Replicas[i].Name})
			}
		}
	}
	return dst
}

// heardPeers takes what other routers said into the accounts. What they saw
// of a replica's health is a hint and ejects nothing.
func (a *app) heardPeers(peers []ring.PeerView) {
	cfg := a.config()
	node := a.peers.Load()
	if node != nil && node.Stormy() {
		a.proxy.PeersStorm()
	}
	for i := range cfg.Pools {
		name := cfg.Pools[i].Name
		h := a.homes[name].Load()
		if h == nil {
			continue // nothing told yet; the next round is soon
		}
		// Decisions wait for the pool's mutex: all that can be is made before.
		var held []int
		loads, hot := make([]map[fleet.ID]fleet.Load, len(peers)), []admission.HotPrefix(nil)
		for j := range peers {
			loads[j] = h.loads(&peers[j])
			for _, x := range peers[j].Hot {
				if id := h.id(x.Replica); id != 0 {
					hot = append(hot, admission.HotPrefix{Prefix: x.Prefix, Replica: id})
				}
			}
			a.hint(&peers[j], h)
		}
		a.proxy.WithCore(name, func(core proxy.Core, now float64) {
			pool, ok := core.(*admission.Pool)
			if !ok {
				return
			}
			for j := range peers {
				pool.Peers(now, peers[j].Router, loads[j])
				held = peers[j].Held(held[:0], name)
				pool.PeerHeld(peers[j].Router, held)
			}
			pool.PeerHot(hot)
			if b := a.budgets[name]; b != nil && node != nil {
				requests, attempts := node.PeerBudget(name)
				b.SetPeers(float64(requests), float64(max(0, attempts-requests)))
			}
		})
	}
}

// hintFor is how long a peer's word that a replica is unwell hurries the
// probes of it, seconds.
const hintFor = 2.0

// hint notes which replicas a peer has ejected: they are probed sooner.
func (a *app) hint(p *ring.PeerView, h *home) {
	for i := range p.Loads {
		if p.Loads[i].State == fleet.StateEjected && !p.Assumed {
			if id := h.id(p.Loads[i].Name); id != 0 {
				a.hints.Store(id, a.now()+hintFor)
			}
		}
	}
}

// hinted tells whether a peer said lately that it has ejected the replica.
func (a *app) hinted(id fleet.ID) bool {
	until, ok := a.hints.Load(id)
	return ok && a.now() < until.(float64)
}

// id is the ID of the replica of that name in the pool, 0 = it has none.
func (h *home) id(name string) fleet.ID {
	if i := h.hash.Index(name); i >= 0 {
		return h.ids[i]
	}
	return 0
}

// loads are a peer's accounts of the pool's replicas; nil when it is gone.
func (h *home) loads(p *ring.PeerView) map[fleet.ID]fleet.Load {
	if p.Gone {
		return nil
	}
	loads := make(map[fleet.ID]fleet.Load, len(h.ids))
	for i := range p.Loads {
		if id := h.id(p.Loads[i].Name); id != 0 {
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
		_, _ = w.Write(wire.NewError(wire.CodeNotFound, "this router has no peers configured").AppendBody(nil, wire.KindNone))
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
	if code := cli.Parse(fs, args, 0); code >= 0 {
		return code
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
		var e struct{ Error struct{ Message string } }
		if json.Unmarshal(b, &e) == nil && e.Error.Message != "" {
			return nil, errors.New(e.Error.Message)
		}
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
