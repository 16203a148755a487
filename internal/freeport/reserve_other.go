//go:build !linux

package freeport

import "net"

// reserve finds a port that is free now; it is not kept.
func reserve() (addr string, release func(), err error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	return ln.Addr().String(), func() {}, ln.Close()
}
