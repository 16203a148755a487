//go:build !amd64

package wire

import "unsafe"

func specialWords(dst *uint64, src *byte, n int) (or uint64) {
	return specialWordsGo(unsafe.Slice(dst, n), unsafe.Slice(src, 64*n))
}

func highWords(src *byte, n int) (count int) { return highWordsGo(unsafe.Slice(src, 64*n)) }
