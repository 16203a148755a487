// Package fdio reads and writes non-blocking sockets without telling the
// scheduler. Such a call does not wait, so it is short; announced to the
// scheduler, each one lets the runtime's monitor thread wake up, take the
// processor away and hand it to another thread when the call takes some 20 µs,
// as one with 100 KB does. With one processor that cost more than the I/O
// itself. Use it inside of a syscall.RawConn's Read and Write only, which wait.
package fdio

import "errors"

// ErrAgain says that the call would have had to wait.
var ErrAgain = errors.New("again")

// Most is how many bytes one call should be given, so that none keeps the
// processor for long: copying them takes some 50 µs.
const Most = 256 << 10

// Set fills in the pieces; empty ones are left out. More than four may panic.
func (v *Pieces) Set(pieces ...[]byte) {
	v.Reset()
	for _, p := range pieces {
		v.Add(p)
	}
}
