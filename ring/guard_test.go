package ring

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/telemetry"
)

// seal encrypts a user message as memberlist does.
func seal(key, payload []byte) []byte {
	block, err := aes.NewCipher(key)
	if err != nil {
		panic(err)
	}
	gcm, _ := cipher.NewGCM(block)
	p := make([]byte, 1+cryptNonce)
	p[0] = cryptVersion
	rand.Read(p[1:])
	return gcm.Seal(p, p[1:], append([]byte{8}, payload...), nil) // 8: user message
}

// words are datagrams in which router name claims n requests at each replica.
func words(name string, epoch, seq uint64, n int) [][]byte {
	s := &Snapshot{}
	for i := range 3 {
		s.Replicas = append(s.Replicas, Account{Name: fmt.Sprintf("10.1.0.%d:8000", i), Load: fleet.Load{Requests: n}})
	}
	parts, _ := say(&routerState{name: name, epoch: epoch, seq: seq - 1}, s, 1, true)
	return parts
}

// attack injects p into rs[0], which must come to know nothing from it, and
// checks which counter moved.
func attack(t *testing.T, net *memNet, rs []*router, from string, p []byte, counter string) {
	t.Helper()
	before := rs[0].page()
	status := rs[0].Members()
	net.inject(from, rs[0].addr, p)
	time.Sleep(time.Millisecond)
	if !all(rs, agree)() {
		t.Fatalf("%s: views changed: %s", counter, rs[0].seen("r2"))
	}
	after := rs[0].Members()
	for i := range after.Members {
		if after.Members[i].Epoch != status.Members[i].Epoch || after.Members[i].State != status.Members[i].State || len(after.Members) != len(status.Members) {
			t.Fatalf("%s: members changed: %+v", counter, after)
		}
	}
	line := func(page string) string {
		for l := range strings.Lines(page) {
			if strings.HasPrefix(l, counter) {
				return l
			}
		}
		return ""
	}
	if line(before) == line(rs[0].page()) {
		t.Fatalf("%s did not count\n%s", counter, rs[0].page())
	}
}

func TestForgedReplayedAndForeignDatagramsChangeNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		net := newMemNet(11)
		rs := []*router{}
		for i := range 3 {
			rs = append(rs, start(t, net, i+1, func(o *Options) { o.Allow = []string{"10.0.0.0/24"} }))
		}
		defer closeAll(rs...)
		var mu sync.Mutex
		var heard [][]byte
		net.tap(func(from, to string, p []byte) {
			mu.Lock()
			defer mu.Unlock()
			if from == rs[1].addr && to == rs[0].addr {
				heard = append(heard, slices.Clone(p))
			}
		})
		within(t, 5*time.Second, "views agree", all(rs, agree))
		time.Sleep(6 * time.Second) // all of an account, hot prefixes too, has been told
		m := rs[0].Members().Members[0]
		later := words("r2", m.Epoch, m.Seq+1000, 99)[0]
		const datagrams = `penstock_peer_datagrams_total{result="%s"}`

		attack(t, net, rs, rs[1].addr, seal(bytes.Repeat([]byte{8}, 32), later), fmt.Sprintf(datagrams, "forged"))
		attack(t, net, rs, rs[1].addr, append([]byte{8}, later...), fmt.Sprintf(datagrams, "forged"))
		attack(t, net, rs, rs[1].addr, []byte{8}, fmt.Sprintf(datagrams, "forged"))
		flipped := seal(testKey, later)
		flipped[len(flipped)/2] ^= 1
		attack(t, net, rs, rs[1].addr, flipped, fmt.Sprintf(datagrams, "forged"))
		attack(t, net, rs, "192.168.0.1:7946", seal(testKey, later), fmt.Sprintf(datagrams, "outside"))
		mu.Lock()
		replay := slices.Clone(heard[len(heard)/2])
		mu.Unlock()
		attack(t, net, rs, rs[1].addr, replay, fmt.Sprintf(datagrams, "replayed"))
		// Past the window of nonces: the sequence and the epoch still tell.
		attack(t, net, rs, rs[1].addr, seal(testKey, words("r2", m.Epoch, 1, 99)[0]), fmt.Sprintf(datagrams, "old"))
		attack(t, net, rs, rs[1].addr, seal(testKey, words("r2", m.Epoch-1, 1<<40, 99)[0]), fmt.Sprintf(datagrams, "old"))
		attack(t, net, rs, rs[1].addr, seal(testKey, []byte("P\x01nonsense")), fmt.Sprintf(datagrams, "garbage"))
		attack(t, net, rs, rs[1].addr, seal(testKey, []byte("P\x02x")), fmt.Sprintf(datagrams, "unknown_version"))
		// A router that was never a member has a voice and no vote.
		attack(t, net, rs, rs[1].addr, seal(testKey, words("stranger", 5, 5, 99)[0]), fmt.Sprintf(datagrams, "ok"))
		if rs[0].seen("stranger") != "never" {
			t.Fatal("a stranger's account counts")
		}
		// A dead router does not rise by its old words.
		rs[1].Close()
		within(t, 5*time.Second, "gone", func() bool { return rs[0].seen("r2") == "gone" })
		mu.Lock()
		old := heard
		mu.Unlock()
		for _, p := range old {
			net.inject(rs[1].addr, rs[0].addr, p)
		}
		for _, p := range words("r2", m.Epoch, 2, 99) {
			net.inject(rs[1].addr, rs[0].addr, seal(testKey, p))
		}
		time.Sleep(100 * time.Millisecond)
		if rs[0].seen("r2") != "gone" {
			t.Fatalf("risen: %s", rs[0].seen("r2"))
		}
	})
}

func TestRouterFromOutsideCannotJoin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		net := newMemNet(12)
		a := start(t, net, 1, func(o *Options) { o.Allow = []string{"10.0.0.1/32"} })
		b := start(t, net, 2, nil)
		defer closeAll(a, b)
		time.Sleep(10 * time.Second)
		if len(a.Members().Members) != 0 || !a.metric(`penstock_peer_datagrams_total{result="ok"} 0`) ||
			a.metric(`penstock_peer_streams_total{result="outside"} 0`) {
			t.Fatalf("%+v\n%s", a.Members(), a.page())
		}
	})
}

func TestRouterWithAnotherKeyCannotJoin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		net := newMemNet(13)
		a := start(t, net, 1, nil)
		b := start(t, net, 2, func(o *Options) { o.Keys = [][]byte{bytes.Repeat([]byte{9}, 32)} })
		defer closeAll(a, b)
		time.Sleep(10 * time.Second)
		if len(a.Members().Members) != 0 || len(b.Members().Members) != 0 || a.metric(`penstock_peer_streams_total{result="forged"} 0`) {
			t.Fatalf("%+v\n%s", a.Members(), a.page())
		}
	})
}

func TestKeysRotateWithoutALostInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		net := newMemNet(14)
		old, fresh := base64.StdEncoding.EncodeToString(testKey), NewKey()
		dir := t.TempDir()
		var rs []*router
		write := func(i int, lines ...string) {
			if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), []byte("# keys\n"+strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		for i := range 3 {
			write(i, old)
			rs = append(rs, start(t, net, i+1, func(o *Options) { o.KeyFile = filepath.Join(dir, fmt.Sprint(i)) }))
		}
		defer closeAll(rs...)
		within(t, 5*time.Second, "views agree", all(rs, agree))
		for _, lines := range [][]string{{old, fresh}, {fresh, old}, {fresh}} {
			for i := range rs { // one router after the other
				write(i, lines...)
				for range 60 {
					time.Sleep(100 * time.Millisecond)
					if !all(rs, agree)() {
						t.Fatalf("router %d at %d keys: views differ", i, len(lines))
					}
				}
			}
		}
		net.inject(rs[1].addr, rs[0].addr, seal(testKey, words("r2", 1<<49, 1, 99)[0]))
		time.Sleep(time.Second)
		if !all(rs, agree)() || !rs[0].metric(`penstock_peer_datagrams_total{result="forged"} 1`) {
			t.Fatalf("the old key still opens the door\n%s", rs[0].page())
		}
		write(0, "not a key")
		time.Sleep(6 * time.Second)
		if !all(rs, agree)() || rs[0].logs.FilterMessage("the keys stay as they were").Len() == 0 {
			t.Fatal("a broken key file")
		}
	})
}

func TestNamesBehindDNSAreLookedUpAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		net := newMemNet(15)
		var mu sync.Mutex
		var ips []string
		lookup := func(string) ([]string, error) {
			mu.Lock()
			defer mu.Unlock()
			if len(ips) == 0 {
				return nil, fmt.Errorf("no such host")
			}
			return ips, nil
		}
		dns := func(o *Options) { o.Join, o.lookup = []string{"routers.prod.svc"}, lookup }
		rs := []*router{start(t, net, 1, dns), start(t, net, 2, dns)}
		time.Sleep(15 * time.Second)
		if len(rs[0].Members().Members) != 0 {
			t.Fatal("joined by no name")
		}
		mu.Lock()
		ips = []string{"10.0.0.1", "10.0.0.2"}
		mu.Unlock()
		within(t, 15*time.Second, "joined when the name got addresses", all(rs, agree))
		closeAll(rs...)
	})
}

func TestClockThatWentBackOverARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		net := newMemNet(16)
		rs := startAll(t, net, 2)
		defer func() { closeAll(rs...) }()
		within(t, 5*time.Second, "views agree", all(rs, agree))
		rs[1].Close()
		time.Sleep(5 * time.Second)
		rs[1] = start(t, net, 2, func(o *Options) { o.epoch = 5 })
		rs[1].requests(3, 3, 3)
		within(t, 5*time.Second, "the peers tell it of its later life", all(rs, agree))
	})
}

func TestOptionsAreRefusedByTheirName(t *testing.T) {
	o := Options{Name: "a b", Bind: ":1", Interval: time.Hour, Bandwidth: 3, Allow: []string{"10.0.0.1"}, Join: []string{":x:y"},
		HoldShare: -1, Snapshot: func(*Snapshot) {}, OnPeers: func([]PeerView) {}}
	err := o.Validate()
	for _, want := range []string{"peers.name", "peers.interval", "peers.bandwidth", "peers.allow", "peers.join", "peers.hold_share", "peers.key_file"} {
		if !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%s is not named in %v", want, err)
		}
	}
	for _, bad := range []string{"", "AAAA", "!!", "# only\n"} {
		if _, err := ParseKeys([]byte(bad)); err == nil {
			t.Errorf("keys %q", bad)
		}
	}
	if _, err := ParseKeys([]byte(NewKey())); err != nil {
		t.Error(err)
	}
}

// A list of networks without the router's own address is told at the start:
// memberlist would leave the router out of its own list, and fail on that later.
func TestAllowWithoutItsOwnAddressIsRefused(t *testing.T) {
	o := Options{Name: "r1", Keys: [][]byte{testKey}, Bind: "127.0.0.1:0", Allow: []string{"10.0.0.0/8"}, Metrics: telemetry.New(), Log: zap.NewNop(),
		Snapshot: func(*Snapshot) {}, OnPeers: func([]PeerView) {}}
	n, err := New(o)
	if err == nil {
		n.Close()
		t.Fatal("it started")
	}
	if s := err.Error(); !strings.Contains(s, "peers.allow: leaves out") || !strings.Contains(s, "127.0.0.1 (peers.bind)") {
		t.Error(err)
	}
	o.Allow = append(o.Allow, "127.0.0.0/8")
	if n, err = New(o); err != nil {
		t.Fatal(err)
	}
	n.Close()
	// Where the options do not tell the address, it shows when it is known.
	net := newMemNet(3)
	o.Bind, o.Allow, o.transport = "", []string{"192.168.0.0/16"}, net.host("10.0.0.1:7946")
	if n, err = New(o); err == nil {
		n.Close()
		t.Fatal("it started")
	}
	if s := err.Error(); !strings.Contains(s, "peers.allow: leaves out") || !strings.Contains(s, "10.0.0.1") {
		t.Error(err)
	}
}

func TestRoutersOnTheLoopback(t *testing.T) {
	net := newMemNet(17)
	var rs []*router
	for i := range 3 {
		rs = append(rs, start(t, net, i+1, func(o *Options) {
			o.transport, o.Bind, o.Join = nil, "127.0.0.1:0", nil
			o.Allow = []string{"127.0.0.0/8"}
			if i > 0 {
				o.Join = []string{rs[0].Members().Addr}
			}
		}))
	}
	wait := func(what string, ok func() bool) {
		t.Helper()
		for range 2000 {
			if ok() {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Fatalf("never: %s", what)
	}
	wait("views agree", all(rs, agree))
	rs[2].Close()
	wait("a killed router's account is gone", func() bool { return rs[0].seen("r3") == "gone" && rs[1].seen("r3") == "gone" })
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if err := rs[1].Leave(ctx); err != nil {
		t.Fatal(err)
	}
	wait("the leaver is gone", func() bool { return rs[0].seen("r2") == "gone" && rs[0].Members().Members[0].State == "left" })
	rs[0].Close()
	// memberlist's Shutdown does not wait for a probe that is under way: it has
	// up to its own time-out to see the end. Each look takes up to a second.
	var left error
	for range 30 {
		if left = goleak.Find(); left == nil {
			return
		}
	}
	t.Error(left)
}
