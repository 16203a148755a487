package admission

import (
	"math/bits"

	"github.com/penstock/penstock/fleet"
)

// prefixIndex knows which replica holds which prefix. Each replica has an LRU
// list of at most the blocks that its KV cache holds; one open-addressing
// table from fingerprint to the set of replicas answers, in one pass, how much
// of a prompt each of them has.
//
// Fingerprints are chained (entry i stands for all blocks up to i) and a chain
// is always touched from its end to its head, so a replica never holds a block
// without the ones before it: the longest hit can be searched by bisection.
type prefixIndex struct {
	words int      // words of one replica set
	keys  []uint64 // 0 = free; len is a power of two
	sets  []uint64 // len(keys)*words
	used  int
	lru   []blockLRU // by slot
	stack []uint64   // scratch of longest
}

// blockLRU is one replica's blocks, the most recently used first.
type blockLRU struct {
	limit int
	count int
	head  int32
	tail  int32
	free  int32
	nodes []blockNode
	table []int32 // fingerprint -> node+1; 0 = free; len is a power of two
}

type blockNode struct {
	hash       uint64
	prev, next int32
}

const (
	minTable   = 64
	searchDeep = 72 // more than 2*log2 of any chain
)

// spread places a fingerprint in a table of mask+1 slots (Fibonacci hashing:
// the fingerprint's low bits may be poor).
func spread(h uint64, mask uint64) uint64 { return (h * 0x9e3779b97f4a7c15 >> 20) & mask }

func nonZero(h uint64) uint64 {
	if h == 0 {
		return 1
	}
	return h
}

// setSlots makes room for n replicas.
func (x *prefixIndex) setSlots(n int) {
	for len(x.lru) < n {
		x.lru = append(x.lru, blockLRU{head: -1, tail: -1, free: -1})
	}
	words := max(1, (len(x.lru)+63)/64)
	if words == x.words {
		return
	}
	old := *x
	x.words = words
	x.stack = make([]uint64, searchDeep*words)
	x.keys, x.sets, x.used = nil, nil, 0
	x.grow(max(minTable, len(old.keys)))
	for i, k := range old.keys {
		if k != 0 {
			j := x.slotOf(k)
			x.keys[j] = k
			x.used++
			copy(x.sets[j*words:], old.sets[i*old.words:(i+1)*old.words])
		}
	}
}

// grow re-makes the table with n slots, entries kept.
func (x *prefixIndex) grow(n int) {
	keys, sets := x.keys, x.sets
	x.keys, x.sets = make([]uint64, n), make([]uint64, n*x.words)
	for i, k := range keys {
		if k != 0 {
			j := x.slotOf(k)
			x.keys[j] = k
			copy(x.sets[j*x.words:(j+1)*x.words], sets[i*x.words:])
		}
	}
}

// slotOf finds where key is, or the free slot where it would go.
func (x *prefixIndex) slotOf(key uint64) int {
	mask := uint64(len(x.keys) - 1)
	i := spread(key, mask)
	for x.keys[i] != 0 && x.keys[i] != key {
		i = (i + 1) & mask
	}
	return int(i)
}

func (x *prefixIndex) mark(key uint64, slot int) {
	i := x.slotOf(key)
	if x.keys[i] == 0 {
		if 2*(x.used+1) > len(x.keys) {
			x.grow(2 * len(x.keys))
			i = x.slotOf(key)
		}
		x.keys[i] = key
		x.used++
	}
	x.sets[i*x.words+slot>>6] |= 1 << (slot & 63)
}

func (x *prefixIndex) unmark(key uint64, slot int) {
	i := x.slotOf(key)
	if x.keys[i] == 0 {
		return
	}
	set := x.sets[i*x.words : (i+1)*x.words]
	set[slot>>6] &^= 1 << (slot & 63)
	for _, w := range set {
		if w != 0 {
			return
		}
	}
	x.remove(uint64(i))
}

// remove frees a slot, moving later entries of its run back (no tombstones:
// look-ups stay short however long the process runs).
func (x *prefixIndex) remove(i uint64) {
	mask := uint64(len(x.keys) - 1)
	w := x.words
	x.used--
	for j := i; ; {
		j = (j + 1) & mask
		k := x.keys[j]
		if k == 0 {
			break
		}
		home := spread(k, mask)
		if (j-home)&mask >= (j-i)&mask {
			x.keys[i] = k
			copy(x.sets[int(i)*w:(int(i)+1)*w], x.sets[int(j)*w:])
			i = j
		}
	}
	x.keys[i] = 0
	clear(x.sets[int(i)*w : (int(i)+1)*w])
}

// longest writes to out, by slot, how many leading blocks each replica holds.
func (x *prefixIndex) longest(blocks []uint64, out []int32) {
	clear(out)
	if len(blocks) == 0 || x.used == 0 {
		return
	}
	i := x.slotOf(nonZero(blocks[0]))
	if x.keys[i] == 0 {
		return
	}
	w := x.words
	s := x.stack
	copy(s[:w], x.sets[i*w:])
	x.search(blocks, 1, len(blocks), 0, true, out)
}

// search resolves the replicas of the set at stack level d, which hold the
// first lo blocks, and at most hi.
func (x *prefixIndex) search(blocks []uint64, lo, hi, d int, first bool, out []int32) {
	w := x.words
	set := x.stack[d*w : (d+1)*w]
	for lo < hi {
		mid := (lo + hi) / 2
		if first {
			mid, first = hi-1, false // a whole hit is common in conversations
		}
		i := x.slotOf(nonZero(blocks[mid]))
		if x.keys[i] == 0 {
			hi = mid
			continue
		}
		has := x.stack[(d+1)*w : (d+2)*w]
		var some, left uint64
		for k := range set {
			has[k] = set[k] & x.sets[i*w+k]
			some |= has[k]
			left |= set[k] &^ has[k]
		}
		switch {
		case some == 0:
			hi = mid
		case left == 0:
			lo = mid + 1
		default:
			for k := range set {
				set[k] &^= has[k]
			}
			x.search(blocks, mid+1, hi, d+1, false, out)
			hi = mid
		}
	}
	for k, v := range set {
		for v != 0 {
			out[k<<6+bits.TrailingZeros64(v)] = int32(lo)
			v &= v - 1
		}
	}
}

// touch enters a chain at one replica, or makes it the most recent there.
func (x *prefixIndex) touch(slot int, blocks []uint64) {
	l := &x.lru[slot]
	if l.limit <= 0 {
		return
	}
	if len(blocks) > l.limit {
		blocks = blocks[:l.limit]
	}
	at, k := l.front(blocks)
	for i := len(blocks) - 1; i >= k; i-- {
		h := nonZero(blocks[i])
		if n := l.find(h); n >= 0 {
			l.unlink(n)
			l.link(n, at)
			continue
		}
		if l.count >= l.limit {
			x.unmark(l.nodes[l.tail].hash, slot)
			l.evict()
		}
		l.push(h, at)
		x.mark(h, slot)
	}
}

// front moves to the front the run of blocks, from the first on, that are
// neighbours in the list already: most often the whole chain, as the last
// request of the same prefix left it. It returns the run's last node (-1 =
// none) and its length.
func (l *blockLRU) front(blocks []uint64) (last int32, length int) {
	if len(blocks) == 0 {
		return -1, 0
	}
	first := l.find(nonZero(blocks[0]))
	if first < 0 {
		return -1, 0
	}
	last, length = first, 1
	for length < len(blocks) {
		n := l.nodes[last].next
		if n < 0 || l.nodes[n].hash != nonZero(blocks[length]) {
			break
		}
		last = n
		length++
	}
	if l.head == first {
		return last, length
	}
	before, after := l.nodes[first].prev, l.nodes[last].next
	l.nodes[before].next = after
	if after >= 0 {
		l.nodes[after].prev = before
	} else {
		l.tail = before
	}
	l.nodes[first].prev, l.nodes[last].next = -1, l.head
	l.nodes[l.head].prev = last
	l.head = first
	return last, length
}

// drop takes blocks out (KV events: removed).
func (x *prefixIndex) drop(slot int, blocks []uint64) {
	l := &x.lru[slot]
	for _, h := range blocks {
		h = nonZero(h)
		if n := l.find(h); n >= 0 {
			l.unlink(n)
			l.forget(n)
			x.unmark(h, slot)
		}
	}
}

// setLimit bounds a replica's blocks.
func (x *prefixIndex) setLimit(slot, limit int) {
	l := &x.lru[slot]
	l.limit = max(0, limit)
	for l.count > l.limit {
		x.unmark(l.nodes[l.tail].hash, slot)
		l.evict()
	}
}

// forget empties a replica's part: it restarted, or its slot is to be reused.
func (x *prefixIndex) forget(slot int) {
	l := &x.lru[slot]
	for n := l.head; n >= 0; n = l.nodes[n].next {
		x.unmark(l.nodes[n].hash, slot)
	}
	*l = blockLRU{limit: l.limit, head: -1, tail: -1, free: -1}
}

func (l *blockLRU) find(h uint64) int32 {
	if len(l.table) == 0 {
		return -1
	}
	mask := uint64(len(l.table) - 1)
	for i := spread(h, mask); ; i = (i + 1) & mask {
		n := l.table[i]
		if n == 0 {
			return -1
		}
		if l.nodes[n-1].hash == h {
			return n - 1
		}
	}
}

// link puts a node behind node at, -1 = at the front.
func (l *blockLRU) link(n, at int32) {
	next := l.head
	if at >= 0 {
		next = l.nodes[at].next
		l.nodes[at].next = n
	} else {
		l.head = n
	}
	l.nodes[n].prev, l.nodes[n].next = at, next
	if next >= 0 {
		l.nodes[next].prev = n
	} else {
		l.tail = n
	}
}

func (l *blockLRU) unlink(n int32) {
	nd := l.nodes[n]
	if nd.prev >= 0 {
		l.nodes[nd.prev].next = nd.next
	} else {
		l.head = nd.next
	}
	if nd.next >= 0 {
		l.nodes[nd.next].prev = nd.prev
	} else {
		l.tail = nd.prev
	}
}

func (l *blockLRU) push(h uint64, at int32) {
	n := l.free
	if n >= 0 {
		l.free = l.nodes[n].next
	} else {
		n = int32(len(l.nodes))
		l.nodes = append(l.nodes, blockNode{})
	}
	l.nodes[n].hash = h
	l.count++
	if 2*l.count > len(l.table) {
		l.rehash(max(minTable, 2*len(l.table)))
	}
	l.enter(n)
	l.link(n, at)
}

func (l *blockLRU) enter(n int32) {
	mask := uint64(len(l.table) - 1)
	i := spread(l.nodes[n].hash, mask)
	for l.table[i] != 0 {
		i = (i + 1) & mask
	}
	l.table[i] = n + 1
}

func (l *blockLRU) rehash(size int) {
	l.table = make([]int32, size)
	for n := l.head; n >= 0; n = l.nodes[n].next {
		l.enter(n)
	}
}

func (l *blockLRU) evict() {
	n := l.tail
	l.unlink(n)
	l.forget(n)
}

// forget frees an unlinked node and closes its gap in the table.
func (l *blockLRU) forget(n int32) {
	mask := uint64(len(l.table) - 1)
	i := spread(l.nodes[n].hash, mask)
	for l.table[i] != n+1 {
		i = (i + 1) & mask
	}
	for j := i; ; {
		j = (j + 1) & mask
		m := l.table[j]
		if m == 0 {
			break
		}
		home := spread(l.nodes[m-1].hash, mask)
		if (j-home)&mask >= (j-i)&mask {
			l.table[i] = m
			i = j
		}
	}
	l.table[i] = 0
	l.nodes[n].next = l.free
	l.free = n
	l.count--
}

// PrefixStored tells, from the replica's own KV events, that it holds these
// chained fingerprints (first to last).
func (p *Pool) PrefixStored(id fleet.ID, blocks []uint64) {
	if r := p.byID[id]; r != nil {
		p.index.touch(r.slot, blocks)
	}
}

// PrefixRemoved tells, from the replica's own KV events, that it holds these
// no more.
func (p *Pool) PrefixRemoved(id fleet.ID, blocks []uint64) {
	if r := p.byID[id]; r != nil {
		p.index.drop(r.slot, blocks)
	}
}

// PrefixCleared tells that the replica's prefix cache is empty.
func (p *Pool) PrefixCleared(id fleet.ID) {
	if r := p.byID[id]; r != nil {
		p.index.forget(r.slot)
	}
}
