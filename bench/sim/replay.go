package sim

import (
	"fmt"
	"slices"

	"github.com/penstock/penstock/admission"
)

// Replay gives the calls that a daemon's pool had (admission.Record) to a
// fresh pool, as the simulator calls it, and compares every decision. It
// returns the pool as it is then, how many decisions were compared, and what
// the first that differs was.
func Replay(cfg admission.Config, calls []admission.Call) (p *admission.Pool, decisions int, err error) {
	r := replay{pool: admission.New(cfg), byTicket: map[*admission.Ticket]int{}}
	for i := range calls {
		c := &calls[i]
		n, err := r.call(c)
		if err != nil {
			return r.pool, decisions, fmt.Errorf("call %d at %.6f s: %w", i, c.Now, err)
		}
		decisions += n
	}
	return r.pool, decisions, nil
}

type replay struct {
	pool     *admission.Pool
	tickets  []*admission.Ticket
	byTicket map[*admission.Ticket]int
	out      []*admission.Ticket
}

func (r *replay) ticket(n int) *admission.Ticket {
	for len(r.tickets) < n {
		t := &admission.Ticket{}
		r.tickets = append(r.tickets, t)
		r.byTicket[t] = len(r.tickets)
	}
	return r.tickets[n-1]
}

// call makes one call and returns how many decisions came of it.
func (r *replay) call(c *admission.Call) (int, error) {
	p := r.pool
	switch c.Op {
	case admission.OpJoin:
		p.Join(c.Now, c.Spec)
	case admission.OpRemove:
		p.Remove(c.Now, c.ID)
	case admission.OpDrain:
		p.Drain(c.Now, c.ID, c.On)
	case admission.OpAdmit:
		t := r.ticket(c.Ticket)
		t.Work = c.Work
		if d := p.Admit(c.Now, t); d != c.Decision {
			return 0, fmt.Errorf("ticket %d: recorded %+v, replayed %+v", c.Ticket, c.Decision, d)
		}
		return 1, nil
	case admission.OpFirst:
		p.First(c.Now, r.ticket(c.Ticket))
	case admission.OpProgress:
		p.Progress(c.Now, r.ticket(c.Ticket), c.Tokens)
	case admission.OpDone:
		p.Done(c.Now, r.ticket(c.Ticket), c.End)
	case admission.OpTold:
		p.Told(r.ticket(c.Ticket), c.Print)
	case admission.OpStood:
		p.Stood(c.Now, c.Seconds)
	case admission.OpLeave:
		p.Leave(c.Now, r.ticket(c.Ticket))
	case admission.OpObserve:
		p.Observe(c.Now, c.ID, c.Sample)
	case admission.OpEvidence:
		p.Evidence(c.Now, c.ID, c.Evidence)
	case admission.OpPeers:
		p.Peers(c.Now, c.Peer, c.Loads)
	case admission.OpPeerHot:
		p.PeerHot(c.Hot)
	case admission.OpPeerHeld:
		p.PeerHeld(c.Peer, c.Held)
	case admission.OpAdvance:
		r.out = p.Advance(c.Now, r.out[:0])
		if err := r.same(c.Tickets); err != nil {
			return 0, err
		}
		for i, t := range r.out {
			if t.Decision != c.Decided[i] {
				return 0, fmt.Errorf("ticket %d, held: recorded %+v, replayed %+v", c.Tickets[i], c.Decided[i], t.Decision)
			}
		}
		return len(r.out), nil
	case admission.OpRevoked:
		r.out = p.Revoked(r.out[:0])
		return len(r.out), r.same(c.Tickets)
	case admission.OpStored:
		p.PrefixStored(c.ID, c.Blocks)
	case admission.OpRemoved:
		p.PrefixRemoved(c.ID, c.Blocks)
	case admission.OpCleared:
		p.PrefixCleared(c.ID)
	case admission.OpReconfigure:
		return 0, p.Reconfigure(c.Config)
	default:
		return 0, fmt.Errorf("unknown call %d", c.Op)
	}
	return 0, nil
}

func (r *replay) same(want []int) error {
	got := make([]int, len(r.out))
	for i, t := range r.out {
		got[i] = r.byTicket[t]
	}
	if !slices.Equal(got, want) {
		return fmt.Errorf("recorded tickets %v, replayed %v", want, got)
	}
	return nil
}
