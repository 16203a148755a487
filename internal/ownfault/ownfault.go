// Package ownfault tells errors that this process or its host causes from
// those of the other side: a router that has run out of file descriptors must
// not take a healthy replica for dead.
package ownfault

import (
	"errors"
	"fmt"
	"syscall"
	"time"
)

// lateLeast is how long after a deadline its time-out has to be seen for the
// process to have stood still.
const lateLeast = 100 * time.Millisecond

// Late is a time-out that was seen long after its deadline: this process, or
// the whole machine, stood still, and the answer may have been there in time.
type Late struct {
	By  time.Duration
	Err error
}

func (e *Late) Error() string {
	return fmt.Sprintf("%v (seen %v after the deadline: the router itself stood still)", e.Err, e.By.Round(time.Millisecond))
}

// Unwrap gives the time-out.
func (e *Late) Unwrap() error { return e.Err }

// Timeout returns err, a time-out at that deadline, as what it says now: Late
// when the deadline is long over.
func Timeout(err error, deadline time.Time) error {
	if late := time.Since(deadline); late > lateLeast {
		return &Late{late, err}
	}
	return err
}

// Is tells whether err says that this process, or its host, stood still or is out of
// something: file descriptors, memory, buffers, local ports.
func Is(err error) bool {
	var late *Late
	if errors.As(err, &late) {
		return true
	}
	for _, e := range [...]error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.EADDRNOTAVAIL} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
