package admission

import (
	"fmt"
	"math"
	"testing"

	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/scorer"
	"pgregory.net/rapid"
)

// TestRandomLives drives a pool through random arrivals, answers, failures,
// joins, drains, samples and peers, and checks that accounts are exact.
func TestRandomLives(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		classes := []Class{{Name: "top", Wait: -1}, {Name: "mid", Wait: 1}, {Name: "low", Wait: 5, Patient: true}, {Name: "never", Wait: 0}}
		cfg := Config{
			Policy:    rapid.SampledFrom(scorer.Names()).Draw(t, "policy"),
			Shadow:    rapid.SampledFrom([]string{"", "lmetric"}).Draw(t, "shadow"),
			Classes:   classes[:rapid.IntRange(1, 4).Draw(t, "classes")],
			Objective: rapid.SampledFrom([]Objective{{}, {TTFT: 0.3}, {TTFT: 1, TTFTPer1k: 0.1, ITL: 0.03}}).Draw(t, "objective"),
			Cap:       rapid.SampledFrom([]int{0, 0, 2}).Draw(t, "cap"),
			MaxHeld:   rapid.SampledFrom([]int{0, 3}).Draw(t, "max held"),
			Headroom:  rapid.SampledFrom([]float64{0, 0.3}).Draw(t, "headroom"),
			NoHold:    rapid.Bool().Draw(t, "no hold"),
		}
		p := New(cfg)
		now := 1.0
		join := func(id int) {
			var prof *fleet.Profile
			if id%2 == 0 {
				prof = h100()
			}
			p.Join(now, ReplicaSpec{ID: fleet.ID(id), Profile: prof, Warm: id%3 == 0})
		}
		for id := 1; id <= rapid.IntRange(1, 5).Draw(t, "replicas"); id++ {
			join(id)
		}
		var held, placed []*Ticket
		drop := func(l []*Ticket, i int) []*Ticket { l[i] = l[len(l)-1]; return l[:len(l)-1] }
		settle := func() {
			for _, x := range p.Advance(now, nil) {
				at := -1
				for i, h := range held {
					if h == x {
						at = i
					}
				}
				if at < 0 {
					t.Fatal("Advance returned a ticket that was not held")
				}
				held = drop(held, at)
				switch x.Decision.Verdict {
				case Placed:
					placed = append(placed, x)
				case Shed:
				default:
					t.Fatalf("Advance returned %+v", x.Decision)
				}
			}
			for _, x := range p.Revoked(nil) {
				at := -1
				for i, h := range placed {
					if h == x {
						at = i
					}
				}
				if at < 0 {
					t.Fatal("Revoked returned a ticket that is not placed")
				}
				placed = drop(placed, at)
				p.Done(now, x, End{Outcome: Failed, Evidence: fleet.EvidenceReset})
			}
			for _, x := range held {
				if x.expire <= now {
					t.Fatalf("held at %v though its time was over at %v", now, x.expire)
				}
			}
		}
		end := func(i int) {
			x := placed[i]
			placed = drop(placed, i)
			e := End{Outcome: Outcome(rapid.IntRange(1, 3).Draw(t, "outcome"))}
			if e.Outcome == Failed {
				e.Evidence = fleet.Evidence(rapid.IntRange(1, 9).Draw(t, "evidence"))
			}
			if e.Outcome == Finished {
				e.Prompt, e.Completion, e.Cached = x.Work.Prompt, rapid.IntRange(0, 300).Draw(t, "made"), rapid.IntRange(0, 100).Draw(t, "cached")
			}
			p.Done(now, x, e)
			if e.Outcome == Failed && x.Work.Excluded < 4 && rapid.Bool().Draw(t, "again") {
				x.Work.Exclude[x.Work.Excluded] = x.Decision.Replica
				x.Work.Excluded++
				switch p.Admit(now, x).Verdict {
				case Placed:
					placed = append(placed, x)
				case Held:
					held = append(held, x)
				}
			}
		}
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			now += rapid.SampledFrom([]float64{0, 0.001, 0.02, 0.3, 3}).Draw(t, "dt")
			switch rapid.IntRange(0, 13).Draw(t, "what") {
			case 0, 1, 2, 3:
				blocks := make([]uint64, rapid.IntRange(0, 30).Draw(t, "blocks"))
				for i := range blocks {
					blocks[i] = uint64(i+1) * 0x9e3779b97f4a7c15
				}
				x := &Ticket{Work: fleet.Work{Tenant: uint32(rapid.IntRange(0, 3).Draw(t, "tenant")), Class: uint8(rapid.IntRange(0, 4).Draw(t, "class")),
					Print: uint64(rapid.IntRange(0, 5).Draw(t, "print")), Prompt: rapid.SampledFrom([]int{0, 10, 1000, 30_000, 2_000_000}).Draw(t, "prompt"), Bytes: 100, Blocks: blocks, Tokens: 16,
					Whole: rapid.Bool().Draw(t, "whole"), Deadline: rapid.SampledFrom([]float64{0, now + 0.5}).Draw(t, "deadline")}}
				switch d := p.Admit(now, x); d.Verdict {
				case Placed:
					placed = append(placed, x)
				case Held:
					held = append(held, x)
				case Shed:
					if d.Reason == ReasonNone {
						t.Fatal("shed without a reason")
					}
					p.Told(x, x.Work.Print)
				}
			case 4, 5:
				if len(placed) > 0 {
					p.First(now, placed[rapid.IntRange(0, len(placed)-1).Draw(t, "who")])
				}
			case 6:
				if len(placed) > 0 {
					p.Progress(now, placed[rapid.IntRange(0, len(placed)-1).Draw(t, "who")], rapid.IntRange(0, 500).Draw(t, "tokens"))
				}
			case 7, 8:
				if len(placed) > 0 {
					end(rapid.IntRange(0, len(placed)-1).Draw(t, "who"))
				}
			case 9:
				if len(held) > 0 {
					i := rapid.IntRange(0, len(held)-1).Draw(t, "who")
					p.Leave(now, held[i])
					held = drop(held, i)
				}
			case 10:
				id := fleet.ID(rapid.IntRange(1, 6).Draw(t, "id"))
				switch rapid.IntRange(0, 3).Draw(t, "change") {
				case 0:
					p.Remove(now, id)
				case 1:
					join(int(id))
				default:
					p.Drain(now, id, rapid.Bool().Draw(t, "on"))
				}
			case 11:
				p.Evidence(now, fleet.ID(rapid.IntRange(1, 6).Draw(t, "id")), fleet.Evidence(rapid.IntRange(0, fleet.EvidenceCount-1).Draw(t, "probe")))
			case 12:
				nan := math.NaN()
				p.Observe(now, fleet.ID(rapid.IntRange(1, 6).Draw(t, "id")), rapid.SampledFrom([]fleet.Sample{
					{At: now, Waiting: nan, Running: nan, KVUsage: nan, Steps: -1, PromptTokens: -1, OutputTokens: -1},
					{At: now, Waiting: 50, Running: 50, KVUsage: 0.9, KVTokens: 100_000, Steps: now, PromptTokens: now, OutputTokens: now},
					{At: now, Broken: true},
				}).Draw(t, "sample"))
			case 13:
				peer := fmt.Sprint("peer", rapid.IntRange(0, 1).Draw(t, "peer"))
				p.Peers(now, peer, rapid.SampledFrom([]map[fleet.ID]fleet.Load{nil,
					{1: {Requests: 5, Prefilling: 2, PrefillTokens: 900, KVTokens: 4000, OutTokens: 500}}}).Draw(t, "loads"))
				p.PeerHeld(peer, rapid.SampledFrom([][]int{nil, {0}, {3, 40}, {0, 0, 0, 7}}).Draw(t, "peer's held"))
			}
			if rapid.IntRange(0, 2).Draw(t, "settle") > 0 {
				settle()
			}
			for i := range p.View().Replicas {
				v := &p.View().Replicas[i]
				l := v.Load()
				if l.Requests < 0 || l.Prefilling < 0 || l.PrefillTokens < 0 || l.KVTokens < 0 || l.OutTokens < 0 || l.Unique < 0 {
					t.Fatalf("negative account %+v", l)
				}
				var fresh scorer.Loaded
				if fresh.Of(v); !p.reps[i].stale && fresh != p.loaded[i] {
					t.Fatalf("replica %d has changed, and predictions go by what it was:\n%+v\n%+v", v.ID, fresh, p.loaded[i])
				}
				if cfg.Cap > 0 && v.Own.Requests > cfg.Cap {
					t.Fatalf("%d at a replica with cap %d", v.Own.Requests, cfg.Cap)
				}
			}
		}
		for len(placed) > 0 {
			end(0)
		}
		now += 1000
		settle()
		for len(placed) > 0 || len(held) > 0 {
			for len(placed) > 0 {
				x := placed[0]
				placed = drop(placed, 0)
				p.Done(now, x, End{Outcome: Cancelled})
			}
			for len(held) > 0 {
				p.Leave(now, held[0])
				held = drop(held, 0)
			}
		}
		for i := range p.View().Replicas {
			l := p.View().Replicas[i].Own
			l.LastFirst = 0
			if l != (fleet.Load{}) {
				t.Fatalf("account is not zero: %+v", l)
			}
		}
		p.turns.roll(now + 1e6)
		for c, w := range p.turns.work {
			if w != 0 || len(p.turns.list) > 0 || len(p.turns.byPrint) > 0 {
				t.Fatalf("class %d: %v of work is still expected back, %d turns, %d prints", c, w, len(p.turns.list), len(p.turns.byPrint))
			}
		}
		s := p.Stats()
		shed := uint64(0)
		for _, n := range s.Shed {
			shed += n
		}
		if s.Placed != s.Finished+s.Failed+s.Cancelled || s.Offered != s.Placed+s.Left+shed || s.Held != 0 || s.HeldBytes != 0 || s.HeldWork != 0 {
			t.Fatalf("books do not balance: %+v", s)
		}
	})
}

// TestNobodyStarves keeps a pool saturated: whatever the classes, tenants,
// weights and lengths are, every class gets its minimum share of the work and
// every tenant of a class a fair part of the class's, while others flood.
func TestNobodyStarves(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		classes := []Class{{Name: "a", Wait: 1e9, Patient: true}, {Name: "b", Wait: 1e9, Patient: true}, {Name: "c", Wait: 1e9, Patient: true}}[:rapid.IntRange(1, 3).Draw(t, "classes")]
		for i := 1; i < len(classes); i++ {
			classes[i].MinShare = rapid.SampledFrom([]float64{0, 0.05, 0.2}).Draw(t, "share")
		}
		tenants := rapid.IntRange(1, 4).Draw(t, "tenants")
		p := New(Config{Cap: rapid.IntRange(1, 3).Draw(t, "cap"), Classes: classes, HangAfter: 1e9, LookAhead: rapid.SampledFrom([]int{1, 4, 32}).Draw(t, "look")})
		for id := range rapid.IntRange(1, 3).Draw(t, "replicas") {
			p.Join(0, ReplicaSpec{ID: fleet.ID(id + 1), Profile: h100(), Warm: true})
		}
		now := 1.0
		var running []*Ticket
		waiting := map[[2]uint32]int{}
		work := map[[2]uint32]float64{}
		longest := 0.0
		add := func(class uint8, tenant uint32) {
			x := &Ticket{Work: fleet.Work{Model: 1, Tenant: tenant, Class: class, Prompt: rapid.SampledFrom([]int{50, 500, 4000}).Draw(t, "prompt"), MaxOut: 100}}
			switch d := p.Admit(now, x); d.Verdict {
			case Placed:
				running = append(running, x)
			case Held:
				waiting[[2]uint32{uint32(class), tenant}]++
			default:
				t.Fatalf("%+v", d)
			}
			longest = max(longest, p.tokenWork(&x.Work))
		}
		refill := func() { // everybody always wants more
			for c := range classes {
				for k := range tenants {
					for waiting[[2]uint32{uint32(c), uint32(k)}] < 3 {
						add(uint8(c), uint32(k))
					}
				}
			}
		}
		refill()
		total := 0.0
		for range 300 {
			now += 0.01
			i := rapid.IntRange(0, len(running)-1).Draw(t, "who ends")
			x := running[i]
			running[i] = running[len(running)-1]
			running = running[:len(running)-1]
			p.Done(now, x, End{Outcome: Finished, Prompt: x.Work.Prompt, Completion: 100})
			for _, y := range p.Advance(now, nil) {
				if y.Decision.Verdict != Placed {
					t.Fatalf("%+v", y.Decision)
				}
				running = append(running, y)
				k := [2]uint32{uint32(y.Work.Class), y.Work.Tenant}
				waiting[k]--
				w := p.tokenWork(&y.Work)
				work[k] += w
				total += w
			}
			refill()
		}
		for c := range classes {
			sum := 0.0
			for k := range tenants {
				sum += work[[2]uint32{uint32(c), uint32(k)}]
			}
			share := p.cfg.Classes[c].MinShare
			if sum < share*total-2*longest {
				t.Fatalf("class %d had %.0f of %.0f token-work; its share is %g", c, sum, total, share)
			}
			for k := range tenants {
				if mine := work[[2]uint32{uint32(c), uint32(k)}]; mine < sum/float64(tenants)-3*longest {
					t.Fatalf("class %d: tenant %d had %.0f of %.0f, there are %d", c, k, mine, sum, tenants)
				}
			}
		}
	})
}
