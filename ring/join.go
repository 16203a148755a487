package ring

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"strconv"
	"syscall"
	"time"

	"github.com/hashicorp/memberlist"
	"go.uber.org/zap"
)

const (
	joinFirst   = time.Second      // between the first tries
	joinSlowest = 10 * time.Second // while nobody was found
	joinAgain   = 30 * time.Second // to find whom the list or DNS has got since
	tendEvery   = time.Second
	keysEvery   = 5 * time.Second
	askTimeout  = time.Second

	// How long and of how many routers that are away the last sequence number
	// is remembered, against replays.
	rememberFor  = 24 * 3600.0
	rememberMost = 1024
)

// joinLoop finds the others. It goes on for good: the list or the names in it
// may change, and two halves that lost each other have to meet again.
func (n *Node) joinLoop() {
	wait := joinFirst
	for {
		missing := n.missing()
		if len(missing) > 0 {
			_, _ = n.ml.Join(missing) // memberlist logs why not
		}
		switch {
		case len(n.opts.Join) == 0 || n.ml.NumMembers() > 1: // a join of itself does not count
			wait = joinAgain
		case wait == joinAgain:
			wait = joinFirst
		default:
			wait = min(wait*3/2, joinSlowest)
		}
		if !n.sleep(wait + time.Duration(rand.Float64()*0.2*float64(wait))) {
			return
		}
	}
}

// missing resolves the join list and returns the addresses that no member has.
func (n *Node) missing() []string {
	have := map[string]bool{}
	for _, m := range n.ml.Members() {
		have[m.Address()] = true
	}
	var out []string
	for _, j := range n.opts.Join {
		host, port, _ := hostPort(j, DefaultPort)
		ips := []string{host}
		if net.ParseIP(host) == nil {
			var err error
			if ips, err = n.resolve(host); err != nil {
				n.log.Debug("a router to join has no address now", zap.String("join", j), zap.Error(err))
				continue
			}
		}
		for _, ip := range ips {
			if a := net.JoinHostPort(ip, strconv.Itoa(port)); !have[a] {
				have[a] = true
				out = append(out, a)
			}
		}
	}
	return out
}

func (n *Node) resolve(host string) ([]string, error) {
	if n.opts.lookup != nil {
		return n.opts.lookup(host)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	return net.DefaultResolver.LookupHost(ctx, host)
}

// tendLoop does what is not urgent, every second.
func (n *Node) tendLoop() {
	was := map[string]Member{}
	for round := 0; n.sleep(tendEvery); round++ {
		n.mu.Lock()
		now := n.opts.Now()
		n.table.forget(now, rememberFor, rememberMost)
		s := n.table.status(now, false)
		strangers := n.table.strangers(now)
		n.mu.Unlock()
		n.tell(was, &s)
		n.meet(&s, strangers)
		if n.opts.KeyFile != "" && round%int(keysEvery/tendEvery) == 0 {
			n.rereadKeys()
		}
		var silent []string
		for _, m := range s.Members {
			if m.State == peerWords[peerSilent] {
				silent = append(silent, m.Router)
			}
		}
		n.ask(silent)
	}
}

// tell logs what changed of the peers since the last time.
func (n *Node) tell(was map[string]Member, s *Status) {
	for _, m := range s.Members {
		old := was[m.Router]
		was[m.Router] = m
		if old.State != m.State {
			f := []zap.Field{zap.String("router", m.Router), zap.String("addr", m.Addr), zap.String("state", m.State), zap.Float64("share", s.Share)}
			if m.State == peerWords[peerSilent] {
				n.log.Warn("a peer went silent without leaving: it is left its fair share of the replicas", f...)
			} else {
				n.log.Info("peer", f...)
			}
		}
		if m.Drift && (!old.Drift || old.ConfigHash != m.ConfigHash) {
			n.log.Warn("a peer's configuration differs from this router's", zap.String("router", m.Router),
				zap.Uint64("hash", m.ConfigHash), zap.Uint64("own_hash", s.ConfigHash))
		} else if old.Drift && !m.Drift && m.State == peerWords[peerFresh] {
			n.log.Info("a peer's configuration is the same again", zap.String("router", m.Router))
		}
	}
}

// meet joins peers that are heard though membership holds them for dead, as
// after a partition that lasted, and strangers that know this router.
func (n *Node) meet(s *Status, strangers []string) {
	if len(strangers) > 0 {
		_, _ = n.ml.Join(strangers)
	}
	members := map[string]bool{}
	for _, m := range n.ml.Members() {
		members[m.Name] = true
	}
	for _, m := range s.Members {
		if m.State == peerWords[peerFresh] && !members[m.Router] {
			_, _ = n.ml.Join([]string{m.Addr})
		}
	}
}

// ask knocks at silent peers: where nothing listens any more, the process is
// gone and no share has to be left to it. A host or a network that is gone
// does not answer, and the peer stays silent.
func (n *Node) ask(silent []string) {
	for _, name := range silent {
		n.mu.Lock()
		addr := ""
		if p := n.table.peers[name]; p != nil && p.state == peerSilent {
			addr = p.addr
		}
		n.mu.Unlock()
		if addr == "" {
			continue
		}
		c, err := n.guard.DialAddressTimeout(memberlist.Address{Addr: addr, Name: name}, askTimeout)
		if err == nil {
			c.Close()
			continue
		}
		if errors.Is(err, syscall.ECONNREFUSED) {
			n.mu.Lock()
			n.table.refused(name, n.opts.Now())
			n.mu.Unlock()
			n.poke()
		}
	}
}

func (n *Node) rereadKeys() {
	keys, err := readKeys(n.opts.KeyFile)
	if err != nil {
		n.log.Warn("the keys stay as they were", zap.Error(err))
		return
	}
	if err := n.keys.set(keys); err != nil {
		n.log.Warn("the keys stay as they were", zap.Error(err))
	}
}
