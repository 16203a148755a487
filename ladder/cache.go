package ladder

import (
	"sync"

	"github.com/penstock/penstock/internal/mutant"
)

// The longest that an answer may be kept, seconds (degradation.md).
const (
	MaxTenantStaleness = 4 * 3600.0
	MaxSharedStaleness = 24 * 3600.0
)

// Key is the exact request: a hash over its whole body, model and API, and
// over the tenant unless the answer is declared shared.
type Key [2]uint64

// Cache keeps whole answers of deterministic requests, bounded in bytes; the
// least recently used leaves first. Safe for concurrent use.
type Cache struct {
	mu    sync.Mutex
	limit int
	bytes int
	m     map[Key]*entry
	head  entry // ring: head.next is the most recently used
}

type entry struct {
	key        Key
	body       []byte
	at         float64
	prev, next *entry
}

// NewCache returns a cache of at most limit bytes of answers.
func NewCache(limit int) *Cache {
	c := &Cache{limit: limit, m: map[Key]*entry{}}
	c.head.prev, c.head.next = &c.head, &c.head
	return c
}

func (c *Cache) unlink(e *entry) { e.prev.next, e.next.prev = e.next, e.prev }

func (c *Cache) front(e *entry) {
	e.prev, e.next = &c.head, c.head.next
	e.prev.next, e.next.prev = e, e
}

func (c *Cache) drop(e *entry) {
	c.unlink(e)
	delete(c.m, e.key)
	c.bytes -= len(e.body)
}

// Put keeps a copy of body, made at time now (seconds). An answer larger than
// an eighth of the cache is not kept.
func (c *Cache) Put(k Key, body []byte, now float64) {
	if len(body) > c.limit/8 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.m[k]; e != nil {
		c.drop(e)
	}
	e := &entry{key: k, body: append([]byte(nil), body...), at: now}
	c.m[k] = e
	c.front(e)
	c.bytes += len(e.body)
	for c.bytes > c.limit {
		c.drop(c.head.prev)
	}
}

// Get returns the answer to k and its age when it is at most staleness
// seconds old. An older one is dropped: a miss. The bytes are not to be
// changed.
func (c *Cache) Get(k Key, staleness, now float64) (body []byte, age float64, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.m[k]
	if e == nil {
		return nil, 0, false
	}
	if age = now - e.at; age > staleness && !mutant.On("stale-cache") {
		c.drop(e)
		return nil, 0, false
	}
	c.unlink(e)
	c.front(e)
	return e.body, age, true
}

// Bytes is how much is held now.
func (c *Cache) Bytes() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes
}
