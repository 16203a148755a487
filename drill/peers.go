package drill

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/penstock/penstock/ring"
)

func init() {
	checks["peers"] = checkPeers
	checks["views_agree"] = checkViewsAgree
	checks["peer_requests"] = checkPeerRequests
	checks["spread"] = checkSpread
}

// network is where the routers' gossip goes. With relays, routers reach each
// other through them only, so that the network between can be cut.
type network struct {
	bind   []string // by router
	relays []*relay // empty: routers talk straight

	mu  sync.Mutex
	cut bool // router 0 is apart from the others
}

// relay passes on what is sent to one router: datagrams and connections.
type relay struct {
	net    *network
	to     int
	addr   string
	udp    *net.UDPConn
	tcp    net.Listener
	target *net.UDPAddr
}

const gossipKey = "cGVuc3RvY2stZHJpbGxzIQ=="

// makeNetwork gives each router a gossip address, and a relay in front of it
// when the scenario wants to cut the network.
func (st *stage) makeNetwork() error {
	n := st.sc.Routers
	if n < 2 {
		return nil
	}
	st.net = &network{}
	if err := os.WriteFile(filepath.Join(st.dir, "gossip.key"), []byte(gossipKey+"\n"), 0o600); err != nil {
		return err
	}
	for i := range n {
		addr, err := st.freeAddr()
		if err != nil {
			return err
		}
		st.net.bind = append(st.net.bind, addr)
		if !st.sc.Relayed {
			continue
		}
		r := &relay{net: st.net, to: i}
		if r.tcp, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			return err
		}
		r.addr = r.tcp.Addr().String()
		ua, err := net.ResolveUDPAddr("udp", r.addr)
		if err == nil {
			r.udp, err = net.ListenUDP("udp", ua)
		}
		if err == nil {
			r.target, err = net.ResolveUDPAddr("udp", addr)
		}
		if err != nil {
			r.tcp.Close()
			return err
		}
		st.net.relays = append(st.net.relays, r)
		go r.datagrams()
		go r.connections()
	}
	return nil
}

// peersOf is the peers section of router i's configuration.
func (st *stage) peersOf(i int) string {
	if st.net == nil {
		return ""
	}
	known := func(k int) string {
		if len(st.net.relays) > 0 {
			return st.net.relays[k].addr
		}
		return st.net.bind[k]
	}
	var join []string
	for k := range st.net.bind {
		if k != i {
			join = append(join, fmt.Sprintf("%q", known(k)))
		}
	}
	return fmt.Sprintf(`{name: r%d, bind: %q, advertise: %q, join: [%s], key_file: %q}`, i, st.net.bind[i], known(i), strings.Join(join, ", "), filepath.Join(st.dir, "gossip.key"))
}

func (n *network) isCut() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.cut
}

// act is a step's `network`: split takes router 0 apart from the others, heal ends it.
func (n *network) act(what string) error {
	if n == nil || len(n.relays) == 0 {
		return fmt.Errorf("network: the scenario is not relayed")
	}
	if what != "split" && what != "heal" {
		return fmt.Errorf("network: %q is not split or heal", what)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cut = what == "split"
	return nil
}

// datagrams passes on datagrams. Routers send from the address that they are
// bound to, which tells who it is.
func (r *relay) datagrams() {
	buf := make([]byte, 65536)
	for {
		k, from, err := r.udp.ReadFromUDP(buf)
		if err != nil {
			return
		}
		crosses := (from.String() == r.net.bind[0]) != (r.to == 0)
		if crosses && r.net.isCut() {
			continue
		}
		_, _ = r.udp.WriteToUDP(buf[:k], r.target)
	}
}

// connections passes on connections. Nothing tells who they are of, so a cut
// network passes none: they are accepted and hang, as in a real partition.
func (r *relay) connections() {
	for {
		c, err := r.tcp.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			for r.net.isCut() {
				time.Sleep(20 * time.Millisecond)
			}
			d, err := net.Dial("tcp", r.target.String())
			if err != nil {
				return
			}
			defer d.Close()
			go func() {
				_, _ = io.Copy(d, c)
				_ = d.(*net.TCPConn).CloseWrite()
			}()
			_, _ = io.Copy(c, d)
		}()
	}
}

func (n *network) close() {
	if n == nil {
		return
	}
	n.mu.Lock()
	n.cut = false
	n.mu.Unlock()
	for _, r := range n.relays {
		r.udp.Close()
		r.tcp.Close()
	}
}

// sight is what the routers said of each other at one time, and what the
// replicas really had.
type sight struct {
	at      float64
	views   []*view // by router; nil = it did not answer
	running []int   // requests in each replica
}

// view is one router's.
type view struct {
	status ring.Status
	own    int // requests that it has placed
	peers  int // that it counts for its peers
}

// watchPeers looks at all routers ten times a second.
func watchPeers(ctx context.Context, st *stage, start time.Time, rec *record, mu *sync.Mutex) {
	client := &http.Client{Timeout: time.Second}
	defer client.CloseIdleConnections()
	for ctx.Err() == nil {
		s := sight{at: time.Since(start).Seconds(), views: make([]*view, len(st.routers))}
		for _, n := range st.order {
			s.running = append(s.running, st.replicas[n].srv.Counts().Running)
		}
		var wg sync.WaitGroup
		for i, r := range st.routers {
			wg.Go(func() { s.views[i] = r.look(client) })
		}
		wg.Wait()
		mu.Lock()
		rec.sights = append(rec.sights, s)
		mu.Unlock()
		sleep(ctx, 100*time.Millisecond)
	}
}

func (r *router) look(client *http.Client) *view {
	v := &view{}
	var replicas struct {
		Replicas []struct {
			Own   struct{ Requests int } `json:"account"`
			Peers struct{ Requests int } `json:"peers_account"`
		}
	}
	if getJSON(client, r.admin+"/admin/v1/peers", &v.status) != nil || getJSON(client, r.admin+"/admin/v1/replicas", &replicas) != nil {
		return nil
	}
	for _, x := range replicas.Replicas {
		v.own += x.Own.Requests
		v.peers += x.Peers.Requests
	}
	return v
}

func getJSON(client *http.Client, url string, into any) error {
	resp, err := client.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(into)
}

// within finds the first sight from after on, and before before, for which f holds.
func (r *record) within(e *Expect, what string, f func(s *sight) (bool, string)) (bool, string) {
	last := "nothing was seen"
	for i := range r.sights {
		s := &r.sights[i]
		if s.at < r.from(e) || e.Before > 0 && s.at >= e.Before.S() {
			continue
		}
		ok, seen := f(s)
		if last = seen; ok {
			took, wanted := s.at-r.from(e), ""
			if e.Within > 0 {
				wanted = fmt.Sprintf("; wanted within %gs", e.Within.S())
			}
			return e.Within == 0 || took <= e.Within.S(), fmt.Sprintf("%s %.2f s after %gs (%s)%s", what, took, e.After.S(), seen, wanted)
		}
	}
	return false, fmt.Sprintf("never after %gs: %s; last seen: %s", e.After.S(), what, last)
}

// index is which router `of` names: r0, r1, ...; default r0.
func (e *Expect) index() int {
	k := 0
	_, _ = fmt.Sscanf(e.Of, "r%d", &k)
	return k
}

// peers: how many peers are in `state` (fresh, silent, lost) for router `of`
// comes into [min, max], within `within` after `after`.
func checkPeers(r *record, e *Expect) (bool, string) {
	return r.within(e, "peers "+e.State, func(s *sight) (bool, string) {
		v := s.views[min(e.index(), len(s.views)-1)]
		if v == nil {
			return false, "it does not answer"
		}
		n := map[string]int{"fresh": v.status.Fresh, "silent": v.status.Silent, "lost": v.status.Lost}[e.State]
		return inRange(e, float64(n)), fmt.Sprintf("%d %s", n, e.State)
	})
}

// peer_requests: what router `of` counts for its peers comes into [min, max].
func checkPeerRequests(r *record, e *Expect) (bool, string) {
	return r.within(e, "requests of peers", func(s *sight) (bool, string) {
		v := s.views[min(e.index(), len(s.views)-1)]
		if v == nil {
			return false, "it does not answer"
		}
		return inRange(e, float64(v.peers)), fmt.Sprintf("%d requests", v.peers)
	})
}

// views_agree: each router that answers knows all others that answer, and what
// it holds of their accounts is what they say of themselves, to a tenth and two
// requests (what changed while the news was under way).
func checkViewsAgree(r *record, e *Expect) (bool, string) {
	return r.within(e, "all views agree", func(s *sight) (bool, string) {
		alive, all := 0, 0
		for _, v := range s.views {
			if v != nil {
				alive++
				all += v.own
			}
		}
		for i, v := range s.views {
			if v == nil {
				continue
			}
			if v.status.Fresh != alive-1 {
				return false, fmt.Sprintf("r%d knows %d of %d", i, v.status.Fresh, alive-1)
			}
			told := 0
			for _, m := range v.status.Members {
				for _, l := range m.Loads {
					told += l.Requests
				}
			}
			if others := all - v.own; math.Abs(float64(told-others)) > 2+0.1*float64(others) {
				return false, fmt.Sprintf("r%d has %d requests of others, which have %d", i, told, others)
			}
		}
		return alive > 1, fmt.Sprintf("%d routers, %d requests", alive, all)
	})
}

// spread: the mean, over the time between after and before, of what the
// replica with most requests really has over the mean of all.
func checkSpread(r *record, e *Expect) (bool, string) {
	sum, n := 0.0, 0
	for _, s := range r.sights {
		if s.at < r.from(e) || e.Before > 0 && s.at >= e.Before.S() {
			continue
		}
		most, all := 0, 0
		for _, k := range s.running {
			most = max(most, k)
			all += k
		}
		if all > 0 {
			sum += float64(most) * float64(len(s.running)) / float64(all)
			n++
		}
	}
	if n == 0 {
		return false, "no request was seen at the replicas"
	}
	return inRange(e, sum/float64(n)), fmt.Sprintf("the busiest replica had %.2f x the mean, in the mean of %d looks; wanted %s", sum/float64(n), n, limits(e))
}
