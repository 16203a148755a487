package ring

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

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
//	meta:     flags (1 = leaving) config:8 n {pool:4 requests attempts} m {request:8 repeats}
//	hot:      {prefix:8 id:5}...
const (
	codecMagic   = 'P'
	codecVersion = 1

	tagAccounts = 1
	tagMeta     = 2
	tagHot      = 3

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
	names   map[string]string // interned router names
}

// encoder cuts states into datagrams of at most maxPayload bytes. It is
// reused; the parts are valid until its next use.
type encoder struct {
	buf       []byte
	ends      []int
	start     int // of the part being written
	limit     int
	truncated int // entries left out because a single bucket was over a datagram
}

func (e *encoder) reset(limit int) {
	e.buf, e.ends, e.start, e.limit, e.truncated = e.buf[:0], e.ends[:0], 0, limit, 0
}

// parts returns the datagrams.
func (e *encoder) parts(dst [][]byte) [][]byte {
	start := 0
	for _, end := range e.ends {
		dst = append(dst, e.buf[start:end:end])
		start = end
	}
	return dst
}

func (e *encoder) begin(h *header) {
	e.start = len(e.buf)
	b := append(e.buf, codecMagic, codecVersion, byte(len(h.router)))
	b = append(b, h.router...)
	b = binary.AppendUvarint(b, h.epoch)
	b = binary.AppendUvarint(b, h.seq)
	b = binary.AppendUvarint(b, h.stamp)
	b = binary.AppendUvarint(b, millis(h.interval, maxInterval))
	e.buf = binary.AppendUvarint(b, millis(h.age, maxAge))
}

func millis(s float64, most uint64) uint64 {
	if !(s > 0) {
		return 0
	}
	return uint64(min(s*1000+0.5, float64(most)))
}

func (e *encoder) end() { e.ends = append(e.ends, len(e.buf)) }

// make makes room for n bytes: it begins another part when the current one
// has too little left.
func (e *encoder) make(h *header, n int) {
	if len(e.buf)-e.start+n > e.limit {
		e.end()
		e.begin(h)
	}
}

// section writes one section whose payload fill appends.
func (e *encoder) section(tag byte, fill func(b []byte) []byte) {
	e.buf = append(e.buf, tag, 0, 0)
	from := len(e.buf)
	e.buf = fill(e.buf)
	n := len(e.buf) - from
	// The length is a varint padded to two bytes: it is known only now.
	e.buf[from-2], e.buf[from-1] = byte(n)|0x80, byte(n>>7)
}

const sectionOverhead = 3

// round encodes all that r says in its current round. Hot prefixes are left
// out unless withHot.
func (e *encoder) round(h *header, r *routerState, withHot bool) {
	e.begin(h)
	e.section(tagMeta, r.meta.append)
	first := 0
	for first < buckets {
		e.make(h, sectionOverhead+2+r.buckets[first].size())
		first = e.accounts(r, first)
	}
	if withHot {
		e.make(h, sectionOverhead+len(r.hot.list)*hotSize)
		e.section(tagHot, r.hot.append)
	}
	e.end()
}

// relay encodes all that is known of r for a push/pull: for each round that
// something of r is known from, what is known from it. A router of which only
// the epoch and sequence are remembered gives one message without sections,
// which is enough to keep its old words from counting elsewhere.
func (e *encoder) relay(r *routerState, now float64) {
	var seqs []uint64
	note := func(v version) {
		if v.seq != 0 && !slices.Contains(seqs, v.seq) {
			seqs = append(seqs, v.seq)
		}
	}
	for i := range r.buckets {
		note(r.buckets[i].version)
	}
	note(r.meta.version)
	note(r.hot.version)
	note(version{seq: r.seq})
	for _, seq := range seqs {
		h := header{router: r.name, epoch: r.epoch, seq: seq, interval: r.interval, age: now - r.madeOf(seq)}
		e.begin(&h)
		if r.meta.seq == seq {
			e.section(tagMeta, r.meta.append)
		}
		if r.hot.seq == seq {
			e.make(&h, sectionOverhead+len(r.hot.list)*hotSize)
			e.section(tagHot, r.hot.append)
		}
		for first := 0; first < buckets; {
			if r.buckets[first].seq != seq {
				first++
				continue
			}
			e.make(&h, sectionOverhead+2+r.buckets[first].size())
			first = e.accounts(r, first)
		}
		e.end()
	}
}

// madeOf is when what r said in round seq was made.
func (r *routerState) madeOf(seq uint64) float64 {
	for i := range r.buckets {
		if r.buckets[i].seq == seq {
			return r.buckets[i].made
		}
	}
	switch seq {
	case r.meta.seq:
		return r.meta.made
	case r.hot.seq:
		return r.hot.made
	}
	return r.made
}

// accounts writes one section from bucket first on, as many as fit, and
// returns the first bucket that did not. Only buckets of the version of first
// are taken, since a message has one.
func (e *encoder) accounts(r *routerState, first int) (next int) {
	e.section(tagAccounts, func(b []byte) []byte {
		head := len(b)
		b = append(b, byte(first), byte(first))
		seq := r.buckets[first].seq
		for next = first; next < buckets && r.buckets[next].seq == seq; next++ {
			mark := len(b)
			list := r.buckets[next].entries
			for i := range list {
				b = list[i].append(b)
				if len(b)-e.start > e.limit {
					if next > first {
						return b[:mark]
					}
					e.truncated += len(list) - i
					b = b[:len(b)-list[i].size()]
					next++
					return b
				}
			}
			b[head+1] = byte(next)
		}
		return b
	})
	return next
}

func (e *entry) append(b []byte) []byte {
	id := uint64(e.id)
	b = append(b, byte(id>>32), byte(id>>24), byte(id>>16), byte(id>>8), byte(id))
	hint := uint64(0)
	if e.state != 0 {
		hint = 1
	}
	b = binary.AppendUvarint(b, uint64(e.requests)<<1|hint)
	b = binary.AppendUvarint(b, uint64(e.prefilling))
	if e.prefilling > 0 {
		b = binary.BigEndian.AppendUint16(b, uint16(e.prefill))
	}
	b = binary.BigEndian.AppendUint16(b, uint16(e.kv))
	b = binary.BigEndian.AppendUint16(b, uint16(e.out))
	b = append(b, byte(e.first))
	if hint != 0 {
		b = append(b, e.state, e.reason, byte(e.since))
	}
	return b
}

func (b *bucket) size() int {
	n := 0
	for i := range b.entries {
		n += b.entries[i].size()
	}
	return n
}

func (e *entry) size() int { return len(e.append(make([]byte, 0, maxEntry))) }

func (m *meta) append(b []byte) []byte {
	b = append(b, flag(m.leaving))
	b = binary.BigEndian.AppendUint64(b, m.config)
	b = append(b, byte(len(m.budgets)))
	for _, x := range m.budgets {
		b = binary.BigEndian.AppendUint32(b, x.pool)
		b = binary.AppendUvarint(b, uint64(x.requests))
		b = binary.AppendUvarint(b, uint64(x.attempts))
	}
	b = append(b, byte(len(m.storms)))
	for _, x := range m.storms {
		b = binary.BigEndian.AppendUint64(b, x.Request)
		b = binary.AppendUvarint(b, uint64(x.Repeats))
	}
	return b
}

const hotSize = 8 + idBits/8

func (h *hotSet) append(b []byte) []byte {
	for _, x := range h.list {
		b = binary.BigEndian.AppendUint64(b, x.prefix)
		id := uint64(x.replica)
		b = append(b, byte(id>>32), byte(id>>24), byte(id>>16), byte(id>>8), byte(id))
	}
	return b
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
	m.ranges, m.hasMeta, m.hasHot = m.ranges[:0], false, false
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
