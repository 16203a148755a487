package admission

import (
	"slices"
	"testing"

	"github.com/penstock/penstock/fleet"
)

func chain(from uint64, n int) (b []uint64) {
	for i := range n {
		b = append(b, from<<32+uint64(i)+1)
	}
	return b
}

func hotPool() *Pool {
	p := New(Config{})
	for i := range 3 {
		p.Join(0, ReplicaSpec{ID: fleet.ID(i + 1), Warm: true})
	}
	return p
}

func place(p *Pool, now float64, blocks []uint64) *Ticket {
	t := &Ticket{Work: fleet.Work{Prompt: 64 * len(blocks), Tokens: 64, Blocks: blocks, MaxOut: 10}}
	p.Admit(now, t)
	return t
}

// What one router has sent somewhere another one finds warm there, by the part
// that is shared and not by what was one request's own.
func TestPeersShareWarmPrefixes(t *testing.T) {
	a, b := hotPool(), hotPool()
	shared := chain(1, 12)
	first := append(slices.Clone(shared), chain(2, 5)...)
	where := place(a, 1, first).Decision.Replica
	place(a, 1.1, append(slices.Clone(shared), chain(3, 5)...))

	other := append(slices.Clone(shared), chain(4, 5)...)
	var hot []HotPrefix
	for _, h := range a.Hot(nil) { // only of the first replica, so that the answer is known
		if h.Replica == where {
			hot = append(hot, h)
		}
	}
	b.PeerHot(hot)
	d := place(b, 2, other).Decision
	if d.Replica != where || d.Hit < 8*64*0.5 {
		t.Errorf("placed on %d with a hit of %g tokens; the prefix is warm on %d", d.Replica, d.Hit, where)
	}
	// Nothing is known of another prompt.
	if d := place(b, 2.1, chain(9, 12)).Decision; d.Hit != 0 {
		t.Errorf("a prompt that nobody sent is taken for warm: %g tokens", d.Hit)
	}
}

func TestHotPrefixesAreBounded(t *testing.T) {
	a, b := hotPool(), hotPool()
	for i := range uint64(200) {
		tk := place(a, float64(i), chain(i+1, 3))
		a.First(float64(i)+0.1, tk)
		a.Done(float64(i)+0.2, tk, End{Outcome: Finished})
	}
	hot := a.Hot(nil)
	if len(hot) != hotMost || hot[0].Prefix != chain(200, 3)[2] {
		t.Errorf("%d told, the first is %x", len(hot), hot[0].Prefix)
	}
	for i := range uint64(3 * hotKept) {
		b.PeerHot([]HotPrefix{{i, 1}, {i, 2}, {i, 1}, {i, 99}})
	}
	if len(b.hot.told) > hotKept || len(b.hot.order) > hotKept {
		t.Errorf("%d kept", len(b.hot.told))
	}
	if ids := b.hot.told[3*hotKept-1]; !slices.Equal(ids, []fleet.ID{1, 2}) {
		t.Errorf("replicas %v", ids)
	}
}

// A request that goes round the routers is counted by all of them together.
func TestRepeatsAreCountedAmongRouters(t *testing.T) {
	var guards [4]*StormGuard
	for i := range guards {
		guards[i] = NewStormGuard(StormConfig{})
	}
	others := func(self int, now float64) (n int) {
		for i, g := range guards {
			if i != self {
				g.Each(now, func(print uint64, tries int) {
					if print == 7 {
						n += tries
					}
				})
			}
		}
		return n
	}
	guards[0].Answered(0, 7) // shed by the first router
	for i := 1; i < 4; i++ { // then sent to each of the others, which shed it too
		now := float64(i)
		ok, wait := guards[i].RepeatAmong(now, 7, others(i, now))
		if ok != (i <= 2) {
			t.Errorf("repeat %d: served %v", i, ok)
		}
		if !ok && (wait <= 0 || wait > 10) {
			t.Errorf("come again in %g s", wait)
		}
		guards[i].Answered(now, 7)
	}
	if n := others(-1, 30); n != 0 {
		t.Errorf("%d counted after the window", n)
	}
	if ok, _ := guards[1].RepeatAmong(30, 7, others(1, 30)); !ok {
		t.Error("refused after the window")
	}
}
