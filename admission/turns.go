package admission

// A refused client is told when to return (Retry-After), and its turn is kept:
// when it is back by then, it goes before those that come for the first time.
// So the wait that was told is the wait that it has. What is kept for returns is
// a share of what the replicas take; whoever is refused gets the next time at
// which that share is free, so that those who obey come back one after another.
//
// Routers do not tell each other of turns: one that returns to another router is
// a new one there.

const (
	// returnShare is the share of what replicas take that is kept for those who
	// return. More would make the wait shorter, and let fewer of those who come
	// for the first time in at once.
	returnShare = 0.25
	// turnEarly is how much too early a client may be, as a share of its wait.
	turnEarly = 0.05
	// A turn is kept for turnLate seconds and turnSlack of the wait longer: a
	// client may count in whole seconds, and has a way to go.
	turnLate  = 2.0
	turnSlack = 0.25
	maxTurns  = 8192
	// The share of those who return is a running mean; before anything is seen
	// it is as if turnPrior had come back.
	turnPrior = 3
	turnGain  = 0.05
)

// turn is one refused request.
type turn struct {
	print uint64  // by which it is known when it returns; 0 = it is not
	due   float64 // from when it goes first
	until float64 // and until when
	work  float64
	class int
	open  bool // it has neither come back nor is it too late
}

// turns are the refused requests that may come back, in the order in which they
// were refused.
type turns struct {
	list    []turn // list[0] is number base
	base    uint64
	byPrint map[uint64]uint64 // print -> number
	work    []float64         // of the open ones, by class
	share   float64           // of the refused that come back: a running mean
	seen    float64           // of how many
	serial  uint64
}

func (q *turns) init(classes int) {
	q.byPrint, q.work, q.share, q.base = make(map[uint64]uint64), make([]float64, classes), 1, 1
}

// add keeps a turn and returns its number.
func (q *turns) add(now, wait float64, class int, work float64) uint64 {
	q.roll(now)
	if len(q.list) >= maxTurns {
		q.close(&q.list[0])
		q.pop()
	}
	due := now + (1-turnEarly)*wait
	q.list = append(q.list, turn{due: due, until: now + TurnKept(wait), work: work, class: class, open: true})
	q.work[class] += work
	return q.base + uint64(len(q.list)) - 1
}

// TurnKept is for how long the turn of a client is kept that was told to return
// in wait seconds.
func TurnKept(wait float64) float64 { return (1+turnSlack)*wait + turnLate }

// at finds a turn by its number, nil when it is over.
func (q *turns) at(n uint64) *turn {
	if n < q.base || n-q.base >= uint64(len(q.list)) || !q.list[n-q.base].open {
		return nil
	}
	return &q.list[n-q.base]
}

// name says by what print the client of a turn will be known.
func (q *turns) name(n, print uint64) {
	t := q.at(n)
	if t == nil || print == 0 {
		return
	}
	if old := q.at(q.byPrint[print]); old != nil {
		q.close(old) // it was refused again, or two are alike
	}
	t.print = print
	q.byPrint[print] = n
}

// back takes the turn of a client that is known by print. first tells whether
// it is its turn now.
func (q *turns) back(now float64, print uint64) (first bool) {
	if print == 0 || len(q.byPrint) == 0 {
		return false
	}
	q.roll(now)
	t := q.at(q.byPrint[print])
	if t == nil {
		return false
	}
	q.learn(1)
	q.close(t)
	return now >= t.due
}

// learn takes note that one has come back (1) or not (0).
func (q *turns) learn(back float64) {
	q.seen++
	q.share += max(turnGain, 1/(q.seen+turnPrior)) * (back - q.share)
}

// ahead is the work that is expected back before one of class c.
func (q *turns) ahead(now float64, c int) (sum float64) {
	q.roll(now)
	for i := 0; i <= c; i++ {
		sum += q.work[i]
	}
	return q.share * sum
}

// close ends a turn.
func (q *turns) close(t *turn) {
	if !t.open {
		return
	}
	t.open = false
	q.work[t.class] -= t.work
	if t.print != 0 {
		delete(q.byPrint, t.print)
	}
}

func (q *turns) pop() {
	q.list = q.list[1:]
	q.base++
	if len(q.list) == 0 {
		clear(q.work) // sums of many numbers: nothing is left of them
	}
}

// roll forgets the turns of those who have not come.
func (q *turns) roll(now float64) {
	for len(q.list) > 0 {
		t := &q.list[0]
		if t.open {
			if now < t.until {
				return
			}
			q.learn(0)
			q.close(t)
		}
		q.pop()
	}
}

// Told notes that the client of a shed ticket was told when to return, and the
// print by which it will be known then (Work.Print).
func (p *Pool) Told(t *Ticket, print uint64) {
	if t.turn != 0 {
		p.turns.name(t.turn, print)
	}
}
