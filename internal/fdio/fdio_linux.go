//go:build linux

package fdio

import (
	"os"
	"syscall"
	"unsafe"
)

// Read is read(2); n = 0 without an error is the end.
func Read(fd uintptr, p []byte) (int, error) {
	return call(syscall.SYS_READ, "read", fd, unsafe.Pointer(unsafe.SliceData(p)), len(p))
}

// Write is write(2).
func Write(fd uintptr, p []byte) (int, error) {
	return call(syscall.SYS_WRITE, "write", fd, unsafe.Pointer(unsafe.SliceData(p)), len(p))
}

// Pieces is what Writev writes: room for a few slices.
type Pieces struct {
	iov [4]syscall.Iovec
	n   int
}

// Add appends a piece; an empty one is left out. More than four panic.
func (v *Pieces) Add(p []byte) {
	if len(p) > 0 {
		v.iov[v.n].Base = unsafe.SliceData(p)
		v.iov[v.n].SetLen(len(p))
		v.n++
	}
}

// Reset lets go of what was set.
func (v *Pieces) Reset() { v.iov, v.n = [4]syscall.Iovec{}, 0 }

// Empty tells whether nothing is left to write.
func (v *Pieces) Empty() bool { return v.n == 0 }

// Writev is one writev(2) of what is left, at most about Most bytes of it, and
// drops from v what was written.
func Writev(fd uintptr, v *Pieces) error {
	n, size := 0, 0
	for n < v.n && size < Most {
		size += int(v.iov[n].Len)
		n++
	}
	last := &v.iov[n-1]
	cut := max(0, size-Most)
	last.SetLen(int(last.Len) - cut)
	var w int
	var err error
	if n == 1 {
		w, err = call(syscall.SYS_WRITE, "write", fd, unsafe.Pointer(last.Base), int(last.Len))
	} else {
		w, err = call(syscall.SYS_WRITEV, "writev", fd, unsafe.Pointer(&v.iov[0]), n)
	}
	last.SetLen(int(last.Len) + cut)
	v.drop(w)
	return err
}

func (v *Pieces) drop(w int) {
	i := 0
	for i < v.n && w >= int(v.iov[i].Len) {
		w -= int(v.iov[i].Len)
		i++
	}
	if w > 0 {
		b := unsafe.Slice(v.iov[i].Base, int(v.iov[i].Len))[w:]
		v.iov[i].Base = unsafe.SliceData(b)
		v.iov[i].SetLen(len(b))
	}
	k := copy(v.iov[:], v.iov[i:v.n])
	clear(v.iov[k:])
	v.n = k
}

func call(nr uintptr, name string, fd uintptr, p unsafe.Pointer, n int) (int, error) {
	for {
		r, _, errno := syscall.RawSyscall(nr, fd, uintptr(p), uintptr(n))
		switch errno {
		case 0:
			return int(r), nil
		case syscall.EINTR:
		case syscall.EAGAIN:
			return 0, ErrAgain
		default:
			return 0, os.NewSyscallError(name, errno)
		}
	}
}
