// Package tenant says what each tenant may do: rate, burst, requests at a
// time. Limits are kept in this router's memory.
package tenant

import (
	"math"
	"sync"
)

// Limits of one tenant. A zero field is no limit.
type Limits struct {
	Rate     float64 // requests per second
	Burst    float64 // requests at once; 0 with a Rate = one second's worth, at least 1
	Parallel int     // requests in flight
}

// Limiter holds every tenant's bucket. Safe for concurrent use. Memory is
// bounded: a tenant whose bucket is full and that has nothing in flight is
// forgotten when more than maxTenants are known.
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
			l.forget(now)
		}
		b = &bucket{tokens: l.limits.Burst, at: now}
		l.m[tenant] = b
	}
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

// forget drops tenants that would be as good as new.
func (l *Limiter) forget(now float64) {
	for t, b := range l.m {
		full := l.limits.Rate <= 0 || b.tokens+(now-b.at)*l.limits.Rate >= l.limits.Burst
		if b.inFlight == 0 && (full || math.IsNaN(b.tokens)) {
			delete(l.m, t)
		}
	}
}
