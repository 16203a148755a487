package proxy

import (
	"testing"
	"time"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/ladder"
)

// standStill makes n replicas that answer when the gate opens. standing lets the
// router know that they do nothing, until it has taken each out of service.
func standStill(t *testing.T, n int) (replicas []*fakeReplica, gate chan struct{}) {
	gate = make(chan struct{})
	for range n {
		replicas = append(replicas, newFakeReplica(t, func(c *fakeConn) {
			<-gate
			ok(c)
		}))
	}
	return replicas, gate
}

func (g *rig) standing(replicas []*fakeReplica) {
	for k := range 2 { // they did work
		for i := range replicas {
			g.p.Observe(fleet.ID(i+1), fleet.Sample{At: g.p.Now(), Steps: float64(k), PromptTokens: float64(k), OutputTokens: float64(k)})
		}
	}
	eventually(g.t, "all are out of service", func() bool {
		out := 0
		for i, v := range g.replicas() {
			g.p.Evidence(fleet.ID(i+1), fleet.EvidenceScrapeFailed)
			if v.Health.State == fleet.StateEjected {
				out++
			}
		}
		return out == len(replicas)
	})
}

func longSilence(o *Options, c *admission.Config) {
	o.FirstToken = time.Hour
	c.HangAfter = 2
}

// When all replicas stand still at once, their requests wait where they are: no
// other replica could have them. When the fleet goes on, each is answered.
func TestRequestsWaitForAFleetThatStandsStill(t *testing.T) {
	const each = 20 // more than the attempt budget would let move on
	replicas, gate := standStill(t, 2)
	g := newRig(t, replicas, longSilence)
	answers := make(chan answer, 2*each)
	for range each {
		for _, body := range []string{plainBody, sseBody} {
			go func() { answers <- g.do(chat(body)) }()
		}
	}
	eventually(t, "all are at a replica", func() bool { return len(replicas[0].requests())+len(replicas[1].requests()) == 2*each })
	g.standing(replicas)
	select {
	case a := <-answers:
		t.Errorf("answered while nobody could: %d %s", a.status, a.body)
	default:
	}
	close(gate)
	for range 2 * each {
		if a := <-answers; a.status != 200 || a.err != nil {
			t.Fatalf("%d %s %v", a.status, a.body, a.err)
		}
	}
	if n := len(replicas[0].requests()) + len(replicas[1].requests()); n != 2*each {
		t.Errorf("%d attempts for %d requests", n, 2*each)
	}
	g.settled()
}

// A lower tier can answer meanwhile: nobody waits then.
func TestASilentFleetIsLeftForALowerTier(t *testing.T) {
	replicas, gate := standStill(t, 1)
	g := climbRig(t, replicas, nil, ladder.Route{Tiers: []ladder.Tier{poolTier("p", 0), staticTier(t)}}, longSilence)
	got := make(chan answer, 1)
	go func() { got <- g.do(chat(chatBody)) }()
	eventually(t, "it is at the replica", func() bool { return len(replicas[0].requests()) == 1 })
	g.standing(replicas)
	a := <-got
	close(gate)
	if a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	disclosed(t, a, "2", "static", degradedSlow)
	g.settled()
}
