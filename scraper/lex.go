package scraper

import (
	"bytes"
	"strconv"
	"unsafe"
)

// value reads what follows the labels: blanks, a number, and perhaps an
// integer time stamp.
func value(rest []byte) (float64, error) {
	if n := len(rest); n > 0 && rest[n-1] == '\r' {
		rest = rest[:n-1]
	}
	rest = trimBlank(rest)
	num := rest
	if i := indexBlank(rest); i >= 0 {
		num = rest[:i]
		if stamp := trimBlankRight(trimBlank(rest[i:])); len(stamp) > 0 {
			if _, err := strconv.ParseInt(text(stamp), 10, 64); err != nil {
				return 0, ErrValue
			}
		}
	}
	return number(num)
}

// number parses as the text format does: Go's syntax without hexadecimal
// floats and underscores.
func number(num []byte) (float64, error) {
	for _, c := range num {
		if c == 'p' || c == 'P' || c == '_' {
			return 0, ErrValue
		}
	}
	v, err := strconv.ParseFloat(text(num), 64)
	if err != nil {
		return 0, ErrValue
	}
	return v, nil
}

// positive reads a label's value as a number over 0; anything else is 0, "not
// said".
func positive(val []byte) float64 {
	v, err := number(val)
	if err != nil || !(v > 0 && v <= mostSaid) {
		return 0
	}
	return v
}

// text views b as a string for the time of a strconv call, which keeps nothing
// of it (its errors hold a copy).
func text(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// nextLabel splits the first name="value" off labels. val is as written, with
// its escapes.
func nextLabel(labels []byte) (key, val, rest []byte, err error) {
	labels = trimBlank(labels)
	if len(labels) == 0 {
		return nil, nil, nil, nil
	}
	eq := bytes.IndexByte(labels, '=')
	if eq < 0 {
		return nil, nil, nil, ErrLabels
	}
	key = trimBlankRight(labels[:eq])
	labels = trimBlank(labels[eq+1:])
	if len(labels) == 0 || labels[0] != '"' {
		return nil, nil, nil, ErrLabels
	}
	end := 1
	for {
		i := bytes.IndexByte(labels[end:], '"')
		if i < 0 {
			return nil, nil, nil, ErrLabels
		}
		end += i
		// An odd number of backslashes before the quote escapes it.
		back := 0
		for labels[end-1-back] == '\\' {
			back++
		}
		if back%2 == 0 {
			break
		}
		end++
	}
	val, labels = labels[1:end], trimBlank(labels[end+1:])
	if len(labels) > 0 {
		if labels[0] != ',' {
			return nil, nil, nil, ErrLabels
		}
		labels = labels[1:]
	}
	return key, val, labels, nil
}

// engineKey names an engine by its label's value; no label and an empty one
// are the same. Up to 7 bytes are taken as they are, longer ones are hashed.
func engineKey(val []byte) uint64 {
	h := uint64(0)
	if len(val) <= 7 {
		for _, c := range val {
			h = h<<8 | uint64(c)
		}
		return h
	}
	h = 14695981039346656037
	for _, c := range val {
		h = (h ^ uint64(c)) * 1099511628211
	}
	return h | 1<<63
}

func isName(c byte) bool {
	return c >= 'a' && c <= 'z' || c == '_' || c >= '0' && c <= '9' || c >= 'A' && c <= 'Z' || c == ':'
}

func isBlank(c byte) bool { return c == ' ' || c == '\t' }

func trimBlank(b []byte) []byte {
	for len(b) > 0 && isBlank(b[0]) {
		b = b[1:]
	}
	return b
}

func trimBlankRight(b []byte) []byte {
	for len(b) > 0 && isBlank(b[len(b)-1]) {
		b = b[:len(b)-1]
	}
	return b
}

func indexBlank(b []byte) int {
	for i, c := range b {
		if isBlank(c) {
			return i
		}
	}
	return -1
}
