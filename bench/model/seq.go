package model

// Reason is why a sequence ended.
type Reason uint8

// The reasons.
const (
	Length  Reason = iota + 1 // generated all of Out
	Aborted                   // the client left, or the engine was told to drop it
	Killed                    // the replica died
)

// Kind of an Event.
type Kind uint8

// The kinds of events.
const (
	First     Kind = iota + 1 // its first output token came
	Finish                    // it ended, see Seq.Ended
	Preempted                 // its KV blocks were taken; it will be recomputed
	Token                     // one more output token; only with Replica.Tokens
)

// Event is something that happened to a sequence at At.
type Event struct {
	Kind Kind
	At   float64
	Seq  *Seq
}

// Seq is one sequence in a replica. The caller fills the first group and
// leaves the memory to the replica until its Finish event.
type Seq struct {
	Prompt  int    // prompt tokens, at least 1
	Out     int    // output tokens that it will generate, at least 1
	Segs    []Seg  // the prompt as chained runs; may cover less than the prompt
	OutHash uint64 // chained hash of prompt + output, 0 = the output is never reused
	User    any

	// Results.
	Arrived  float64 // Add
	Queued   float64 // reached the engine's queue
	Started  float64 // first scheduled
	FirstAt  float64 // end of the step that made its first token
	EndAt    float64
	Cached   int // prompt tokens taken from the prefix cache, at first scheduling
	Preempts int
	Ended    Reason

	state     seqState
	computed  int   // tokens of the (re)computation in the KV cache
	target    int   // tokens to compute before decoding: prompt, after a preemption prompt + made
	made      int   // output tokens; while decoding, as of step base
	base      int64 // decode step at which it joined
	finish    int64 // decode step after which it ends
	phase     int32 // decode step (mod block) at which it needs a new block
	priv      int   // private blocks, without those grown while decoding
	segAt     int   // next entry of Segs to publish
	segTok    int   // prompt tokens before Segs[segAt]
	held      []int32
	prev      *Seq
	next      *Seq
	key       float64
	order     uint64
	heapIndex int
	gone      bool // abort asked for
}

type seqState uint8

const (
	seqNew seqState = iota
	seqPending
	seqWaiting
	seqPrefill
	seqDecode
	seqEnded
)

// seqHeap is a binary heap of sequences by key, ties by order.
type seqHeap []*Seq

func (h seqHeap) less(i, j int) bool {
	if h[i].key != h[j].key {
		return h[i].key < h[j].key
	}
	return h[i].order < h[j].order
}

func (h seqHeap) swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].heapIndex, h[j].heapIndex = i, j
}

func (h *seqHeap) push(s *Seq, key float64) {
	s.key, s.heapIndex = key, len(*h)
	*h = append(*h, s)
	h.up(s.heapIndex)
}

func (h seqHeap) up(i int) {
	for i > 0 {
		p := (i - 1) / 2
		if !h.less(i, p) {
			return
		}
		h.swap(i, p)
		i = p
	}
}

func (h seqHeap) down(i int) {
	for {
		l := 2*i + 1
		if l >= len(h) {
			return
		}
		if r := l + 1; r < len(h) && h.less(r, l) {
			l = r
		}
		if !h.less(l, i) {
			return
		}
		h.swap(i, l)
		i = l
	}
}

func (h *seqHeap) remove(i int) {
	last := len(*h) - 1
	if i != last {
		h.swap(i, last)
	}
	(*h)[last] = nil
	*h = (*h)[:last]
	if i < last {
		h.down(i)
		h.up(i)
	}
}

// seqList is an intrusive list in order of service.
type seqList struct {
	head, tail *Seq
	len        int
}

func (l *seqList) pushBack(s *Seq) {
	s.prev, s.next = l.tail, nil
	if l.tail != nil {
		l.tail.next = s
	} else {
		l.head = s
	}
	l.tail = s
	l.len++
}

func (l *seqList) pushFront(s *Seq) {
	s.prev, s.next = nil, l.head
	if l.head != nil {
		l.head.prev = s
	} else {
		l.tail = s
	}
	l.head = s
	l.len++
}

func (l *seqList) remove(s *Seq) {
	if s.prev != nil {
		s.prev.next = s.next
	} else {
		l.head = s.next
	}
	if s.next != nil {
		s.next.prev = s.prev
	} else {
		l.tail = s.prev
	}
	s.prev, s.next = nil, nil
	l.len--
}
