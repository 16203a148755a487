package proxy

import (
	"sync"
	"sync/atomic"
)

// bled is what the fault tenant-bleed keeps beyond its handler: another
// request's body. Only a -tags mutant build ever fills it.
var bled atomic.Pointer[[]byte]

// bleed is the fault itself: a request is sent with the bytes of
// the one before it.
func bleed(body []byte) []byte {
	mine := append([]byte(nil), body...)
	if old := bled.Swap(&mine); old != nil && len(*old) == len(body) {
		return *old
	}
	return body
}

// abandoned is what the fault abandoned-attempt keeps: connections that nobody
// closes, not even the garbage collector.
var abandoned struct {
	sync.Mutex
	conns []*upConn
}

// abandon is the fault itself: the router goes on and leaves the connection of
// its attempt as it is.
func abandon(u *upConn) {
	abandoned.Lock()
	defer abandoned.Unlock()
	abandoned.conns = append(abandoned.conns, u)
}
