//go:build !linux

package fdio

import (
	"errors"
	"os"
	"syscall"
)

// Read is read(2); n = 0 without an error is the end.
func Read(fd uintptr, p []byte) (int, error) {
	n, err := syscall.Read(int(fd), p)
	return result("read", n, err)
}

// Write is write(2).
func Write(fd uintptr, p []byte) (int, error) {
	n, err := syscall.Write(int(fd), p)
	return result("write", n, err)
}

func result(name string, n int, err error) (int, error) {
	switch {
	case err == nil:
		return n, nil
	case errors.Is(err, syscall.EAGAIN), errors.Is(err, syscall.EINTR):
		return max(n, 0), ErrAgain
	}
	return 0, os.NewSyscallError(name, err)
}

// Pieces is what Writev writes.
type Pieces struct{ left [][]byte }

// Add appends a piece; an empty one is left out.
func (v *Pieces) Add(p []byte) {
	if len(p) > 0 {
		v.left = append(v.left, p)
	}
}

// Reset lets go of what was set.
func (v *Pieces) Reset() { v.left = nil }

// Empty tells whether nothing is left to write.
func (v *Pieces) Empty() bool { return len(v.left) == 0 }

// Writev writes what it can of the first piece and drops that from v.
func Writev(fd uintptr, v *Pieces) error {
	n, err := Write(fd, v.left[0][:min(len(v.left[0]), Most)])
	if v.left[0] = v.left[0][n:]; len(v.left[0]) == 0 {
		v.left = v.left[1:]
	}
	return err
}
