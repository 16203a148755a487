package proxy

import "sync"

// Sizes of pooled buffers. A stream's chunks are a few hundred bytes, so the
// small one is what a connection usually borrows, and only while bytes are
// there: nothing is held while it waits.
const (
	smallBuffer = 4 << 10
	largeBuffer = 32 << 10
)

// buffer is a pooled read buffer with a window of unread bytes.
type buffer struct {
	b    []byte
	r, w int
}

var (
	smallBuffers = sync.Pool{New: func() any { return &buffer{b: make([]byte, smallBuffer)} }}
	largeBuffers = sync.Pool{New: func() any { return &buffer{b: make([]byte, largeBuffer)} }}
)

func getBuffer(large bool) *buffer {
	if large {
		return largeBuffers.Get().(*buffer)
	}
	return smallBuffers.Get().(*buffer)
}

func putBuffer(b *buffer) {
	if b == nil {
		return
	}
	b.r, b.w = 0, 0
	switch cap(b.b) {
	case smallBuffer:
		smallBuffers.Put(b)
	case largeBuffer:
		largeBuffers.Put(b)
	}
}

// unread returns the window.
func (b *buffer) unread() []byte { return b.b[b.r:b.w] }

// scratch is a pooled byte slice to append to: heads, held-back answers.
type scratch struct{ b []byte }

// scratchKeep bounds what goes back to the pool, so that one large answer
// does not pin its memory.
const scratchKeep = 64 << 10

var scratches = sync.Pool{New: func() any { return &scratch{b: make([]byte, 0, 1024)} }}

func getScratch() *scratch { return scratches.Get().(*scratch) }

func putScratch(s *scratch) {
	if s == nil || cap(s.b) > scratchKeep {
		return
	}
	s.b = s.b[:0]
	scratches.Put(s)
}
