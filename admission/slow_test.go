package admission

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/penstock/penstock/fleet"
)

// machine plays a fleet whose answers all wait while the machine stands still.
type machine struct {
	p     *Pool
	rng   *rand.Rand
	rate  float64                   // requests a second
	took  func(id fleet.ID) float64 // until the first token, when nothing stands still
	still func(now float64) bool    // the replicas stand still
	deaf  func(now float64) bool    // the router does too: it sees nothing before the end, and says so

	open []*machineRun
	sent map[fleet.ID]int
}

type machineRun struct {
	t     *Ticket
	id    fleet.ID
	left  float64
	first bool
}

const machineStep = 0.005

func (m *machine) play(from, to float64) {
	deafSince, due := 0.0, from
	if m.sent == nil {
		m.sent = map[fleet.ID]int{}
	}
	for now := from; now < to; now += machineStep {
		if m.still == nil || !m.still(now) {
			for _, r := range m.open {
				r.left -= machineStep
			}
		}
		if m.deaf != nil && m.deaf(now) {
			if deafSince == 0 {
				deafSince = now
			}
			continue
		}
		if deafSince > 0 {
			m.p.Stood(now, now-deafSince)
			deafSince = 0
		}
		for _, t := range m.p.Advance(now, nil) {
			m.place(t)
		}
		for _, t := range m.p.Revoked(nil) {
			m.open = slices.DeleteFunc(m.open, func(r *machineRun) bool { return r.t == t })
			m.p.Done(now, t, End{Outcome: Failed})
		}
		m.answers(now)
		for ; due <= now; due += m.rng.ExpFloat64() / m.rate {
			t := request(60)
			m.p.Admit(now, t)
			m.place(t)
		}
	}
}

// place sends what was placed.
func (m *machine) place(t *Ticket) {
	if d := t.Decision; d.Verdict == Placed {
		m.sent[d.Replica]++
		m.open = append(m.open, &machineRun{t: t, id: d.Replica, left: m.took(d.Replica) * (0.8 + 0.4*m.rng.Float64())})
	}
}

// answers gives what is there, in any order, as sockets do.
func (m *machine) answers(now float64) {
	m.rng.Shuffle(len(m.open), func(i, j int) { m.open[i], m.open[j] = m.open[j], m.open[i] })
	rest := m.open[:0]
	for _, r := range m.open {
		if r.left <= 0 && !r.first {
			m.p.First(now, r.t)
			r.first = true
		}
		if r.left <= -0.1 {
			m.p.Done(now, r.t, End{Outcome: Finished, Completion: 8})
			continue
		}
		rest = append(rest, r)
	}
	m.open = rest
}

func (m *machine) ejections() (n int) {
	for _, e := range m.p.Stats().Ejections {
		n += int(e)
	}
	return n
}

func even(fleet.ID) float64 { return 0.03 }

// every tells of the first `of` seconds of each `each`.
func every(each, of float64) func(float64) bool {
	return func(now float64) bool { return now-each*float64(int(now/each)) < of }
}

// Whoever stands still, and however often, a replica is not to blame for it.
func TestAMachineThatStandsStillEjectsNobody(t *testing.T) {
	for name, m := range map[string]machine{
		"replicas, dense":     {rate: 120, still: every(2, 0.4)},
		"replicas, long":      {rate: 60, still: every(5, 2.5)},
		"replicas, sparse":    {rate: 4, still: every(1.3, 0.4)},
		"replicas, often":     {rate: 40, still: every(0.4, 0.15)},
		"all, dense":          {rate: 120, still: every(2, 0.4), deaf: every(2, 0.4)},
		"router alone, dense": {rate: 120, deaf: every(2, 0.4)},
		"router alone, long":  {rate: 60, deaf: every(12, 6)},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(3) {
				m := m
				m.p, m.rng, m.took = pool(t, Config{}, 3), rand.New(rand.NewPCG(seed, 1)), even
				m.play(1, 40)
				if n := m.ejections(); n > 0 {
					t.Errorf("seed %d: %d ejections, %v", seed, n, m.p.Stats().Ejections)
				}
			}
		})
	}
}

// And a replica that is slow is ejected all the same.
func TestASlowReplicaIsEjectedOnAMachineThatStandsStill(t *testing.T) {
	for name, m := range map[string]machine{
		"calm":                {rate: 60},
		"calm, sparse":        {rate: 5},
		"replicas":            {rate: 60, still: every(2, 0.4)},
		"all":                 {rate: 60, still: every(2, 0.4), deaf: every(2, 0.4)},
		"router alone":        {rate: 60, deaf: every(2, 0.4)},
		"router alone, often": {rate: 60, deaf: every(0.5, 0.1)},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(3) {
				m := m
				slowFrom := 10.0
				now := 0.0
				m.p, m.rng = pool(t, Config{}, 3), rand.New(rand.NewPCG(seed, 2))
				m.took = func(id fleet.ID) float64 {
					if id == 2 && now >= slowFrom {
						return 0.6
					}
					return 0.03
				}
				m.play(1, slowFrom)
				now = slowFrom
				before := m.sent[2]
				m.play(slowFrom, slowFrom+20)
				got, all := m.sent[2]-before, 20*m.rate
				if e := m.p.Stats().Ejections[fleet.EvidenceSlow]; e == 0 && float64(got) > 0.02*all {
					t.Errorf("seed %d: not ejected, %d of %.0f requests went there", seed, got, all)
				}
				if float64(got) > max(12, 0.05*all) {
					t.Errorf("seed %d: %d of %.0f requests went to the slow replica", seed, got, all)
				}
			}
		})
	}
}

// One request that is of another kind than was thought, and takes long, is no
// sign that its replica is slow.
func TestOneLateRequestEjectsNobody(t *testing.T) {
	p := pool(t, Config{}, 3)
	m := machine{p: p, rng: rand.New(rand.NewPCG(1, 3)), rate: 60, took: even}
	m.play(1, 10)
	odd := request(60)
	d := p.Admit(10, odd)
	if d.Verdict != Placed {
		t.Fatalf("%+v", d)
	}
	m.play(10, 13)
	if n := m.ejections(); n > 0 {
		t.Errorf("%d ejections for one request that waits", n)
	}
	p.First(13, odd)
	m.play(13, 15)
	if n := m.ejections(); n > 0 {
		t.Errorf("%d ejections for one late first token", n)
	}
}

// Answers that were there and could not be read are not late.
func TestWhatCameWhileTheRouterStoodStillIsNotLate(t *testing.T) {
	for _, told := range []bool{true, false} {
		p := pool(t, Config{}, 3)
		n := 0
		for now := 1.0; now < 40; now += 0.5 {
			a := request(60)
			d := p.Admit(now, a)
			if d.Verdict != Placed {
				t.Fatalf("%+v", d)
			}
			took := 0.03
			if d.Replica == 2 && now > 10 {
				took, n = 0.4, n+1
				if told {
					p.Stood(now+took, 0.3)
				}
			}
			p.First(now+took, a)
			p.Done(now+took, a, End{Outcome: Finished, Completion: 1})
		}
		if e := p.Stats().Ejections[fleet.EvidenceSlow]; n < slowRun || (e == 0) != told {
			t.Errorf("router stood still %v: %d ejections after %d late answers", told, e, n)
		}
	}
}

// A router that stood still for longer than a hung replica gets has seen no
// sign of anybody, and waits for one as long as ever.
func TestARouterThatStoodStillCallsNobodyHung(t *testing.T) {
	for _, told := range []bool{true, false} {
		p := pool(t, Config{}, 2)
		now := 1.0
		for k := range 20 {
			now += 0.25
			for id := fleet.ID(1); id <= 2; id++ {
				p.Observe(now, id, fleet.Sample{At: now, Steps: float64(10 + k), PromptTokens: float64(10 + k), OutputTokens: float64(10 + k)})
			}
		}
		var sent []*Ticket
		for range 4 {
			a := request(60)
			p.Admit(now, a)
			sent = append(sent, a)
		}
		now += 6
		if told {
			p.Stood(now, 6)
		}
		p.Advance(now, nil)
		if n := p.Stats().Ejections[fleet.EvidenceStalled]; (n == 0) != told {
			t.Errorf("router stood still %v: %d replicas with %d requests are ejected", told, n, len(sent))
		}
		now += 12 // and now nothing comes
		p.Advance(now, nil)
		if n := p.Stats().Ejections[fleet.EvidenceStalled]; n < 2 {
			t.Errorf("nothing for 12 s after it: %d of 2 replicas ejected", n)
		}
	}
}

// A hung replica that wakes has ended what was given up meanwhile, or its pages
// come again: it is tried at once, not when its ejection is over.
func TestAWokenReplicaIsTriedAtOnce(t *testing.T) {
	page := func(at, running float64) fleet.Sample {
		return fleet.Sample{At: at, Running: running, Steps: 10, PromptTokens: 10, OutputTokens: 10}
	}
	for name, c := range map[string]struct {
		pages func(now float64) (fleet.Sample, bool) // from the time of the hang, 0
		wakes float64                                // when it is to be tried; 0 = not before its time is over
	}{
		"its requests end when it wakes": {func(now float64) (fleet.Sample, bool) { return page(now, map[bool]float64{true: 3}[now < 9]), true }, 9},
		"its pages come again":           {func(now float64) (fleet.Sample, bool) { return page(now, 0), now < 1 || now >= 9 }, 9},
		"it hangs on":                    {func(now float64) (fleet.Sample, bool) { return page(now, 3), true }, 0},
		"its front end counts what was given up": {func(now float64) (fleet.Sample, bool) {
			return page(now, map[bool]float64{true: 3}[now < 5.6]), true
		}, 0},
	} {
		p := pool(t, Config{}, 2)
		p.Observe(0.5, 1, page(0.5, 0))
		p.view.Replicas[0].Health.Apply(5, fleet.EvidenceStalled, 0, &p.cfg.Health)
		until := p.view.Replicas[0].Health.Until + 5 // as if it had been hung before
		p.view.Replicas[0].Health.Until = until
		tried := 0.0
		for now := 1.0; now < until+1 && tried == 0; now += 0.25 {
			if s, ok := c.pages(now); ok {
				p.Observe(now, 1, s)
			}
			p.Advance(now, nil)
			if now > 5 && p.view.Replicas[0].Health.State == fleet.StateTrial {
				tried = now
			}
		}
		if want := c.wakes; want > 0 && tried != want || want == 0 && tried < until {
			t.Errorf("%s: tried at %v, its ejection ends at %v", name, tried, until)
		}
	}
}

// Requests that wait in a queue which the router did not know of are no reason
// to take away from their replica what it works on.
func TestTimeoutsAtAReplicaThatWorksAreNoFailures(t *testing.T) {
	for _, works := range []bool{true, false} {
		p := pool(t, Config{}, 2)
		run := request(10)
		p.Admit(1, run)
		id := run.Decision.Replica
		p.First(1.1, run)
		var waits []*Ticket
		for len(waits) < 4 {
			a := request(10)
			if p.Admit(1.2, a).Replica == id {
				waits = append(waits, a)
			}
		}
		now := 1.2
		for k := 1; now < 4; k++ {
			now += 0.5
			if works {
				p.Progress(now, run, 32*k)
			}
		}
		for _, a := range waits {
			p.Done(now, a, End{Outcome: Failed, Evidence: fleet.EvidenceFirstTimeout})
		}
		if open := p.View().Replicas[id-1].Health.Open(); open != works {
			t.Errorf("replica works %v: in use %v after %d first tokens that did not come", works, open, len(waits))
		}
	}
}
