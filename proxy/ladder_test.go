package proxy

import (
	"bufio"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/ladder"
	"github.com/penstock/penstock/tenant"
)

// bad answers 500 to everything.
func bad(c *fakeConn) { c.json(500, `{"error":{"message":"broken","code":500}}`, "") }

const chatBody = `{"model":"route", "temperature":0,"messages":[{"role":"user","content":"hi"}]}`

// climbRig is a router whose model "route" has the given ladder; pool p serves
// m1 at the first replicas, pool s serves m2 (or what the option says).
func climbRig(t *testing.T, primary, second []*fakeReplica, r ladder.Route, options ...rigOption) *rig {
	t.Helper()
	r.Model = "route"
	secondModel := "m2"
	options = append([]rigOption{func(o *Options, _ *admission.Config) {
		o.Pools = []PoolOptions{{Name: "p", Models: []string{"m1"}}, {Name: "s", Models: []string{secondModel}, Core: admission.New(admission.Config{})}}
		o.Routes = []RouteOptions{{Route: r}}
	}}, options...)
	g := newRig(t, primary, options...)
	for i, rep := range second {
		spec := ReplicaSpec{ID: fleet.ID(100 + i), Addr: rep.addr(), Models: []string{secondModel}, Warm: true, Region: 2}
		if err := g.p.AddReplica("s", spec); err != nil {
			t.Fatal(err)
		}
	}
	return g
}

func poolTier(pool string, number int) ladder.Tier {
	return ladder.Tier{Kind: ladder.KindPool, Number: number, Pool: pool}
}

// disclosed checks that the answer carries the whole disclosure, or none.
func disclosed(t *testing.T, a answer, tier, kind, reason string) {
	t.Helper()
	h := a.headers
	if tier == "" {
		for n := range h {
			if strings.HasPrefix(n, "X-Degraded") {
				t.Errorf("an answer of tier 0 carries %s: %s", n, h.Get(n))
			}
		}
		return
	}
	cache := "private, no-store"
	if kind == "static" {
		cache = "public, max-age=30"
	}
	if h.Get("X-Degraded") != "true" || h.Get("X-Degraded-Tier") != tier || h.Get("X-Degraded-Kind") != kind || h.Get("X-Degraded-Reason") != reason ||
		len(h.Values("Retry-After")) != 1 || h.Get("Retry-After") != "5" || len(h.Values("Cache-Control")) != 1 || h.Get("Cache-Control") != cache {
		t.Errorf("status %d, wanted the disclosure of tier %s %s %s, got %v", a.status, tier, kind, reason, h)
	}
}

func TestEquivalentFailoverIsNotDisclosed(t *testing.T) {
	r1, r2 := newFakeReplica(t, bad), newFakeReplica(t, ok)
	g := climbRig(t, []*fakeReplica{r1}, []*fakeReplica{r2}, ladder.Route{Tiers: []ladder.Tier{poolTier("p", 0), poolTier("s", 0)}})
	for _, body := range []string{chatBody, strings.Replace(chatBody, `"model"`, `"stream":true,"model"`, 1)} {
		a := g.do(chat(body))
		if a.status != 200 {
			t.Fatalf("%d %s", a.status, a.body)
		}
		disclosed(t, a, "", "", "")
	}
	g.settled()
	if v := g.metric(`penstock_tier_answers_total{route="route",tier="0"}`); v != 2 {
		t.Errorf("%v answers of tier 0", v)
	}
}

func TestDowngradeIsDisclosedAndAsksForItsModel(t *testing.T) {
	r1, r2 := newFakeReplica(t, bad), newFakeReplica(t, ok)
	g := climbRig(t, []*fakeReplica{r1}, []*fakeReplica{r2}, ladder.Route{Tiers: []ladder.Tier{poolTier("p", 0), poolTier("s", 2)}})
	stream := strings.Replace(chatBody, `"model"`, `"stream":true,"model"`, 1)
	for i, body := range []string{chatBody, stream} {
		a := g.do(chat(body))
		if a.status != 200 || a.err != nil {
			t.Fatalf("%d %s", a.status, a.body)
		}
		disclosed(t, a, "2", "downgraded", "primary_failed")
		if got, want := string(r2.requests()[i].body), strings.Replace(body, `"route"`, `"m2"`, 1); got != want {
			t.Errorf("sent %s, wanted %s", got, want)
		}
	}
	g.settled()
}

// A smaller model that nobody tried lately is not used.
func TestTierWithoutAGoodValidationIsNotUsed(t *testing.T) {
	r1, r2 := newFakeReplica(t, bad), newFakeReplica(t, ok)
	tier := poolTier("s", 2)
	tier.Validate = &ladder.Validation{Route: "route", Pool: "s", Model: "m2"}
	var good atomic.Bool
	g := climbRig(t, []*fakeReplica{r1}, []*fakeReplica{r2}, ladder.Route{Tiers: []ladder.Tier{poolTier("p", 0), tier}},
		func(o *Options, _ *admission.Config) {
			o.Routes[0].Validated = func(*ladder.Validation) bool { return good.Load() }
		})
	a := g.do(chat(chatBody))
	if a.status != 502 || len(r2.requests()) != 0 {
		t.Errorf("%d, the tier got %d requests", a.status, len(r2.requests()))
	}
	disclosed(t, a, "", "", "") // an honest error is no degraded answer
	good.Store(true)
	disclosed(t, g.do(chat(chatBody)), "2", "downgraded", "primary_failed")
	g.settled()
}

func TestReduceReplacesTheBytesOfOneValue(t *testing.T) {
	body := `{"model":"route", "zz":1.0,"max_tokens": 500 ,"messages":[{"role":"user","content":"max_tokens\": 500"}]}` + "\n"
	r1 := newFakeReplica(t, func(c *fakeConn) {
		if strings.Contains(string(c.req.body), `"max_tokens": 500`) {
			c.json(429, `{"error":{"message":"too much"}}`, "Retry-After: 1\r\n")
			return
		}
		ok(c)
	})
	tiers := []ladder.Tier{poolTier("p", 0), {Kind: ladder.KindReduce, Number: 1, MaxTokens: 100}}
	g := climbRig(t, []*fakeReplica{r1}, nil, ladder.Route{Tiers: tiers})
	a := g.do(chat(body))
	if a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	disclosed(t, a, "1", "reduced", "capacity")
	reqs := r1.requests()
	want := strings.Replace(strings.Replace(body, `"max_tokens": 500`, `"max_tokens": 100`, 1), `"route"`, `"m1"`, 1)
	if got := string(reqs[len(reqs)-1].body); got != want {
		t.Errorf("sent   %s\nwanted %s", got, want)
	}
	g.settled()
}

// clock lets a test move the router's time on.
type clock struct {
	start time.Time
	more  atomic.Int64
}

func (c *clock) now() float64 {
	return time.Since(c.start).Seconds() + time.Duration(c.more.Load()).Seconds()
}

func TestCachedTierIsTheTenantsOwnFreshAndDeterministic(t *testing.T) {
	r1 := newFakeReplica(t, ok)
	ck := &clock{start: time.Now()}
	tiers := []ladder.Tier{poolTier("p", 0), {Kind: ladder.KindCached, Number: 2, Staleness: time.Minute}}
	g := climbRig(t, []*fakeReplica{r1}, nil, ladder.Route{Tiers: tiers}, func(o *Options, _ *admission.Config) { o.Now = ck.now })
	warm := strings.Replace(chatBody, `"temperature":0`, `"temperature":1`, 1)
	stream := strings.Replace(chatBody, `"model"`, `"stream":true,"model"`, 1)
	for _, b := range []string{chatBody, warm, stream} {
		if a := g.do(chat(b, "X-Sandbox-ID: t1")); a.status != 200 {
			t.Fatalf("%d %s", a.status, a.body)
		}
	}
	encoded := chatBody + "\n" // answered in a form that only its own head tells
	r1.set(func(c *fakeConn) { c.json(200, "\x1f\x8b packed", "Content-Encoding: gzip\r\n") })
	if a := g.do(chat(encoded, "X-Sandbox-ID: t1")); a.status != 200 || a.headers.Get("Content-Encoding") != "gzip" {
		t.Fatalf("%d %v", a.status, a.headers)
	}
	r1.set(bad)
	a := g.do(chat(chatBody, "X-Sandbox-ID: t1"))
	if a.status != 200 || a.body != answerOK || a.headers.Get("Age") == "" {
		t.Fatalf("%d %v %s", a.status, a.headers, a.body)
	}
	disclosed(t, a, "2", "cached", "primary_failed")
	for what, raw := range map[string]string{
		"another tenant":         chat(chatBody, "X-Sandbox-ID: t2"),
		"no tenant":              chat(chatBody),
		"another body":           chat(chatBody+" ", "X-Sandbox-ID: t1"),
		"an encoded answer":      chat(encoded, "X-Sandbox-ID: t1"),
		"not deterministic":      chat(warm, "X-Sandbox-ID: t1"),
		"a stream":               chat(stream, "X-Sandbox-ID: t1"),
		"another API's endpoint": post("/v1/completions", chatBody, "X-Sandbox-ID: t1"),
	} {
		if a := g.do(raw); a.status == 200 {
			t.Errorf("%s got a cached answer", what)
		} else {
			disclosed(t, a, "", "", "")
		}
	}
	g.settled()
	ck.more.Store(int64(61 * time.Second))
	if a := g.do(chat(chatBody, "X-Sandbox-ID: t1")); a.status == 200 {
		t.Error("a cached answer older than its staleness was given")
	}
	g.settled()
}

const staticFile = `{"id":"s","object":"chat.completion","created":1,"model":"fixed","choices":[{"index":0,"message":{"role":"assistant","content":"We are busy."},"finish_reason":"stop"}]}`

func staticTier(t *testing.T) ladder.Tier {
	s, err := ladder.NewStatic("static.json", []byte(staticFile))
	if err != nil {
		t.Fatal(err)
	}
	return ladder.Tier{Kind: ladder.KindStatic, Number: 2, Static: s}
}

func TestStaticTierAnswersInBothForms(t *testing.T) {
	r1 := newFakeReplica(t, bad)
	g := climbRig(t, []*fakeReplica{r1}, nil, ladder.Route{Tiers: []ladder.Tier{poolTier("p", 0), staticTier(t)}})
	a := g.do(chat(chatBody))
	if a.status != 200 || a.body != staticFile {
		t.Fatalf("%d %s", a.status, a.body)
	}
	disclosed(t, a, "2", "static", "primary_failed")
	a = g.do(chat(strings.Replace(chatBody, `"model"`, `"stream":true,"model"`, 1)))
	if a.status != 200 || !strings.HasPrefix(a.headers.Get("Content-Type"), "text/event-stream") || !strings.Contains(a.body, `"content":"We are busy."`) ||
		!strings.Contains(a.body, `"finish_reason":"stop"`) || !strings.HasSuffix(a.body, frameDone) {
		t.Fatalf("%d %v %q", a.status, a.headers, a.body)
	}
	disclosed(t, a, "2", "static", "primary_failed")
	// It is a chat completion, and nothing else.
	if a := g.do(post("/v1/completions", `{"model":"route","prompt":"x"}`)); a.status != 502 {
		t.Errorf("completions: %d %s", a.status, a.body)
	}
	g.settled()
}

// The whole ladder runs inside its budget: a primary that hangs for ever, and
// a second tier that does, still leave time for the one in memory.
func TestHangingTiersLeaveTheBudgetToTheNext(t *testing.T) {
	hang := func(c *fakeConn) { c.waitClose() }
	r1, r2 := newFakeReplica(t, hang), newFakeReplica(t, hang)
	g := climbRig(t, []*fakeReplica{r1}, []*fakeReplica{r2}, ladder.Route{Budget: 2 * time.Second, Tiers: []ladder.Tier{poolTier("p", 0), poolTier("s", 2), staticTier(t)}},
		func(o *Options, _ *admission.Config) { o.FirstToken = time.Hour })
	for _, body := range []string{chatBody, strings.Replace(chatBody, `"model"`, `"stream":true,"model"`, 1)} {
		a := g.do(chat(body))
		if a.status != 200 {
			t.Fatalf("%d %s", a.status, a.body)
		}
		disclosed(t, a, "2", "static", "primary_slow")
	}
	if len(r1.requests()) != 2 || len(r2.requests()) != 2 {
		t.Errorf("the tiers got %d and %d requests, wanted 2 each", len(r1.requests()), len(r2.requests()))
	}
	g.settled()
}

// A route's budget that is too short for a whole answer of so many tokens says
// nothing of the replica.
func TestShortBudgetIsNoEvidenceAgainstAReplica(t *testing.T) {
	r1 := newFakeReplica(t, func(c *fakeConn) { c.waitClose() })
	g := climbRig(t, []*fakeReplica{r1}, nil, ladder.Route{Budget: time.Second, Tiers: []ladder.Tier{poolTier("p", 0), staticTier(t)}})
	disclosed(t, g.do(chat(strings.Replace(chatBody, `{`, `{"max_tokens":100000,`, 1))), "2", "static", "primary_slow")
	if h := g.replicas()[0].Health; h.Fails > 0 || !h.Open() {
		t.Errorf("%+v", h)
	}
	g.settled()
}

// A stream that does not begin does say something, and so does a whole answer
// that is late even for itself, or late by the request's own time-out.
func TestWhatALateAnswerTeaches(t *testing.T) {
	late, early := time.Now().Add(-time.Second), time.Now().Add(time.Hour)
	for name, c := range map[string]struct {
		stream    bool
		rungBy    time.Time
		took      float64
		blameless bool
	}{
		"too early":         {false, late, 3.9, true},
		"late for itself":   {false, late, 4.1, false},
		"a stream":          {true, late, 3.9, false},
		"the rung has time": {false, early, 3.9, false},
		"without a ladder":  {false, time.Time{}, 3.9, false},
	} {
		f := &flight{p: &Proxy{opt: Options{FirstTokenFactor: 4}}}
		f.body.Stream, f.climb.rungBy = c.stream, c.rungBy
		r := f.taught(result{kind: failed, evidence: fleet.EvidenceFirstTimeout}, c.took, 1)
		if (r.evidence == fleet.EvidenceOK) != c.blameless {
			t.Errorf("%s: %v", name, r.evidence)
		}
	}
}

func TestRegionFailsClosed(t *testing.T) {
	r1, r2 := newFakeReplica(t, ok), newFakeReplica(t, ok)
	g := climbRig(t, nil, []*fakeReplica{r2}, ladder.Route{Regions: 1, Tiers: []ladder.Tier{poolTier("p", 0), poolTier("s", 2)}})
	if err := g.p.AddReplica("p", ReplicaSpec{ID: 1, Addr: r1.addr(), Models: []string{"m1"}, Warm: true, Region: 1}); err != nil {
		t.Fatal(err)
	}
	if a := g.do(chat(chatBody)); a.status != 200 || len(r1.requests()) != 1 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	g.p.RemoveReplica(1)
	a := g.do(chat(chatBody))
	if a.status != 503 || !strings.Contains(a.body, "no_permitted_replica") || a.headers.Get("Retry-After") == "" {
		t.Errorf("%d %v %s", a.status, a.headers, a.body)
	}
	disclosed(t, a, "", "", "")
	if n := len(r2.requests()); n != 0 {
		t.Errorf("%d requests crossed into another region", n)
	}
	g.settled()
}

// When enough attempts fail, the route leaves its primary alone.
func TestRouteThatIsDegradedDoesNotAskItsPrimary(t *testing.T) {
	r1, r2 := newFakeReplica(t, bad), newFakeReplica(t, ok)
	g := climbRig(t, []*fakeReplica{r1}, []*fakeReplica{r2}, ladder.Route{Tiers: []ladder.Tier{poolTier("p", 0), poolTier("s", 2)}},
		func(o *Options, _ *admission.Config) { o.Routes[0].Rules = ladder.Rules{MinAttempts: 3} })
	state := func(s string) bool {
		return g.metric(fmt.Sprintf(`penstock_route_state{route="route",state=%q}`, s)) == 1
	}
	if !state("PRIMARY_HEALTHY") {
		t.Fatal("a new route is not healthy")
	}
	for n := 0; !state("DEGRADED_FALLBACK"); n++ {
		if n == 40 {
			t.Fatal("never degraded")
		}
		body := strings.Replace(chatBody, "hi", fmt.Sprint("hi ", n), 1)
		if a := g.do(chat(body)); a.status != 200 {
			t.Fatalf("%d %s", a.status, a.body)
		}
	}
	before := len(r1.requests())
	for n := range 5 {
		a := g.do(chat(strings.Replace(chatBody, "hi", fmt.Sprint("later ", n), 1)))
		disclosed(t, a, "2", "downgraded", "route_degraded")
	}
	if after := len(r1.requests()); after > before+1 { // the router's own canary may have come
		t.Errorf("the primary got %d more requests", after-before)
	}
	g.settled()
}

// More than two repeats of a request that had a degraded answer are a storm.
func TestRepeatsAfterADegradedAnswerAreAStorm(t *testing.T) {
	r1 := newFakeReplica(t, bad)
	g := climbRig(t, []*fakeReplica{r1}, nil, ladder.Route{Tiers: []ladder.Tier{poolTier("p", 0), staticTier(t)}})
	for n := range 3 {
		if a := g.do(chat(chatBody)); a.status != 200 {
			t.Fatalf("repeat %d: %d %s", n, a.status, a.body)
		}
	}
	a := g.do(chat(chatBody))
	if a.status != 429 || !strings.Contains(a.body, "ERR_RETRY_STORM_DETECTED") || a.headers.Get("Retry-After") == "" || a.headers.Get("Retry-After-Ms") == "" {
		t.Errorf("%d %v %s", a.status, a.headers, a.body)
	}
	// Nobody else is touched.
	for _, raw := range []string{chat(chatBody + " "), chat(chatBody, "X-Sandbox-ID: other")} {
		if a := g.do(raw); a.status != 200 {
			t.Errorf("another request: %d %s", a.status, a.body)
		}
	}
	g.settled()
}

// Every way out gives the tenant's place back.
func TestTenantsPlacesAreReturned(t *testing.T) {
	r1 := newFakeReplica(t, nil)
	ways := []func(c *fakeConn){ok, bad, func(c *fakeConn) { c.rst() }, func(c *fakeConn) { c.sseHead(); c.chunk(frameD(1)); c.rst() },
		func(c *fakeConn) { c.json(200, "not json", "") }, func(c *fakeConn) { c.json(400, `{"error":{"message":"no"}}`, "") }}
	r1.set(func(c *fakeConn) { ways[c.n%len(ways)](c) })
	g := newRig(t, []*fakeReplica{r1}, func(o *Options, _ *admission.Config) { o.Limits = tenant.Limits{Parallel: 4} })
	for n := range 60 {
		body := plainBody
		if n%2 == 0 {
			body = sseBody
		}
		g.do(chat(body, "X-Sandbox-ID: t1"))
	}
	r1.set(func(c *fakeConn) { c.waitClose() })
	eventually(t, "the replica is not ejected", func() bool {
		c := g.dial()
		defer c.Close()
		before := len(r1.requests())
		_, _ = io.WriteString(c, chat(sseBody, "X-Sandbox-ID: t1"))
		for end := time.Now().Add(200 * time.Millisecond); time.Now().Before(end); time.Sleep(time.Millisecond) {
			if len(r1.requests()) > before {
				return true // and leaves
			}
		}
		return false
	})
	g.settled()
	eventually(t, "all places returned", func() bool { return g.p.limiter.InFlight() == 0 })
}

func TestTenantOverItsLimitIsTold(t *testing.T) {
	r1 := newFakeReplica(t, ok)
	ck := &clock{start: time.Now()}
	g := newRig(t, []*fakeReplica{r1}, func(o *Options, _ *admission.Config) {
		o.Now, o.Limits = ck.now, tenant.Limits{Rate: 0.001, Burst: 2}
	})
	for range 2 {
		if a := g.do(chat(plainBody, "X-Sandbox-ID: t1")); a.status != 200 {
			t.Fatalf("%d %s", a.status, a.body)
		}
	}
	a := g.do(chat(plainBody, "X-Sandbox-ID: t1"))
	if a.status != 429 || !strings.Contains(a.body, `"rate_limited"`) || a.headers.Get("X-Sandbox-Id") != "t1" {
		t.Errorf("%d %v %s", a.status, a.headers, a.body)
	}
	var s float64
	if _, err := fmt.Sscan(a.headers.Get("Retry-After"), &s); err != nil || s < 900 || s > 1001 {
		t.Errorf("Retry-After %q: the next one is allowed in about 1,000 s", a.headers.Get("Retry-After"))
	}
	if a := g.do(chat(plainBody, "X-Sandbox-ID: t2")); a.status != 200 {
		t.Errorf("another tenant: %d", a.status)
	}
	g.settled() // what is under way while the clock jumps would look hung
	ck.more.Store(int64(1001 * time.Second))
	if a := g.do(chat(plainBody, "X-Sandbox-ID: t1")); a.status != 200 {
		t.Errorf("after the wait: %d %s", a.status, a.body)
	}
	eventually(t, "all places returned", func() bool { return g.p.limiter.InFlight() == 0 })
}

func TestServiceGetsTheRequestAndNotTheCredentials(t *testing.T) {
	r1 := newFakeReplica(t, ok)
	sv := newFakeReplica(t, func(c *fakeConn) { c.json(201, `{"found":1}`, "X-Own: yes\r\nSet-Cookie: a=1\r\n") })
	g := newRig(t, []*fakeReplica{r1}, func(o *Options, _ *admission.Config) {
		o.Services = []ServiceOptions{{Name: "retrieval", Prefix: "/retrieval/", URL: "http://" + sv.addr(), Timeout: 20 * time.Second}}
	})
	a := g.do(post("/retrieval/find?q=a%2Fb&x=1", `{"k": 1}`, "Authorization: Bearer secret", "x-api-key: secret", "X-Mine: kept", "X-Request-ID: abc"))
	if a.status != 201 || a.body != `{"found":1}` || a.headers.Get("X-Own") != "yes" || a.headers.Get("X-Request-Id") != "abc" {
		t.Fatalf("%d %v %s", a.status, a.headers, a.body)
	}
	q := sv.requests()[0]
	if q.line != "POST /retrieval/find?q=a%2Fb&x=1 HTTP/1.1" || string(q.body) != `{"k": 1}` || q.header("X-Mine") != "kept" {
		t.Errorf("the service got %s\n%s\n%s", q.line, q.head, q.body)
	}
	if strings.Contains(q.head, "secret") {
		t.Errorf("credentials went to the service:\n%s", q.head)
	}
	g.settled()
}

func TestServiceThatIsDownTouchesItsOwnPathOnly(t *testing.T) {
	r1 := newFakeReplica(t, ok)
	sv := newFakeReplica(t, func(c *fakeConn) { c.fin() })
	g := newRig(t, []*fakeReplica{r1}, func(o *Options, _ *admission.Config) {
		o.Services = []ServiceOptions{{Name: "retrieval", Prefix: "/retrieval/", URL: "http://" + sv.addr(), Timeout: 20 * time.Second}}
	})
	began := time.Now()
	for n := range 8 {
		a := g.do("GET /retrieval/find HTTP/1.1\r\nHost: r\r\n\r\n")
		if a.status != 503 || !strings.Contains(a.body, `"retrieval_unavailable"`) || a.headers.Get("Retry-After") == "" {
			t.Fatalf("request %d: %d %v %s", n, a.status, a.headers, a.body)
		}
		if a := g.do(chat(plainBody)); a.status != 200 {
			t.Fatalf("chat: %d", a.status)
		}
	}
	// One trial, and on a slow machine one for each second that it took.
	if n := len(sv.requests()); n < breakerFails || n > breakerFails+1+int(time.Since(began).Seconds()) {
		t.Errorf("the service saw %d requests, its breaker opens after %d", n, breakerFails)
	}
	sv.set(func(c *fakeConn) { c.json(200, `{}`, "") })
	eventually(t, "the service is back", func() bool { return g.do("GET /retrieval/find HTTP/1.1\r\nHost: r\r\n\r\n").status == 200 })
	g.settled()
}

// What is marked and what is ended, by the setting.
func TestIntegrityBySetting(t *testing.T) {
	wrong := strings.Replace(answerOK, `"model":"m1"`, `"model":"other"`, 1)
	for name, set := range map[string]struct {
		f    rigOption
		want int
		mark string
	}{
		"auto":      {func(*Options, *admission.Config) {}, 200, "model_substitution"},
		"observe":   {func(o *Options, _ *admission.Config) { o.TolerateViolations = true }, 200, "model_substitution"},
		"terminate": {func(o *Options, _ *admission.Config) { o.StrictIntegrity = true }, 502, ""},
	} {
		t.Run(name, func(t *testing.T) {
			r1 := newFakeReplica(t, func(c *fakeConn) {
				if strings.Contains(string(c.req.body), `"stream"`) {
					c.sseHead()
					c.chunk(strings.Replace(frameRole, `"id":"c"`, `"id":"c","model":"other"`, 1))
					c.chunk(frameD(1) + frameFin + frameDone)
					c.end()
					return
				}
				c.json(200, wrong, "")
			})
			g := newRig(t, []*fakeReplica{r1}, set.f)
			for _, body := range []string{plainBody, sseBody} {
				a := g.do(chat(body))
				if a.status != set.want || a.headers.Get("X-Stream-Integrity") != set.mark {
					t.Errorf("%d, marked %q: %s", a.status, a.headers.Get("X-Stream-Integrity"), a.body)
				}
			}
			if v := g.metric(`penstock_stream_integrity_total{kind="model_substitution"}`); v != 2 {
				t.Errorf("counted %v", v)
			}
			r1.set(func(c *fakeConn) { c.sseHead(); c.chunk(frameD(1) + frameDone); c.end() })
			c := g.dial()
			defer c.Close()
			_, _ = io.WriteString(c, chat(sseBody))
			a, err := readAnswer(bufio.NewReader(c), false)
			if err != nil {
				t.Fatal(err)
			}
			if ended := !strings.Contains(a.body, "[DONE]"); ended != (name == "terminate") {
				t.Errorf("no finish reason: %q", a.body)
			}
			g.settled()
		})
	}
}
