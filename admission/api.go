// Package admission decides what becomes of a request: placed on a replica,
// held, or shed. It owns the account of every replica, the held queue, the
// fair shares and what is learned from answers.
//
// It is pure: a step machine without clock, goroutine, I/O or random source.
// A Pool is not safe for concurrent use; the daemon wraps it in one mutex and
// the simulator calls it straight. Times are seconds (float64) of the owner's
// clock; durations are seconds.
package admission

import "github.com/penstock/penstock/fleet"

// Verdict is what was decided.
type Verdict uint8

const (
	Placed Verdict = iota + 1 // goes to Decision.Replica now; the account is already charged
	Held                      // waits in the router; a later Advance decides
	Shed                      // refused; Reason and RetryAfter say why and when to return
)

// Reason is why a request was shed; a closed set.
type Reason uint8

const (
	ReasonNone         Reason = iota
	ReasonCapacity            // capacity_exhausted: cannot be reached within the allowed wait
	ReasonQueueFull           // the held queue's count, bytes or token-work bound
	ReasonDeadline            // its deadline passed while held
	ReasonNoReplica           // no live replica that serves it (gpu-pending)
	ReasonNotPermitted        // policy (region, tools, model) excludes all that live
	ReasonTooLong             // no replica could ever hold prompt + minimum output
	ReasonExhausted           // every replica that could was already tried (Exclude)
	reasonCount
)

var reasonWords = [...]string{"none", "capacity", "queue_full", "deadline", "no_replica", "not_permitted", "too_long", "exhausted"}

func (r Reason) String() string {
	if int(r) < len(reasonWords) {
		return reasonWords[r]
	}
	return "unknown"
}

// ReasonCount is the number of reasons.
const ReasonCount = int(reasonCount)

// Decision is the answer to Admit, and what Advance leaves in Ticket.Decision.
type Decision struct {
	Verdict    Verdict
	Replica    fleet.ID
	Reason     Reason
	RetryAfter float64 // seconds, forecast of the queue's drain, with jitter

	// What was predicted for the chosen replica, seconds.
	TTFT, ITL, Own, Harm float64
	Hit                  float64 // prompt tokens expected in its prefix cache
}

// Outcome is how a placed request ended, for the accounts.
type Outcome uint8

const (
	Finished  Outcome = iota + 1 // a whole answer
	Failed                       // the replica's fault
	Cancelled                    // the client left, or its deadline passed
)

// End is what is known at the end of a placed request. Zero token counts mean
// "not known" (no usage came); the pool then uses its estimates.
type End struct {
	Outcome    Outcome
	Prompt     int // usage.prompt_tokens
	Cached     int // usage.prompt_tokens_details.cached_tokens
	Completion int // usage.completion_tokens
	Evidence   fleet.Evidence
	RetryAfter float64 // what a busy replica asked for, seconds; 0 = nothing
}

// Ticket is one request in a Pool. The caller owns the memory, fills Work and
// passes the same pointer until Done or Leave; after that it may be reused
// for another attempt (Admit again) or another request.
type Ticket struct {
	Work     fleet.Work
	Decision Decision
	User     any // the caller's own pointer, untouched

	ticketState
}

// ReplicaSpec is a replica as the configuration or discovery gives it.
type ReplicaSpec struct {
	ID      fleet.ID
	Name    string
	Models  []uint32
	Caps    uint64
	Region  uint64
	Domain  uint32
	Profile *fleet.Profile // nil = generic, learned
	MaxLen  int            // longest prompt + output, tokens, as it says itself; the profile's counts more; 0 = not known
	Warm    bool           // known at start-up: no slow start
}
