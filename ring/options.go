package ring

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/penstock/penstock/telemetry"
	"go.uber.org/zap"
)

// Options configure a Node. Snapshot and OnPeers are needed; the rest has defaults.
type Options struct {
	// Name of this router, one among all routers, at most MaxName visible
	// ASCII bytes. A restart under the same name is the same router. Default:
	// the host name.
	Name string
	// Bind is where to listen, UDP and TCP: IP:port, :port or IP. Default :7946.
	Bind string
	// Advertise is the IP or IP:port that peers are told. Default: the address
	// bound to, or the one the system sends from.
	Advertise string
	// Join lists other routers: host, host:port, IP or IP:port. A name may
	// stand for any number of addresses; it is looked up again every 30 s.
	// This router's own address in it does no harm.
	Join []string
	// Keys, or KeyFile (see ParseKeys; read again every 5 s): needed.
	Keys    [][]byte
	KeyFile string
	// Allow lists the networks that peers may be in, as CIDR. Default: all.
	Allow []string
	// Interval between two sends of this router's account to each peer, 50 ms
	// to 1.4 s; each is jittered by 10 %. Default 200 ms: the stale sum's
	// correction holds for much longer, and 16 routers of 100 replicas stay
	// under the bandwidth bound.
	Interval time.Duration
	// Bandwidth is the most bits/s of accounts to all peers together, at least
	// 50000; the interval stretches up to 1.4 s to keep it (and no further: a
	// killed router's account has to be gone within 5 s). Default 1000000.
	Bandwidth int
	// HoldShare is how long a router that went silent without leaving, and
	// whose host does not refuse connections, is left its share of the
	// replicas. Default 60 s: longer than most partitions last, short enough
	// for a host that is lost for good.
	HoldShare time.Duration
	// Snapshot fills s, which is empty, with this router's own account. It is
	// called once per interval, on slow networks more often, never twice at a
	// time, and must not block long.
	Snapshot func(s *Snapshot)
	// OnPeers takes the routers of which something changed. It is called from
	// one goroutine; the slices are valid during the call.
	OnPeers func(peers []PeerView)
	// Now is the clock of Snapshot and OnPeers, in seconds. Default: seconds
	// since New.
	Now     func() float64
	Log     *zap.Logger         // default: none
	Metrics *telemetry.Registry // default: one of its own

	allow     []netip.Prefix
	lookup    func(host string) ([]string, error) // of tests; default: the system's resolver
	transport memberlist.NodeAwareTransport       // of tests; default: UDP and TCP
	epoch     uint64                              // of tests; default: now, ms since 1970
}

const (
	defaultInterval  = 200 * time.Millisecond
	minInterval      = 50 * time.Millisecond
	longestInterval  = 1400 * time.Millisecond // x 3.5 < 5 s
	defaultBandwidth = 1_000_000
	minBandwidth     = 50_000
	defaultHoldShare = 60 * time.Second
)

// SettingError is a setting that a router cannot talk to peers with.
type SettingError struct {
	Key string // as in the configuration: peers.join[1]
	Msg string
}

func (e *SettingError) Error() string { return e.Key + ": " + e.Msg }

// Problems sets the defaults and tells all that is wrong, by setting: all that
// New refuses and that shows without the network.
func (o *Options) Problems() (problems []*SettingError) {
	bad := func(key, format string, args ...any) {
		problems = append(problems, &SettingError{key, fmt.Sprintf(format, args...)})
	}
	if o.Name == "" {
		o.Name, _ = os.Hostname()
	}
	if !validName([]byte(o.Name)) {
		bad("peers.name", "%q is not 1 to %d visible ASCII bytes", o.Name, MaxName)
	}
	if o.Bind == "" {
		o.Bind = fmt.Sprint(":", DefaultPort)
	}
	o.Interval = orDefault(o.Interval, defaultInterval)
	if o.Interval < minInterval || o.Interval > longestInterval {
		bad("peers.interval", "%v is not within %v and %v", o.Interval, minInterval, longestInterval)
	}
	o.Bandwidth = orDefault(o.Bandwidth, defaultBandwidth)
	if o.Bandwidth < minBandwidth || o.Bandwidth > math.MaxInt32 {
		bad("peers.bandwidth", "%d bit/s is not within %d and %d", o.Bandwidth, minBandwidth, math.MaxInt32)
	}
	o.HoldShare = orDefault(o.HoldShare, defaultHoldShare)
	if o.HoldShare < 0 {
		bad("peers.hold_share", "%v is negative", o.HoldShare)
	}
	switch {
	case o.KeyFile != "":
		keys, err := readKeys(o.KeyFile)
		if err != nil {
			bad("peers.key_file", "%s", err)
		}
		o.Keys = keys
	case len(o.Keys) == 0:
		bad("peers.key_file", "needed, since peers only talk encrypted")
	}
	return append(problems, o.addresses()...)
}

// addresses tells what is wrong with where this router and its peers are.
func (o *Options) addresses() (problems []*SettingError) {
	bad := func(key, format string, args ...any) {
		problems = append(problems, &SettingError{key, fmt.Sprintf(format, args...)})
	}
	own, from := netip.Addr{}, "" // what peers are told, where the options say it
	if ip, _, err := parseBind(o.Bind); err != nil {
		bad("peers.bind", "%s", err)
	} else if a, ok := netip.AddrFromSlice(ip); ok && !a.IsUnspecified() {
		own, from = a.Unmap(), "peers.bind"
	}
	if o.Advertise != "" {
		at, err := parseAdvertise(o.Advertise, DefaultPort)
		if err != nil {
			bad("peers.advertise", "%s", err)
		}
		own, from = at.Addr(), "peers.advertise"
	}
	o.allow = nil
	for i, s := range o.Allow {
		p, err := netip.ParsePrefix(strings.TrimSpace(s))
		if err != nil {
			bad(fmt.Sprintf("peers.allow[%d]", i), "%q is not a network: write it as 10.0.0.0/8", s)
			continue
		}
		o.allow = append(o.allow, p.Masked())
	}
	if own.IsValid() && len(o.allow) == len(o.Allow) && len(o.allow) > 0 && !slices.ContainsFunc(o.allow, func(p netip.Prefix) bool { return p.Contains(own) }) {
		problems = append(problems, leftOut(own, from))
	}
	for i, j := range o.Join {
		if err := checkJoin(j); err != nil {
			bad(fmt.Sprintf("peers.join[%d]", i), "%s", err)
		}
	}
	return problems
}

// leftOut is the error of an allow list without this router itself.
func leftOut(own any, from string) *SettingError {
	return &SettingError{"peers.allow", fmt.Sprintf("leaves out this router's own address, %v (%s), which its peers are told; put its network into it, or set advertise", own, from)}
}

// Validate sets the defaults and tells all that is wrong in one error.
func (o *Options) Validate() error {
	var errs []error
	for _, p := range o.Problems() {
		errs = append(errs, p)
	}
	return errors.Join(errs...)
}

func orDefault[T comparable](v, d T) T {
	var zero T
	if v == zero {
		return d
	}
	return v
}
