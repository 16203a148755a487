package ring

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/penstock/penstock/fleet"
)

// A datagram is
//
//	'P' version nameLen name epoch seq stamp interval age section...
//	section = tag length payload
//
// with epoch (ms since 1970), seq, stamp (ms since epoch when it was sent),
// interval (ms), age (ms, of what is passed on for another router) and length
// as varints. Each datagram can be understood alone. A section with a tag that
// is not known is skipped, so that sections can be added without a new
// version; a new version is for what old routers must not misread.
//
//	accounts: first last (buckets) entry...   entry = id:5 requests<<1|hint prefilling [prefill:2] kv:2 out:2 first:1 [state reason since]
//	meta:     flags (1 = leaving) addrLen addr port:2 config:8 n {pool:4 requests attempts} m {request:8 repeats}
//	hot:      {prefix:8 id:5}...
//	held:     {pool:4 n held...}...   of pools that hold requests, by class
const (
	codecMagic   = 'P'
	codecVersion = 1

	tagAccounts = 1
	tagMeta     = 2
	tagHot      = 3
	tagHeld     = 4

	// MaxDatagram is the most bytes in a UDP payload, all overhead included:
	// it passes every path with the IPv6 minimum MTU of 1280 and, unlike
	// memberlist's gossip, is never dropped for its size in silence.
	MaxDatagram = 1200
	// memberlistOverhead is what memberlist puts round a user message: version
	// 1, nonce 12 and tag 16 of the encryption, CRC 5, message type 1.
	memberlistOverhead = 35
	maxPayload         = MaxDatagram - memberlistOverhead

	// MaxName is the longest name of a router, in bytes.
	MaxName = 64

	maxHeader   = 2 + 1 + MaxName + 8 + 10 + 8 + 4 + 5
	maxEntry    = idBits/8 + 4 + 3 + 2 + 2 + 2 + 1 + 3
	maxInterval = 60_000     // ms
	maxAge      = 86_400_000 // ms
)

// Why a datagram was refused.
var (
	errUnknownVersion = errors.New("unknown version")
	errGarbage        = errors.New("garbage")
)

// header is what every datagram begins with.
type header struct {
	router   string
	epoch    uint64  // ms since 1970
	seq      uint64  // at least 1
	stamp    uint64  // ms since epoch, of sending; 0 = not from the router itself
	interval float64 // s
	age      float64 // s
}

// bucketRange is what a datagram says of the buckets first to last.
type bucketRange struct {
	first, last int
	entries     []entry // ascending, ids in these buckets only
}

// message is a decoded datagram. It is reused: decode resets it and keeps its memory.
type message struct {
	header
	ranges  []bucketRange
	hasMeta bool
	meta    meta
	hasHot  bool
	hot     hotSet
	hasHeld bool
	held    heldSet
	names   map[string]string // interned router names
}

// reader takes a datagram apart; after the first thing that does not fit, bad
// is set and all it gives is zero.
type reader struct {
	b   []byte
	bad bool
}

func (r *reader) take(n int) []byte {
	if r.bad || n > len(r.b) {
		r.bad = true
		return nil
	}
	p := r.b[:n]
	r.b = r.b[n:]
	return p
}

func (r *reader) byte() byte {
	if p := r.take(1); p != nil {
		return p[0]
	}
	return 0
}

// uvarint reads one of at most limit.
func (r *reader) uvarint(limit uint64) uint64 {
	v, n := binary.Uvarint(r.b)
	if r.bad || n <= 0 || v > limit {
		r.bad = true
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) uint16() uint16 {
	if p := r.take(2); p != nil {
		return binary.BigEndian.Uint16(p)
	}
	return 0
}

func (r *reader) uint32() uint32 {
	if p := r.take(4); p != nil {
		return binary.BigEndian.Uint32(p)
	}
	return 0
}

func (r *reader) uint64() uint64 {
	if p := r.take(8); p != nil {
		return binary.BigEndian.Uint64(p)
	}
	return 0
}

func (r *reader) id() replicaID {
	if p := r.take(idBits / 8); p != nil {
		return replicaID(p[0])<<32 | replicaID(binary.BigEndian.Uint32(p[1:]))
	}
	return 0
}

// decode reads one datagram. What it accepts is well formed in every part; a
// datagram that is not is refused as a whole.
func (m *message) decode(p []byte) error {
	m.ranges, m.hasMeta, m.hasHot, m.hasHeld = m.ranges[:0], false, false, false
	r := reader{b: p}
	if r.byte() != codecMagic || len(p) < 2 {
		return errGarbage
	}
	if v := r.byte(); v != codecVersion {
		return fmt.Errorf("%w %d", errUnknownVersion, v)
	}
	name := r.take(int(r.byte()))
	if !validName(name) {
		return errGarbage
	}
	m.router = m.intern(name)
	m.epoch = r.uvarint(1 << 50)
	m.seq = r.uvarint(1 << 62)
	m.stamp = r.uvarint(1 << 50)
	m.interval = float64(r.uvarint(maxInterval)) / 1000
	m.age = float64(r.uvarint(maxAge)) / 1000
	if r.bad || m.epoch == 0 || m.seq == 0 {
		return errGarbage
	}
	for len(r.b) > 0 {
		tag := r.byte()
		sec := reader{b: r.take(int(r.uvarint(1 << 14)))}
		if r.bad || !m.section(tag, &sec) {
			return errGarbage
		}
	}
	return nil
}

func (m *message) section(tag byte, sec *reader) bool {
	switch tag {
	case tagAccounts:
		m.decodeAccounts(sec)
	case tagMeta:
		m.hasMeta = true
		m.meta.decode(sec)
	case tagHot:
		m.hasHot = true
		m.hot.decode(sec)
	case tagHeld:
		m.hasHeld = true
		m.held.decode(sec)
	default:
		return true // of a newer router
	}
	return !sec.bad && len(sec.b) == 0
}

// intern returns name as a string that is made once.
func (m *message) intern(name []byte) string {
	if s, ok := m.names[string(name)]; ok {
		return s
	}
	if m.names == nil || len(m.names) > 1000 {
		m.names = map[string]string{}
	}
	s := string(name)
	m.names[s] = s
	return s
}

func validName(name []byte) bool {
	if len(name) == 0 || len(name) > MaxName {
		return false
	}
	for _, c := range name {
		if c <= ' ' || c > '~' {
			return false
		}
	}
	return true
}

func (m *message) decodeAccounts(r *reader) {
	if len(m.ranges) < cap(m.ranges) {
		m.ranges = m.ranges[:len(m.ranges)+1]
	} else {
		m.ranges = append(m.ranges, bucketRange{})
	}
	g := &m.ranges[len(m.ranges)-1]
	g.entries = g.entries[:0]
	g.first, g.last = int(r.byte()), int(r.byte())
	if g.last < g.first {
		r.bad = true
	}
	low := replicaID(g.first) << (idBits - 8)
	for len(r.b) > 0 && !r.bad {
		var e entry
		e.decode(r)
		if e.id < low || e.id.bucket() > g.last {
			r.bad = true // not ascending, or out of its range
		}
		low = e.id + 1
		g.entries = append(g.entries, e)
	}
}

func (e *entry) decode(r *reader) {
	e.id = r.id()
	x := r.uvarint(maxCount<<1 | 1)
	e.requests = uint32(x >> 1)
	e.prefilling = uint32(r.uvarint(uint64(e.requests)))
	if e.prefilling > 0 {
		e.prefill = q16(r.uint16())
	}
	e.kv, e.out = q16(r.uint16()), q16(r.uint16())
	e.first = q8(r.byte())
	if x&1 != 0 {
		e.state, e.reason, e.since = r.byte(), r.byte(), q8(r.byte())
		if e.state == 0 || e.state > uint8(fleet.StateDraining) || int(e.reason) >= fleet.EvidenceCount || e.since > q8Top {
			r.bad = true
		}
	}
}

func (m *meta) decode(r *reader) {
	m.leaving = r.byte()&1 != 0
	m.addr = netip.AddrPort{}
	if n := int(r.byte()); n != 0 {
		ip, ok := netip.AddrFromSlice(r.take(n))
		if !ok || ip.Is4In6() {
			r.bad = true
		}
		m.addr = netip.AddrPortFrom(ip, r.uint16())
	}
	m.config = r.uint64()
	m.budgets, m.storms = m.budgets[:0], m.storms[:0]
	n := int(r.byte())
	if n > MaxBudgets {
		r.bad = true
	}
	for i := 0; i < n && !r.bad; i++ {
		m.budgets = append(m.budgets, wireBudget{r.uint32(), uint32(r.uvarint(maxCount)), uint32(r.uvarint(maxCount))})
	}
	n = int(r.byte())
	if n > MaxStorms {
		r.bad = true
	}
	for i := 0; i < n && !r.bad; i++ {
		m.storms = append(m.storms, Storm{r.uint64(), int(r.uvarint(maxCount))})
	}
}

func (h *hotSet) decode(r *reader) {
	h.list = h.list[:0]
	if len(r.b) > MaxHot*hotSize {
		r.bad = true
	}
	for len(r.b) > 0 && !r.bad {
		h.list = append(h.list, wireHot{r.uint64(), r.id()})
	}
}

func (h *heldSet) decode(r *reader) {
	h.list = h.list[:0]
	for len(r.b) > 0 && !r.bad {
		w := wireHeld{pool: r.uint32(), classes: int(r.byte())}
		if w.classes == 0 || w.classes > MaxHeldClasses || len(h.list) == MaxBudgets {
			r.bad = true
		}
		for c := 0; c < w.classes && !r.bad; c++ {
			w.count[c] = uint32(r.uvarint(maxCount))
		}
		h.list = append(h.list, w)
	}
}
