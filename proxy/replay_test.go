package proxy

import (
	"bytes"
	"encoding/gob"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/bench/sim"
	"github.com/penstock/penstock/fleet"
)

// What the daemon decided under a real load, over real sockets, the simulator
// decides too when it is given the recorded inputs: all decisions, held
// requests and predictions bit for bit, and the same knowledge in the end.
func TestDaemonDecidesAsTheSimulatorDoes(t *testing.T) {
	var log bytes.Buffer
	enc := gob.NewEncoder(&log)
	cfg := admission.Config{Cap: 3, MaxHeld: 8, Objective: admission.Objective{TTFT: 0.25, ITL: 0.05},
		Classes: []admission.Class{{Name: "high", Wait: -1}, {Name: "low", Wait: 0.02}}}
	rec := admission.Record(admission.New(cfg), func(c *admission.Call) {
		if err := enc.Encode(c); err != nil {
			t.Error(err)
		}
	})
	var replicas []*fakeReplica
	for i := range 3 {
		replicas = append(replicas, newFakeReplica(t, func(c *fakeConn) {
			time.Sleep(time.Duration(2+5*i) * time.Millisecond)
			if i == 0 && c.n%9 == 4 {
				c.json(500, `{"error":{"message":"no"}}`, "")
				return
			}
			ok(c)
		}))
	}
	g := newRig(t, replicas, func(o *Options, _ *admission.Config) {
		o.Pools[0].Core = rec
		o.Classes = []ClassOptions{{Name: "high"}, {Name: "low"}}
	})
	g.core = rec.Pool

	const seed = 7
	t.Logf("seed %d", seed)
	stop := make(chan struct{})
	var feed, clients sync.WaitGroup
	feed.Go(func() { // what the scraper and the prober tell meanwhile
		for k := 0; ; k++ {
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
			}
			id := fleet.ID(k%3 + 1)
			g.p.Observe(id, fleet.Sample{At: g.p.now(), Engines: 1, Waiting: float64(k % 4), Running: 2, KVUsage: 0.1, KVTokens: 1e5, Steps: float64(k), PromptTokens: float64(9 * k), OutputTokens: float64(5 * k)})
			g.p.Evidence(id, fleet.EvidenceProbeOK)
			if k == 20 || k == 30 {
				g.p.DrainReplica(3, k == 20)
			}
		}
	})
	var mu sync.Mutex
	statuses := map[int]int{}
	for k := range 16 {
		clients.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(k)))
			for n := range 16 {
				body, class := plainBody, "high"
				if rng.IntN(2) == 0 {
					body = sseBody
				}
				if rng.IntN(3) == 0 {
					class = "low"
				}
				body = strings.Replace(body, "hi", fmt.Sprintf("%s %d %d", strings.Repeat("once upon a time ", 40), k, n), 1)
				a := g.do(chat(body, "X-Request-Class: "+class, fmt.Sprintf("X-Sandbox-ID: tenant-%d", (k+n)%4)))
				mu.Lock()
				statuses[a.status]++
				mu.Unlock()
			}
		})
	}
	clients.Wait()
	close(stop)
	feed.Wait()
	g.settled()

	pl := g.p.pools[0]
	pl.mu.Lock()
	defer pl.mu.Unlock()
	var calls []admission.Call
	for dec := gob.NewDecoder(&log); log.Len() > 0; {
		var c admission.Call
		if err := dec.Decode(&c); err != nil {
			t.Fatal(err)
		}
		calls = append(calls, c)
	}
	pool, n, err := sim.Replay(cfg, calls)
	if err != nil {
		t.Fatal(err)
	}
	st := rec.Pool.Stats()
	t.Logf("%d calls, %d decisions equal; %d held, statuses %v", len(calls), n, st.EverHeld, statuses)
	if !reflect.DeepEqual(pool.Stats(), st) {
		t.Errorf("totals: recorded %+v, replayed %+v", st, pool.Stats())
	}
	for i, a := range rec.View().Replicas {
		b := pool.View().Replicas[i]
		if a.Own != b.Own || a.Other != b.Other || a.ScalePrefill != b.ScalePrefill || a.ScaleDecode != b.ScaleDecode || a.Offset != b.Offset || a.Health != b.Health {
			t.Errorf("replica %d: recorded %+v, replayed %+v", a.ID, a, b)
		}
	}
	if st.EverHeld == 0 || st.Failed == 0 || statuses[200] == 0 {
		t.Errorf("the load held, failed or answered nothing: %+v", st)
	}

	// A recording that was not of this configuration must be told apart.
	cfg.Cap = 1
	if _, _, err := sim.Replay(cfg, calls); err == nil {
		t.Error("a replay with another cap brought the same decisions")
	}
}
