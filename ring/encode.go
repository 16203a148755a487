package ring

import (
	"encoding/binary"
	"slices"
)

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
	b := e.buf
	b = append(b, codecMagic, codecVersion, byte(len(h.router)))
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
	e.make(h, sectionOverhead+len(r.held.list)*maxHeldSize)
	e.section(tagHeld, r.held.append)
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
	note(r.held.version)
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
		if r.held.seq == seq {
			e.make(&h, sectionOverhead+len(r.held.list)*maxHeldSize)
			e.section(tagHeld, r.held.append)
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
	case r.held.seq:
		return r.held.made
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
	ip := m.addr.Addr().AsSlice() // empty when there is none
	b = append(b, byte(len(ip)))
	if len(ip) > 0 {
		b = binary.BigEndian.AppendUint16(append(b, ip...), m.addr.Port())
	}
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

const maxHeldSize = 4 + 1 + 3*MaxHeldClasses

func (h *heldSet) append(b []byte) []byte {
	for _, w := range h.list {
		b = append(binary.BigEndian.AppendUint32(b, w.pool), byte(w.classes))
		for _, n := range w.count[:w.classes] {
			b = binary.AppendUvarint(b, uint64(n))
		}
	}
	return b
}
