package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/internal/freeport"
	"github.com/penstock/penstock/ring"
)

// What serve refuses of the peers' addresses by the file alone, check refuses
// with the same words.
func TestCheckRefusesWhatServeDoes(t *testing.T) {
	dir := t.TempDir()
	file, key, cert := filepath.Join(dir, "p.yaml"), filepath.Join(dir, "key"), filepath.Join(dir, "cert")
	for name, text := range map[string]string{key: ring.NewKey(), cert: "no certificate"} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ setting, want string }{
		{`peers: {key_file: key, advertise: router-1}`, `:1:peers.advertise: "router-1" is not an IP address: write it as 10.0.0.1 or 10.0.0.1:7946`},
		{`peers: {key_file: key, advertise: "10.0.0.1:x"}`, `:1:peers.advertise: "10.0.0.1:x" is not IP or IP:port`},
		{`peers: {key_file: key, advertise: 0.0.0.0}`, `:1:peers.advertise: 0.0.0.0 is no address that peers could send to`},
		{`peers: {key_file: key, join: [a, "b:0", "http://c:1", "d:e:f"]}`, `:1:peers.join[1]: "b:0" is not host or host:port: write it as router-2.internal, 10.0.0.2 or 10.0.0.2:7946`},
		{`peers: {key_file: key, join: [a, "b:0", "http://c:1", "d:e:f"]}`, `:1:peers.join[2]: "http://c:1" is not`},
		{`peers: {key_file: key, join: [a, "b:0", "http://c:1", "d:e:f"]}`, `:1:peers.join[3]: "d:e:f" is not`},
		{`peers: {key_file: key, join: ["a b"]}`, `:1:peers.join[0]: "a b" is not`},
		{`peers: {key_file: key, bind: "localhost:7946"}`, `:1:peers.bind: "localhost" is not an IP address: write it as 10.0.0.1:7946, or :7946`},
		{`peers: {key_file: key, name: "a b"}`, `:1:peers.name: "a b" is not 1 to`},
		{`peers: {key_file: key, advertise: 10.0.0.1, allow: [10.1.0.0/16]}`, `:1:peers.allow: leaves out this router's own address, 10.0.0.1 (peers.advertise)`},
		{`tls: {cert_file: cert, key_file: key}`, `:1:tls.cert_file: ` + cert + `: tls: failed to find any PEM data`},
	} {
		if err := os.WriteFile(file, []byte(c.setting+"\npools: [{name: a, replicas: {static: [\"http://127.0.0.1:2\"]}}]\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		for _, args := range [][]string{{"check", file}, {"serve", "--config", file, "--listen", "127.0.0.1:0", "--admin", "off"}} {
			if code, out := command1(args...); code != 1 || !strings.Contains(out, file+c.want) {
				t.Errorf("%s of %s: status %d, want 1 with %q:\n%s", args[0], c.setting, code, c.want, out)
			}
		}
	}
	good := "peers: {key_file: key, name: r1, bind: \":7946\", advertise: \"10.0.0.1\", allow: [10.0.0.0/8], join: [10.0.0.2, \"10.0.0.3:7000\", router.internal, \"router_4.internal.:7946\", \"::1\", \"[::1]:7946\"]}\npools: [{name: a, replicas: {static: [\"http://127.0.0.1:2\"]}}]\n"
	if err := os.WriteFile(file, []byte(good), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out := command1("check", file); code != 0 {
		t.Errorf("a good file: %d %s", code, out)
	}
}

// Routers that know the same replicas, by IDs of their own and in another
// order, agree where a new prefix goes; one that joins takes only its share.
func TestRoutersAgreeOnTheHomeOfAPrefix(t *testing.T) {
	view := func(names ...string) *fleet.View {
		v := &fleet.View{}
		for i, n := range names {
			v.Replicas = append(v.Replicas, fleet.Replica{ID: fleet.ID(i + 1), Name: n})
		}
		return v
	}
	name := func(v *fleet.View, id fleet.ID) string { return v.Replicas[id-1].Name }
	v1, v2 := view("a:1", "b:1", "c:1", "d:1"), view("d:1", "c:1", "b:1", "a:1")
	var none *home
	h1, h2 := none.update(v1), none.update(v2)
	if h1.update(v1) != h1 {
		t.Error("made anew though nothing changed")
	}
	v3 := view("a:1", "b:1", "c:1", "d:1", "e:1")
	h3 := h1.update(v3)
	moved, count := 0, map[string]int{}
	for k := range uint64(1000) {
		blocks := []uint64{k*77 + 1, k*77 + 2, k*77 + 3}
		p1, p2, p3 := h1.prefer(blocks), h2.prefer(blocks), h3.prefer(blocks)
		if name(v1, p1[0]) != name(v2, p2[0]) || name(v1, p1[1]) != name(v2, p2[1]) {
			t.Fatalf("two homes for one prefix: %v %v", p1, p2)
		}
		count[name(v1, p1[0])]++
		if name(v3, p3[0]) != name(v1, p1[0]) {
			moved++
			if name(v3, p3[0]) != "e:1" {
				t.Fatal("a prefix moved between replicas that stayed")
			}
		}
	}
	if moved < 120 || moved > 280 || len(count) != 4 {
		t.Errorf("%d of 1000 moved to the fifth replica; homes %v", moved, count)
	}
	if none.prefer([]uint64{1}) != [2]fleet.ID{} || h1.prefer(nil) != [2]fleet.ID{} {
		t.Error("a home without peers or without a prefix")
	}
	// What is beyond the first blocks is a request's own.
	long := make([]uint64, 20)
	for i := range long {
		long[i] = uint64(i + 1)
	}
	key, _ := admission.PrefixKey(long)
	long[19] = 99
	if k, _ := admission.PrefixKey(long); k != key {
		t.Error("the end of a prompt changes its home")
	}
}

// A request that is refused and comes again is counted by both routers
// together: alone each would serve it three times, six in all.
func TestRetryStormGoesRoundTheRouters(t *testing.T) {
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte("MDEyMzQ1Njc4OWFiY2RlZg==\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	dead, bind := freeport.Addr(t), [2]string{freeport.Addr(t), freeport.Addr(t)}
	var routers [2]*process
	for i := range routers {
		file := filepath.Join(t.TempDir(), "p.yaml")
		text := fmt.Sprintf("pools: [{name: main, models: [m1], replicas: {static: [%q]}}]\npeers: {name: r%d, bind: %q, join: [%q], key_file: %q}\n", "http://"+dead, i, bind[i], bind[1-i], key)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		routers[i] = startServe(t, "--config", file)
	}
	for _, r := range routers {
		r.until("knows the other", func() bool {
			_, body := get(r.admin + "/admin/v1/peers")
			return strings.Contains(body, `"fresh":1`)
		})
		r.until("the dead replica is known to be dead", func() bool {
			_, body := get(r.admin + "/admin/v1/replicas")
			return strings.Contains(body, `"ejected"`)
		})
	}
	for n := range 7 {
		code, body := routers[n%2].chat("m1")
		if strings.Contains(body, "ERR_RETRY_STORM_DETECTED") {
			if n < 3 {
				t.Errorf("refused as a storm at send %d", n+1)
			}
			if n > 5 {
				t.Errorf("refused only at send %d: they do not count together", n+1)
			}
			return
		}
		if code != 503 {
			t.Fatalf("send %d: %d %s", n+1, code, body)
		}
		time.Sleep(600 * time.Millisecond) // three rounds of gossip
	}
	t.Error("never refused as a storm")
}

func TestPeersOfARouterThatHasNone(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc((&app{}).peersAPI))
	defer srv.Close()
	var out, errs strings.Builder
	code := showPeers(t.Context(), []string{"--admin", srv.URL}, &out, &errs)
	if code != 1 || out.Len() > 0 || errs.String() != "penstock peers: this router has no peers configured\n" {
		t.Errorf("%d %q %q", code, out.String(), errs.String())
	}
}
