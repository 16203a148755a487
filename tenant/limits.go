// Package tenant says what each tenant may do: rate, burst, requests at a
// time. Limits are kept in this router's memory.
package tenant

import (
	"sync"
)

// Limits of one tenant. A zero field is no limit.
type Limits struct {
	Rate     float64 // requests per second
	Burst    float64 // requests at once; 0 with a Rate = one second's worth, at least 1
	Parallel int     // requests in flight
}

// Limiter holds every tenant's bucket. Safe for concurrent use. Memory is
// bounded: a tenant that has nothing in flight may be forgotten when more than
// maxTenants are known.
type Limiter struct {
	mu     sync.Mutex
	limits Limits
	m      map[string]*bucket
}

// maxTenants bounds what is remembered (about 100 bytes each).
const maxTenants = 100_000

type bucket struct {
	tokens   float64
	at       float64
	inFlight int
}

// NewLimiter returns a limiter that gives each tenant the same limits.
func NewLimiter(l Limits) *Limiter {
	if l.Rate > 0 && l.Burst <= 0 {
		l.Burst = max(1, l.Rate)
	}
	return &Limiter{limits: l, m: map[string]*bucket{}}
}

// Take asks for one request at time now (seconds). When it is refused, wait
// says in how many seconds the next one is allowed (at least 1 ms). Every
// true has to be followed by one Return.
func (l *Limiter) Take(tenant string, now float64) (ok bool, wait float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.m[tenant]
	if b == nil {
		if len(l.m) >= maxTenants {
			l.forget()
		}
		b = &bucket{tokens: l.limits.Burst, at: now}
		l.m[tenant] = b
	}
	return l.take(b, now)
}

func (l *Limiter) take(b *bucket, now float64) (ok bool, wait float64) {
	if l.limits.Parallel > 0 && b.inFlight >= l.limits.Parallel {
		return false, 1
	}
	if l.limits.Rate > 0 {
		b.tokens = min(l.limits.Burst, b.tokens+max(0, now-b.at)*l.limits.Rate)
		b.at = now
		if b.tokens < 1 {
			return false, max(0.001, (1-b.tokens)/l.limits.Rate)
		}
		b.tokens--
	}
	b.inFlight++
	return true, 0
}

// Return gives back the place of one request.
func (l *Limiter) Return(tenant string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.m[tenant]
	if b == nil || b.inFlight == 0 {
		panic("BUG: a tenant's place was returned twice")
	}
	b.inFlight--
}

// InFlight is the sum over all tenants.
func (l *Limiter) InFlight() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, b := range l.m {
		n += b.inFlight
	}
	return n
}

// forgetLook bounds how many tenants are looked at to forget one.
const forgetLook = 64

// forget drops one tenant that has nothing in flight, of a few looked at the
// one with the fullest bucket. It comes back with a full one: no more than a
// client that makes up a new name gets anyway. When none of them is idle the
// table grows, by no more than the requests in flight.
func (l *Limiter) forget() {
	n, best, tokens := 0, "", -1.0
	for t, b := range l.m {
		if b.inFlight == 0 && b.tokens > tokens {
			best, tokens = t, b.tokens
		}
		if n++; n == forgetLook {
			break
		}
	}
	if tokens >= 0 {
		delete(l.m, best)
	}
}
