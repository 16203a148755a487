package ring

import (
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
)

// front is a router with the real admission core, wired to its node as the
// daemon does it, in front of replicas that all fronts share.
type front struct {
	*Node
	fleet *testFleet

	mu   sync.Mutex // of pool
	pool *admission.Pool
	ids  map[string]fleet.ID
}

// testFleet counts what the replicas really have, whoever sent it.
type testFleet struct {
	begin    time.Time
	mu       sync.Mutex
	requests []int
	worst    []int // most at once
	work     []float64
	placed   int
	wg       sync.WaitGroup
}

func (f *testFleet) now() float64 { return time.Since(f.begin).Seconds() }

func (f *testFleet) add(i, n int, work float64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requests[i] += n
	f.work[i] += work
	f.worst[i] = max(f.worst[i], f.requests[i])
	if n > 0 {
		f.placed++
	}
}

func newFront(t *testing.T, net *memNet, fl *testFleet, i int, cfg admission.Config) *front {
	f := &front{fleet: fl, pool: admission.New(cfg), ids: map[string]fleet.ID{}}
	for k := range fl.requests {
		name := fmt.Sprintf("10.1.0.%d:8000", k)
		f.ids[name] = fleet.ID(k + 1)
		f.pool.Join(0, admission.ReplicaSpec{ID: fleet.ID(k + 1), Name: name, Warm: true})
	}
	var err error
	f.Node, err = New(Options{Name: fmt.Sprint("r", i), Keys: [][]byte{testKey}, Join: []string{"10.0.0.1"},
		transport: net.host(fmt.Sprintf("10.0.0.%d:7946", i)), Now: fl.now, Snapshot: f.snapshot, OnPeers: f.onPeers})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func (f *front) snapshot(s *Snapshot) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range f.pool.View().Replicas {
		r := &f.pool.View().Replicas[i]
		s.Replicas = append(s.Replicas, Account{Name: r.Name, Load: r.Own, State: r.Health.State, Reason: r.Health.Reason, Since: r.Health.Since})
	}
}

func (f *front) onPeers(peers []PeerView) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := f.fleet.now()
	for _, v := range peers {
		loads := map[fleet.ID]fleet.Load{}
		for _, a := range v.Loads {
			loads[f.ids[a.Name]] = a.Load
		}
		f.pool.Peers(now, v.Router, loads)
	}
	f.advance(now)
}

// advance wakes the held requests that are decided.
func (f *front) advance(now float64) {
	for _, t := range f.pool.Advance(now, nil) {
		t.User.(chan struct{}) <- struct{}{}
	}
}

// serve is one request: admitted, prefilled and decoded for as long as said.
func (f *front) serve(prompt int, prefill, decode time.Duration) {
	defer f.fleet.wg.Done()
	wake := make(chan struct{}, 1)
	t := &admission.Ticket{User: wake, Work: fleet.Work{Prompt: prompt, MaxOut: 100, Seqs: 1, Arrived: f.fleet.now()}}
	f.mu.Lock()
	d := f.pool.Admit(f.fleet.now(), t)
	f.mu.Unlock()
	if d.Verdict == admission.Held {
		<-wake
		d = t.Decision
	}
	if d.Verdict != admission.Placed {
		return
	}
	i := int(d.Replica) - 1
	work := float64(prompt)
	f.fleet.add(i, 1, work)
	time.Sleep(prefill)
	f.mu.Lock()
	f.pool.First(f.fleet.now(), t)
	f.mu.Unlock()
	time.Sleep(decode)
	f.fleet.add(i, -1, -work)
	f.mu.Lock()
	now := f.fleet.now()
	f.pool.Done(now, t, admission.End{Outcome: admission.Finished, Prompt: prompt, Completion: 100, Evidence: fleet.EvidenceOK})
	f.advance(now)
	f.mu.Unlock()
}

// drive sends rate requests a second (Poisson) for d, dealt to the fronts by
// shares, and calls watch every 10 ms in its second half.
func (f *testFleet) drive(rng *rand.Rand, fronts []*front, shares []int, rate float64, d time.Duration, watch func()) {
	end := time.Now().Add(d)
	half := time.Now().Add(d / 2)
	sum := 0
	for _, s := range shares {
		sum += s
	}
	next := time.Now().Add(d / 2)
	for time.Now().Before(end) {
		time.Sleep(time.Duration(rng.ExpFloat64() / rate * float64(time.Second)))
		k, at := 0, rng.IntN(sum)
		for at >= shares[k] {
			at -= shares[k]
			k++
		}
		prompt := int(200 * math.Exp(0.5*rng.NormFloat64()))
		f.wg.Add(1)
		go fronts[k].serve(prompt, time.Duration(50+prompt/10)*time.Millisecond, time.Duration(1500+rng.IntN(1000))*time.Millisecond)
		for time.Now().After(next) && time.Now().After(half) {
			watch()
			next = next.Add(10 * time.Millisecond)
		}
	}
}

func testFleetRun(t *testing.T, net *memNet, fronts int, cfg admission.Config, latency time.Duration, loss float64, shares []int, rate float64, watch func(f *testFleet)) *testFleet {
	fl := &testFleet{begin: time.Now(), requests: make([]int, 4), worst: make([]int, 4), work: make([]float64, 4)}
	var fs []*front
	for i := range fronts {
		fs = append(fs, newFront(t, net, fl, i+1, cfg))
	}
	defer func() {
		for _, f := range fs {
			f.Close()
		}
		time.Sleep(10 * time.Second)
	}()
	within(t, 5*time.Second, "all know all", func() bool {
		for _, f := range fs {
			if f.Members().Fresh != fronts-1 {
				return false
			}
		}
		return true
	})
	net.set(loss, latency)
	time.Sleep(3 * time.Second)
	fl.drive(rand.New(rand.NewPCG(1, uint64(fronts))), fs, shares, rate, 12*time.Second, func() {
		if watch != nil {
			fl.mu.Lock()
			watch(fl)
			fl.mu.Unlock()
		}
	})
	time.Sleep(10 * time.Second)
	stop := make(chan struct{})
	go func() { // what is held goes on with time
		for {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
				for _, f := range fs {
					f.mu.Lock()
					f.advance(fl.now())
					f.mu.Unlock()
				}
			}
		}
	}()
	fl.wg.Wait()
	close(stop)
	return fl
}

// The acceptance line: with a cap of K per replica and 3 routers, the total is
// at most K(1 + 10 %).
func TestCapHoldsOverAllRouters(t *testing.T) {
	const capped = 40
	for _, c := range []struct {
		name    string
		latency time.Duration
		loss    float64
	}{{"lan", 2 * time.Millisecond, 0}, {"a tenth lost", 2 * time.Millisecond, 0.1}, {"a fifth lost", 2 * time.Millisecond, 0.2}, {"all lost", 2 * time.Millisecond, 1}} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				// 160 places, 2.1 s each: 76 a second; 120 are offered.
				fl := testFleetRun(t, newMemNet(21), 3, admission.Config{Cap: capped, NoLearn: true}, c.latency, c.loss, []int{3, 2, 1}, 120, nil)
				t.Logf("most at once per replica %v of %d, %d placed", fl.worst, capped, fl.placed)
				for i, w := range fl.worst {
					if float64(w) > capped*1.1 {
						t.Errorf("replica %d had %d at once, cap %d", i, w, capped)
					}
				}
			})
		})
	}
}

// The acceptance line: with gossip that takes 200 ms or 1 s or is lost, no
// herding: the worst replica has at most 1.3 x the mean work.
func TestStaleGossipDoesNotHerd(t *testing.T) {
	for _, c := range []struct {
		name    string
		latency time.Duration
		loss    float64
	}{{"2 ms", 2 * time.Millisecond, 0}, {"200 ms", 200 * time.Millisecond, 0}, {"1 s", time.Second, 0}, {"lost", 2 * time.Millisecond, 1}} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sum, n := 0.0, 0
				testFleetRun(t, newMemNet(22), 8, admission.Config{NoLearn: true}, c.latency, c.loss, []int{1, 1, 1, 1, 1, 1, 1, 1}, 200, func(f *testFleet) {
					total, worst := 0, 0
					for _, r := range f.requests {
						total += r
						worst = max(worst, r)
					}
					if total > 0 {
						sum += float64(worst) * float64(len(f.requests)) / float64(total)
						n++
					}
				})
				ratio := sum / float64(n)
				t.Logf("worst replica over mean, mean of %d looks: %.3f", n, ratio)
				if ratio > 1.3 {
					t.Errorf("worst replica has %.2f x the mean", ratio)
				}
			})
		})
	}
}
