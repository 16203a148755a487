package admission

import "math"

// BudgetConfig bounds attempts. Zero fields mean their defaults.
type BudgetConfig struct {
	PerRequest int     // attempts of one request, the first included; default 2
	Extra      float64 // attempts above one per request, as a share of the requests of the window; default 0.2
	Window     float64 // seconds; default 10
	Floor      float64 // extra attempts per second of the window that are always allowed (at once if need be: a replica's death fails all of its requests together); default 3
}

// Defaults fills the fields that are zero.
func (c *BudgetConfig) Defaults() {
	orDefault(&c.PerRequest, 2)
	orDefault(&c.Extra, 0.2)
	orDefault(&c.Window, 10)
	orDefault(&c.Floor, 3)
}

// budgetSlots is the grain of the sliding window.
const budgetSlots = 20

// AttemptBudget bounds the attempts of a pool: at most PerRequest for each
// request, and no more than Extra x requests above one per request over the
// window, whatever fails. It is not safe for concurrent use.
//
// Requests and extra attempts of peers count too (SetPeers), so that the bound
// is the fleet's.
type AttemptBudget struct {
	cfg      BudgetConfig
	slot     int64
	requests [budgetSlots]uint32
	extra    [budgetSlots]uint32
	sumReq   uint32
	sumExtra uint32
	promised [budgetSlots]uint32 // repeats that clients were told to come with
	sumProm  uint32
	due      float64 // when the last of them may come
	peerReq  float64
	peerEx   float64
	refused  uint64
}

// NewAttemptBudget makes a budget; zero fields of cfg are defaults.
func NewAttemptBudget(cfg BudgetConfig) *AttemptBudget {
	cfg.Defaults()
	return &AttemptBudget{cfg: cfg, slot: math.MinInt64}
}

func (b *AttemptBudget) roll(now float64) int {
	s := int64(math.Floor(now / b.cfg.Window * budgetSlots))
	if b.slot == math.MinInt64 || s-b.slot >= budgetSlots {
		clear(b.requests[:])
		clear(b.extra[:])
		clear(b.promised[:])
		b.sumReq, b.sumExtra, b.sumProm, b.slot = 0, 0, 0, s
	}
	for b.slot < s {
		b.slot++
		i := b.index()
		b.sumReq -= b.requests[i]
		b.sumExtra -= b.extra[i]
		b.sumProm -= b.promised[i]
		b.requests[i], b.extra[i], b.promised[i] = 0, 0, 0
	}
	return b.index()
}

func (b *AttemptBudget) index() int {
	return int(((b.slot % budgetSlots) + budgetSlots) % budgetSlots)
}

// Request counts a new request; its first attempt is always allowed.
func (b *AttemptBudget) Request(now float64) {
	i := b.roll(now)
	b.requests[i]++
	b.sumReq++
}

// Repeated counts a request that is a client's own repeat
// (X-Stainless-Retry-Count above 0). One that Later told to come is an extra
// attempt: the request was counted when it first came. Any other (most were
// shed before) had no attempt yet and counts as a request.
func (b *AttemptBudget) Repeated(now float64) {
	i := b.roll(now)
	if b.sumProm == 0 {
		b.requests[i]++
		b.sumReq++
		return
	}
	for k := range b.promised { // any of them: which one it is does not matter
		if b.promised[k] > 0 {
			b.promised[k]--
			b.sumProm--
			break
		}
	}
	b.extra[i]++
	b.sumExtra++
}

// The pause before a client's own repeat, seconds: at least so long, since what
// failed a moment ago fails again; and not longer than a client would wait.
const (
	laterLeast = 1.0
	laterMost  = 60.0
)

// Later is asked when a request failed and is not tried again by the router,
// but has an attempt left: in how many seconds a repeat by the client fits into
// the bound. Each call takes the next place, so that repeats come one after
// another, however many fail together. ok is false when the places of the next
// minute are taken.
func (b *AttemptBudget) Later(now float64) (wait float64, ok bool) {
	i := b.roll(now)
	bound := max(b.cfg.Extra*(float64(b.sumReq)+b.peerReq), b.cfg.Floor*b.cfg.Window)
	rate := bound / b.cfg.Window
	if free := bound - float64(b.sumExtra) - float64(b.sumProm) - b.peerEx; free > rate {
		rate = free
	}
	at := max(now+laterLeast, b.due+1/rate)
	if at > now+laterMost {
		b.refused++
		return 0, false
	}
	b.due = at
	b.promised[i]++
	b.sumProm++
	return at - now, true
}

// Left is how many attempts a request may still make here: PerRequest less
// what the SDK and this router have spent.
func (b *AttemptBudget) Left(spent, repeats int) int {
	return max(0, b.cfg.PerRequest-spent-repeats)
}

// Allow asks for one attempt beyond a request's first, and counts it when it
// is allowed.
func (b *AttemptBudget) Allow(now float64) bool {
	i := b.roll(now)
	bound := max(b.cfg.Extra*(float64(b.sumReq)+b.peerReq), b.cfg.Floor*b.cfg.Window)
	if float64(b.sumExtra)+b.peerEx+1 > bound {
		b.refused++
		return false
	}
	b.extra[i]++
	b.sumExtra++
	return true
}

// Retry is Allow under the name that the proxy asks by.
func (b *AttemptBudget) Retry(now float64) bool { return b.Allow(now) }

// Unused takes back what Allow counted: no replica took the attempt. Which one
// of those in the window it was does not matter; the latest was most likely.
func (b *AttemptBudget) Unused() {
	if b.sumExtra == 0 {
		return // its window has passed
	}
	i := b.index()
	for b.extra[i] == 0 {
		i = (i + budgetSlots - 1) % budgetSlots
	}
	b.extra[i]--
	b.sumExtra--
}

// SetPeers gives the sums of all peers over the same window.
func (b *AttemptBudget) SetPeers(requests, extra float64) { b.peerReq, b.peerEx = requests, extra }

// Totals are this router's sums over the window, for the peers, and how many
// attempts were refused since the start.
func (b *AttemptBudget) Totals(now float64) (requests, extra float64, refused uint64) {
	b.roll(now)
	return float64(b.sumReq), float64(b.sumExtra), b.refused
}

// StormConfig bounds repeats of one request after a degraded or shed answer.
type StormConfig struct {
	Repeats int     // repeats allowed within Window; default 2
	Window  float64 // seconds; default 10
	Max     int     // requests remembered; default 8192 (the oldest is forgotten)
}

// StormGuard counts repeats by the request's fingerprint. Only a request that
// had a degraded or shed answer is remembered at all. Not safe for concurrent
// use.
type StormGuard struct {
	cfg  StormConfig
	seen map[uint64]int32 // fingerprint -> index in ring
	ring []stormEntry
	next int32
}

type stormEntry struct {
	print   uint64
	at      float64 // of the last degraded or shed answer
	repeats int
	used    bool
}

// NewStormGuard makes a guard; zero fields of cfg are defaults.
func NewStormGuard(cfg StormConfig) *StormGuard {
	orDefault(&cfg.Repeats, 2)
	orDefault(&cfg.Window, 10)
	orDefault(&cfg.Max, 8192)
	return &StormGuard{cfg: cfg, seen: make(map[uint64]int32)}
}

// Answered notes that the request of that fingerprint had a degraded or shed
// answer.
func (g *StormGuard) Answered(now float64, print uint64) {
	if i, ok := g.seen[print]; ok {
		e := &g.ring[i]
		if now-e.at > g.cfg.Window {
			e.repeats = 0
		}
		e.at = now
		return
	}
	if len(g.ring) < g.cfg.Max {
		g.ring = append(g.ring, stormEntry{})
		g.next = int32(len(g.ring) - 1)
	} else {
		g.next = (g.next + 1) % int32(len(g.ring))
		if e := &g.ring[g.next]; e.used {
			delete(g.seen, e.print)
		}
	}
	g.ring[g.next] = stormEntry{print: print, at: now, used: true}
	g.seen[print] = g.next
}

// Repeat is asked when a request comes. It is false when this is one repeat
// too many; retryAfter is then when the window ends.
func (g *StormGuard) Repeat(now float64, print uint64) (ok bool, retryAfter float64) {
	return g.RepeatAmong(now, print, 0)
}

// RepeatAmong is Repeat where other routers saw that request tries times since
// its degraded or shed answer, that one included (Each).
func (g *StormGuard) RepeatAmong(now float64, print uint64, tries int) (ok bool, retryAfter float64) {
	until := now + g.cfg.Window // when only others know it
	if i, known := g.seen[print]; known {
		e := &g.ring[i]
		if now-e.at > g.cfg.Window {
			e.repeats = 0
		} else {
			e.repeats++
			tries += e.repeats
			until = e.at + g.cfg.Window
		}
	}
	if tries > g.cfg.Repeats {
		return false, max(0.001, until-now)
	}
	return true, 0
}

// Forget ends the window of a request that was answered in full.
func (g *StormGuard) Forget(print uint64) {
	if i, ok := g.seen[print]; ok {
		g.ring[i].at, g.ring[i].repeats = math.Inf(-1), 0
	}
}

// Each calls f for each request whose window is open, with how often it came
// since its degraded or shed answer, that one included: what a router tells
// its peers.
func (g *StormGuard) Each(now float64, f func(print uint64, tries int)) {
	for i := range g.ring {
		if e := &g.ring[i]; e.used && now-e.at <= g.cfg.Window {
			f(e.print, 1+e.repeats)
		}
	}
}

// Count is how many repeats of that fingerprint were seen in its window.
func (g *StormGuard) Count(now float64, print uint64) int {
	if i, ok := g.seen[print]; ok && now-g.ring[i].at <= g.cfg.Window {
		return g.ring[i].repeats
	}
	return 0
}

// Add counts repeats that a peer saw.
func (g *StormGuard) Add(now float64, print uint64, repeats int) {
	if i, ok := g.seen[print]; ok && now-g.ring[i].at <= g.cfg.Window {
		g.ring[i].repeats += repeats
		return
	}
	g.Answered(now, print)
	g.ring[g.seen[print]].repeats = repeats
}
