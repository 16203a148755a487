// Package freeport finds addresses that nobody else is given.
//
// To listen on port 0 and close again is no way to find one: of 20 ports found
// so, one in fifty times two are the same, and the system also gives them to
// others before the one for whom they were found listens there.
package freeport

import (
	"errors"
	"net"
)

// Reserve returns a loopback address on which nobody listens: connections are
// refused. Until release the system gives its port to nobody who asks for any;
// who asks for this one can listen there, again and again.
func Reserve() (addr string, release func(), err error) {
	for range 100 {
		if addr, release, err = reserve(); err != nil {
			return "", nil, err
		}
		// Peers use the same port of UDP, which cannot be kept.
		if c, err := net.ListenPacket("udp", addr); err == nil {
			return addr, release, c.Close()
		}
		release()
	}
	return "", nil, errors.New("no port is free for TCP and UDP")
}

// Addr is Reserve for a test; the port is kept until it ends.
func Addr(t interface {
	Helper()
	Fatal(args ...any)
	Cleanup(func())
}) string {
	t.Helper()
	addr, release, err := Reserve()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(release)
	return addr
}
