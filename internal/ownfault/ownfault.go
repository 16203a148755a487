// Package ownfault tells errors that this process or its host causes from
// those of the other side: a router that has run out of file descriptors must
// not take a healthy replica for dead.
package ownfault

import (
	"errors"
	"syscall"
)

// Is tells whether err says that this process, or its host, is out of
// something: file descriptors, memory, buffers, local ports.
func Is(err error) bool {
	for _, e := range [...]error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.EADDRNOTAVAIL} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
