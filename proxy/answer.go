package proxy

import (
	"bytes"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/wire"
)

// dateLine is the Date header, rendered once a second.
type dateLine struct {
	sec  int64
	line []byte
}

var currentDate atomic.Pointer[dateLine]

func appendDate(dst []byte) []byte {
	now := time.Now()
	d := currentDate.Load()
	if d == nil || d.sec != now.Unix() {
		line := now.UTC().AppendFormat([]byte("Date: "), http.TimeFormat)
		d = &dateLine{now.Unix(), append(line, "\r\n"...)}
		currentDate.Store(d)
	}
	return append(dst, d.line...)
}

// appendStatus writes the status line. The usual ones are constants.
func appendStatus(dst []byte, status int) []byte {
	if status == 200 {
		return append(dst, "HTTP/1.1 200 OK\r\n"...)
	}
	dst = append(dst, "HTTP/1.1 "...)
	dst = strconv.AppendInt(dst, int64(status), 10)
	dst = append(dst, ' ')
	text := http.StatusText(status)
	if text == "" {
		text = "Unknown"
	}
	return append(append(dst, text...), "\r\n"...)
}

// appendOwn writes what every answer of the router carries: Server, Date,
// the request's id, trace and tenant, and Connection.
func (f *flight) appendOwn(dst []byte) []byte {
	q := &f.req
	dst = append(dst, "Server: penstock\r\n"...)
	dst = appendDate(dst)
	dst = appendLine(dst, f.p.requestHeader, q.id)
	dst = appendLine(dst, headerTraceparent, q.trace[:])
	if len(q.tenant) > 0 {
		dst = appendLine(dst, f.p.tenantHeader, q.tenant)
	}
	if f.p.opt.ShowReplica && f.replica != nil {
		dst = append(append(append(dst, "X-Penstock-Replica: "...), f.replica.spec.Name...), "\r\n"...)
	}
	dst = f.appendDegraded(dst)
	switch {
	case f.closeConn:
		dst = append(dst, "Connection: close\r\n"...)
	case q.http10:
		dst = append(dst, "Connection: keep-alive\r\n"...)
	}
	return dst
}

// Replies is what an answer of the router itself is made of.
type reply struct {
	status  int
	ctype   string
	headers string // further header lines, each with CRLF
	body    []byte
	length  int // of the body that a HEAD was not sent; noLength = none is said
}

// noLength leaves Content-Length out: 204 and 304 must not or need not have
// one, and of a service's HEAD it may not be known.
const noLength = -1

// reply writes one whole answer of the router's own.
func (f *flight) reply(a reply) {
	if f.p.stopping.Load() || f.p.draining.Load() {
		f.closeConn = true
	}
	s := getScratch()
	b := f.appendOwn(appendStatus(s.b, a.status))
	b = append(b, a.headers...)
	if a.ctype != "" {
		b = append(append(append(b, "Content-Type: "...), a.ctype...), "\r\n"...)
	}
	if a.length != noLength {
		b = append(b, "Content-Length: "...)
		b = strconv.AppendInt(b, int64(max(a.length, len(a.body))), 10)
		b = append(b, "\r\n"...)
	}
	b = append(b, "\r\n"...)
	if !f.req.head {
		b = append(b, a.body...)
		f.sent = int64(len(a.body))
	}
	f.status, f.wrote = a.status, true
	if f.conn.send(b) != nil {
		f.closeConn = true
	}
	s.b = b
	putScratch(s)
}

// fail answers with an error of the router's own.
func (f *flight) fail(e *wire.Error) {
	f.errCode = e.Code
	f.failClosed()
	s := getScratch()
	var extra []byte
	if e.Status >= 400 {
		e.EachHeader(func(name, value string) {
			extra = append(append(append(append(extra, name...), ": "...), value...), "\r\n"...)
		})
	}
	s.b = e.AppendBody(s.b, f.req.kind)
	f.reply(reply{status: e.Status, ctype: "application/json", headers: string(extra), body: s.b})
	putScratch(s)
}

// outMode is how the body goes to the client.
type outMode uint8

const (
	outNone    outMode = iota // no body (HEAD, 204, 304)
	outLength                 // Content-Length
	outChunked                // chunked
	outClose                  // until the connection ends (HTTP/1.0)
)

// appendAnswerHead renders the replica's head for the client: status and end-
// to-end headers as they came, framing rebuilt, the router's own added.
// length is the body's length where mode is outLength.
func (f *flight) appendAnswerHead(dst []byte, h *answerHead, mode outMode, length int64) []byte {
	if mode == outClose || f.p.draining.Load() {
		f.closeConn = true
	}
	dst = appendStatus(dst, h.status)
	dst = f.appendMark(f.appendOwn(dst))
	retry := false
	for rest := h.raw; len(rest) > 0; {
		i := bytes.IndexByte(rest, '\n') + 1
		line := rest[:i]
		rest = rest[i:]
		c := bytes.IndexByte(line, ':')
		name := line[:c]
		switch f.headerOf(name) {
		case hHop, hConnection, hContentLength, hTransferEncoding, hServer, hDate, hRequestID, hTraceparent, hTenant, hExpect:
			continue
		case hRetryAfter:
			if h.retryAfter <= 0 && (h.status == 429 || h.status == 503) {
				continue // senseless: the router says when
			}
			retry = true
		case hLocation:
			continue // a replica's redirect names the replica itself
		case hContentType:
		default:
			if named(h.connNames, name) || routersOwn(name) || equalFold(name, "x-should-retry") || equalFold(name, "retry-after-ms") ||
				f.climb.tier > 0 && equalFold(name, "cache-control") {
				continue
			}
		}
		dst = append(dst, line...)
	}
	if h.status == 429 || h.status == 503 {
		dst = f.appendBusyHeaders(dst, h, retry)
	}
	switch mode {
	case outLength:
		dst = append(dst, "Content-Length: "...)
		dst = strconv.AppendInt(dst, length, 10)
		dst = append(dst, "\r\n"...)
	case outChunked:
		dst = append(dst, "Transfer-Encoding: chunked\r\n"...)
	}
	return append(dst, "\r\n"...)
}

// appendBusyHeaders tells the client when to come again, beside what the
// replica said itself: every 429 and 503 carries it.
func (f *flight) appendBusyHeaders(dst []byte, h *answerHead, has bool) []byte {
	s := max(h.retryAfter, 1)
	if !has {
		dst = append(dst, "Retry-After: "...)
		dst = strconv.AppendInt(dst, int64(s+0.999), 10)
		dst = append(dst, "\r\n"...)
	}
	dst = append(dst, "retry-after-ms: "...)
	dst = strconv.AppendInt(dst, int64(s*1000), 10)
	if f.attemptsSpent() {
		return append(dst, "\r\nx-should-retry: false\r\n"...)
	}
	return append(dst, "\r\nx-should-retry: true\r\n"...)
}

// sendHeld sends a head and a body that may be large, in one writev.
func (f *flight) sendHeld(head, body []byte) error {
	if len(body) == 0 {
		return f.conn.send(head)
	}
	return f.conn.sendv(head, body)
}

// routersOwn tells whether a header says what only the router may say.
func routersOwn(name []byte) bool {
	return hasPrefixFold(name, "x-degraded") || equalFold(name, "x-stream-integrity") || equalFold(name, "x-penstock-replica")
}
