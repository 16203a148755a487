package admission

import (
	"maps"
	"slices"

	"github.com/penstock/penstock/fleet"
)

// Op is the method of Pool that a Call stands for; a closed set.
type Op uint8

// The calls that change a pool.
const (
	OpJoin Op = iota + 1
	OpRemove
	OpDrain
	OpAdmit
	OpFirst
	OpProgress
	OpDone
	OpLeave
	OpObserve
	OpEvidence
	OpPeers
	OpPeerHot
	OpAdvance
	OpRevoked
	OpStored
	OpRemoved
	OpCleared
	OpReconfigure
	OpTold
	OpStood
	OpPeerHeld
)

// Call is one call into a Pool: what it was told, and what it decided. It
// shares no memory with the caller, so it may be kept or encoded (its fields
// are all exported; encoding/gob takes it as it is, NaN included).
type Call struct {
	Op     Op
	Now    float64
	Ticket int // number of the ticket, from 1; 0 = none

	// What it was told.
	ID       fleet.ID
	Spec     ReplicaSpec
	On       bool
	Work     fleet.Work
	Tokens   int
	End      End
	Sample   fleet.Sample
	Evidence fleet.Evidence
	Peer     string
	Loads    map[fleet.ID]fleet.Load
	Hot      []HotPrefix
	Held     []int
	Blocks   []uint64
	Config   Config
	Print    uint64
	Seconds  float64

	// What it answered.
	Decision Decision   // of Admit
	Tickets  []int      // of Advance and Revoked
	Decided  []Decision // of Advance, beside Tickets
}

// Recorder is a Pool that tells of every call that changes it. The log of the
// calls, given to a fresh pool of the same Config, must bring the same
// decisions (bench/sim.Replay): that is what makes a simulation of this code
// worth believing. It remembers every ticket that it saw, so it is for a
// bounded recording, not for a life.
type Recorder struct {
	*Pool
	tell    func(*Call)
	tickets map[*Ticket]int
}

// Record wraps a pool. tell is called under the caller's lock, after each call.
func Record(p *Pool, tell func(*Call)) *Recorder {
	return &Recorder{Pool: p, tell: tell, tickets: map[*Ticket]int{}}
}

func (r *Recorder) number(t *Ticket) int {
	n := r.tickets[t]
	if n == 0 {
		n = len(r.tickets) + 1
		r.tickets[t] = n
	}
	return n
}

func (r *Recorder) numbers(list []*Ticket) (out []int) {
	for _, t := range list {
		out = append(out, r.number(t))
	}
	return out
}

// Join records Pool.Join.
func (r *Recorder) Join(now float64, s ReplicaSpec) {
	r.Pool.Join(now, s)
	s.Models = slices.Clone(s.Models)
	if s.Profile != nil {
		p := *s.Profile
		s.Profile = &p
	}
	r.tell(&Call{Op: OpJoin, Now: now, Spec: s})
}

// Remove records Pool.Remove.
func (r *Recorder) Remove(now float64, id fleet.ID) {
	r.Pool.Remove(now, id)
	r.tell(&Call{Op: OpRemove, Now: now, ID: id})
}

// Drain records Pool.Drain.
func (r *Recorder) Drain(now float64, id fleet.ID, on bool) {
	r.Pool.Drain(now, id, on)
	r.tell(&Call{Op: OpDrain, Now: now, ID: id, On: on})
}

// Admit records Pool.Admit.
func (r *Recorder) Admit(now float64, t *Ticket) Decision {
	w := t.Work
	w.Blocks = slices.Clone(w.Blocks)
	d := r.Pool.Admit(now, t)
	r.tell(&Call{Op: OpAdmit, Now: now, Ticket: r.number(t), Work: w, Decision: d})
	return d
}

// First records Pool.First.
func (r *Recorder) First(now float64, t *Ticket) {
	r.Pool.First(now, t)
	r.tell(&Call{Op: OpFirst, Now: now, Ticket: r.number(t)})
}

// Progress records Pool.Progress.
func (r *Recorder) Progress(now float64, t *Ticket, tokens int) {
	r.Pool.Progress(now, t, tokens)
	r.tell(&Call{Op: OpProgress, Now: now, Ticket: r.number(t), Tokens: tokens})
}

// Done records Pool.Done.
func (r *Recorder) Done(now float64, t *Ticket, e End) {
	r.Pool.Done(now, t, e)
	r.tell(&Call{Op: OpDone, Now: now, Ticket: r.number(t), End: e})
}

// Told records Pool.Told.
func (r *Recorder) Told(t *Ticket, print uint64) {
	r.Pool.Told(t, print)
	r.tell(&Call{Op: OpTold, Ticket: r.number(t), Print: print})
}

// Stood records Pool.Stood.
func (r *Recorder) Stood(now, seconds float64) {
	r.Pool.Stood(now, seconds)
	r.tell(&Call{Op: OpStood, Now: now, Seconds: seconds})
}

// Leave records Pool.Leave.
func (r *Recorder) Leave(now float64, t *Ticket) {
	r.Pool.Leave(now, t)
	r.tell(&Call{Op: OpLeave, Now: now, Ticket: r.number(t)})
}

// Observe records Pool.Observe.
func (r *Recorder) Observe(now float64, id fleet.ID, s fleet.Sample) {
	r.Pool.Observe(now, id, s)
	r.tell(&Call{Op: OpObserve, Now: now, ID: id, Sample: s})
}

// Evidence records Pool.Evidence.
func (r *Recorder) Evidence(now float64, id fleet.ID, e fleet.Evidence) {
	r.Pool.Evidence(now, id, e)
	r.tell(&Call{Op: OpEvidence, Now: now, ID: id, Evidence: e})
}

// Peers records Pool.Peers.
func (r *Recorder) Peers(now float64, peer string, loads map[fleet.ID]fleet.Load) {
	r.Pool.Peers(now, peer, loads)
	r.tell(&Call{Op: OpPeers, Now: now, Peer: peer, Loads: maps.Clone(loads)})
}

// PeerHot records Pool.PeerHot.
func (r *Recorder) PeerHot(list []HotPrefix) {
	r.Pool.PeerHot(list)
	r.tell(&Call{Op: OpPeerHot, Hot: slices.Clone(list)})
}

// PeerHeld records Pool.PeerHeld.
func (r *Recorder) PeerHeld(peer string, held []int) {
	r.Pool.PeerHeld(peer, held)
	r.tell(&Call{Op: OpPeerHeld, Peer: peer, Held: slices.Clone(held)})
}

// Advance records Pool.Advance.
func (r *Recorder) Advance(now float64, out []*Ticket) []*Ticket {
	n := len(out)
	out = r.Pool.Advance(now, out)
	c := Call{Op: OpAdvance, Now: now, Tickets: r.numbers(out[n:])}
	for _, t := range out[n:] {
		c.Decided = append(c.Decided, t.Decision)
	}
	r.tell(&c)
	return out
}

// Revoked records Pool.Revoked.
func (r *Recorder) Revoked(out []*Ticket) []*Ticket {
	n := len(out)
	out = r.Pool.Revoked(out)
	r.tell(&Call{Op: OpRevoked, Tickets: r.numbers(out[n:])})
	return out
}

// PrefixStored records Pool.PrefixStored.
func (r *Recorder) PrefixStored(id fleet.ID, blocks []uint64) {
	r.Pool.PrefixStored(id, blocks)
	r.tell(&Call{Op: OpStored, ID: id, Blocks: slices.Clone(blocks)})
}

// PrefixRemoved records Pool.PrefixRemoved.
func (r *Recorder) PrefixRemoved(id fleet.ID, blocks []uint64) {
	r.Pool.PrefixRemoved(id, blocks)
	r.tell(&Call{Op: OpRemoved, ID: id, Blocks: slices.Clone(blocks)})
}

// PrefixCleared records Pool.PrefixCleared.
func (r *Recorder) PrefixCleared(id fleet.ID) {
	r.Pool.PrefixCleared(id)
	r.tell(&Call{Op: OpCleared, ID: id})
}
