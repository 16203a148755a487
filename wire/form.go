package wire

import (
	"bytes"
	"strings"
)

// scanForm finds the fields "model" and "stream" in multipart form data by its
// boundaries alone; files are stepped over, never copied.
func (b *Body) scanForm(contentType string, body []byte) *Error {
	b.Multipart = true
	boundary, ok := formBoundary(contentType)
	if !ok {
		return badBody("", "Content-Type must be multipart/form-data with a boundary")
	}
	b.scratch = append(append(b.scratch[:0], "\r\n--"...), boundary...)
	delim := b.scratch
	if !bytes.HasPrefix(body, delim[2:]) {
		// A preamble is allowed before the first delimiter.
		i := bytes.Index(body, delim)
		if i < 0 {
			return badBody("", "the form data has no part: its boundary does not occur")
		}
		return b.formParts(body, i+len(delim), delim)
	}
	return b.formParts(body, len(delim)-2, delim)
}

// formParts goes over the parts; i is behind the first delimiter.
func (b *Body) formParts(body []byte, i int, delim []byte) *Error {
	for {
		if bytes.HasPrefix(body[i:], []byte("--")) {
			break
		}
		// White space may pad the delimiter's line.
		for i < len(body) && (body[i] == ' ' || body[i] == '\t') {
			i++
		}
		if !bytes.HasPrefix(body[i:], []byte("\r\n")) {
			return badBody("", "the form data is malformed at byte %d: a line end is expected behind the boundary", i)
		}
		head := i + 2
		start := head
		if bytes.HasPrefix(body[head:], []byte("\r\n")) { // no header at all
			start += 2
		} else {
			n := bytes.Index(body[head:], []byte("\r\n\r\n"))
			if n < 0 {
				return badBody("", "the form data is malformed at byte %d: the part's headers do not end", head)
			}
			start = head + n + 4
		}
		n := bytes.Index(body[start:], delim)
		if n < 0 {
			return badBody("", "the form data is cut: the part at byte %d does not end", head)
		}
		if e := b.formField(body, head, start, start+n); e != nil {
			return e
		}
		i = start + n + len(delim)
	}
	if b.seen&seenModel == 0 {
		return badBody("model", "you must give a model: the field \"model\" is missing")
	}
	return nil
}

func (b *Body) formField(body []byte, head, start, end int) *Error {
	name, file := formName(body[head:start])
	if file {
		b.MediaParts++
		b.MediaBytes += end - start
		b.HasAudio = true
		return nil
	}
	val := body[start:end]
	switch string(name) {
	case "model":
		if e := b.once(seenModel, "model"); e != nil {
			return e
		}
		if len(val) == 0 || len(val) > 1024 {
			return badBody("model", "model must be a name of 1 to 1024 bytes")
		}
		b.Model, b.ModelStart, b.ModelEnd = b.name(val), start, end
	case "stream":
		if e := b.once(seenStream, "stream"); e != nil {
			return e
		}
		switch strings.ToLower(string(val)) {
		case "true", "1", "on", "yes":
			b.Stream = true
		}
	}
	return nil
}

// formName returns the field name in a part's headers, and whether the part is
// a file.
func formName(head []byte) (name []byte, file bool) {
	for len(head) > 0 {
		line := head
		if i := bytes.Index(head, []byte("\r\n")); i >= 0 {
			line, head = head[:i], head[i+2:]
		} else {
			head = nil
		}
		const want = "content-disposition:"
		if len(line) < len(want) || !strings.EqualFold(string(line[:len(want)]), want) {
			continue
		}
		rest := line[len(want):]
		for {
			i := bytes.IndexByte(rest, ';')
			if i < 0 {
				return name, file
			}
			var key, val []byte
			key, val, rest = formParam(rest[i+1:])
			switch strings.ToLower(string(key)) {
			case "name":
				name = val
			case "filename", "filename*":
				file = true
			}
		}
	}
	return name, file
}

// formParam reads ` key="value"` and returns what follows it.
func formParam(p []byte) (key, val, rest []byte) {
	i := bytes.IndexByte(p, '=')
	if s := bytes.IndexByte(p, ';'); i < 0 || s >= 0 && s < i {
		return nil, nil, p
	}
	key, p = bytes.TrimSpace(p[:i]), bytes.TrimLeft(p[i+1:], " \t")
	if len(p) > 0 && p[0] == '"' {
		for j := 1; j < len(p); j++ {
			switch p[j] {
			case '\\':
				j++
			case '"':
				return key, p[1:j], p[j+1:]
			}
		}
		return key, p[1:], nil
	}
	if s := bytes.IndexByte(p, ';'); s >= 0 {
		return key, bytes.TrimSpace(p[:s]), p[s:]
	}
	return key, bytes.TrimSpace(p), nil
}

// formBoundary takes the boundary out of a Content-Type.
func formBoundary(ct string) (string, bool) {
	const want = "multipart/form-data"
	if len(ct) < len(want) || !strings.EqualFold(ct[:len(want)], want) {
		return "", false
	}
	rest := []byte(ct[len(want):])
	for {
		i := bytes.IndexByte(rest, ';')
		if i < 0 {
			return "", false
		}
		var key, val []byte
		key, val, rest = formParam(rest[i+1:])
		if strings.EqualFold(string(key), "boundary") {
			// RFC 2046: 1 to 70 characters.
			return string(val), len(val) >= 1 && len(val) <= 70
		}
	}
}
