package proxy

import "errors"

var errBadChunk = errors.New("the answer's chunked framing is broken")

// dechunker takes chunked framing apart, whatever way it was cut on the
// road. The zero value is ready.
type dechunker struct {
	state  uint8
	digits uint8
	total  int   // bytes of extensions and trailers so far
	left   int64 // of the present chunk's data
}

const (
	dcSize  uint8 = iota
	dcSpace       // white space behind the size
	dcExt
	dcSizeLF
	dcData
	dcDataCR
	dcDataLF
	dcTrailer   // at the start of a trailer line
	dcTrailLine // in one
	dcTrailLineLF
	dcTrailLF // CR of the empty line seen
	dcEnd
)

// extLimit bounds extensions and trailers, which are dropped.
const extLimit = 8 << 10

// whole measures the chunks that lie whole, without extension, at the start
// of p. each is called with the data of each; when it says false, the walk
// stops before that chunk. n is their length with framing. The last (empty)
// chunk is not counted. Only between chunks does it find any.
func (d *dechunker) whole(p []byte, each func(data []byte) bool) (n int, ok bool) {
	if d.state != dcSize || d.digits != 0 {
		return 0, true
	}
	for {
		var size, i int
		q := p[n:]
		for i < len(q) && i < 7 {
			v := hexValue[q[i]]
			if v < 0 {
				break
			}
			size = size<<4 | int(v)
			i++
		}
		if size == 0 || i+2+size+2 > len(q) || q[i] != '\r' || q[i+1] != '\n' {
			return n, true
		}
		end := i + 2 + size
		if q[end] != '\r' || q[end+1] != '\n' {
			return n, true
		}
		if !each(q[i+2 : end]) {
			return n, false
		}
		n += end + 2
	}
}

// next takes bytes off p: data is the next stretch of payload (may be empty),
// n how much of p was used. It stops before more data, so call it until p is
// used up or ended.
func (d *dechunker) next(p []byte) (data []byte, n int, err error) {
	for n < len(p) {
		b := p[n]
		switch d.state {
		case dcSize:
			v := hexValue[b]
			switch {
			case v >= 0:
				if d.digits >= 15 {
					return nil, n, errBadChunk
				}
				d.left = d.left<<4 | int64(v)
				d.digits++
			case d.digits == 0:
				return nil, n, errBadChunk
			case b == '\r':
				d.state = dcSizeLF
			case b == ';':
				d.state = dcExt
			case b == ' ' || b == '\t':
				d.state = dcSpace
			default:
				return nil, n, errBadChunk
			}
		case dcSpace:
			d.total++
			switch {
			case d.total > extLimit:
				return nil, n, errBadChunk
			case b == '\r':
				d.state = dcSizeLF
			case b != ' ' && b != '\t':
				return nil, n, errBadChunk
			}
		case dcExt:
			if d.total++; d.total > extLimit || b == '\n' {
				return nil, n, errBadChunk
			}
			if b == '\r' {
				d.state = dcSizeLF
			}
		case dcSizeLF:
			if b != '\n' {
				return nil, n, errBadChunk
			}
			d.digits = 0
			d.state = dcData
			if d.left == 0 {
				d.state = dcTrailer
			}
		case dcData:
			k := min(int64(len(p)-n), d.left)
			data = p[n : n+int(k)]
			n += int(k)
			if d.left -= k; d.left == 0 {
				d.state = dcDataCR
			}
			return data, n, nil
		case dcDataCR:
			if b != '\r' {
				return nil, n, errBadChunk
			}
			d.state = dcDataLF
		case dcDataLF:
			if b != '\n' {
				return nil, n, errBadChunk
			}
			d.state = dcSize
		case dcTrailer:
			d.state = dcTrailLine
			if b == '\r' {
				d.state = dcTrailLF
			}
		case dcTrailLine:
			if d.total++; d.total > extLimit || b == '\n' {
				return nil, n, errBadChunk
			}
			if b == '\r' {
				d.state = dcTrailLineLF
			}
		case dcTrailLineLF:
			if b != '\n' {
				return nil, n, errBadChunk
			}
			d.state = dcTrailer
		case dcTrailLF:
			if b != '\n' {
				return nil, n, errBadChunk
			}
			d.state = dcEnd
			return nil, n + 1, nil
		case dcEnd:
			return nil, n, nil
		}
		n++
	}
	return nil, n, nil
}

func (d *dechunker) ended() bool { return d.state == dcEnd }

var hexValue = func() (t [256]int8) {
	for i := range t {
		t[i] = -1
	}
	for i := 0; i < 10; i++ {
		t['0'+i] = int8(i)
	}
	for i := 0; i < 6; i++ {
		t['a'+i], t['A'+i] = int8(10+i), int8(10+i)
	}
	return t
}()
