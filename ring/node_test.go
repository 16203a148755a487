package ring

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/telemetry"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

var testKey = bytes.Repeat([]byte{7}, 32)

// router is a node with an account that the test sets and the views that it got.
type router struct {
	*Node
	addr string
	reg  *telemetry.Registry
	logs *observer.ObservedLogs

	mu    sync.Mutex
	snap  Snapshot
	views map[string]PeerView
}

func (r *router) set(f func(s *Snapshot)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f(&r.snap)
}

// requests sets how many requests the router has at each replica.
func (r *router) requests(n ...int) {
	r.set(func(s *Snapshot) {
		s.Replicas = s.Replicas[:0]
		for i, k := range n {
			s.Replicas = append(s.Replicas, Account{Name: fmt.Sprintf("10.1.0.%d:8000", i), Load: fleet.Load{Requests: k, KVTokens: float64(100 * k)}})
		}
	})
}

// seen returns the requests that a peer has at each replica, as this router
// knows, or a word for why there are none.
func (r *router) seen(peer string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	v, ok := r.views[peer]
	switch {
	case !ok:
		return "never"
	case v.Gone:
		return "gone"
	}
	var b strings.Builder
	if v.Assumed {
		b.WriteString("assumed ")
	}
	for _, a := range v.Loads {
		fmt.Fprint(&b, a.Load.Requests, " ")
	}
	return strings.TrimSpace(b.String())
}

func (r *router) metric(line string) bool {
	var b bytes.Buffer
	r.reg.Write(&b)
	return strings.Contains(b.String(), line+"\n")
}

func (r *router) page() string {
	var b bytes.Buffer
	r.reg.Write(&b)
	return b.String()
}

func start(t *testing.T, net *memNet, i int, change func(o *Options)) *router {
	t.Helper()
	core, logs := observer.New(zap.InfoLevel)
	r := &router{addr: fmt.Sprintf("10.0.0.%d:7946", i), reg: telemetry.New(), logs: logs, views: map[string]PeerView{}}
	r.requests(i, 0, 10*i)
	o := Options{
		Name: fmt.Sprint("r", i), Keys: [][]byte{testKey}, Join: []string{"10.0.0.1", "10.0.0.2"},
		transport: net.host(r.addr), Metrics: r.reg, Log: zap.New(core),
		Snapshot: func(s *Snapshot) {
			r.mu.Lock()
			defer r.mu.Unlock()
			s.Replicas = append(s.Replicas, r.snap.Replicas...)
			s.Budgets = append(s.Budgets, r.snap.Budgets...)
			s.Storms = append(s.Storms, r.snap.Storms...)
			s.Hot = append(s.Hot, r.snap.Hot...)
			s.Held = append(s.Held, r.snap.Held...)
			s.ConfigHash = r.snap.ConfigHash
		},
		OnPeers: func(peers []PeerView) {
			r.mu.Lock()
			defer r.mu.Unlock()
			for _, v := range peers {
				v.Loads = append([]Account(nil), v.Loads...)
				v.Hot = append([]Hot(nil), v.Hot...)
				v.held = append([]wireHeld(nil), v.held...)
				r.views[v.Router] = v
			}
		},
	}
	if change != nil {
		change(&o)
	}
	var err error
	if r.Node, err = New(o); err != nil {
		t.Fatal(err)
	}
	return r
}

func startAll(t *testing.T, net *memNet, n int) []*router {
	rs := make([]*router, n)
	for i := range rs {
		rs[i] = start(t, net, i+1, nil)
	}
	return rs
}

func closeAll(rs ...*router) {
	for _, r := range rs {
		r.Close()
	}
	time.Sleep(10 * time.Second) // let memberlist's own goroutines see it
}

// within waits until ok, for at most d of virtual time, and returns how long it took.
func within(t *testing.T, d time.Duration, what string, ok func() bool) time.Duration {
	t.Helper()
	begin := time.Now()
	for !ok() {
		if time.Since(begin) > d {
			t.Fatalf("not within %v: %s", d, what)
		}
		time.Sleep(5 * time.Millisecond)
	}
	return time.Since(begin)
}

func all(rs []*router, ok func(r, peer *router) bool) func() bool {
	return func() bool {
		for _, r := range rs {
			for _, p := range rs {
				if r != p && !ok(r, p) {
					return false
				}
			}
		}
		return true
	}
}

// agree tells that everyone knows everyone's account as it is.
func agree(r, p *router) bool {
	p.mu.Lock()
	var b strings.Builder
	for _, a := range p.snap.Replicas {
		fmt.Fprint(&b, a.Load.Requests, " ")
	}
	p.mu.Unlock()
	return r.seen(p.opts.Name) == strings.TrimSpace(b.String())
}

func TestRoutersKnowEachOthersAccounts(t *testing.T) {
	for _, n := range []int{2, 3, 8} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				net := newMemNet(1)
				rs := startAll(t, net, n)
				defer closeAll(rs...)
				within(t, 5*time.Second, "views agree after the start", all(rs, agree))
				for i, r := range rs {
					r.requests(i+100, 7, 0)
				}
				within(t, 300*time.Millisecond, "views follow a change in an interval", all(rs, agree))
				if s := rs[0].Members(); s.Fresh != n-1 || s.Share != 1 || s.Routers != n {
					t.Fatalf("%+v", s)
				}
			})
		})
	}
}

func TestManyRoutersThatStartTogetherAllMeet(t *testing.T) {
	for seed := range uint64(5) {
		synctest.Test(t, func(t *testing.T) {
			net := newMemNet(100 + seed)
			net.set(0.05, time.Millisecond)
			rs := startAll(t, net, 16)
			defer closeAll(rs...)
			took := within(t, 10*time.Second, "all know all", all(rs, func(r, p *router) bool { return r.seen(p.opts.Name) != "never" }))
			t.Logf("after %v", took)
		})
	}
}

func TestViewsFollowThroughALossyNetwork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		net := newMemNet(2)
		rs := startAll(t, net, 5)
		defer closeAll(rs...)
		within(t, 5*time.Second, "views agree", all(rs, agree))
		net.set(0.3, 20*time.Millisecond)
		time.Sleep(5 * time.Second)
		for i, r := range rs {
			r.requests(50+i, 1, 2)
		}
		within(t, 3*time.Second, "views agree with 30 % lost", all(rs, agree))
	})
}

func TestSlowGossipIsLateAndNotLost(t *testing.T) {
	for _, latency := range []time.Duration{200 * time.Millisecond, time.Second} {
		t.Run(latency.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				net := newMemNet(3)
				rs := startAll(t, net, 3)
				defer closeAll(rs...)
				within(t, 5*time.Second, "views agree", all(rs, agree))
				net.set(0, latency)
				time.Sleep(20 * time.Second)
				for i, r := range rs {
					r.requests(50+i, 1, 2)
				}
				// All change at once, so that at first each supposes of the others
				// that they did again what it did itself.
				within(t, 2*latency+500*time.Millisecond, "views agree", all(rs, agree))
				if s := rs[0].Members(); s.Fresh != 2 {
					t.Fatalf("%d fresh", s.Fresh)
				}
				rs[0].mu.Lock()
				age := rs[0].views["r2"].Age
				rs[0].mu.Unlock()
				if lat := latency.Seconds(); age < 0.5*lat || age > 1.2*lat+0.1 {
					t.Fatalf("an account %v under way has an age of %.3f s", latency, age)
				}
			})
		})
	}
}

func TestKilledRoutersAccountIsGoneAndItsShareFree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		net := newMemNet(4)
		rs := startAll(t, net, 3)
		defer closeAll(rs...)
		within(t, 5*time.Second, "views agree", all(rs, agree))
		rs[2].Close()
		took := within(t, 5*time.Second, "the killed router's account is gone", func() bool {
			return rs[0].seen("r3") == "gone" && rs[1].seen("r3") == "gone"
		})
		t.Logf("gone after %v", took)
		if s := rs[0].Members(); s.Share != 1 || s.Lost != 1 || s.Routers != 2 {
			t.Fatalf("%+v", s)
		}
		// It comes back under its name with another life.
		time.Sleep(20 * time.Second)
		rs[2] = start(t, net, 3, nil)
		within(t, 5*time.Second, "it is back", all(rs, agree))
	})
}

func TestLostHostIsLeftItsShareForAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		net := newMemNet(5)
		rs := startAll(t, net, 3)
		defer closeAll(rs...)
		within(t, 5*time.Second, "views agree", all(rs, agree))
		net.partition(1, rs[2].addr) // nothing answers there, not even with a refusal
		within(t, time.Second, "it is taken to have at least what it had", func() bool { return rs[1].seen("r3") == "assumed 3 0 30" })
		within(t, 5*time.Second, "its account is replaced by the own one", func() bool { return rs[0].seen("r3") == "assumed 1 0 10" })
		s := rs[0].Members()
		if s.Share != 2./3 || s.Routers != 3 || s.Silent != 1 {
			t.Fatalf("%+v", s)
		}
		within(t, time.Second, "the lonely one takes a third", func() bool { s := rs[2].Members(); return s.Share == 1./3 && s.Routers == 3 })
		var table strings.Builder
		if err := s.Write(&table); err != nil || !strings.Contains(table.String(), "2 of 3 routers") || !strings.Contains(table.String(), "silent") {
			t.Fatal(err, table.String())
		}
		if !rs[0].metric("penstock_peer_share_ratio 0.6666666666666666") || !rs[0].metric(`penstock_peers{state="silent"} 1`) {
			t.Fatal(rs[0].page())
		}
		rs[0].requests(9, 9, 9)
		within(t, time.Second, "the assumed account follows the own one", func() bool { return rs[0].seen("r3") == "assumed 9 9 9" })
		time.Sleep(59 * time.Second)
		within(t, 5*time.Second, "the share is free in the end", func() bool { return rs[0].seen("r3") == "gone" && rs[0].Members().Share == 1 })
		net.partition(0, rs[2].addr)
		within(t, 5*time.Second, "and it is welcome when it is heard again", all(rs, agree))
	})
}

func TestPartitionHealsInTwoSeconds(t *testing.T) {
	for _, lasts := range []time.Duration{3 * time.Second, 30 * time.Second, 5 * time.Minute, 25 * time.Minute} {
		t.Run(lasts.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				net := newMemNet(6)
				rs := startAll(t, net, 5)
				defer closeAll(rs...)
				within(t, 5*time.Second, "views agree", all(rs, agree))
				net.partition(1, rs[3].addr, rs[4].addr)
				time.Sleep(lasts)
				for i, r := range rs {
					r.requests(200+i, i, 0)
				}
				time.Sleep(time.Second)
				if agree(rs[0], rs[3]) || !agree(rs[0], rs[1]) || !agree(rs[3], rs[4]) {
					t.Fatal("the partition is not one")
				}
				net.partition(0, rs[3].addr, rs[4].addr)
				took := within(t, 2*time.Second, "views agree after the heal", all(rs, agree))
				t.Logf("agree %v after a partition of %v", took, lasts)
				within(t, 10*time.Second, "membership is whole again", func() bool {
					for _, r := range rs {
						if r.ml.NumMembers() != len(rs) {
							return false
						}
					}
					return true
				})
			})
		})
	}
}

func TestLeavingRouterIsForgottenAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		net := newMemNet(7)
		rs := startAll(t, net, 3)
		defer closeAll(rs...)
		within(t, 5*time.Second, "views agree", all(rs, agree))
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		left := make(chan error, 1)
		go func() { left <- rs[2].Leave(ctx) }()
		within(t, 100*time.Millisecond, "gone", func() bool { return rs[0].seen("r3") == "gone" && rs[1].seen("r3") == "gone" })
		if err := <-left; err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		if s := rs[0].Members(); s.Share != 1 || s.Routers != 2 || s.Members[1].State != "left" {
			t.Fatalf("%+v", s)
		}
	})
}

func TestHintsBudgetsStormsAndHotPrefixesAreShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		net := newMemNet(8)
		rs := startAll(t, net, 3)
		defer closeAll(rs...)
		for _, r := range rs {
			r.set(func(s *Snapshot) {
				s.Budgets = []Budget{{"llama-70b", 100, 110}, {"other", 1, 1}}
				s.Storms = []Storm{{42, 2}}
				s.Held = []Held{{"llama-70b", []int{0, 3}}, {"other", []int{0}}}
				s.Hot = []Hot{{77, "10.1.0.1:8000"}, {78, "not-known-here:1"}}
			})
		}
		rs[1].set(func(s *Snapshot) {
			s.Replicas[1].State, s.Replicas[1].Reason = fleet.StateEjected, fleet.EvidenceRefused
		})
		within(t, 5*time.Second, "the sums are right", func() bool {
			req, att := rs[0].PeerBudget("llama-70b")
			return req == 200 && att == 220 && rs[0].PeerRepeats(42) == 4 && rs[0].PeerRepeats(43) == 0
		})
		within(t, 5*time.Second, "views", all(rs, agree))
		within(t, 2*time.Second, "hot prefixes", func() bool {
			rs[0].mu.Lock()
			defer rs[0].mu.Unlock()
			v := rs[0].views["r2"]
			return len(v.Hot) == 1 && v.Hot[0] == Hot{77, "10.1.0.1:8000"} && v.Loads[1].State == fleet.StateEjected && v.Loads[1].Reason == fleet.EvidenceRefused
		})
		held := func(pool string) []int {
			rs[0].mu.Lock()
			defer rs[0].mu.Unlock()
			v := rs[0].views["r2"]
			return v.Held(nil, pool)
		}
		if a, b := held("llama-70b"), held("other"); !slices.Equal(a, []int{0, 3}) || b != nil {
			t.Errorf("r2 holds %v and %v of its pools, not [0 3] and nothing", a, b)
		}
		rs[2].set(func(s *Snapshot) { s.Held = nil })
		within(t, time.Second, "what is held no more is told", func() bool {
			rs[0].mu.Lock()
			defer rs[0].mu.Unlock()
			v := rs[0].views["r3"]
			return v.Held(nil, "llama-70b") == nil
		})
		rs[1].Close()
		within(t, 5*time.Second, "a lost router's counts are gone", func() bool {
			req, _ := rs[0].PeerBudget("llama-70b")
			return held("llama-70b") == nil && req == 100 && rs[0].PeerRepeats(42) == 2
		})
	})
}

func TestConfigurationDriftIsSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		net := newMemNet(9)
		rs := startAll(t, net, 3)
		defer closeAll(rs...)
		for _, r := range rs {
			r.set(func(s *Snapshot) { s.ConfigHash = 1 })
		}
		within(t, 5*time.Second, "views", all(rs, agree))
		time.Sleep(2 * time.Second)
		warned := func() int { return rs[0].logs.FilterMessageSnippet("configuration differs").Len() }
		if warned() != 0 || !rs[0].metric("penstock_peer_config_drift 0") {
			t.Fatal("drift where there is none")
		}
		rs[1].set(func(s *Snapshot) { s.ConfigHash = 2 })
		time.Sleep(5 * time.Second)
		if warned() != 1 || !rs[0].metric("penstock_peer_config_drift 1") || !rs[0].Members().Members[0].Drift {
			t.Fatalf("%d warnings\n%s", warned(), rs[0].page())
		}
		rs[1].set(func(s *Snapshot) { s.ConfigHash = 1 })
		time.Sleep(2 * time.Second)
		if rs[0].logs.FilterMessageSnippet("is the same again").Len() != 1 || !rs[0].metric("penstock_peer_config_drift 0") {
			t.Fatal("the end of the drift is not seen")
		}
	})
}

func TestAccountsOfTwoThousandReplicasKeepTheBandwidthBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		net := newMemNet(10)
		rs := startAll(t, net, 4)
		defer closeAll(rs...)
		loads := make([]int, 2000)
		for i := range loads {
			loads[i] = i
		}
		for _, r := range rs {
			r.requests(loads...)
		}
		within(t, 10*time.Second, "views agree", all(rs, agree))
		net.mu.Lock()
		before := net.bytes
		net.mu.Unlock()
		time.Sleep(20 * time.Second)
		net.mu.Lock()
		rate := float64(net.bytes-before) * 8 / 20 / 4
		net.mu.Unlock()
		t.Logf("%.0f bit/s each, one round per %.3f s", rate, rs[0].Members().Interval)
		if rate > defaultBandwidth {
			t.Fatalf("%.0f bit/s", rate)
		}
		if s := rs[0].Members(); s.Fresh != 3 || s.Interval <= 0.2 {
			t.Fatalf("%d fresh, interval %v", s.Fresh, s.Interval)
		}
	})
}
