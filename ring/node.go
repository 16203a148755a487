package ring

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/hashicorp/memberlist"
	"github.com/penstock/penstock/telemetry"
	"go.uber.org/zap"
)

// Node is this router among its peers.
type Node struct {
	opts  Options
	log   *zap.Logger
	keys  *keyring
	guard *guard
	ml    *memberlist.Memberlist
	count nodeCounts
	start time.Time

	asking sync.Mutex // Options.Snapshot is called once at a time

	mu       sync.Mutex // of what follows; never held while memberlist is called
	table    *table
	msg      message
	relaying encoder

	wake  chan struct{} // the deliverer has something to look at
	stop  chan struct{}
	once  sync.Once
	tasks sync.WaitGroup
}

type nodeCounts struct {
	ok, old, garbage, unknown    *metrics.Counter
	streamOK, streamBad, streamF *metrics.Counter
}

// New starts a node: it listens, joins in the background and sends its account
// to whoever is there. A router without any peer works alone.
func New(o Options) (*Node, error) {
	if o.Snapshot == nil || o.OnPeers == nil {
		panic("BUG: ring: Snapshot and OnPeers are needed")
	}
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	if o.Metrics == nil {
		o.Metrics = telemetry.New()
	}
	keys, err := newKeyring(o.Keys)
	if err != nil {
		return nil, err
	}
	n := &Node{opts: o, log: o.Log.Named("peers"), keys: keys, start: time.Now(),
		wake: make(chan struct{}, 1), stop: make(chan struct{})}
	if n.opts.Now == nil {
		n.opts.Now = func() float64 { return time.Since(n.start).Seconds() }
	}
	epoch := o.epoch
	if epoch == 0 {
		epoch = uint64(max(1, time.Now().UnixMilli()))
	}
	n.table = newTable(o.Name, epoch, o.HoldShare.Seconds())
	inner := o.transport
	if inner == nil {
		t, err := listen(o.Bind, o.Advertise)
		if err != nil {
			return nil, err
		}
		inner = t
	}
	n.guard = newGuard(inner, keys, o.allow, o.Metrics)
	n.register(o.Metrics)
	if n.ml, err = memberlist.Create(n.config()); err != nil {
		_ = n.guard.Shutdown()
		return nil, fmt.Errorf("peers: %w", err)
	}
	if len(n.ml.Members()) == 0 { // memberlist would not have this router itself
		ip, _, _ := n.guard.FinalAdvertiseAddr("", 0)
		_ = n.ml.Shutdown()
		return nil, leftOut(ip, "where it sends from")
	}
	ip, port, err := n.guard.FinalAdvertiseAddr("", 0)
	if addr, ok := netip.AddrFromSlice(ip); ok && err == nil {
		n.mu.Lock()
		n.table.self.meta.addr = netip.AddrPortFrom(addr.Unmap(), uint16(port))
		n.mu.Unlock()
	}
	n.run(n.publishLoop, n.deliverLoop, n.joinLoop, n.tendLoop)
	return n, nil
}

func (n *Node) run(loops ...func()) {
	for _, f := range loops {
		n.tasks.Add(1)
		go func() {
			defer n.tasks.Done()
			f()
		}()
	}
}

// config is memberlist's: its defaults for a LAN, except for what is said here.
func (n *Node) config() *memberlist.Config {
	c := memberlist.DefaultLANConfig()
	c.Name = n.opts.Name
	c.Transport = n.guard
	c.Keyring = n.keys.list
	c.Delegate, c.Events, c.Ping, c.Conflict = delegate{n}, delegate{n}, delegate{n}, delegate{n}
	c.Logger = log.New(&logWriter{log: n.log, forged: n.count.streamF.Inc}, "", 0)
	c.EnableCompression = false   // accounts do not compress
	c.UDPBufferSize = MaxDatagram // so that it passes whatever path our own pass
	c.TCPTimeout = 2 * time.Second
	c.DeadNodeReclaimTime = 5 * time.Second // a restarted pod has another address
	if len(n.opts.allow) > 0 {
		for _, p := range n.opts.allow {
			c.CIDRsAllowed = append(c.CIDRsAllowed, net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())})
		}
	}
	return c
}

func (n *Node) register(reg *telemetry.Registry) {
	n.count = nodeCounts{
		ok:        reg.Counter(telemetry.PeerDatagrams, "ok"),
		old:       reg.Counter(telemetry.PeerDatagrams, "old"),
		garbage:   reg.Counter(telemetry.PeerDatagrams, "garbage"),
		unknown:   reg.Counter(telemetry.PeerDatagrams, "unknown_version"),
		streamOK:  reg.Counter(telemetry.PeerStreams, "ok"),
		streamBad: reg.Counter(telemetry.PeerStreams, "garbage"),
		streamF:   reg.Counter(telemetry.PeerStreams, "forged"),
	}
	gauge := func(d *telemetry.Def, f func(s *Status) float64, labels ...string) {
		reg.Gauge(d, func() float64 {
			n.mu.Lock()
			defer n.mu.Unlock()
			s := n.table.status(n.opts.Now(), false)
			return f(&s)
		}, labels...)
	}
	gauge(telemetry.PeerMembers, func(s *Status) float64 { return float64(s.Fresh) }, "fresh")
	gauge(telemetry.PeerMembers, func(s *Status) float64 { return float64(s.Silent) }, "silent")
	gauge(telemetry.PeerMembers, func(s *Status) float64 { return float64(s.Lost) }, "lost")
	gauge(telemetry.PeerShare, func(s *Status) float64 { return s.Share })
	gauge(telemetry.PeerDrift, func(s *Status) float64 { return float64(s.Drift) })
	gauge(telemetry.PeerUnknown, func(s *Status) float64 { return float64(s.Unknown) })
	gauge(telemetry.PeerInterval, func(s *Status) float64 { return s.Interval })
}

// Members describes this router and all peers, with their accounts.
func (n *Node) Members() Status {
	local := n.ml.LocalNode().Address()
	n.mu.Lock()
	defer n.mu.Unlock()
	s := n.table.status(n.opts.Now(), true)
	s.Addr = local
	return s
}

// PeerBudget sums what the fresh peers have counted of a pool in the last 10 s.
func (n *Node) PeerBudget(pool string) (requests, attempts int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.table.budget(pool)
}

// PeerRepeats sums what the fresh peers have counted of a request
// (Snapshot.Storms).
func (n *Node) PeerRepeats(request uint64) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.table.repeats(request)
}

// Stormy tells whether a fresh peer has requests in Snapshot.Storms.
func (n *Node) Stormy() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.table.stormy()
}

// SetKeys makes keys the only ones; the first encrypts. With a KeyFile that is
// done by itself when the file changes.
func (n *Node) SetKeys(keys [][]byte) error { return n.keys.set(keys) }

// Leave tells the peers that this router is going and that its account is
// void, and ends the node. Call it when the last request has ended.
func (n *Node) Leave(ctx context.Context) error {
	if !n.halt() {
		return nil
	}
	n.farewell()
	wait := time.Second
	if d, ok := ctx.Deadline(); ok {
		wait = max(time.Millisecond, min(wait, time.Until(d)))
	}
	err := errors.Join(n.ml.Leave(wait), n.ml.Shutdown())
	done := make(chan struct{})
	go func() { n.tasks.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done(): // a join under way ends by its own time-out
	}
	return err
}

// Close ends the node without telling anyone.
func (n *Node) Close() error {
	if !n.halt() {
		return nil
	}
	err := n.ml.Shutdown()
	n.tasks.Wait()
	return err
}

// halt tells the loops to end; true the first time.
func (n *Node) halt() bool {
	first := false
	n.once.Do(func() { first = true; close(n.stop) })
	return first
}

// sleep waits for d; false means that the node ends.
func (n *Node) sleep(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-n.stop:
		return false
	}
}

// packetOverhead is what a datagram costs on the wire besides its payload:
// memberlist's, UDP and IPv4 headers.
const packetOverhead = memberlistOverhead + 28

// publishLoop sends this router's account to all peers, again and again.
func (n *Node) publishLoop() {
	var snap Snapshot
	var enc encoder
	var parts [][]byte
	var targets []memberlist.Node
	interval := n.opts.Interval
	lastHot := 0
	for round := 0; ; round++ {
		if !n.sleep(interval + time.Duration((rand.Float64()-0.5)*0.2*float64(interval))) {
			return
		}
		n.snapshot(&snap)
		withHot := round == 0 || round-lastHot >= hotEvery(len(snap.Hot))
		if withHot {
			lastHot = round
		}
		n.mu.Lock()
		n.table.publish(&snap, n.opts.Now(), interval.Seconds())
		targets = n.targets(targets[:0], round)
		n.encode(&enc, interval, withHot)
		parts = enc.parts(parts[:0])
		if next := n.stretched(parts, len(targets)); next != interval {
			// The datagrams say when the next are to be expected.
			interval = next
			n.table.self.interval = interval.Seconds()
			n.encode(&enc, interval, withHot)
			parts = enc.parts(parts[:0])
		}
		n.mu.Unlock()
		for i := range targets {
			for _, p := range parts {
				_ = n.ml.SendBestEffort(&targets[i], p) // lost ones are repaired by the next
			}
		}
		n.poke()
	}
}

func (n *Node) snapshot(s *Snapshot) {
	n.asking.Lock()
	defer n.asking.Unlock()
	s.Reset()
	n.opts.Snapshot(s)
}

// hotEvery is how many rounds pass between two sends of the hot prefixes.
func hotEvery(n int) int {
	if n == 0 {
		return 25
	}
	return 5
}

// stretched is the interval that keeps the bandwidth when parts go to so many peers.
func (n *Node) stretched(parts [][]byte, peers int) time.Duration {
	bits := 0
	for _, p := range parts {
		bits += 8 * (len(p) + packetOverhead) * peers
	}
	d := time.Duration(float64(bits) / float64(n.opts.Bandwidth) * float64(time.Second))
	return min(max(d, n.opts.Interval), max(longestInterval, n.opts.Interval))
}

// encode encodes the current round. n.mu is held.
func (n *Node) encode(enc *encoder, interval time.Duration, withHot bool) {
	r := &n.table.self
	enc.reset(maxPayload)
	h := header{router: r.name, epoch: r.epoch, seq: r.seq, interval: interval.Seconds(),
		stamp: uint64(time.Since(n.start)/time.Millisecond) + 1}
	enc.round(&h, r, withHot)
}

// Lost routers are told on, so that a healed partition is noticed at once, but
// only every fifth round and for tellLost (s). Whoever comes back later than
// that is found by the join list.
const (
	tellLost      = 3600
	tellLostEvery = 5
)

// targets appends whom to send to in this round. n.mu is held.
func (n *Node) targets(dst []memberlist.Node, round int) []memberlist.Node {
	now := n.opts.Now()
	for _, name := range n.table.sorted() {
		p := n.table.peers[name]
		if !p.known || p.state == peerLeft {
			continue
		}
		if p.state == peerLost && (now-p.since > tellLost || round%tellLostEvery != 0) {
			continue
		}
		ap, err := netip.ParseAddrPort(p.addr)
		if err != nil {
			continue
		}
		dst = append(dst, memberlist.Node{Name: name, Addr: ap.Addr().AsSlice(), Port: ap.Port(), PMax: 5})
	}
	return dst
}

// farewell sends the last words, three times since any may be lost.
func (n *Node) farewell() {
	var enc encoder
	n.mu.Lock()
	n.table.leaving = true
	n.table.publish(&Snapshot{}, n.opts.Now(), n.opts.Interval.Seconds())
	n.encode(&enc, n.opts.Interval, true)
	targets := n.targets(nil, 0)
	n.mu.Unlock()
	for try := range 3 {
		if try > 0 {
			time.Sleep(20 * time.Millisecond)
		}
		for i := range targets {
			for _, p := range enc.parts(nil) {
				_ = n.ml.SendBestEffort(&targets[i], p)
			}
		}
	}
}

func (n *Node) poke() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// gather is how long the deliverer lets news gather: a round of 16 routers
// then takes some tens of deliveries a second and not hundreds.
const gather = 5 * time.Millisecond

// deliverLoop gives what changed to OnPeers and ends accounts in time.
func (n *Node) deliverLoop() {
	var views []PeerView
	var silent []string
	var snap Snapshot
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		n.mu.Lock()
		now := n.opts.Now()
		if n.table.late(now) { // on a slow network only
			n.mu.Unlock()
			n.snapshot(&snap)
			n.mu.Lock()
			now = n.opts.Now()
			n.table.look(&snap, now)
		}
		silent = n.table.tick(now, silent[:0])
		views = n.table.views(views[:0], now)
		next := n.table.next(now) - now
		n.mu.Unlock()
		if len(views) > 0 {
			n.opts.OnPeers(views)
		}
		if len(silent) > 0 {
			names := slices.Clone(silent)
			n.run(func() { n.ask(names) })
		}
		timer.Reset(time.Duration(max(next, 0.001)*float64(time.Second)) + time.Millisecond)
		select {
		case <-n.stop:
			return
		case <-timer.C:
		case <-n.wake:
			if !n.sleep(gather) {
				return
			}
		}
	}
}

// hear takes one message of another router and tells whether it was news.
func (n *Node) hear(p []byte) (news bool, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.msg.decode(p); err != nil {
		return false, err
	}
	news, bumped := n.table.hear(&n.msg, n.opts.Now())
	if bumped {
		n.log.Warn("another router speaks under this one's name, or the clock went back over a restart", zap.String("router", n.opts.Name))
	}
	if news {
		n.poke()
	}
	return news, nil
}
