package admission

import (
	"math"
	"testing"

	"github.com/penstock/penstock/fleet"
)

// A long prompt that was placed here is no sign that each peer has placed one of
// its length there: a short one is placed beside it, and not refused or held.
func TestALongPromptIsNotTakenForOneOfEachPeer(t *testing.T) {
	p := pool(t, Config{Objective: Objective{TTFT: 1}}, 1)
	for i := range 50 {
		now := 1 + 0.1*float64(i)
		x := request(300)
		if d := p.Admit(now, x); d.Verdict != Placed {
			t.Fatalf("%+v", d)
		}
		p.First(now+0.02, x)
		p.Done(now+0.05, x, End{Outcome: Cancelled})
	}
	for _, peer := range []string{"a", "b", "c", "d", "e", "f", "g"} {
		p.Peers(10, peer, map[fleet.ID]fleet.Load{1: {Requests: 1, KVTokens: 500, OutTokens: 100}})
	}
	if d := p.Admit(10.01, request(12000)); d.Verdict != Placed {
		t.Fatalf("%+v", d)
	}
	// Not none either: peers go on like this router.
	if l := p.View().Replicas[0].Peers; l.Prefilling < 3 || l.PrefillTokens < 300 {
		t.Errorf("after one prompt placed here since they were heard, seven peers are taken to have %+v", l)
	}
	if d := p.Admit(10.02, request(300)); d.Verdict != Placed || d.TTFT > 0.6 {
		t.Errorf("a short prompt behind one of 12,000 tokens: %+v", d)
	}
}

// What prompts of peers take of a replica's time counts though this router sends
// none there, as much as it is: words come now and then, and a prompt is in those
// that happen to find it waiting.
func TestPromptsOfPeersTakeTime(t *testing.T) {
	for _, every := range []float64{0.05, 0.2, 1} {
		p := pool(t, Config{Objective: Objective{TTFT: 1}}, 2)
		// The peer sends replica 1 a prompt of 5,000 tokens every 0.37 s, alone there.
		const each, work = 0.37, 5000.0
		var pr struct{ alone, seconds float64 }
		v := &p.View().Replicas[0]
		p.loadedOf(0)
		pr.seconds = work * v.Profile.PerPrefill
		pr.alone = p.loaded[0].Through(work)
		sum, n := 0.0, 0.0
		for i := 1; float64(i)*every < 120; i++ {
			now := float64(i) * every
			l := fleet.Load{Requests: 1, KVTokens: 5000, OutTokens: 50}
			if math.Mod(now, each) < pr.alone {
				l.Prefilling, l.PrefillTokens = 1, work
			}
			p.Peers(now, "x", map[fleet.ID]fleet.Load{1: l})
			p.Advance(now, nil)
			if now > 20 {
				sum, n = sum+v.PrefillShare, n+1
			}
		}
		want := pr.seconds / each
		t.Logf("heard every %g s: share of replica 1 %.3f, truly %.3f; of replica 2 %.3f", every, sum/n, want, p.View().Replicas[1].PrefillShare)
		if got := sum / n; got < 0.7*want || got > 1.4*want {
			t.Errorf("heard every %g s: a replica is taken to spend %.3f of its time on prompts of a peer, truly %.3f", every, got, want)
		}
		if got := p.View().Replicas[1].PrefillShare; got != 0 {
			t.Errorf("replica 2, with none, is taken to spend %.3f", got)
		}
	}
}
