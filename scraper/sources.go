package scraper

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"sort"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
)

// Target is one replica that a Source found, its name already resolved: the
// data path never looks a name up.
type Target struct {
	Name     string            // host:port as written (DNS: ip:port), for people and metrics
	Addr     string            // ip:port to connect to
	Host     string            // Host header and TLS name, host:port
	TLS      bool              // https
	BasePath string            // before every path, no trailing slash; usually empty
	Labels   map[string]string // of its target group; names that begin with "__" are left out
}

// Key tells targets apart: the same name at another address is another
// replica (a pod that was replaced has an empty cache and no history).
func (t *Target) Key() string {
	scheme := "http://"
	if t.TLS {
		scheme = "https://"
	}
	return scheme + t.Name + t.BasePath + " " + t.Addr
}

func (t *Target) equal(u *Target) bool {
	return t.Key() == u.Key() && t.Host == u.Host && maps.Equal(t.Labels, u.Labels)
}

// Source finds replicas. Run gives the whole list when it is first known and
// at each change, until ctx ends; it blocks so long. When it cannot find out
// (a file that is broken or gone, an endpoint or a name server that fails) the
// last list stands. Calls of found are never concurrent.
type Source interface {
	Run(ctx context.Context, found func([]Target))
}

// Resolver looks names up; *net.Resolver is one.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
	LookupSRV(ctx context.Context, service, proto, name string) (string, []*net.SRV, error)
}

// SourceOptions are common to all sources. Zero values mean the defaults.
type SourceOptions struct {
	Every    time.Duration // between looks; default 2 s for a file, 30 s for HTTP (Prometheus' refresh_interval is 60 s), 15 s for DNS
	Names    time.Duration // how long the address of a name is believed; default 15 s
	Lookup   time.Duration // time-out of one look-up; default 5 s
	Resolver Resolver      // default net.DefaultResolver
	Log      *zap.Logger   // default none
}

func (o SourceOptions) withDefaults(every time.Duration) SourceOptions {
	if o.Every <= 0 {
		o.Every = every
	}
	if o.Names <= 0 {
		o.Names = 15 * time.Second
	}
	if o.Lookup <= 0 {
		o.Lookup = 5 * time.Second
	}
	if o.Resolver == nil {
		o.Resolver = net.DefaultResolver
	}
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	return o
}

// Watch runs sources as one: change tells which targets are new and which are
// gone, gone ones first in effect (a replica whose labels changed is both). A
// target that several sources list is there once. It blocks until ctx ends.
func Watch(ctx context.Context, sources []Source, change func(added, removed []Target)) {
	var mu sync.Mutex
	lists := make([][]Target, len(sources))
	have := map[string]Target{}
	var wg sync.WaitGroup
	for i, src := range sources {
		wg.Go(func() {
			src.Run(ctx, func(found []Target) {
				mu.Lock()
				defer mu.Unlock()
				lists[i] = found
				added, removed := merge(have, lists)
				if len(added)+len(removed) > 0 {
					change(added, removed)
				}
			})
		})
	}
	wg.Wait()
}

// merge brings have in line with the lists; of one key the first list wins.
func merge(have map[string]Target, lists [][]Target) (added, removed []Target) {
	want := map[string]Target{}
	for _, list := range lists {
		for _, t := range list {
			if _, ok := want[t.Key()]; !ok {
				want[t.Key()] = t
			}
		}
	}
	for k, old := range have {
		if now, ok := want[k]; !ok || !now.equal(&old) {
			removed = append(removed, old)
			delete(have, k)
		}
	}
	for k, t := range want {
		if _, ok := have[k]; !ok {
			added = append(added, t)
			have[k] = t
		}
	}
	byKey := func(ts []Target) { sort.Slice(ts, func(i, j int) bool { return ts[i].Key() < ts[j].Key() }) }
	byKey(added)
	byKey(removed)
	return added, removed
}

// poller is a Source that looks again and again.
type poller struct {
	o     SourceOptions
	what  string // for the log
	look  func(ctx context.Context) ([]Target, error)
	names *names // resolves what look found; nil when it gives addresses already
	once  bool   // look never gives anything else
}

// Run implements Source.
func (p *poller) Run(ctx context.Context, found func([]Target)) {
	q := quiet{log: p.o.Log, what: p.what}
	var raw, last []Target
	looked, told := false, false
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		t.Reset(p.o.Every)
		if !looked || !p.once {
			list, err := p.look(ctx)
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				q.failed(err)
			} else {
				q.worked()
				raw, looked = list, true
			}
		}
		if !looked {
			continue
		}
		now := raw
		if p.names != nil {
			now = p.names.resolve(ctx, raw)
			if ctx.Err() != nil {
				return
			}
		}
		now = sortTargets(now)
		if !told || !slices.EqualFunc(now, last, func(a, b Target) bool { return a.equal(&b) }) {
			last, told = now, true
			found(slices.Clone(now))
		}
		if p.once && p.names.literal(raw) {
			<-ctx.Done()
			return
		}
	}
}

// sortTargets returns ts by key, each key once.
func sortTargets(ts []Target) []Target {
	ts = slices.Clone(ts)
	sort.SliceStable(ts, func(i, j int) bool { return ts[i].Key() < ts[j].Key() })
	return slices.CompactFunc(ts, func(a, b Target) bool { return a.Key() == b.Key() })
}

// names remembers the addresses of host names.
type names struct {
	o     SourceOptions
	known map[string]*hostAddr
}

type hostAddr struct {
	addr  netip.Addr
	asked time.Time
	q     quiet
}

func newNames(o SourceOptions) *names { return &names{o: o, known: map[string]*hostAddr{}} }

// literal tells whether no name needs looking up.
func (n *names) literal(ts []Target) bool {
	for i := range ts {
		host, _, _ := net.SplitHostPort(ts[i].Host)
		if _, err := netip.ParseAddr(host); err != nil {
			return false
		}
	}
	return true
}

// resolve fills in Addr; targets whose name has never had an address are left
// out. One written target is one replica: of several addresses the one in use
// is kept while the name has it, so that a rotating answer does not look like
// a new replica each time.
func (n *names) resolve(ctx context.Context, raw []Target) []Target {
	var due []string
	for i := range raw {
		host, _, _ := net.SplitHostPort(raw[i].Host)
		if _, err := netip.ParseAddr(host); err == nil {
			continue
		}
		h := n.known[host]
		if h == nil {
			h = &hostAddr{q: quiet{log: n.o.Log.With(zap.String("host", host)), what: "name of a replica: look-up"}}
			n.known[host] = h
		}
		wait := n.o.Names
		if !h.addr.IsValid() {
			wait = min(wait, 2*time.Second) // it is being waited for
		}
		if (h.asked.IsZero() || time.Since(h.asked) >= wait) && !slices.Contains(due, host) {
			due = append(due, host)
		}
	}
	var wg sync.WaitGroup
	for _, host := range due {
		h := n.known[host]
		wg.Go(func() { n.ask(ctx, host, h) })
	}
	wg.Wait()
	out := make([]Target, 0, len(raw))
	inUse := map[string]bool{}
	for _, t := range raw {
		host, port, _ := net.SplitHostPort(t.Host)
		addr, err := netip.ParseAddr(host)
		if err != nil {
			addr = n.known[host].addr
			inUse[host] = true
		}
		if !addr.IsValid() {
			continue
		}
		t.Addr = net.JoinHostPort(addr.String(), port)
		out = append(out, t)
	}
	maps.DeleteFunc(n.known, func(host string, _ *hostAddr) bool { return !inUse[host] })
	return out
}

// ask looks one name up.
func (n *names) ask(ctx context.Context, host string, h *hostAddr) {
	h.asked = time.Now()
	addrs, err := lookup(ctx, &n.o, "ip", host)
	if err != nil {
		if ctx.Err() == nil {
			h.q.failed(err)
		}
		return
	}
	h.q.worked()
	if !slices.Contains(addrs, h.addr) {
		h.addr = addrs[0]
	}
}

// lookup returns a name's addresses, at least one, IPv4 before IPv6 and then
// in order, without doubles.
func lookup(ctx context.Context, o *SourceOptions, network, host string) ([]netip.Addr, error) {
	ctx, cancel := context.WithTimeout(ctx, o.Lookup)
	defer cancel()
	addrs, err := o.Resolver.LookupNetIP(ctx, network, host)
	if err != nil {
		return nil, err
	}
	for i := range addrs {
		addrs[i] = addrs[i].Unmap()
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	addrs = slices.Compact(addrs)
	if len(addrs) == 0 {
		return nil, fmt.Errorf("name %q has no address", host)
	}
	return addrs, nil
}

// parseTarget reads host:port or a URL with scheme, and perhaps a base path.
func parseTarget(s, scheme string) (Target, error) {
	if !strings.Contains(s, "://") {
		s = scheme + "://" + s
	}
	u, err := url.Parse(s)
	if err != nil {
		return Target{}, fmt.Errorf("target %q is not host:port: %w", s, err)
	}
	if u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return Target{}, fmt.Errorf("target %q is not host:port or http(s)://host:port", s)
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	host := net.JoinHostPort(strings.ToLower(u.Hostname()), port)
	return Target{Name: host, Host: host, TLS: u.Scheme == "https", BasePath: strings.TrimRight(u.Path, "/")}, nil
}

// Static is a fixed list of URLs or host:port; names in it are looked up again
// and again.
func Static(urls []string, o SourceOptions) (Source, error) {
	var list []Target
	for _, s := range urls {
		t, err := parseTarget(s, "http")
		if err != nil {
			return nil, err
		}
		list = append(list, t)
	}
	o = o.withDefaults(2 * time.Second)
	return &poller{o: o, what: "static replicas", names: newNames(o), once: true,
		look: func(context.Context) ([]Target, error) { return list, nil }}, nil
}

// DNS finds replicas behind a name: kind "A" or "AAAA" with a port, each
// address being one replica, or "SRV", which brings the ports.
func DNS(name, kind string, port int, o SourceOptions) (Source, error) {
	o = o.withDefaults(15 * time.Second)
	p := &poller{o: o, what: "DNS look-up of replicas"}
	switch kind {
	case "A", "AAAA", "":
		network := "ip4"
		if kind == "AAAA" {
			network = "ip6"
		}
		if port < 1 || port > 65535 {
			return nil, fmt.Errorf("dns.port: %d is not from 1 to 65535", port)
		}
		p.look = func(ctx context.Context) ([]Target, error) {
			addrs, err := lookup(ctx, &o, network, name)
			return fromAddrs(addrs, name, uint16(port)), err
		}
	case "SRV":
		p.look = func(ctx context.Context) ([]Target, error) { return lookSRV(ctx, &o, name) }
	default:
		return nil, fmt.Errorf("dns.type: %q is not A, AAAA or SRV", kind)
	}
	return p, nil
}

func fromAddrs(addrs []netip.Addr, name string, port uint16) []Target {
	out := make([]Target, 0, len(addrs))
	for _, a := range addrs {
		addr := netip.AddrPortFrom(a, port).String()
		out = append(out, Target{Name: addr, Addr: addr, Host: net.JoinHostPort(name, fmt.Sprint(port))})
	}
	return out
}

func lookSRV(ctx context.Context, o *SourceOptions, name string) ([]Target, error) {
	sctx, cancel := context.WithTimeout(ctx, o.Lookup)
	defer cancel()
	_, srvs, err := o.Resolver.LookupSRV(sctx, "", "", name)
	if err != nil {
		return nil, err
	}
	var out []Target
	var errs []error
	for _, r := range srvs {
		host := strings.TrimSuffix(r.Target, ".")
		addrs, err := lookup(ctx, o, "ip", host)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		out = append(out, fromAddrs(addrs[:1], host, r.Port)...)
	}
	// Half an answer would throw living replicas out: the last list stands.
	return out, errors.Join(errs...)
}
