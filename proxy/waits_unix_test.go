//go:build unix

package proxy

import "syscall"

// smallReceiveBuffer makes a socket of a client that takes little.
func smallReceiveBuffer(_, _ string, c syscall.RawConn) (err error) {
	_ = c.Control(func(fd uintptr) { err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4096) })
	return err
}
