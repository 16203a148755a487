// Package peers runs several router processes as one, each on a loopback
// address of its own, before emulated replicas and behind a plain TCP
// balancer. It needs minutes and a machine with nothing else to do: `make
// peers` runs it, `go test ./...` passes over it.
package peers

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

const replicas = 4

// stage is a number of routers as processes, replicas and a balancer.
type stage struct {
	t        *testing.T
	binary   string
	dir      string
	replicas []string // host:port
	admins   []string
	publics  []string
	procs    map[string]*exec.Cmd
	balancer string
}

// ports are below those that outgoing connections use.
var nextPort atomic.Int64

func init() { nextPort.Store(int64(12000 + os.Getpid()%100*60)) }

func port(t *testing.T, host string, n int) int {
	t.Helper()
next:
	for range 200 {
		p := int(nextPort.Add(int64(n))) - n
		for i := range n {
			ln, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(p+i)))
			if err != nil {
				continue next
			}
			ln.Close()
		}
		return p
	}
	t.Fatal("no free port")
	return 0
}

func start(t *testing.T, routers int, pool string) *stage {
	t.Helper()
	return startWith(t, routers, pool, nil)
}

// startWith lets change have the last word on each router's file; gossip are
// all routers' addresses.
func startWith(t *testing.T, routers int, pool string, change func(i int, gossip []string, text string) string) *stage {
	t.Helper()
	if os.Getenv("PENSTOCK_PEERS") == "" {
		t.Skip("make peers runs this")
	}
	s := &stage{t: t, binary: os.Getenv("PENSTOCK_BIN"), dir: t.TempDir(), procs: map[string]*exec.Cmd{}}
	first := port(t, "127.0.0.1", replicas)
	for i := range replicas {
		s.replicas = append(s.replicas, fmt.Sprintf("127.0.0.1:%d", first+i))
	}
	s.spawn("replicas", "bench", "replica", "--listen", s.replicas[0], "--count", strconv.Itoa(replicas), "--profile", "l40s-8b", "--model", "m1")
	for _, r := range s.replicas {
		s.until("replica "+r, func() bool { return s.get("http://"+r+"/health") != "" || s.ok("http://"+r+"/health") })
	}
	key := filepath.Join(s.dir, "key")
	s.write(key, "MDEyMzQ1Njc4OWFiY2RlZg==\n")
	hosts, gossip := make([]string, routers), make([]string, routers)
	for i := range routers {
		hosts[i] = fmt.Sprintf("127.0.0.%d", 2+i)
		gossip[i] = fmt.Sprintf("%s:%d", hosts[i], port(t, hosts[i], 1))
	}
	for i := range routers {
		p := port(t, hosts[i], 2)
		s.publics = append(s.publics, fmt.Sprintf("%s:%d", hosts[i], p))
		s.admins = append(s.admins, fmt.Sprintf("http://%s:%d", hosts[i], p+1))
		text := fmt.Sprintf("listen: %q\nadmin: %q\nlog: {level: warn}\npeers: {name: r%d, bind: %q, join: [%q], key_file: %q, allow: [127.0.0.0/8]}\n"+
			"pools:\n  - {name: main, models: [m1], replicas: {static: [%s]}, profile: {base: l40s-8b}%s}\n",
			s.publics[i], strings.TrimPrefix(s.admins[i], "http://"), i, gossip[i], gossip[(i+1)%routers], key, quoted(s.replicas), pool)
		if routers == 1 {
			text = strings.Replace(text, "peers: ", "# ", 1)
		}
		if change != nil {
			text = change(i, gossip, text)
		}
		file := filepath.Join(s.dir, fmt.Sprintf("r%d.yaml", i))
		s.write(file, text)
		s.spawn(fmt.Sprintf("r%d", i), "serve", "--config", file)
	}
	for i := range routers {
		s.until(s.publics[i]+" is ready", func() bool { return s.ok("http://" + s.publics[i] + "/readyz") })
		if routers > 1 {
			s.until("router knows all", func() bool { return s.fresh(i) == routers-1 })
		}
	}
	s.balance(s.publics)
	return s
}

func quoted(addrs []string) string {
	var q []string
	for _, a := range addrs {
		q = append(q, fmt.Sprintf("%q", "http://"+a))
	}
	return strings.Join(q, ", ")
}

func (s *stage) write(file, text string) {
	s.t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		s.t.Fatal(err)
	}
}

// spawn starts a process that ends with the test.
func (s *stage) spawn(name string, args ...string) *exec.Cmd {
	s.t.Helper()
	log, err := os.Create(filepath.Join(s.dir, name+".log"))
	if err != nil {
		s.t.Fatal(err)
	}
	cmd := exec.Command(s.binary, args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.procs[name] = cmd
	s.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		log.Close()
		if s.t.Failed() {
			b, _ := os.ReadFile(log.Name())
			s.t.Logf("%s: %s", name, b[max(0, len(b)-1500):])
		}
	})
	return cmd
}

var client = &http.Client{Timeout: 2 * time.Second}

func (s *stage) get(url string) string {
	resp, err := client.Get(url)
	if err != nil {
		return ""
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return string(b)
}

func (s *stage) ok(url string) bool {
	resp, err := client.Get(url)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

func (s *stage) until(what string, f func() bool) {
	s.t.Helper()
	for end := time.Now().Add(20 * time.Second); !f(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			s.t.Fatalf("not within 20 s: %s", what)
		}
	}
}

// fresh is how many peers router i knows.
func (s *stage) fresh(i int) int {
	v := struct{ Fresh int }{-1}
	_ = json.Unmarshal([]byte(s.get(s.admins[i]+"/admin/v1/peers")), &v)
	return v.Fresh
}

// balance deals connections to the routers in turn.
func (s *stage) balance(to []string) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.t.Fatal(err)
	}
	s.balancer = ln.Addr().String()
	s.t.Cleanup(func() { ln.Close() })
	go func() {
		for k := 0; ; k++ {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				d, err := net.Dial("tcp", to[k%len(to)])
				if err != nil {
					return
				}
				defer d.Close()
				go func() { _, _ = io.Copy(d, c); d.Close() }()
				_, _ = io.Copy(c, d)
			}()
		}
	}()
}

// requests is what a replica has: running and waiting.
func (s *stage) requests(replica string) (n float64) {
	for line := range strings.Lines(s.get("http://" + replica + "/metrics")) {
		if strings.HasPrefix(line, "vllm:num_requests_running") || strings.HasPrefix(line, "vllm:num_requests_waiting{") {
			v, _ := strconv.ParseFloat(strings.TrimSpace(line[strings.LastIndexByte(line, ' ')+1:]), 64)
			n += v
		}
	}
	return n
}

// outcome is what the load generator and the replicas saw.
type outcome struct {
	Goodput   float64 `json:"goodput"`
	CachedPct float64 `json:"cached_pct"`
	OK        int     `json:"ok"`
	Offered   int     `json:"offered"`
	Refused   int     `json:"refused"`
	TTFT      struct{ P50, P95 float64 }

	most   float64 // requests in a replica at once
	spread float64 // the busiest over the mean, in the mean
	late   time.Duration
}

// strained is how late one short sleep in a hundred may end on a machine whose
// figures are the routers'. Replicas, routers, balancer and load share it: when it
// has no time for a sleeper, it has none for them either.
const strained = 25 * time.Millisecond

// judge fails the test for what is wrong, unless the machine was the
// bottleneck: then there is no verdict, and that is said.
func (o *outcome) judge(t *testing.T, wrong []string) {
	t.Helper()
	if len(wrong) > 0 && o.late > strained {
		t.Skipf("no verdict, the machine was the bottleneck: one sleep in a hundred ended %v late. Seen: %s", o.late, strings.Join(wrong, "; "))
	}
	for _, w := range wrong {
		t.Error(w)
	}
}

// sleeps measures until stop by how much one short sleep in a hundred ends too late.
func sleeps(stop chan struct{}) time.Duration {
	const nap = 5 * time.Millisecond
	var late []time.Duration
	for {
		select {
		case <-stop:
			slices.Sort(late)
			return late[len(late)*99/100]
		default:
		}
		at := time.Now()
		time.Sleep(nap)
		late = append(late, time.Since(at)-nap)
	}
}

// load runs the generator and watches the replicas from warm on.
func (s *stage) load(warm, length time.Duration, args ...string) (o outcome) {
	s.t.Helper()
	file := filepath.Join(s.dir, "load.json")
	args = append([]string{"bench", "load", "--url", "http://" + s.balancer, "--model", "m1", "--warmup", warm.String(), "--duration", length.String(), "--quiet", "--json", file}, args...)
	stop, sum, looks := make(chan struct{}), 0.0, 0.0
	var wg sync.WaitGroup
	wg.Go(func() { o.late = sleeps(stop) })
	wg.Go(func() {
		for from := time.Now(); ; time.Sleep(100 * time.Millisecond) {
			select {
			case <-stop:
				return
			default:
			}
			worst, all := 0.0, 0.0
			for _, r := range s.replicas {
				n := s.requests(r)
				worst, all = max(worst, n), all+n
			}
			if at := time.Since(from); at > warm && at < length && all > 0 {
				o.most = max(o.most, worst)
				sum, looks = sum+worst*replicas/all, looks+1
			}
		}
	})
	out, err := exec.Command(s.binary, args...).CombinedOutput()
	close(stop)
	wg.Wait()
	if err != nil {
		s.t.Fatalf("bench load: %v: %s", err, out)
	}
	b, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(b, &o)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	o.spread = sum / max(looks, 1)
	return o
}

// Several routers do as well as one: goodput and prefix hits within 2 %, and
// no replica with more than 1.3 x the mean.
func TestSeveralRoutersActAsOne(t *testing.T) {
	var one outcome
	for _, n := range []int{1, 3, 8} {
		t.Run(strconv.Itoa(n), func(t *testing.T) {
			s := start(t, n, ", objective: {ttft: 1s}")
			// The first half minute is for the caches: while they are young, each
			// prefix has a first time at each replica, and more so with more routers.
			o := s.load(30*time.Second, 55*time.Second, "--rate", "32", "--prompt", "200", "--out", "60", "--families", "40", "--prefix", "1000", "--zipf", "0.8", "--ttft", "1s", "--tpot", "100ms")
			t.Logf("%d routers: goodput %.3f of %d, hits %.1f %%, refused %d, TTFT p50 %.3f p95 %.3f s, worst replica / mean %.2f; sleeps late by %v", n, o.Goodput, o.Offered, o.CachedPct, o.Refused, o.TTFT.P50, o.TTFT.P95, o.spread, o.late)
			var wrong []string
			bad := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
			if n == 1 {
				one = o
				if o.Goodput < 0.98 {
					bad("one router alone: goodput %.3f of a load that four replicas serve", o.Goodput)
				}
			} else {
				if one.Offered == 0 || one.Goodput < 0.98 {
					t.Skip("nothing to compare with: one router was not measured, or gave no figure")
				}
				if o.Goodput < 0.98*one.Goodput || o.CachedPct < 0.98*one.CachedPct {
					bad("goodput %.3f, hits %.1f %%; one router %.3f, %.1f %%", o.Goodput, o.CachedPct, one.Goodput, one.CachedPct)
				}
				if o.spread > 1.3 {
					bad("the busiest replica had %.2f x the mean", o.spread)
				}
			}
			o.judge(t, wrong)
		})
	}
}

// A cap of K requests per replica holds over all routers, to a tenth.
func TestCapHoldsOverAllRouters(t *testing.T) {
	const most = 20
	s := start(t, 3, fmt.Sprintf(", concurrency: %d", most))
	o := s.load(4*time.Second, 16*time.Second, "--rate", "75", "--prompt", "100", "--out", "60")
	t.Logf("most at once in a replica %g, cap %d; %d of %d answered, %d refused; sleeps late by %v", o.most, most, o.OK, o.Offered, o.Refused, o.late)
	if o.most > most*1.1 {
		t.Errorf("a replica had %g at once, cap %d", o.most, most)
	}
	if o.most < most*0.9 {
		o.judge(t, []string{fmt.Sprintf("the load never came to the cap of %d: %g at once", most, o.most)})
	}
}
