package ring

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/memberlist"
)

// memNet is a network in memory: datagrams take a while, get lost, and do not
// cross a partition; streams to a partitioned host time out, to a stopped one
// are refused. In a synctest bubble its time is virtual.
type memNet struct {
	mu      sync.Mutex
	rng     *rand.Rand
	hosts   map[string]*memTransport
	cut     map[string]int // partition of each address, by default 0
	loss    float64
	latency func(rng *rand.Rand) time.Duration
	sent    int
	bytes   int
	taps    []func(from, to string, p []byte)
}

func newMemNet(seed uint64) *memNet {
	return &memNet{rng: rand.New(rand.NewPCG(seed, seed)), hosts: map[string]*memTransport{}, cut: map[string]int{},
		latency: func(rng *rand.Rand) time.Duration {
			return time.Millisecond + time.Duration(rng.IntN(2000))*time.Microsecond
		}}
}

type memTransport struct {
	net     *memNet
	addr    string
	packets chan *memberlist.Packet
	streams chan net.Conn
}

type memAddr string

func (memAddr) Network() string  { return "mem" }
func (a memAddr) String() string { return string(a) }

type memConn struct {
	net.Conn
	remote memAddr
}

func (c memConn) RemoteAddr() net.Addr { return c.remote }

func (n *memNet) host(addr string) *memTransport {
	n.mu.Lock()
	defer n.mu.Unlock()
	t := &memTransport{n, addr, make(chan *memberlist.Packet, 4096), make(chan net.Conn, 16)}
	n.hosts[addr] = t
	return t
}

// partition puts the addresses into partition k.
func (n *memNet) partition(k int, addrs ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, a := range addrs {
		n.cut[a] = k
	}
}

func (n *memNet) set(loss float64, latency time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.loss = loss
	n.latency = func(*rand.Rand) time.Duration { return latency }
}

// tap lets f see every datagram that is sent from now on.
func (n *memNet) tap(f func(from, to string, p []byte)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.taps = append(n.taps, f)
}

// inject delivers a datagram as if it came from an address.
func (n *memNet) inject(from, to string, p []byte) {
	n.mu.Lock()
	t := n.hosts[to]
	n.mu.Unlock()
	t.packets <- &memberlist.Packet{Buf: append([]byte(nil), p...), From: memAddr(from), Timestamp: time.Now()}
}

func (t *memTransport) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	a, err := net.ResolveTCPAddr("tcp", t.addr)
	if err != nil {
		return nil, 0, err
	}
	return a.IP.To4(), a.Port, nil
}

func (t *memTransport) WriteTo(b []byte, addr string) (time.Time, error) {
	return t.WriteToAddress(b, memberlist.Address{Addr: addr})
}

func (t *memTransport) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	n := t.net
	if len(b) > MaxDatagram {
		panic(fmt.Sprintf("a datagram of %d bytes", len(b)))
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.sent++
	n.bytes += len(b)
	for _, tap := range n.taps {
		tap(t.addr, a.Addr, b)
	}
	if n.cut[t.addr] != n.cut[a.Addr] || n.rng.Float64() < n.loss {
		return time.Now(), nil
	}
	p := append([]byte(nil), b...)
	time.AfterFunc(n.latency(n.rng), func() {
		n.mu.Lock()
		to := n.hosts[a.Addr]
		n.mu.Unlock()
		if to == nil {
			return
		}
		select {
		case to.packets <- &memberlist.Packet{Buf: p, From: memAddr(t.addr), Timestamp: time.Now()}:
		default:
		}
	})
	return time.Now(), nil
}

func (t *memTransport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	n := t.net
	n.mu.Lock()
	cut, to, wait := n.cut[t.addr] != n.cut[addr], n.hosts[addr], 2*n.latency(n.rng)
	n.mu.Unlock()
	if cut || wait > timeout {
		time.Sleep(timeout)
		return nil, errors.New("dial: time-out")
	}
	time.Sleep(wait)
	if to == nil {
		return nil, fmt.Errorf("dial: %w", syscall.ECONNREFUSED)
	}
	here, there := net.Pipe()
	to.streams <- memConn{there, memAddr(t.addr)}
	return memConn{here, memAddr(addr)}, nil
}

func (t *memTransport) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	return t.DialTimeout(a.Addr, timeout)
}

func (t *memTransport) PacketCh() <-chan *memberlist.Packet { return t.packets }
func (t *memTransport) StreamCh() <-chan net.Conn           { return t.streams }

func (t *memTransport) Shutdown() error {
	t.net.mu.Lock()
	defer t.net.mu.Unlock()
	if t.net.hosts[t.addr] == t {
		delete(t.net.hosts, t.addr)
	}
	return nil
}
