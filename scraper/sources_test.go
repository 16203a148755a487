package scraper

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// fakeDNS answers from a table; a name that is not there fails.
type fakeDNS struct {
	mu    sync.Mutex
	hosts map[string][]string
	srv   map[string][]*net.SRV
	asked int
}

func (f *fakeDNS) LookupNetIP(_ context.Context, network, host string) ([]netip.Addr, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked++
	var out []netip.Addr
	for _, a := range f.hosts[host] {
		ip := netip.MustParseAddr(a)
		if network == "ip" || ip.Is4() == (network == "ip4") {
			out = append(out, ip)
		}
	}
	if len(out) == 0 {
		return nil, errors.New("no such host")
	}
	return out, nil
}

func (f *fakeDNS) LookupSRV(_ context.Context, _, _, name string) (string, []*net.SRV, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.srv[name] == nil {
		return "", nil, errors.New("no such name")
	}
	return name, f.srv[name], nil
}

func (f *fakeDNS) set(host string, addrs ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hosts[host] = addrs
}

// fleetOf follows changes the way a daemon does.
type fleetOf struct {
	mu      sync.Mutex
	have    map[string]Target
	changes int
	bad     string
}

func (f *fleetOf) change(added, removed []Target) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.changes++
	for _, t := range removed {
		if _, ok := f.have[t.Key()]; !ok {
			f.bad = "removed what was not there: " + t.Key()
		}
		delete(f.have, t.Key())
	}
	for _, t := range added {
		if _, ok := f.have[t.Key()]; ok {
			f.bad = "added twice: " + t.Key()
		}
		f.have[t.Key()] = t
	}
}

func (f *fleetOf) String() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var list []Target
	for _, t := range f.have {
		list = append(list, t)
	}
	var names []string
	for _, t := range sortTargets(list) {
		names = append(names, t.Name+"="+t.Addr)
	}
	if f.bad != "" {
		names = append(names, f.bad)
	}
	return strings.Join(names, " ")
}

func (f *fleetOf) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.changes
}

// watching runs f while sources are watched, in a bubble.
func watching(t *testing.T, make func() []Source, f func(t *testing.T, have *fleetOf)) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(context.Background())
		have := &fleetOf{have: map[string]Target{}}
		var wg sync.WaitGroup
		wg.Go(func() { Watch(ctx, make(), have.change) })
		f(t, have)
		cancel()
		wg.Wait()
	})
}

func must(t *testing.T) func(s Source, err error) Source {
	return func(s Source, err error) Source {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
}

func (f *fleetOf) want(t *testing.T, want string) {
	t.Helper()
	if got := f.String(); got != want {
		t.Errorf("replicas %q, want %q", got, want)
	}
}

func TestStaticNamesAreFollowed(t *testing.T) {
	dns := &fakeDNS{hosts: map[string][]string{"b.test": {"10.0.0.9", "10.0.0.2"}}}
	o := SourceOptions{Resolver: dns}
	watching(t, func() []Source {
		return []Source{must(t)(Static([]string{"http://10.0.0.1:8000", "https://B.test/base/", "c.test:9000"}, o))}
	}, func(t *testing.T, have *fleetOf) {
		time.Sleep(time.Second)
		have.want(t, "10.0.0.1:8000=10.0.0.1:8000 b.test:443=10.0.0.2:443")
		dns.set("c.test", "10.0.0.3") // it was not known yet: found within seconds
		time.Sleep(3 * time.Second)
		have.want(t, "10.0.0.1:8000=10.0.0.1:8000 c.test:9000=10.0.0.3:9000 b.test:443=10.0.0.2:443")
		changes := have.count()
		dns.set("b.test", "10.0.0.1", "10.0.0.2") // more addresses: the one in use stays
		time.Sleep(40 * time.Second)
		dns.set("b.test") // the name server fails: the same
		time.Sleep(40 * time.Second)
		if have.count() != changes {
			t.Error("changed though the address in use was still right, or not known to be wrong")
		}
		dns.set("b.test", "10.0.0.7")
		time.Sleep(40 * time.Second)
		have.want(t, "10.0.0.1:8000=10.0.0.1:8000 c.test:9000=10.0.0.3:9000 b.test:443=10.0.0.7:443")
	})
}

func TestDNSNames(t *testing.T) {
	dns := &fakeDNS{hosts: map[string][]string{"svc": {"10.0.0.2", "10.0.0.1", "fd00::1"}, "p1": {"10.1.0.1"}},
		srv: map[string][]*net.SRV{"_vllm._tcp.svc": {{Target: "p1.", Port: 8001}, {Target: "p2.", Port: 8002}}}}
	o := SourceOptions{Resolver: dns}
	watching(t, func() []Source { return []Source{must(t)(DNS("svc", "A", 8000, o))} }, func(t *testing.T, have *fleetOf) {
		time.Sleep(time.Second)
		have.want(t, "10.0.0.1:8000=10.0.0.1:8000 10.0.0.2:8000=10.0.0.2:8000")
		dns.set("svc")
		time.Sleep(time.Minute)
		have.want(t, "10.0.0.1:8000=10.0.0.1:8000 10.0.0.2:8000=10.0.0.2:8000")
		dns.set("svc", "10.0.0.2", "10.0.0.3")
		time.Sleep(16 * time.Second)
		have.want(t, "10.0.0.2:8000=10.0.0.2:8000 10.0.0.3:8000=10.0.0.3:8000")
	})
	dns.set("svc", "fd00::1")
	watching(t, func() []Source { return []Source{must(t)(DNS("svc", "AAAA", 8000, o))} }, func(t *testing.T, have *fleetOf) {
		time.Sleep(time.Second)
		have.want(t, "[fd00::1]:8000=[fd00::1]:8000")
	})
	watching(t, func() []Source { return []Source{must(t)(DNS("_vllm._tcp.svc", "SRV", 0, o))} }, func(t *testing.T, have *fleetOf) {
		time.Sleep(time.Second)
		have.want(t, "") // half an answer is none
		dns.set("p2", "10.1.0.2")
		time.Sleep(16 * time.Second)
		have.want(t, "10.1.0.1:8001=10.1.0.1:8001 10.1.0.2:8002=10.1.0.2:8002")
	})
	for _, kind := range []string{"MX", "a"} {
		if _, err := DNS("svc", kind, 8000, o); err == nil {
			t.Errorf("type %s is taken", kind)
		}
	}
	if _, err := DNS("svc", "A", 0, o); err == nil {
		t.Error("port 0 is taken")
	}
}

func TestTargetFileIsFollowedAndABrokenOneIsNot(t *testing.T) {
	for _, c := range []struct{ name, two, one, none string }{
		{"targets.json", `[{"targets":["10.0.0.1:8000","10.0.0.2:8000"],"labels":{"zone":"a","__meta":"x"}}]`, `[{"targets":["10.0.0.2:8000"],"labels":{"zone":"a"}}]`, `[]`},
		{"targets.yml", "- targets: ['10.0.0.1:8000', '10.0.0.2:8000']\n  labels: {zone: a}\n", "- targets: ['10.0.0.2:8000']\n  labels: {zone: a}\n", "[]\n"},
	} {
		path := filepath.Join(t.TempDir(), c.name)
		write := func(s string) {
			if err := os.WriteFile(path, []byte(s), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		watching(t, func() []Source { return []Source{File(path, SourceOptions{})} }, func(t *testing.T, have *fleetOf) {
			const both = "10.0.0.1:8000=10.0.0.1:8000 10.0.0.2:8000=10.0.0.2:8000"
			time.Sleep(5 * time.Second)
			have.want(t, "")
			write(c.two) // it comes later
			time.Sleep(5 * time.Second)
			have.want(t, both)
			for _, broken := range []string{"", "[{", "{}", "null", `[{"targets":["http://u:p@x:1"]}]`, `[{"targets":["ftp://x"]}]`, `[{"targets":"x"}]`} {
				write(broken)
				time.Sleep(5 * time.Second)
				have.want(t, both)
			}
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			time.Sleep(5 * time.Second)
			have.want(t, both)
			changes := have.count()
			write(c.two)
			time.Sleep(5 * time.Second)
			if have.count() != changes {
				t.Error("told of a change where there was none")
			}
			write(c.one)
			time.Sleep(5 * time.Second)
			have.want(t, "10.0.0.2:8000=10.0.0.2:8000")
			write(strings.ReplaceAll(c.one, "zone", "region")) // a changed label: the same replica, joined anew
			time.Sleep(5 * time.Second)
			have.want(t, "10.0.0.2:8000=10.0.0.2:8000")
			for _, target := range have.have {
				if target.Labels["region"] != "a" || len(target.Labels) != 1 {
					t.Errorf("labels %v", target.Labels)
				}
			}
			write(c.none)
			time.Sleep(5 * time.Second)
			have.want(t, "")
		})
	}
}

func TestTargetsOverHTTP(t *testing.T) {
	var answer atomic.Value
	answer.Store(`[{"targets":["10.0.0.1:8000"],"labels":{"__scheme__":"https"}}]`)
	failed := make(chan struct{}, 1)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a := answer.Load().(string)
		if a == "" {
			w.WriteHeader(500)
			select {
			case failed <- struct{}{}:
			default:
			}
		}
		fmt.Fprint(w, a)
	}))
	defer srv.Close()
	ctx, cancel := context.WithCancel(context.Background())
	lists := make(chan []Target)
	done := make(chan struct{})
	go func() {
		defer close(done)
		HTTP(srv.URL, SourceOptions{Every: 5 * time.Millisecond}).Run(ctx, func(ts []Target) { lists <- ts })
	}()
	if ts := <-lists; len(ts) != 1 || !ts[0].TLS || ts[0].Addr != "10.0.0.1:8000" {
		t.Errorf("%+v", ts)
	}
	answer.Store("") // an outage says nothing
	<-failed
	answer.Store(`[{"targets":["10.0.0.2:8000"]}]`)
	if ts := <-lists; len(ts) != 1 || ts[0].Addr != "10.0.0.2:8000" || ts[0].TLS {
		t.Errorf("%+v", ts)
	}
	cancel()
	<-done
}

func TestSeveralSourcesAreOneFleet(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.json")
	if err := os.WriteFile(path, []byte(`[{"targets":["10.0.0.1:8000","10.0.0.2:8000"]}]`), 0o600); err != nil {
		t.Fatal(err)
	}
	watching(t, func() []Source {
		return []Source{must(t)(Static([]string{"10.0.0.1:8000"}, SourceOptions{})), File(path, SourceOptions{})}
	}, func(t *testing.T, have *fleetOf) {
		time.Sleep(5 * time.Second)
		have.want(t, "10.0.0.1:8000=10.0.0.1:8000 10.0.0.2:8000=10.0.0.2:8000")
		if err := os.WriteFile(path, []byte(`[]`), 0o600); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Second)
		have.want(t, "10.0.0.1:8000=10.0.0.1:8000")
	})
}

func TestBadTargets(t *testing.T) {
	for _, s := range []string{"", "http://", "ftp://a:1", "http://u@a:1", "http://a:1?x=1", "http://a:1#x", "a:b:c"} {
		if got, err := parseTarget(s, "http"); err == nil {
			t.Errorf("%q gives %+v", s, got)
		}
	}
}
