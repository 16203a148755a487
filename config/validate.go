package config

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// validator checks what a single value cannot show, and normalises. It goes
// on after each problem, so that all are told at once.
type validator struct {
	c      *Config
	source Source
	errs   Errors
	bad    map[string]bool // keys already complained about
	unread map[string]bool // of these, the ones whose value is not what somebody meant to give
}

// lost tells whether the value of key, or of something around it, could not
// be read or is under a misspelt name: what would be said of it follows from
// that, and so does what would be said of others because of it.
func (v *validator) lost(key string) bool {
	for key != "" && !v.unread[key] {
		key = key[:max(0, strings.LastIndexAny(key, ".["))]
	}
	return key != ""
}

// line is that of key, or of the nearest thing around it that is in the file.
func (c *Config) line(key string) int {
	for {
		if l := c.lines[key]; l > 0 {
			return l
		}
		i := strings.LastIndexAny(key, ".[")
		if i < 0 {
			return c.lines[""]
		}
		key = key[:i]
	}
}

// Problem is one that shows only where the configuration is put to use.
func (c *Config) Problem(key string, err error) Problem {
	if c.File == "" {
		return Problem{Source: "flags and environment", Key: key, Msg: err.Error()}
	}
	return Problem{Source: c.File, Line: c.line(key), Key: key, Msg: err.Error()}
}

func (v *validator) fail(key, format string, args ...any) {
	if v.bad[key] || v.lost(key) {
		return
	}
	v.bad[key] = true
	v.errs = append(v.errs, v.c.Problem(key, fmt.Errorf(format, args...)))
}

func (v *validator) warn(format string, args ...any) {
	v.c.Warnings = append(v.c.Warnings, fmt.Sprintf(format, args...))
}

func (v *validator) all() {
	c := v.c
	v.addresses()
	v.pools()
	v.classes()
	v.routes()
	if c.Attempts.PerRequest < 1 || c.Attempts.PerRequest > 5 {
		v.fail("attempts.per_request", "%d is not from 1 to 5", c.Attempts.PerRequest)
	}
	v.limits()
	v.times()
	if c.Tenants.Header == "" || !headerName.MatchString(c.Tenants.Header) {
		v.fail("tenants.header", "%q is not a header name", c.Tenants.Header)
	}
	v.oneOf("log.level", c.Log.Level, []string{"debug", "info", "warn", "error"})
	v.oneOf("integrity", c.Integrity, []string{"observe", "auto", "terminate"})
	v.services()
	if t := c.Tracing.OTLP; t != "" {
		if u, err := url.Parse(t); err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			v.fail("tracing.otlp", "%q is not a URL: write it as http://collector:4318", t)
		}
	}
	v.oneOf("log.format", c.Log.Format, []string{"json", "console"})
	v.peers()
	v.tls()
	c.StateDir = c.Path(c.StateDir)
}

func (v *validator) peers() {
	p := v.c.Peers
	if p == nil {
		return
	}
	if p.KeyFile == "" {
		v.fail("peers.key_file", "is required: peers only talk encrypted")
	} else {
		p.KeyFile = v.c.Path(p.KeyFile)
		if _, err := os.Stat(p.KeyFile); err != nil {
			v.fail("peers.key_file", "%s", err)
		}
	}
	for i, s := range p.Allow {
		if _, err := netip.ParsePrefix(s); err != nil {
			v.fail(fmt.Sprintf("peers.allow[%d]", i), "%q is not a network: write it as 10.0.0.0/8", s)
		}
	}
	if p.Interval < 50*time.Millisecond || p.Interval > 1400*time.Millisecond {
		v.fail("peers.interval", "%s is not from 50ms to 1.4s", p.Interval)
	}
	if p.Bandwidth < 50_000 {
		v.fail("peers.bandwidth", "%d bit/s is under 50000", p.Bandwidth)
	}
}

var (
	headerName = regexp.MustCompile("^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}$")
	plainName  = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)
	hostName   = regexp.MustCompile(`^[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?$`)
	labelName  = regexp.MustCompile(`^[a-zA-Z_][a-zA-Z0-9_]*$`)
)

func (v *validator) addresses() {
	c := v.c
	if err := listenAddr(c.Listen); err != nil {
		v.fail("listen", "%s", err)
	}
	for i, h := range c.AdminHosts {
		if !hostName.MatchString(h) {
			v.fail(fmt.Sprintf("admin_hosts[%d]", i), "%q is not a host name (it has no scheme, port or path)", h)
		}
	}
	if c.Admin == "off" {
		return
	}
	if err := listenAddr(c.Admin); err != nil {
		v.fail("admin", "%s, or off", err)
	} else if samePort(c.Admin, c.Listen) && !v.lost("listen") {
		v.fail("admin", "%s is the public listener's address too", c.Admin)
	}
}

// samePort tells whether two addresses cannot be listened on at once.
func samePort(a, b string) bool {
	ha, pa, _ := net.SplitHostPort(a)
	hb, pb, _ := net.SplitHostPort(b)
	all := func(h string) bool { return h == "" || h == "0.0.0.0" || h == "::" }
	return pa == pb && pa != "0" && (ha == hb || all(ha) || all(hb))
}

func (v *validator) oneOf(key, val string, known []string) {
	if slices.Contains(known, val) {
		return
	}
	if near := nearest(val, known); near != "" {
		v.fail(key, "%q is unknown; did you mean %q?", val, near)
		return
	}
	v.fail(key, "%q is unknown; known: %s", val, strings.Join(known, ", "))
}

func (v *validator) pools() {
	c := v.c
	if len(c.Pools) == 0 {
		v.fail("pools", "there are no replicas: give --replica URL, or pools in the file")
		return
	}
	names := map[string]string{}  // pool name -> key
	urls := map[string]string{}   // replica URL -> key
	models := map[string]string{} // model or alias -> pool name
	for i := range c.Pools {
		p, key := &c.Pools[i], fmt.Sprintf("pools[%d]", i)
		v.name(key+".name", p.Name, names)
		v.pool(p, key, urls)
		for j, m := range p.Models {
			k := fmt.Sprintf("%s.models[%d]", key, j)
			if m == "" {
				v.fail(k, "is empty")
			} else if slices.Contains(p.Models[:j], m) {
				v.fail(k, "%q is in the list twice", m)
			} else if models[m] == "" {
				models[m] = p.Name
			}
		}
	}
	v.aliasNames(models)
}

// aliasNames checks that an alias is not a model's name, nor another alias.
func (v *validator) aliasNames(models map[string]string) {
	taken := map[string]string{}
	for i := range v.c.Pools {
		p := &v.c.Pools[i]
		for j, a := range p.Aliases {
			key := fmt.Sprintf("pools[%d].aliases[%d]", i, j)
			if v.c.lines[fmt.Sprintf("pools[%d].aliases.%s", i, a.Name)] > 0 {
				key = fmt.Sprintf("pools[%d].aliases.%s", i, a.Name)
			}
			switch {
			case a.Name == "":
				v.fail(key, "is empty")
			case models[a.Name] != "":
				v.fail(key, "alias %q is the name of a model of pool %q", a.Name, models[a.Name])
			case taken[a.Name] != "":
				v.fail(key, "alias %q is taken by pool %q", a.Name, taken[a.Name])
			case a.Model != "" && len(p.Models) > 0 && !slices.Contains(p.Models, a.Model):
				v.fail(key, "model %q is not one of the pool's models (%s)", a.Model, strings.Join(p.Models, ", "))
			default:
				taken[a.Name] = p.Name
			}
		}
	}
}

func (v *validator) name(key, name string, taken map[string]string) {
	switch {
	case name == "":
		v.fail(key, "is required")
	case !plainName.MatchString(name):
		v.fail(key, "%q is not a name: letters, digits, . _ - (at most 64)", name)
	case taken[name] != "":
		v.fail(key, "%q is already the name of %s", name, taken[name])
	default:
		taken[name] = strings.TrimSuffix(key, ".name")
	}
}

func (v *validator) pool(p *Pool, key string, urls map[string]string) {
	r := &p.Replicas
	if r.Empty() && !v.badUnder(key+".replicas") {
		v.fail(key+".replicas", "pool %q has no replicas: give static, file, http or dns", p.Name)
	}
	for j, raw := range r.Static {
		k := fmt.Sprintf("%s.replicas.static[%d]", key, j)
		u, err := ReplicaURL(raw)
		switch {
		case v.bad[k]:
		case err != nil:
			v.fail(k, "%s", err)
		case urls[u] != "":
			v.fail(k, "replica %s is already in %s", u, urls[u])
		default:
			urls[u] = k
			r.Static[j] = u
		}
	}
	if r.HTTP != "" && !strings.HasPrefix(r.HTTP, "http://") && !strings.HasPrefix(r.HTTP, "https://") {
		v.fail(key+".replicas.http", "%q is not an http:// or https:// URL", r.HTTP)
	}
	if r.DNS != nil {
		r.DNS.Type = strings.ToUpper(r.DNS.Type)
		v.oneOf(key+".replicas.dns.type", r.DNS.Type, []string{"A", "AAAA", "SRV"})
		if r.DNS.Name == "" {
			v.fail(key+".replicas.dns.name", "is required")
		}
		if r.DNS.Port < 1 || r.DNS.Port > 65535 {
			v.fail(key+".replicas.dns.port", "%d is not from 1 to 65535", r.DNS.Port)
		}
	}
	for name := range p.Labels {
		if !labelName.MatchString(name) {
			v.fail(key+".labels."+name, "%q is not a label name: letters, digits and _", name)
		}
	}
	for j, name := range p.Abilities {
		v.oneOf(fmt.Sprintf("%s.abilities[%d]", key, j), name, Abilities)
	}
	v.policy(key+".policy", p.Policy)
	v.policy(key+".shadow", p.Shadow)
	if p.Shadow != "" && p.Shadow == p.Policy {
		v.fail(key+".shadow", "%q is the policy itself", p.Shadow)
	}
	if p.Headroom.NMinus1 && r.File == "" && r.HTTP == "" && r.DNS == nil && len(r.Static) == 1 && !v.badUnder(key+".replicas") {
		v.fail(key+".headroom", "n-1 keeps the work of one replica free, and pool %q has one", p.Name)
	}
	v.profile(p.Profile, key+".profile")
	v.objective(&p.Objective, key+".objective")
}

func (v *validator) badUnder(key string) bool {
	for k := range v.bad {
		if strings.HasPrefix(k, key) {
			return true
		}
	}
	return false
}

func (v *validator) policy(key, name string) {
	if name != "" && len(v.source.Policies) > 0 {
		v.oneOf(key, name, v.source.Policies)
	}
}

func (v *validator) objective(o *Objective, key string) {
	if o.TTFTPer1K > 0 && o.TTFT <= 0 && !v.lost(key+".ttft") {
		v.fail(key+".ttft_per_1k", "is added to ttft, which is not given")
	}
}

func (v *validator) profile(p *Profile, key string) {
	if p == nil {
		return
	}
	need := p.Base == "" && !v.lost(key+".base") // without a base from the table all has to be given
	if p.Base != "" && len(v.source.Profiles) > 0 {
		k := key + ".base"
		if v.c.lines[k] == 0 {
			k = key
		}
		v.oneOf(k, p.Base, v.source.Profiles)
	}
	for _, f := range []struct {
		key      string
		val      float64
		min, max float64
		needed   bool
	}{{"per_step", float64(p.PerStep), 1e-5, 10, true}, {"per_prefill", float64(p.PerPrefill), 1e-8, 0.1, true},
		{"per_seq", float64(p.PerSeq), 1e-9, 0.1, false}, {"per_kv", float64(p.PerKV), 1e-13, 0.001, false}, {"per_attn", float64(p.PerAttn), 1e-15, 0.001, false},
		{"kv_tokens", float64(p.KVTokens), 256, 1e10, true}, {"max_seqs", float64(p.MaxSeqs), 1, 1e6, true},
		{"max_batched", float64(p.MaxBatched), 16, 1e7, true}, {"block_tokens", float64(p.BlockTokens), 1, 4096, true},
		{"max_model_len", float64(p.MaxModelLen), 16, 1e9, false}} {
		if f.val == 0 {
			if need && f.needed {
				v.fail(key+"."+f.key, "is required, as there is no base from the profile table")
			}
		} else if f.val < f.min || f.val > f.max {
			v.fail(key+"."+f.key, "cannot be true of a replica; see docs/configuration.md for the unit")
		}
	}
}

func (v *validator) classes() {
	c := v.c
	if len(c.Classes) > 16 {
		v.fail("classes", "%d classes; at most 16", len(c.Classes))
	}
	names := map[string]string{}
	shares := Ratio(0)
	for i := range c.Classes {
		k, key := &c.Classes[i], fmt.Sprintf("classes[%d]", i)
		v.name(key+".name", k.Name, names)
		if k.Deadline <= 0 {
			v.fail(key+".deadline", "must be over 0s")
		} else if k.Wait > k.Deadline && !v.lost(key+".deadline") {
			v.fail(key+".wait", "%s is longer than the class's deadline %s", k.Wait, k.Deadline)
		}
		if i > 0 {
			shares += k.MinShare
		}
		if k.Objective != nil {
			v.objective(k.Objective, key+".objective")
		}
	}
	if shares >= 0.9 {
		v.fail("classes", "the min_share of all classes but the first add up to %s; must be under 90%%", shares)
	}
	if len(c.Classes) == 0 {
		c.Classes = []Class{{Name: "standard", Wait: 30 * time.Second, Deadline: 5 * time.Minute}}
	}
}

func (v *validator) services() {
	names, prefixes := map[string]string{}, map[string]string{}
	for i := range v.c.Services {
		s, key := &v.c.Services[i], fmt.Sprintf("services[%d]", i)
		v.name(key+".name", s.Name, names)
		switch {
		case !strings.HasPrefix(s.Prefix, "/") || !strings.HasSuffix(s.Prefix, "/") || len(s.Prefix) < 3 || strings.ContainsAny(s.Prefix, "?#%") || strings.Contains(s.Prefix, "//"):
			v.fail(key+".prefix", "%q is not a path prefix: write it as /retrieval/", s.Prefix)
		case strings.HasPrefix(s.Prefix, "/v1/") || s.Prefix == "/v2/":
			v.fail(key+".prefix", "%q would hide the inference API", s.Prefix)
		case prefixes[s.Prefix] != "":
			v.fail(key+".prefix", "%q is already the prefix of %s", s.Prefix, prefixes[s.Prefix])
		default:
			prefixes[s.Prefix] = key
		}
		if u, err := ReplicaURL(s.URL); err != nil {
			v.fail(key+".url", "%s", strings.ReplaceAll(err.Error(), "replica URL", "service URL"))
		} else {
			s.URL = u
		}
		if s.Connections < 1 {
			v.fail(key+".connections", "must be at least 1")
		}
		if s.Timeout <= 0 {
			v.fail(key+".timeout", "must be over 0s")
		}
	}
}

func (v *validator) limits() {
	l := &v.c.Limits
	for _, f := range []struct {
		key      string
		val      Size
		min, max Size
	}{{"max_body", l.MaxBody, 1 << 10, 4 << 30}, {"max_header", l.MaxHeader, 4 << 10, 1 << 20}, {"receive_bytes", l.ReceiveBytes, 1 << 20, 1 << 40},
		{"buffer_answer", l.BufferAnswer, 0, 1 << 30}, {"held_bytes", l.HeldBytes, 1 << 10, 1 << 40}} {
		if f.val < f.min || f.val > f.max {
			v.fail("limits."+f.key, "must be from %s to %s", f.min, f.max)
		}
	}
	for _, f := range []struct {
		key string
		val int
	}{{"max_in_flight", l.MaxInFlight}, {"max_connections", l.MaxConnections}, {"held_requests", l.HeldRequests}} {
		if f.val < 1 {
			v.fail("limits."+f.key, "must be at least 1")
		}
	}
}

func (v *validator) times() {
	t, s, h := &v.c.Timeouts, &v.c.Scrape, &v.c.Health
	for _, f := range []struct {
		key      string
		val      time.Duration
		min, max time.Duration
	}{{"timeouts.header", t.Header, 100 * time.Millisecond, time.Hour}, {"timeouts.body", t.Body, 100 * time.Millisecond, 24 * time.Hour},
		{"timeouts.idle", t.Idle, 100 * time.Millisecond, 24 * time.Hour}, {"timeouts.write", t.Write, 100 * time.Millisecond, time.Hour},
		{"timeouts.connect", t.Connect, 10 * time.Millisecond, time.Minute}, {"timeouts.first_token", t.FirstToken, 10 * time.Millisecond, 24 * time.Hour},
		{"timeouts.answer", t.Answer, 0, 24 * time.Hour}, {"timeouts.stall", t.Stall, 100 * time.Millisecond, 24 * time.Hour},
		{"timeouts.upstream_idle", t.UpstreamIdle, 10 * time.Millisecond, time.Hour}, {"timeouts.drain_delay", t.DrainDelay, 0, time.Hour},
		{"timeouts.drain_timeout", t.DrainTimeout, 0, 24 * time.Hour}, {"scrape.interval", s.Interval, 20 * time.Millisecond, time.Minute},
		{"scrape.timeout", s.Timeout, 10 * time.Millisecond, time.Minute}, {"health.probe_interval", h.ProbeInterval, 50 * time.Millisecond, time.Minute},
		{"health.probe_timeout", h.ProbeTimeout, 10 * time.Millisecond, time.Minute}, {"health.hang_after", h.HangAfter, 500 * time.Millisecond, time.Hour}} {
		if f.val < f.min || f.val > f.max {
			v.fail(f.key, "%s is not from %s to %s", f.val, f.min, f.max)
		}
	}
	if t.UpstreamIdle >= 5*time.Second {
		v.warn("timeouts.upstream_idle is %s: vLLM closes idle connections after 5 s, so requests may meet closed ones", t.UpstreamIdle)
	}
	if s.MaxPage < 64<<10 {
		v.fail("scrape.max_page", "must be at least 64KiB, a real page has up to 75 KB")
	}
}

func (v *validator) tls() {
	t := &v.c.TLS
	if (t.CertFile == "") != (t.KeyFile == "") {
		if v.lost("tls.cert_file") || v.lost("tls.key_file") {
			return
		}
		v.fail("tls", "cert_file and key_file belong together")
		return
	}
	for _, f := range []struct {
		key  string
		path *string
	}{{"tls.cert_file", &t.CertFile}, {"tls.key_file", &t.KeyFile}} {
		if *f.path == "" {
			continue
		}
		*f.path = v.c.Path(*f.path)
		if _, err := os.Stat(*f.path); err != nil {
			v.fail(f.key, "%s", err)
		}
	}
}

// Path resolves a path of the file: relative ones start at the file's folder.
func (c *Config) Path(p string) string {
	if p == "" || filepath.IsAbs(p) || c.File == "" {
		return p
	}
	return filepath.Join(filepath.Dir(c.File), p)
}

func (s Size) String() string {
	for _, u := range []struct {
		n    Size
		name string
	}{{1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if s >= u.n && s%u.n == 0 {
			return fmt.Sprintf("%d%s", s/u.n, u.name)
		}
	}
	return fmt.Sprintf("%dB", int64(s))
}
