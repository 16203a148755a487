package admission

// phase is where a ticket is on its way. Every way out passes phaseIdle.
type phase uint8

const (
	phaseIdle    phase = iota // not in the pool
	phaseHeld                 // in the held queue
	phaseOut                  // shed while held (or by overflow); the next Advance returns it
	phasePlaced               // charged to a replica, no first token yet
	phaseStarted              // charged, first token seen
)

// ticketState is what the pool keeps in a ticket between Admit and Done.
type ticketState struct {
	phase   phase
	revoked bool    // Revoked has returned it
	trial   bool    // the one request of a recovering replica
	first   bool    // it was told to return now
	since   float64 // when the time of its objective began: its arrival, or later, see Pool.Admit
	charged bool    // its tenant's counter was charged (once per request, not per attempt)

	// While placed.
	rep        *replica
	prev, next *Ticket // tickets at the same replica, oldest first
	placedAt   float64
	firstAt    float64
	due        float64 // when a whole answer's prefill is supposed to be over
	ttft       float64 // predicted
	plain      float64 // predicted with the profile's coefficients, nothing learned
	stood      float64 // how long the router itself had stood still by then, in all
	queue      float64 // part of ttft: prefills ahead
	prefill    float64 // part of ttft: its own prompt
	itl        float64
	pre        float64 // charged prefill work, tokens
	kv         float64 // charged KV tokens
	unique     float64 // of kv, what is not shared with others
	out        float64 // charged output tokens still to come
	steps      float64 // the replica's count of possible decode steps at its first token
	scale      float64 // prefill scale at placement
	alone      bool    // no other prefill was there at placement
	made       int     // output tokens counted so far

	// While held.
	tq       *tenantQueue
	seq      uint64
	latest   float64 // latest useful start
	order    float64 // within a tenant: that, but those whose turn it is go first
	expire   float64 // when it is shed
	heap     int     // place in the expiry heap
	work     float64 // token-work
	passed   int     // younger requests placed past it
	okAt     float64 // since when some replica would have taken it while a warmer one was preferred; 0 = not
	patience float64 // for how long it waits for the warmer one, from okAt on
	lostAt   float64 // when last others of the same look were placed and no replica took it
	toldAt   float64 // when a wait was forecast while this was the newest held one; 0 = never
	told     float64 // and that wait, seconds, before its correction
	turn     uint64  // of a shed one: the number of its turn; 0 = none
	bandPrev *Ticket
	bandNext *Ticket
}

// LostAt is when a look at the queue last placed others before this one and
// found no replica then that would take it, seconds; 0 = never.
func (t *Ticket) LostAt() float64 { return t.lostAt }
