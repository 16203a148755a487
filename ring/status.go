package ring

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"

	"github.com/penstock/penstock/fleet"
)

// Member is one other router as `penstock peers` and the console show it.
type Member struct {
	Router     string  `json:"router"`
	Addr       string  `json:"addr"`
	State      string  `json:"state"` // fresh, silent, lost, left, new
	Age        float64 `json:"age_seconds"`
	Heard      float64 `json:"heard_seconds"` // since the last datagram; -1 = never
	Interval   float64 `json:"interval_seconds"`
	Delay      float64 `json:"delay_seconds"` // one way, half of the shortest round trip; 0 = not known
	Epoch      uint64  `json:"epoch"`         // its start, ms since 1970
	Seq        uint64  `json:"seq"`
	ConfigHash uint64  `json:"config_hash"`
	Drift      bool    `json:"drift"` // its configuration is another
	Unknown    int     `json:"unknown_replicas"`
	Held       int     `json:"held"` // requests in its queues
	// Loads has the replicas with load or a hint only.
	Loads []MemberLoad `json:"loads,omitempty"`
}

// MemberLoad is a peer's account of one replica, as it said it.
type MemberLoad struct {
	Replica       string  `json:"replica"`
	Requests      int     `json:"requests"`
	Prefilling    int     `json:"prefilling"`
	PrefillTokens float64 `json:"prefill_tokens"`
	KVTokens      float64 `json:"kv_tokens"`
	OutTokens     float64 `json:"out_tokens"`
	State         string  `json:"state"`            // a hint when it is not up
	Reason        string  `json:"reason,omitempty"` // of a state that is not up
}

// Status is the whole of the peers at one moment.
type Status struct {
	Self       string   `json:"router"`
	Addr       string   `json:"addr"`
	Epoch      uint64   `json:"epoch"`
	Seq        uint64   `json:"seq"`
	Interval   float64  `json:"interval_seconds"` // between two sends now
	ConfigHash uint64   `json:"config_hash"`
	Fresh      int      `json:"fresh"`
	Silent     int      `json:"silent"`
	Lost       int      `json:"lost"`
	Drift      int      `json:"drift"`
	Unknown    int      `json:"unknown_replicas"`
	Routers    int      `json:"routers"` // last known count: this one, fresh and silent ones
	Share      float64  `json:"share"`   // (1 + fresh) / routers
	Members    []Member `json:"members"`
}

// status describes all; loads are only made when withLoads.
func (t *table) status(now float64, withLoads bool) Status {
	s := Status{Self: t.self.name, Epoch: t.self.epoch, Seq: t.self.seq, Interval: t.self.interval, ConfigHash: t.self.meta.config}
	for _, name := range t.sorted() {
		p := t.peers[name]
		if !p.known {
			continue
		}
		m := Member{Router: name, Addr: p.addr, State: peerWords[p.state], Delay: p.delay, Heard: -1}
		if r := t.state.routers[name]; r != nil {
			m.Age, m.Interval = now-r.made, r.interval
			if p.heard >= 0 {
				m.Heard = now - p.heard
			}
			m.Epoch, m.Seq, m.ConfigHash = r.epoch, r.seq, r.meta.config
			if p.state == peerFresh {
				m.Drift = m.ConfigHash != 0 && s.ConfigHash != 0 && m.ConfigHash != s.ConfigHash
				m.Unknown = t.describe(&m, r, withLoads)
				m.Held = r.held.total()
			}
		}
		switch p.state {
		case peerFresh:
			s.Fresh++
			s.Drift += int(flag(m.Drift))
			s.Unknown = max(s.Unknown, m.Unknown)
		case peerSilent:
			s.Silent++
		case peerLost:
			s.Lost++
		}
		s.Members = append(s.Members, m)
	}
	s.Routers = 1 + s.Fresh + s.Silent
	s.Share = float64(1+s.Fresh) / float64(s.Routers)
	return s
}

// describe adds r's loads to m by name and returns how many replicas in it
// this router does not know.
func (t *table) describe(m *Member, r *routerState, withLoads bool) (unknown int) {
	for i := range r.buckets {
		b := &r.buckets[i]
		for k := range b.entries {
			name, ok := t.names[b.entries[k].id]
			if !ok {
				unknown++
				continue
			}
			if withLoads {
				m.Loads = append(m.Loads, memberLoad(b.entries[k].account(name, b.made)))
			}
		}
	}
	slices.SortFunc(m.Loads, func(a, b MemberLoad) int { return cmp.Compare(a.Replica, b.Replica) })
	return unknown
}

func (h *heldSet) total() (sum int) {
	for i := range h.list {
		for _, n := range h.list[i].count {
			sum += int(n)
		}
	}
	return sum
}

func memberLoad(a Account) MemberLoad {
	l := MemberLoad{Replica: a.Name, Requests: a.Load.Requests, Prefilling: a.Load.Prefilling, PrefillTokens: a.Load.PrefillTokens,
		KVTokens: a.Load.KVTokens, OutTokens: a.Load.OutTokens, State: a.State.String()}
	if a.State != fleet.StateUp {
		l.Reason = a.Reason.String()
	}
	return l
}

// Write prints s for people, as `penstock peers` does.
func (s *Status) Write(w io.Writer) error {
	fmt.Fprintf(w, "router %s at %s, configuration %016x, one round per %.2f s\n", s.Self, s.Addr, s.ConfigHash, s.Interval)
	fmt.Fprintf(w, "knows the accounts of %d of %d routers, itself included (share %.2f)\n\n", 1+s.Fresh, s.Routers, s.Share)
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "ROUTER\tADDRESS\tSTATE\tHEARD\tAGE\tCONFIGURATION\tREQUESTS\tHELD\tPREFILL TOKENS\tKV TOKENS\tREPLICAS")
	for i := range s.Members {
		m := &s.Members[i]
		config, heard, age := fmt.Sprintf("%016x", m.ConfigHash), "never", "-"
		if m.Drift {
			config += " differs"
		}
		if m.Heard >= 0 {
			heard, age = fmt.Sprintf("%.2fs", m.Heard), fmt.Sprintf("%.2fs", m.Age)
		}
		var requests int
		var prefill, kv float64
		for _, l := range m.Loads {
			requests += l.Requests
			prefill += l.PrefillTokens
			kv += l.KVTokens
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%.0f\t%.0f\t%d\n", m.Router, m.Addr, m.State, heard, age, config, requests, m.Held, prefill, kv, len(m.Loads))
	}
	return t.Flush()
}
