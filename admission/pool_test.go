package admission

import (
	"math"
	"testing"

	"github.com/penstock/penstock/fleet"
	"pgregory.net/rapid"
)

func h100() *fleet.Profile {
	return &fleet.Profile{Name: "h100-8b", Base: 0.00736, PerPrefill: 1.68e-5, PerSeq: 1.13e-5, PerKV: 4.2e-8, PerAttn: 1.84e-9,
		KVTokens: 446_652, MaxSeqs: 1024, MaxBatched: 8192, BlockTokens: 16}
}

func pool(t testing.TB, cfg Config, n int) *Pool {
	t.Helper()
	p := New(cfg)
	for i := 1; i <= n; i++ {
		p.Join(0, ReplicaSpec{ID: fleet.ID(i), Name: "r", Profile: h100(), Warm: true})
	}
	return p
}

func request(prompt int) *Ticket { return &Ticket{Work: fleet.Work{Model: 1, Prompt: prompt}} }

func assertZero(t *testing.T, p *Pool) {
	t.Helper()
	for i := range p.View().Replicas {
		l := p.View().Replicas[i].Own
		l.LastFirst = 0
		if l != (fleet.Load{}) {
			t.Fatalf("replica %d: account is not zero: %+v", p.View().Replicas[i].ID, l)
		}
	}
	s := p.Stats()
	if s.Placed != s.Finished+s.Failed+s.Cancelled {
		t.Fatalf("placed %d != finished %d + failed %d + cancelled %d", s.Placed, s.Finished, s.Failed, s.Cancelled)
	}
	shed := uint64(0)
	for _, n := range s.Shed {
		shed += n
	}
	if s.Offered != s.Placed+s.Left+shed {
		t.Fatalf("offered %d != placed %d + left %d + shed %d", s.Offered, s.Placed, s.Left, shed)
	}
	if s.Held != 0 || s.HeldBytes != 0 || s.HeldWork != 0 {
		t.Fatalf("held queue is not empty: %+v", s)
	}
}

func TestOneRequestEndToEnd(t *testing.T) {
	p := pool(t, Config{}, 2)
	r := request(1000)
	d := p.Admit(1, r)
	if d.Verdict != Placed || d.Replica == 0 || d.TTFT <= 0 {
		t.Fatalf("decision %+v", d)
	}
	if l := p.View().Replicas[0].Own.Requests + p.View().Replicas[1].Own.Requests; l != 1 {
		t.Fatalf("%d requests charged", l)
	}
	p.First(1.05, r)
	p.Progress(1.1, r, 32)
	p.Done(2, r, End{Outcome: Finished, Prompt: 990, Completion: 60})
	assertZero(t, p)
}

func TestSecondDonePanics(t *testing.T) {
	p := pool(t, Config{}, 1)
	r := request(10)
	p.Admit(1, r)
	p.Done(2, r, End{Outcome: Cancelled})
	defer func() {
		if recover() == nil {
			t.Fatal("a second Done returned the account twice")
		}
	}()
	p.Done(2, r, End{Outcome: Cancelled})
}

// Picks at one moment count on each other, whatever the prompts' length, the
// replicas' metrics (frozen at what was before) and their profile (known or not).
func TestSimultaneousPicksSpread(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var profile *fleet.Profile
		if rapid.Bool().Draw(t, "profile known") {
			profile = h100()
		}
		p := New(Config{Objective: rapid.SampledFrom([]Objective{{}, {TTFT: 2, ITL: 0.1}}).Draw(t, "objective")})
		for id := fleet.ID(1); id <= 8; id++ {
			p.Join(0, ReplicaSpec{ID: id, Profile: profile, Warm: true})
		}
		frozen := fleet.Sample{At: 0.5, Running: float64(rapid.IntRange(0, 3).Draw(t, "running")), KVUsage: 0.3, Steps: 5, PromptTokens: 5, OutputTokens: 5}
		for range rapid.IntRange(0, 3).Draw(t, "samples") {
			for id := fleet.ID(1); id <= 8; id++ {
				p.Observe(1, id, frozen)
			}
		}
		prompt := rapid.IntRange(1, 1500).Draw(t, "prompt")
		for i := range 64 {
			if d := p.Admit(1, request(prompt)); d.Verdict != Placed {
				t.Fatalf("pick %d: %+v", i, d)
			}
		}
		lo, hi := math.MaxInt, 0
		for i := range p.View().Replicas {
			n := p.View().Replicas[i].Own.Requests
			lo, hi = min(lo, n), max(hi, n)
		}
		if hi-lo > 1 {
			t.Fatalf("64 picks over 8 equal replicas: between %d and %d each", lo, hi)
		}
	})
}

// With metrics that stand still the accounts alone keep the cap: never more than
// K outstanding anywhere, through many lives, and never fewer while some wait.
func TestCapKHoldsWithFrozenMetrics(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		k, replicas := rapid.IntRange(1, 6).Draw(t, "K"), rapid.IntRange(1, 4).Draw(t, "replicas")
		p := New(Config{Cap: k, HangAfter: 1e6, Classes: []Class{{Name: "a", Wait: 1e6}}})
		for id := 1; id <= replicas; id++ {
			p.Join(0, ReplicaSpec{ID: fleet.ID(id), Profile: h100(), Warm: true})
		}
		frozen := fleet.Sample{At: 0.5, Steps: 5, PromptTokens: 5, OutputTokens: 5}
		var placed []*Ticket
		now, held := 1.0, 0
		for range rapid.IntRange(20, 120).Draw(t, "steps") {
			now += 0.01
			for id := 1; id <= replicas; id++ {
				p.Observe(now, fleet.ID(id), frozen)
			}
			if len(placed) > 0 && rapid.IntRange(0, 2).Draw(t, "what") == 0 {
				i := rapid.IntRange(0, len(placed)-1).Draw(t, "who ends")
				p.Done(now, placed[i], End{Outcome: Finished})
				placed = append(placed[:i], placed[i+1:]...)
			} else {
				x := request(rapid.IntRange(1, 3000).Draw(t, "prompt"))
				switch p.Admit(now, x).Verdict {
				case Placed:
					placed = append(placed, x)
				case Held:
					held++
				default:
					t.Fatalf("%+v", x.Decision)
				}
			}
			now += 0.02 // longer than a wait for a warm replica
			for range 2 {
				now += 0.005
				for _, x := range p.Advance(now, nil) {
					placed = append(placed, x)
					held--
				}
			}
			for i := range p.View().Replicas {
				if n := p.View().Replicas[i].Own.Requests; n > k {
					t.Fatalf("replica %d has %d", i, n)
				}
			}
			if want := min(k*replicas, len(placed)+held); len(placed) != want {
				t.Fatalf("%d placed and %d held at %d replicas with cap %d", len(placed), held, replicas, k)
			}
		}
	})
}

func TestPrefixSticksToItsReplica(t *testing.T) {
	p := pool(t, Config{}, 4)
	blocks := make([]uint64, 100)
	for i := range blocks {
		blocks[i] = uint64(i+1) * 7919
	}
	a := &Ticket{Work: fleet.Work{Model: 1, Prompt: 1600, Blocks: blocks, Tokens: 16}}
	first := p.Admit(1, a)
	p.First(1.1, a)
	p.Done(1.5, a, End{Outcome: Finished, Prompt: 1600, Completion: 20})
	for i := 0; i < 5; i++ {
		b := &Ticket{Work: fleet.Work{Model: 1, Prompt: 1700, Blocks: blocks, Tokens: 16}}
		d := p.Admit(2+float64(i), b)
		if d.Replica != first.Replica || d.Hit < 1500 {
			t.Fatalf("the same prefix went to %d (hit %.0f), first to %d", d.Replica, d.Hit, first.Replica)
		}
		p.Done(2.5+float64(i), b, End{Outcome: Finished})
	}
}

func TestUnknownHardwareTakesTraffic(t *testing.T) {
	p := New(Config{})
	p.Join(0, ReplicaSpec{ID: 1, Warm: true})
	for i := 0; i < 100; i++ {
		if d := p.Admit(1, request(3000)); d.Verdict != Placed {
			t.Fatalf("request %d to hardware that nobody described: %+v", i, d)
		}
	}
}

func TestOverloadHoldsThenSheds(t *testing.T) {
	p := pool(t, Config{Objective: Objective{TTFT: 0.5}, Classes: []Class{{Name: "a", Wait: -1}}}, 1)
	var placed, held int
	tickets := make([]*Ticket, 200)
	for i := range tickets {
		tickets[i] = request(4000)
		switch p.Admit(1, tickets[i]).Verdict {
		case Placed:
			placed++
		case Held:
			held++
		}
	}
	if placed < 3 || placed > 12 || held != 200-placed {
		t.Fatalf("%d placed, %d held: 4,000 tokens take 82 ms, the objective is 500 ms", placed, held)
	}
	if w := p.NextWake(1); w > 1.5 {
		t.Fatalf("next wake at %v, after the objective's end", w)
	}
	out := p.Advance(1.6, nil)
	shed := 0
	for _, x := range out {
		if x.Decision.Verdict == Shed {
			shed++
			if x.Decision.Reason != ReasonCapacity || x.Decision.RetryAfter <= 0 {
				t.Fatalf("shed with %+v", x.Decision)
			}
		}
	}
	if shed != held {
		t.Fatalf("%d of %d held were shed when their objective could no longer be met", shed, held)
	}
}
