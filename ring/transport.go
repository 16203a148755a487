package ring

import (
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/hashicorp/memberlist"
	"github.com/penstock/penstock/telemetry"
)

// guard stands between the network and memberlist. memberlist looks at its
// allow list only for one kind of message and at the key only while it handles
// a packet, and counts neither; the guard drops and counts what is from
// outside, forged or replayed before anything of it is looked at.
type guard struct {
	memberlist.NodeAwareTransport
	keys    *keyring
	allow   []netip.Prefix // empty = all
	packets chan *memberlist.Packet
	streams chan net.Conn
	stop    chan struct{}
	once    sync.Once
	wg      sync.WaitGroup
	replays replays // of the packet pump
	scratch []byte  // of the packet pump
	count   guardCounts
}

type guardCounts struct {
	outside, forged, replayed *metrics.Counter
	streamOutside             *metrics.Counter
	in, out                   *metrics.Counter
}

func newGuard(inner memberlist.NodeAwareTransport, keys *keyring, allow []netip.Prefix, reg *telemetry.Registry) *guard {
	g := &guard{NodeAwareTransport: inner, keys: keys, allow: allow,
		packets: make(chan *memberlist.Packet), streams: make(chan net.Conn), stop: make(chan struct{}),
		count: guardCounts{
			outside:       reg.Counter(telemetry.PeerDatagrams, "outside"),
			forged:        reg.Counter(telemetry.PeerDatagrams, "forged"),
			replayed:      reg.Counter(telemetry.PeerDatagrams, "replayed"),
			streamOutside: reg.Counter(telemetry.PeerStreams, "outside"),
			in:            reg.Counter(telemetry.PeerBytes, "in"),
			out:           reg.Counter(telemetry.PeerBytes, "out"),
		}}
	g.wg.Add(2)
	go g.pumpPackets()
	go g.pumpStreams()
	return g
}

func (g *guard) pumpPackets() {
	defer g.wg.Done()
	for {
		select {
		case <-g.stop:
			return
		case p := <-g.NodeAwareTransport.PacketCh():
			if !g.admit(p) {
				continue
			}
			select {
			case <-g.stop:
				return
			case g.packets <- p:
			}
		}
	}
}

// admit tells whether a packet may go on to memberlist.
func (g *guard) admit(p *memberlist.Packet) bool {
	if !g.allowed(p.From) {
		g.count.outside.Inc()
		return false
	}
	g.count.in.Add(len(p.Buf))
	var ok bool
	if ok, g.scratch = g.keys.verify(p.Buf, g.scratch); !ok {
		g.count.forged.Inc()
		return false
	}
	if g.replays.seen(p.Buf[1 : 1+cryptNonce]) {
		g.count.replayed.Inc()
		return false
	}
	return true
}

func (g *guard) pumpStreams() {
	defer g.wg.Done()
	for {
		select {
		case <-g.stop:
			return
		case c := <-g.NodeAwareTransport.StreamCh():
			if !g.allowed(c.RemoteAddr()) {
				g.count.streamOutside.Inc()
				c.Close()
				continue
			}
			select {
			case <-g.stop:
				c.Close()
				return
			case g.streams <- &countedConn{c, &g.count}:
			}
		}
	}
}

// allowed tells whether addr is in the allow list.
func (g *guard) allowed(addr net.Addr) bool {
	if len(g.allow) == 0 {
		return true
	}
	ap, err := netip.ParseAddrPort(addr.String())
	if err != nil {
		return false
	}
	return contains(g.allow, ap.Addr())
}

func contains(allow []netip.Prefix, ip netip.Addr) bool {
	ip = ip.Unmap().WithZone("")
	for _, p := range allow {
		if p.Contains(ip) {
			return true
		}
	}
	return false
}

func (g *guard) PacketCh() <-chan *memberlist.Packet { return g.packets }
func (g *guard) StreamCh() <-chan net.Conn           { return g.streams }

func (g *guard) WriteTo(b []byte, addr string) (time.Time, error) {
	return g.WriteToAddress(b, memberlist.Address{Addr: addr})
}

func (g *guard) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	g.count.out.Add(len(b))
	return g.NodeAwareTransport.WriteToAddress(b, a)
}

func (g *guard) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	return g.DialAddressTimeout(memberlist.Address{Addr: addr}, timeout)
}

func (g *guard) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	if ap, err := netip.ParseAddrPort(a.Addr); len(g.allow) > 0 && (err != nil || !contains(g.allow, ap.Addr())) {
		return nil, fmt.Errorf("peer %s is not in peers.allow", a.Addr)
	}
	c, err := g.NodeAwareTransport.DialAddressTimeout(a, timeout)
	if err != nil {
		return nil, err
	}
	return &countedConn{c, &g.count}, nil
}

func (g *guard) Shutdown() error {
	g.once.Do(func() { close(g.stop) })
	err := g.NodeAwareTransport.Shutdown()
	g.wg.Wait()
	return err
}

// countedConn counts the bytes of a push/pull.
type countedConn struct {
	net.Conn
	count *guardCounts
}

func (c *countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.count.in.Add(n)
	return n, err
}

func (c *countedConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.count.out.Add(n)
	return n, err
}

// netTransport is UDP and TCP on one port. It differs from memberlist's own in
// reading into one buffer (memberlist's makes a 64 KiB one for each packet).
type netTransport struct {
	udp       *net.UDPConn
	tcp       *net.TCPListener
	advertise netip.AddrPort // zero = where it listens
	packets   chan *memberlist.Packet
	streams   chan net.Conn
	stop      chan struct{}
	once      sync.Once
	wg        sync.WaitGroup
}

const socketBuffer = 1 << 20 // bytes; a burst of 16 routers' datagrams is 40 kB

// listen binds to bind (host:port, both optional; port 0 takes a free one).
// advertise is what peers are told, host or host:port.
func listen(bind, advertise string) (*netTransport, error) {
	ip, port, err := parseBind(bind)
	if err != nil {
		return nil, fmt.Errorf("peers.bind: %w", err)
	}
	t := &netTransport{packets: make(chan *memberlist.Packet), streams: make(chan net.Conn), stop: make(chan struct{})}
	for try := 0; ; try++ {
		if t.tcp, err = net.ListenTCP("tcp", &net.TCPAddr{IP: ip, Port: port}); err != nil {
			return nil, fmt.Errorf("peers.bind: %w", err)
		}
		if t.udp, err = net.ListenUDP("udp", &net.UDPAddr{IP: ip, Port: t.tcp.Addr().(*net.TCPAddr).Port}); err == nil {
			break
		}
		t.tcp.Close()
		if port != 0 || try > 10 { // a free TCP port may be taken for UDP
			return nil, fmt.Errorf("peers.bind: %w", err)
		}
	}
	_ = t.udp.SetReadBuffer(socketBuffer) // as much as the system allows
	if t.advertise, err = t.address(advertise); err != nil {
		t.tcp.Close()
		t.udp.Close()
		return nil, fmt.Errorf("peers.advertise: %w", err)
	}
	t.wg.Add(2)
	go t.readPackets()
	go t.accept()
	return t, nil
}

// address finds what to tell peers: what is configured, else the address bound
// to, else the one that the system would send from.
func (t *netTransport) address(advertise string) (netip.AddrPort, error) {
	bound := t.tcp.Addr().(*net.TCPAddr).AddrPort()
	if advertise != "" {
		return parseAdvertise(advertise, int(bound.Port()))
	}
	if !bound.Addr().IsUnspecified() {
		return netip.AddrPortFrom(bound.Addr().Unmap(), bound.Port()), nil
	}
	// No packet is sent: connecting a UDP socket only looks the route up. The
	// address is of a range for documentation.
	c, err := net.Dial("udp", "192.0.2.1:9")
	if err != nil {
		if c, err = net.Dial("udp", "[2001:db8::1]:9"); err != nil {
			return netip.AddrPort{}, fmt.Errorf("no route to tell this router's address by; set it: %w", err)
		}
	}
	defer c.Close()
	return netip.AddrPortFrom(c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap(), bound.Port()), nil
}

func (t *netTransport) readPackets() {
	defer t.wg.Done()
	buf := make([]byte, 1<<16)
	for {
		n, from, err := t.udp.ReadFromUDPAddrPort(buf)
		if err != nil {
			if t.pause() {
				return
			}
			continue
		}
		if n == 0 {
			continue
		}
		p := &memberlist.Packet{Buf: append([]byte(nil), buf[:n]...), From: net.UDPAddrFromAddrPort(from), Timestamp: time.Now()}
		select {
		case t.packets <- p:
		case <-t.stop:
			return
		}
	}
}

func (t *netTransport) accept() {
	defer t.wg.Done()
	for {
		c, err := t.tcp.Accept()
		if err != nil {
			if t.pause() {
				return
			}
			continue
		}
		select {
		case t.streams <- c:
		case <-t.stop:
			c.Close()
			return
		}
	}
}

// pause waits a little after an error, so that a lasting one (no descriptors
// left) does not burn a core; true means to stop.
func (t *netTransport) pause() bool {
	select {
	case <-t.stop:
		return true
	case <-time.After(10 * time.Millisecond):
		return false
	}
}

func (t *netTransport) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	return t.advertise.Addr().AsSlice(), int(t.advertise.Port()), nil
}

func (t *netTransport) WriteTo(b []byte, addr string) (time.Time, error) {
	return t.WriteToAddress(b, memberlist.Address{Addr: addr})
}

func (t *netTransport) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	to, err := netip.ParseAddrPort(a.Addr)
	if err != nil {
		return time.Time{}, err
	}
	_, err = t.udp.WriteToUDPAddrPort(b, to)
	return time.Now(), err
}

func (t *netTransport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	return net.DialTimeout("tcp", addr, timeout)
}

func (t *netTransport) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	return t.DialTimeout(a.Addr, timeout)
}

func (t *netTransport) PacketCh() <-chan *memberlist.Packet { return t.packets }
func (t *netTransport) StreamCh() <-chan net.Conn           { return t.streams }

func (t *netTransport) Shutdown() error {
	t.once.Do(func() { close(t.stop) })
	t.tcp.Close()
	t.udp.Close()
	t.wg.Wait()
	return nil
}
