package wire

// specialWords writes a bit for each special byte of the 64*n bytes at src to
// the n words at dst, the first byte's lowest, and returns all eight-byte
// words of src ored together. See specialsOf for what is special, and
// specialWordsGo for the same in Go.
//
//go:noescape
func specialWords(dst *uint64, src *byte, n int) (or uint64)

// highWords counts the bytes that are not ASCII of the 64*n bytes at src.
//
//go:noescape
func highWords(src *byte, n int) (count int)
