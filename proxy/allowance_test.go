package proxy

import (
	"strings"
	"testing"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/ladder"
)

// extra is how many attempts beyond the first the pool's budget has counted.
func (g *rig) extra(b *admission.AttemptBudget) float64 {
	pl := g.p.pools[0]
	pl.mu.Lock()
	defer pl.mu.Unlock()
	_, n, _ := b.Totals(g.p.now())
	return n
}

// panickyCore fails when it is asked for a second attempt.
type panickyCore struct{ *admission.Pool }

func (c panickyCore) Admit(now float64, t *admission.Ticket) admission.Decision {
	if t.Work.Excluded > 0 {
		panic("test")
	}
	return c.Pool.Admit(now, t)
}

// An attempt that the budget allowed and that no replica took is given back to
// it, on every way out.
func TestAnAttemptThatIsNotMadeIsGivenBack(t *testing.T) {
	busy := func(c *fakeConn) { c.json(503, `{"error":{"message":"busy"}}`, "") }
	for name, c := range map[string]struct {
		body   string
		option rigOption
		tiers  []ladder.Tier
		status int
	}{
		"a panic": {plainBody, func(o *Options, _ *admission.Config) {
			o.Pools[0].Core = panickyCore{admission.New(admission.Config{})}
		}, nil, 500},
		"no other replica": {plainBody, func(*Options, *admission.Config) {}, nil, 503},
		"nothing to reduce": {strings.Replace(chatBody, `"temperature"`, `"max_tokens":5,"temperature"`, 1), func(*Options, *admission.Config) {},
			[]ladder.Tier{poolTier("p", 0), {Kind: ladder.KindReduce, Number: 1, MaxTokens: 64}}, 503},
	} {
		t.Run(name, func(t *testing.T) {
			r := newFakeReplica(t, busy)
			budget := admission.NewAttemptBudget(admission.BudgetConfig{})
			with := func(o *Options, _ *admission.Config) { o.Pools[0].Budget = budget }
			var g *rig
			if c.tiers == nil {
				g = newRig(t, []*fakeReplica{r}, with, c.option)
			} else {
				g = climbRig(t, []*fakeReplica{r}, nil, ladder.Route{Tiers: c.tiers}, with)
			}
			if a := g.do(chat(c.body)); a.status != c.status {
				t.Fatalf("%d %s", a.status, a.body)
			}
			if n := g.extra(budget); n != 0 {
				t.Errorf("%v attempts beyond the first are counted", n)
			}
			if n := len(r.requests()); n != 1 {
				t.Errorf("%d attempts", n)
			}
			g.settled()
		})
	}
}
