package wire

import (
	"crypto/sha256"
	"encoding/binary"
	"math/bits"
	"strconv"

	"github.com/zeebo/xxh3"
)

const (
	// linkBytes is how many canonical prompt bytes one link of the chain
	// covers: about 64 tokens of English, a small multiple of vLLM's 16-token
	// block, so that a match is seldom more than one link short.
	linkBytes = 256
	// maxBlocks bounds what one request keeps. A longer prompt (over 1 MB)
	// gets every second, fourth ... link of the same chain.
	maxBlocks = 4096
)

// chain makes the chained fingerprints of a canonical byte stream.
type chain struct {
	blocks []uint64
	prev   uint64
	every  int // links per entry of blocks
	links  int
	total  int // canonical bytes fed
	n      int // bytes in buf
	buf    [linkBytes]byte
}

func (c *chain) reset(seed uint64) {
	c.blocks, c.prev, c.every, c.links, c.total, c.n = c.blocks[:0], seed, 1, 0, 0, 0
}

// mix64 joins two hashes so that the order matters (the finaliser is rrmxmx's).
func mix64(a, b uint64) uint64 {
	h := a*0x9e3779b97f4a7c15 + b
	h ^= bits.RotateLeft64(h, 49) ^ bits.RotateLeft64(h, 24)
	h *= 0x9fb21c651e98df25
	h ^= h >> 28
	h *= 0x9fb21c651e98df25
	return h ^ h>>28
}

func (c *chain) link(block []byte) {
	c.prev = mix64(c.prev, xxh3.Hash(block))
	c.links++
	if c.links%c.every != 0 {
		return
	}
	if len(c.blocks) == maxBlocks {
		for i := range maxBlocks / 2 {
			c.blocks[i] = c.blocks[2*i+1]
		}
		c.blocks = c.blocks[:maxBlocks/2]
		c.every *= 2
		if c.links%c.every != 0 {
			return
		}
	}
	c.blocks = append(c.blocks, c.prev)
}

func (c *chain) feed(p []byte) {
	c.total += len(p)
	if len(p) < linkBytes-c.n { // the pieces between escapes are short
		c.n += copy(c.buf[c.n:], p)
		return
	}
	if c.n > 0 {
		k := copy(c.buf[c.n:], p)
		c.n += k
		p = p[k:]
		if c.n < linkBytes {
			return
		}
		c.link(c.buf[:])
		c.n = 0
	}
	for len(p) >= linkBytes {
		c.link(p[:linkBytes])
		p = p[linkBytes:]
	}
	c.n = copy(c.buf[:], p)
}

func (c *chain) byte(b byte) {
	c.total++
	c.buf[c.n] = b
	if c.n++; c.n == linkBytes {
		c.link(c.buf[:])
		c.n = 0
	}
}

func (c *chain) uint64(v uint64) {
	var t [8]byte
	binary.LittleEndian.PutUint64(t[:], v)
	c.feed(t[:])
}

// BodyKey names a request by its exact bytes, for the answer cache: tenant,
// API and body.
func BodyKey(k Kind, tenant string, body []byte) (key [32]byte) {
	h := sha256.New()
	h.Write([]byte{byte(k)})
	h.Write([]byte(strconv.Itoa(len(tenant)) + ":" + tenant))
	h.Write(body)
	h.Sum(key[:0])
	return key
}

// BodyHash is a fast hash of the same, for counting repeats. It is not proof
// against a client that builds collisions with its own earlier requests.
func BodyHash(k Kind, tenant string, body []byte) uint64 {
	return mix64(mix64(uint64(k), xxh3.HashString(tenant)), xxh3.Hash(body))
}
