package proxy

import (
	"bytes"
	"encoding/hex"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/penstock/penstock/wire"
)

// request is what is known of one request, all of it owned: nothing in it
// points into fasthttp's buffers, so it may outlive the RequestCtx. Its byte
// slices are the flight's own and are overwritten by the next request on the
// same connection; whoever keeps something longer (logs) makes a string.
type request struct {
	kind    wire.Kind
	path    string // one of the API's paths: a constant
	method  string // a constant; "" for one that the API does not know
	uri     []byte // as it came, with query
	id      []byte
	parent  [8]byte  // the client's span; zero = none came
	trace   [55]byte // traceparent with the router's own span
	tenant  []byte   // value of the tenant header, "" when it had none
	headers []byte   // header lines that go on to a replica
	ctype   []byte
	class   []byte // X-Request-Class as it came

	authorization []byte
	apiKey        []byte

	service  *service // the auxiliary service that the path is of
	body     []byte   // owned; see takeBody
	http10   bool
	head     bool
	identity Identity

	arrived  float64
	deadline float64 // on the process's clock; 0 until known
	timeout  time.Duration
	retries  int64 // X-Stainless-Retry-Count

	classIndex   int
	unknownClass bool // class names none of the classes
}

// reset forgets the last request but keeps the memory.
func (r *request) reset() {
	*r = request{uri: r.uri[:0], id: r.id[:0], tenant: r.tenant[:0], headers: r.headers[:0], ctype: r.ctype[:0],
		class: r.class[:0], authorization: r.authorization[:0], apiKey: r.apiKey[:0]}
}

// Methods, as constants for labels and logs.
var knownMethods = [...]string{"POST", "GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "CONNECT", "TRACE"}

// load reads the head of the request in h. The error is a refusal for what
// the head itself is: framing tricks, bad names. Identity (id, trace, tenant)
// is set even then, as far as it could be read, since every answer echoes it.
func (f *flight) load(h *fasthttp.RequestHeader) *wire.Error {
	r := &f.req
	r.reset()
	r.arrived = f.p.now()
	for _, m := range knownMethods {
		if string(h.Method()) == m {
			r.method = m
		}
	}
	target, isPath := origin(h.RequestURI())
	r.uri = append(r.uri, target...)
	r.http10 = !h.IsHTTP11()
	r.head = r.method == "HEAD"
	err := f.loadHeaders(h.RawHeaders())
	f.identify()
	switch {
	case err != nil:
	case f.conn.bareLF:
		err = badRequest("a line of the request's head ends without CR")
	case string(h.Protocol()) != "HTTP/1.1" && string(h.Protocol()) != "HTTP/1.0":
		err = badRequest("HTTP version not supported; send HTTP/1.1")
	case r.method == "CONNECT" || r.method == "TRACE":
		err = f.wrongMethod()
	case !isPath || bytes.IndexByte(r.uri, '#') >= 0:
		err = badRequest("the request target has to be a path, or a URL of http or https")
	}
	return err
}

// origin is the path and query of a request target. A server must also take a
// whole URL for one (RFC 9112, 3.2.2), as clients send it that have the router for
// their proxy. Which host it names is of no more interest than the Host header.
// False: it is neither.
func origin(target []byte) ([]byte, bool) {
	if len(target) > 0 && target[0] == '/' {
		return target, true
	}
	i := bytes.Index(target, []byte("://"))
	if i < 0 || !equalFold(target[:i], "http") && !equalFold(target[:i], "https") {
		return target, false
	}
	host, path := target[i+3:], []byte(nil)
	if n := bytes.IndexAny(host, "/?"); n >= 0 {
		host, path = host[:n], host[n:]
	}
	if !validHost(host) {
		return target, false
	}
	if len(path) == 0 || path[0] != '/' {
		path = append([]byte("/"), path...)
	}
	return path, true
}

func badRequest(msg string) *wire.Error { return wire.NewError(wire.CodeInvalidRequest, "%s", msg) }

// wrongMethod is a 404 too: the contract has one answer for all that is not
// part of the API.
func (f *flight) wrongMethod() *wire.Error {
	if k := f.req.kind; k != wire.KindNone {
		return wire.NewError(wire.CodeNotFound, "this path does not take this method; it takes %s", k.Method())
	}
	return wire.NewError(wire.CodeNotFound, "this method is not served here")
}

// loadHeaders walks the raw header block once: it refuses what could be read
// in two ways, takes what the router needs, and copies what goes on.
func (f *flight) loadHeaders(raw []byte) *wire.Error {
	r := &f.req
	var bad *wire.Error
	var connection, forwardedFor, trace []byte
	var cl, te, hosts, tenants, types int
	for rest := raw; len(rest) > 0; {
		line, next, ok := nextLine(rest)
		if !ok {
			bad = badRequest("a line of the request's head ends without CR, or has one inside")
			// Go on by bare LF, to find what the answer echoes.
			i := bytes.IndexByte(rest, '\n')
			if i < 0 {
				break
			}
			line, next = bytes.TrimRight(rest[:i], "\r"), rest[i+1:]
		}
		rest = next
		if len(line) == 0 {
			continue
		}
		i := bytes.IndexByte(line, ':')
		if i <= 0 || line[0] == ' ' || line[0] == '\t' || !isToken(line[:i]) {
			bad = badRequest("a header line is not NAME: VALUE (folded lines and spaces in names are refused)")
			continue
		}
		name, value := line[:i], trimOWS(line[i+1:])
		switch f.headerOf(name) {
		case hHost:
			hosts++
			if !validHost(value) {
				bad = badRequest("the Host header is not a host")
			}
		case hContentLength:
			cl++
		case hTransferEncoding:
			te++
		case hConnection:
			if connection == nil {
				connection = value
			} else {
				connection = append(append(append([]byte(nil), connection...), ','), value...)
			}
		case hContentType:
			if types++; types > 1 && string(r.ctype) != string(value) {
				// The body of a form is read by it, here and at the replica.
				bad = badRequest("there are two different Content-Type headers")
			}
			r.ctype = append(r.ctype[:0], value...)
			r.headers = appendLine(r.headers, name, value)
		case hCredential:
			if len(name) == len("x-api-key") {
				r.apiKey = append(r.apiKey[:0], value...)
			} else {
				r.authorization = append(r.authorization[:0], value...)
			}
		case hForwardedFor:
			forwardedFor = value
		case hForwarded:
			if f.p.opt.TrustForwarded {
				r.headers = appendLine(r.headers, name, value)
			}
		case hRequestID:
			r.id = append(r.id[:0], value...)
		case hTraceparent:
			trace = value
		case hTenant:
			tenants++
			r.tenant = append(r.tenant[:0], value...)
			r.headers = appendLine(r.headers, name, value)
		case hClass:
			r.class = append(r.class[:0], value...)
		case hTimeoutMs:
			// Takes precedence over the SDK's own, wherever it stands.
			if ms, ok := parseDigits(value); ok && ms > 0 {
				r.timeout = time.Duration(min(ms, 1e9)) * time.Millisecond
			}
		case hReadTimeout:
			if s, err := strconv.ParseFloat(string(value), 64); err == nil && s > 0 && s < 1e6 && r.timeout == 0 {
				r.timeout = -time.Duration(s * float64(time.Second)) // negative: the weaker source
			}
		case hRetryCount:
			r.retries, _ = parseDigits(value)
		case hHop, hExpect, hPrivate, hAcceptEncoding:
		default:
			r.headers = appendLine(r.headers, name, value)
		}
	}
	f.trace(trace)
	f.forwarded(forwardedFor)
	switch {
	case bad != nil:
		return bad
	case cl > 0 && te > 0:
		return badRequest("Content-Length together with Transfer-Encoding")
	case hosts > 1 || hosts == 0 && !r.http10:
		return badRequest("the request needs one Host header")
	case tenants > 1 || len(r.tenant) > maxTenant:
		// Taken cut or in part, two tenants could be one to the router.
		return wire.NewError(wire.CodeInvalidRequest, "%s has to be given once and be at most %d bytes long", f.p.opt.TenantHeader, maxTenant)
	}
	if len(connection) > 0 {
		r.headers = f.dropNamed(r.headers, connection)
	}
	return nil
}

// headerOf is classify with the two names that are configurable.
func (f *flight) headerOf(name []byte) header {
	if equalFold(name, f.p.requestHeaderLow) {
		return hRequestID
	}
	if equalFold(name, f.p.tenantHeaderLow) {
		return hTenant
	}
	return classify(name)
}

// identify makes the id that the client did not bring, or brought in a shape
// that must not be echoed.
func (f *flight) identify() {
	r := &f.req
	good := len(r.id) >= 1 && len(r.id) <= 128
	for _, b := range r.id {
		good = good && b > ' ' && b < 0x7f
	}
	if !good {
		r.id = appendHex(appendHex(r.id[:0], rand.Uint64()), rand.Uint64())
	}
	if len(r.tenant) > maxTenant {
		r.tenant = r.tenant[:maxTenant] // of a request that is refused: what is echoed
	}
	r.headers = appendLine(r.headers, f.p.requestHeader, r.id)
	r.headers = appendLine(r.headers, headerTraceparent, r.trace[:])
}

// maxTenant bounds the tenant header, bytes.
const maxTenant = 256

var headerTraceparent = []byte("traceparent")

// trace continues the trace of value, or starts one, with an own span.
func (f *flight) trace(value []byte) {
	t := f.req.trace[:0]
	if validTrace(value) {
		_, _ = hex.Decode(f.req.parent[:], value[36:52])
		t = append(t, value[:36]...) // version, trace id and their dashes
		_ = append(appendHex(t, rand.Uint64()|1), value[52:55]...)
		return
	}
	t = append(t, "00-"...)
	t = append(appendHex(appendHex(t, rand.Uint64()|1), rand.Uint64()), '-')
	_ = append(appendHex(t, rand.Uint64()|1), "-01"...)
}

// validTrace checks a W3C traceparent, version 00.
func validTrace(v []byte) bool {
	if len(v) != 55 || v[0] != '0' || v[1] != '0' || v[2] != '-' || v[35] != '-' || v[52] != '-' {
		return false
	}
	hex, traceSet, spanSet := true, false, false
	for i := 3; i < 55; i++ {
		b := v[i]
		if i == 35 || i == 52 {
			continue
		}
		hex = hex && (b >= '0' && b <= '9' || b >= 'a' && b <= 'f')
		traceSet = traceSet || i < 35 && b != '0'
		spanSet = spanSet || i > 35 && i < 52 && b != '0'
	}
	return hex && traceSet && spanSet
}

const hexDigits = "0123456789abcdef"

func appendHex(dst []byte, v uint64) []byte {
	for i := 60; i >= 0; i -= 4 {
		dst = append(dst, hexDigits[v>>uint(i)&15])
	}
	return dst
}

// forwarded writes X-Forwarded-For by the trust rule: replaced by the peer's
// address, or with TrustForwarded, the peer's address appended.
func (f *flight) forwarded(came []byte) {
	h := f.req.headers
	h = append(h, "X-Forwarded-For: "...)
	if f.p.opt.TrustForwarded && len(came) > 0 {
		h = append(append(h, came...), ", "...)
	}
	f.req.headers = append(append(h, f.conn.remoteIP()...), "\r\n"...)
}

func appendLine(dst, name, value []byte) []byte {
	dst = append(append(dst, name...), ": "...)
	return append(append(dst, value...), "\r\n"...)
}

// dropNamed takes out of a block of lines those that a Connection header
// names. Framing is rebuilt by the router and so is never in the block.
func (f *flight) dropNamed(block, connection []byte) []byte {
	out := block[:0]
	for rest := block; len(rest) > 0; {
		i := bytes.IndexByte(rest, '\n') + 1
		line := rest[:i]
		rest = rest[i:]
		if c := bytes.IndexByte(line, ':'); c > 0 && named(connection, line[:c]) && f.droppable(line[:c]) {
			continue
		}
		out = append(out, line...)
	}
	return out
}

// droppable tells whether a Connection header may take the header away: not
// what the router itself puts there, nor the tenant that it counts the request for.
func (f *flight) droppable(name []byte) bool {
	switch f.headerOf(name) {
	case hForwardedFor, hTraceparent, hContentType, hTenant:
		return false
	}
	return true
}

// validHost takes a host with optional port: no user info, no path, no space.
func validHost(v []byte) bool {
	if len(v) == 0 || len(v) > 255 {
		return false
	}
	for _, b := range v {
		if b <= ' ' || b >= 0x7f || b == '@' || b == '/' || b == '\\' || b == '?' || b == '#' || b == ',' {
			return false
		}
	}
	return true
}

// takeBody moves the body's buffer from fasthttp to the flight.
func (f *flight) takeBody(req *fasthttp.Request) { f.req.body = req.SwapBody(nil) }

// bodyKeep is up to where a body's buffer stays with its request to the end.
const bodyKeep = 16 << 10

// blocksKept bounds the fingerprints' memory that an idle connection keeps.
const blocksKept = 1024

// spareBodies are buffers of bodies that no attempt can need any more. What
// is not used again soon is left to the garbage collector.
var spareBodies sync.Pool

// spareLimit bounds what one huge request leaves behind.
const spareLimit = 4 << 20

// dropBody gives up the body once no attempt can need it any more, so that a
// long stream does not hold a long prompt.
func (f *flight) dropBody() {
	if b := f.req.body; cap(b) > bodyKeep {
		f.req.body, f.spent = nil, true
		if cap(b) <= spareLimit {
			spareBodies.Put(&b)
		}
	}
}

// returnBody gives fasthttp a buffer for one that was taken: it keeps them in
// a pool of its own, where the next request of any connection finds it.
func (f *flight) returnBody(req *fasthttp.Request) {
	body := f.req.body
	f.req.body = nil
	if cap(f.body.Blocks) > blocksKept {
		f.body.Blocks, f.ticket.Work.Blocks = nil, nil
	}
	if f.spent {
		f.spent = false
		if b, ok := spareBodies.Get().(*[]byte); ok {
			body = *b
		}
	}
	if body != nil && cap(body) <= spareLimit {
		req.SwapBody(body[:0])
	}
}
