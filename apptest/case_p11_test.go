package apptest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// p11Big is longer than what the router holds back whole.
var p11Big = `{"x":"` + strings.Repeat("y", 10_000_000) + `"}`

// p11Replica ends requests in every bad way, in turn; scale shortens its waits.
func p11Replica(scale float64, healed *atomic.Bool) func(*conn) {
	wait := func(s float64) { time.Sleep(time.Duration(s * scale * float64(time.Second))) }
	return func(c *conn) {
		if healed.Load() {
			c.ok()
			return
		}
		switch c.N % 8 {
		case 0:
			c.json(502, `{"error":{"message":"x"}}`, "")
		case 1: // past the wait for a first token
			c.waitClose(time.Duration(5 * scale * float64(time.Second)))
			c.rst()
		case 2:
			c.rst()
		case 3:
			c.sseHead()
			for i := 1; i <= 3; i++ {
				c.chunk(frame(i))
			}
			wait(.05)
			c.rst()
		case 4:
			c.json(200, p11Big, "")
		case 5:
			c.json(200, `{not json`, "")
		case 6:
			c.waitClose(time.Duration(2 * scale * float64(time.Second)))
			c.close()
		default:
			c.ok()
		}
	}
}

var p11Paths = []string{chat, "/v1/completions", "/v1/embeddings", "/v1/messages"}

func p11Body(rng *rand.Rand) (path, body string) {
	path = p11Paths[rng.IntN(len(p11Paths))]
	switch path {
	case "/v1/embeddings":
		return path, `{"model":"m1","input":"x"}`
	case "/v1/completions":
		body = `{"model":"m1","prompt":"x"}`
	case "/v1/messages":
		body = `{"model":"m1","max_tokens":8,"messages":[{"role":"user","content":"hi"}]}`
	default:
		body = reqBody
	}
	if rng.IntN(2) == 0 {
		body = strings.TrimSuffix(body, "}") + `,"stream":true}`
	}
	return path, body
}

// bad tells whether a request ended otherwise than in a whole answer.
func (a answer) bad(err error) bool {
	_, event := errorEvent(a.Body)
	return err != nil || a.ReadErr != nil || a.Status != 200 || event
}

// p11Load sends n requests from some clients at a time; leave is the share of
// them that leave after at most a time. It returns how many ended badly.
func p11Load(t *testing.T, r *router, seed uint64, n, clients int, leave float64, most time.Duration, tenant func(client int) string) int {
	t.Helper()
	var left, bad atomic.Int64
	left.Store(int64(n))
	var wg sync.WaitGroup
	for w := range clients {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(w)))
			for left.Add(-1) >= 0 {
				path, body := p11Body(rng)
				ctx, cancel := context.Background(), context.CancelFunc(func() {})
				if rng.Float64() < leave {
					ctx, cancel = context.WithTimeout(ctx, time.Duration(rng.Int64N(int64(most))))
				}
				a, err := r.try(ctx, path, body, "X-Sandbox-ID", tenant(w))
				cancel()
				if a.bad(err) {
					bad.Add(1)
				}
			}
		})
	}
	wg.Wait()
	return int(bad.Load())
}

var p11Count atomic.Int64

// p11Fresh is a request that was not sent before: one and the same body every
// few milliseconds is a storm of retries, and refused as that.
func p11Fresh() string {
	return strings.Replace(reqBody, `"hi"`, fmt.Sprintf(`"hi %d"`, p11Count.Add(1)), 1)
}

// TestCaseP11SlotsNeverLeak: 400 requests of one tenant, four at a time, at a
// replica that fails in every way, and 200 that leave. No place is missing on the
// way, no more than four are at the replica, and afterwards all four are free.
func TestCaseP11SlotsNeverLeak(t *testing.T) {
	t.Parallel()
	var healed atomic.Bool
	u1 := replica(t, p11Replica(.1, &healed)) // the case's waits, a tenth of them
	r := start(t, "tenants: {limits: {parallel: 4}}\ntimeouts: {first_token: 300ms, answer: 300ms}\nclasses: [{name: standard, wait: 1s}]\n", u1)
	seed := uint64(time.Now().UnixNano())
	t.Log("seed", seed)
	one := func(int) string { return "t1" }
	bad := p11Load(t, r, seed, 400, 4, 0, 0, one)
	if n := r.sum("penstock_rate_limited_total"); n > 0 {
		t.Errorf("%v of 400 requests, sent four at a time, were over the tenant's limit of four", n)
	}
	u1.mu.Lock()
	most := u1.most
	u1.mu.Unlock()
	if most > 2*4 { // a connection that the router has closed is a handler at the mock for a moment longer
		t.Errorf("%d requests of the tenant were at the replica at once, 4 are allowed", most)
	}
	bad += p11Load(t, r, seed+1, 200, 4, 1, 30*time.Millisecond, one)
	if bad < 200 {
		t.Errorf("only %d of 600 requests ended badly: the case shows little", bad)
	}
	r.zeroAccounts(20 * time.Second)
	healed.Store(true)
	r.eventually(60*time.Second, "the replica is used again", func() bool { return r.post(chat, p11Fresh(), "X-Sandbox-ID", "t1").Status == 200 })
	for _, a := range parallel(4, func(int) answer { return r.post(chat, p11Fresh(), "X-Sandbox-ID", "t1") }) {
		wantOK(t, a)
	}
}

// TestCaseP11TenThousandBadEndings: after so many of them the accounts are
// exactly zero, and the router serves as if nothing had been.
func TestCaseP11TenThousandBadEndings(t *testing.T) {
	want := 10_000
	if raceOn || testing.Short() {
		want = 1_000
	}
	var healed atomic.Bool
	u := []*mock{replica(t, p11Replica(.004, &healed)), replica(t, p11Replica(.004, &healed)), replica(t, p11Replica(.004, &healed))}
	r := start(t, "tenants: {limits: {parallel: 4}}\ntimeouts: {first_token: 100ms, answer: 100ms}\nclasses: [{name: standard, wait: 100ms}]\n", u...)
	seed := uint64(time.Now().UnixNano())
	t.Log("seed", seed)
	bad, asked := 0, 0
	for round := uint64(0); bad < want && asked < 4*want; round++ {
		n := min(2_000, want)
		bad += p11Load(t, r, seed+round, n, 64, .5, 10*time.Millisecond, func(w int) string { return fmt.Sprint("t", w/4) })
		asked += n
	}
	if bad < want {
		t.Errorf("%d bad endings of %d, %d are wanted", bad, asked, want)
	}
	t.Logf("%d bad endings of %d requests; attempts at the replicas: %d", bad, asked, u[0].count()+u[1].count()+u[2].count())
	r.zeroAccounts(20 * time.Second)
	healed.Store(true)
	r.eventually(60*time.Second, "replicas are used again", func() bool { return r.post(chat, p11Fresh(), "X-Sandbox-ID", "t0").Status == 200 })
	for _, a := range parallel(4, func(int) answer { return r.post(chat, p11Fresh(), "X-Sandbox-ID", "t0") }) {
		wantOK(t, a)
	}
}
