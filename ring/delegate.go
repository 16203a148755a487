package ring

import (
	"encoding/binary"
	"errors"
	"time"

	"github.com/hashicorp/memberlist"
	"go.uber.org/zap"
)

// delegate is what memberlist calls. It is called with memberlist's locks
// held: nothing in it may call memberlist.
type delegate struct{ n *Node }

func (delegate) NodeMeta(int) []byte             { return nil }
func (delegate) GetBroadcasts(int, int) [][]byte { return nil }
func (delegate) AckPayload() []byte              { return nil }

func (d delegate) NotifyMsg(p []byte) {
	news, err := d.n.hear(p)
	switch {
	case errors.Is(err, errUnknownVersion):
		d.n.count.unknown.Inc()
	case err != nil:
		d.n.count.garbage.Inc()
	case news:
		d.n.count.ok.Inc()
	default:
		d.n.count.old.Inc()
	}
}

func (d delegate) NotifyPingComplete(o *memberlist.Node, rtt time.Duration, _ []byte) {
	d.n.mu.Lock()
	d.n.table.roundTrip(o.Name, rtt.Seconds())
	d.n.mu.Unlock()
}

func (d delegate) NotifyJoin(o *memberlist.Node) {
	if o.Name == d.n.opts.Name {
		return
	}
	d.n.mu.Lock()
	d.n.table.join(o.Name, o.Address(), d.n.opts.Now())
	d.n.mu.Unlock()
	d.n.poke()
}

func (d delegate) NotifyUpdate(o *memberlist.Node) { d.NotifyJoin(o) }

// NotifyLeave is of no use: memberlist does not say whether a router left or
// was lost, and takes seconds for the latter.
func (delegate) NotifyLeave(*memberlist.Node) {}

func (d delegate) NotifyConflict(existing, other *memberlist.Node) {
	d.n.log.Warn("two routers have one name; give them different ones (peers.name)",
		zap.String("router", existing.Name), zap.String("addr", existing.Address()), zap.String("other_addr", other.Address()))
}

// LocalState is all that this router knows, for a push/pull: messages, each
// after its length.
func (d delegate) LocalState(bool) []byte {
	n := d.n
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []byte
	now := n.opts.Now()
	add := func(r *routerState) {
		if r == nil || r.seq == 0 {
			return
		}
		n.relaying.reset(maxPayload)
		n.relaying.relay(r, now)
		for _, p := range n.relaying.parts(nil) {
			out = binary.AppendUvarint(out, uint64(len(p)))
			out = append(out, p...)
		}
	}
	add(&n.table.self)
	for _, name := range n.table.sorted() {
		add(n.table.state.routers[name])
	}
	return out
}

func (d delegate) MergeRemoteState(p []byte, _ bool) {
	for len(p) > 0 {
		size, k := binary.Uvarint(p)
		if k <= 0 || size > uint64(len(p)-k) {
			d.n.count.streamBad.Inc()
			return
		}
		if _, err := d.n.hear(p[k : k+int(size)]); err != nil {
			d.n.count.streamBad.Inc()
			return
		}
		p = p[k+int(size):]
	}
	d.n.count.streamOK.Inc()
}
