package model

// Seg is one run of prompt tokens. Hash is chained: it stands for the whole
// prompt up to and including this run, as vLLM's block hashes do. A Seg of
// BlockTokens tokens is exactly one block; longer ones are runs of blocks
// that are only ever shared as a run (a system prompt, a turn), which keeps
// the cost of a request independent of its length.
type Seg struct {
	Hash   uint64
	Tokens int
}

// node is one cached Seg. have is how many of its blocks are in the cache,
// counted from its head: eviction takes them from the tail.
type node struct {
	hash       uint64
	full, have int32
	refs       int32
	prev, next int32 // LRU list while refs == 0
}

// cache is the paged KV cache: blocks are free, private to a sequence, or in
// a node (pinned while referenced, else evictable in LRU order).
type cache struct {
	total  int // blocks
	unused int // blocks neither private nor in a node
	idle   int // blocks in nodes without reference: evictable
	nodes  []node
	spare  []int32
	byHash map[uint64]int32
}

func newCache(blocks int) *cache {
	c := &cache{total: blocks, unused: blocks, byHash: map[uint64]int32{}}
	c.nodes = append(c.nodes, node{}) // 0 is the LRU list's sentinel: next = oldest
	return c
}

// available is how many blocks can be had without preemption.
func (c *cache) available() int { return c.unused + c.idle }

// used is how many blocks are held by sequences.
func (c *cache) used() int { return c.total - c.unused - c.idle }

func (c *cache) unlink(i int32) {
	n := &c.nodes[i]
	c.nodes[n.prev].next, c.nodes[n.next].prev = n.next, n.prev
}

func (c *cache) pushNewest(i int32) {
	last := c.nodes[0].prev
	c.nodes[i].prev, c.nodes[i].next = last, 0
	c.nodes[last].next, c.nodes[0].prev = i, i
}

func (c *cache) ref(i int32) {
	n := &c.nodes[i]
	if n.refs == 0 {
		c.unlink(i)
		c.idle -= int(n.have)
	}
	n.refs++
}

func (c *cache) unref(i int32) {
	n := &c.nodes[i]
	n.refs--
	if n.refs < 0 {
		panic("BUG: model: cache reference below zero")
	}
	if n.refs > 0 {
		return
	}
	if n.have == 0 {
		delete(c.byHash, n.hash)
		c.spare = append(c.spare, i)
		return
	}
	c.idle += int(n.have)
	c.pushNewest(i)
}

// take makes b blocks private, evicting the oldest idle ones when needed.
// The caller has checked available.
func (c *cache) take(b int) {
	for c.unused < b {
		i := c.nodes[0].next
		if i == 0 {
			panic("BUG: model: take without available blocks")
		}
		n := &c.nodes[i]
		k := min(int(n.have), b-c.unused)
		n.have -= int32(k)
		c.idle -= k
		c.unused += k
		if n.have == 0 {
			c.unlink(i)
			delete(c.byHash, n.hash)
			c.spare = append(c.spare, i)
		}
	}
	c.unused -= b
}

// give returns b private blocks.
func (c *cache) give(b int) { c.unused += b }

// insert returns the node of hash; a new one is empty and already holds the
// caller's reference.
func (c *cache) insert(hash uint64, blocks int) (i int32, made bool) {
	if i, ok := c.byHash[hash]; ok {
		return i, false
	}
	if k := len(c.spare); k > 0 {
		i = c.spare[k-1]
		c.spare = c.spare[:k-1]
	} else {
		i = int32(len(c.nodes))
		c.nodes = append(c.nodes, node{})
	}
	c.nodes[i] = node{hash: hash, full: int32(blocks), refs: 1}
	c.byHash[hash] = i
	return i, true
}

// match walks the chain and returns how many blocks are cached in front, at
// most limit. path gets the node of each run that takes part (0 = a run too
// short to have one); the last may be held only in part.
func (c *cache) match(segs []Seg, block, limit int, path []int32) (blocks int, out []int32) {
	tokens := 0
	for _, s := range segs {
		full := (tokens+s.Tokens)/block - tokens/block
		tokens += s.Tokens
		i, ok := c.byHash[s.Hash]
		if !ok && full > 0 {
			break
		}
		path = append(path, i)
		if !ok { // a run that completes no block: nothing to hold
			continue
		}
		have := min(int(c.nodes[i].have), full)
		if blocks+have >= limit {
			return limit, path
		}
		blocks += have
		if have < full {
			break
		}
	}
	return blocks, path
}
