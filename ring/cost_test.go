package ring

import (
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/penstock/penstock/fleet"
)

func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkSixteenRouters runs 16 routers of 100 replicas each, all under load
// that changes all the time, on the loopback in this process. Each iteration
// is a second. It reports what one router costs: percent of a core, and kbit/s
// sent with UDP and IP headers.
func BenchmarkSixteenRouters(b *testing.B) {
	const routers, replicas = 16, 100
	snapshot := func(seed uint64) func(*Snapshot) {
		rng := rand.New(rand.NewPCG(seed, 1))
		names := randomSnapshot(rng, replicas, 1)
		return func(s *Snapshot) {
			for i := range names.Replicas {
				n := 1 + rng.IntN(80)
				s.Replicas = append(s.Replicas, Account{Name: names.Replicas[i].Name, Load: fleet.Load{Requests: n, Prefilling: rng.IntN(min(n, 3)),
					PrefillTokens: rng.Float64() * 2e4, KVTokens: float64(n) * 2500, OutTokens: float64(n) * 200, LastFirst: 1}})
			}
			s.ConfigHash = 1
			s.Budgets = append(s.Budgets, Budget{"pool-a", rng.IntN(5000), rng.IntN(5000)}, Budget{"pool-b", rng.IntN(5000), rng.IntN(5000)})
			s.Held = append(s.Held, Held{"pool-a", []int{rng.IntN(300), rng.IntN(300), rng.IntN(300)}}, Held{"pool-b", []int{rng.IntN(300), rng.IntN(300), rng.IntN(300)}})
			for i := range 32 {
				s.Hot = append(s.Hot, Hot{uint64(i), names.Replicas[i].Name})
			}
		}
	}
	key := make([]byte, 32)
	var nodes []*Node
	for i := range routers {
		o := Options{Name: string(rune('a'+i)) + "-router-0", Bind: "127.0.0.1:0", Keys: [][]byte{key}, Snapshot: snapshot(uint64(i)), OnPeers: func([]PeerView) {}}
		if i > 0 {
			o.Join = []string{nodes[0].Members().Addr}
		}
		n, err := New(o)
		if err != nil {
			b.Fatal(err)
		}
		defer n.Close()
		nodes = append(nodes, n)
	}
	for _, n := range nodes {
		for n.Members().Fresh != routers-1 {
			time.Sleep(50 * time.Millisecond)
		}
	}
	sent := func() (bytes, datagrams uint64) {
		for _, n := range nodes {
			bytes += n.guard.count.out.Get()
			datagrams += n.count.ok.Get()
		}
		return
	}
	cpu, begin := cpuTime(), time.Now()
	bytes, heard := sent()
	for b.Loop() {
		time.Sleep(time.Second)
	}
	took := time.Since(begin).Seconds()
	bytes2, heard2 := sent()
	perRouter := took * routers
	b.ReportMetric(100*(cpuTime()-cpu).Seconds()/perRouter, "%core")
	b.ReportMetric((8*float64(bytes2-bytes)+28*8*float64(heard2-heard))/1000/perRouter, "kbit/s")
	b.ReportMetric(float64(heard2-heard)/perRouter, "datagrams/s")
	b.ReportMetric(nodes[0].Members().Interval*1000, "interval-ms")
	for _, n := range nodes {
		if f := n.Members().Fresh; f != routers-1 {
			b.Errorf("%d fresh", f)
		}
	}
}
