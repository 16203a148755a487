package proxy

import "bytes"

// header is a header that the proxy treats in some way of its own.
type header uint8

const (
	hOther header = iota
	hHop          // hop-by-hop: never goes on, in either direction
	hConnection
	hContentLength
	hTransferEncoding
	hHost
	hExpect
	hContentType
	hCredential // Authorization, X-Api-Key: the client's own, never goes on
	hPrivate    // Cookie and the like: not the replica's business
	hAcceptEncoding
	hForwardedFor
	hForwarded // other claims about where a request comes from
	hRequestID
	hTraceparent
	hTenant
	hClass
	hTimeoutMs
	hReadTimeout
	hRetryCount
	hServer
	hDate
	hLocation
	hRetryAfter
)

// longestKnown is the longest name that classify knows.
const longestKnown = 25

// classify names a header. It does not allocate.
func classify(name []byte) header {
	if len(name) > longestKnown {
		return hOther
	}
	var low [longestKnown]byte
	for i, b := range name {
		if 'A' <= b && b <= 'Z' {
			b |= 0x20
		}
		low[i] = b
	}
	switch string(low[:len(name)]) {
	case "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization", "te", "trailer", "upgrade":
		return hHop
	case "connection":
		return hConnection
	case "content-length":
		return hContentLength
	case "transfer-encoding":
		return hTransferEncoding
	case "host":
		return hHost
	case "expect":
		return hExpect
	case "content-type":
		return hContentType
	case "authorization", "x-api-key":
		return hCredential
	case "cookie":
		return hPrivate
	case "accept-encoding":
		return hAcceptEncoding
	case "x-forwarded-for":
		return hForwardedFor
	case "forwarded", "x-forwarded-host", "x-forwarded-proto", "x-real-ip":
		return hForwarded
	case "traceparent":
		return hTraceparent
	case "x-request-class":
		return hClass
	case "x-request-timeout-ms":
		return hTimeoutMs
	case "x-stainless-read-timeout":
		return hReadTimeout
	case "x-stainless-retry-count":
		return hRetryCount
	case "server":
		return hServer
	case "date":
		return hDate
	case "location":
		return hLocation
	case "retry-after":
		return hRetryAfter
	}
	return hOther
}

// isToken tells whether name is a header name by RFC 9110.
func isToken(name []byte) bool {
	for _, b := range name {
		if !tokenBytes[b] {
			return false
		}
	}
	return len(name) > 0
}

var tokenBytes = func() (t [256]bool) {
	for b := '0'; b <= '9'; b++ {
		t[b] = true
	}
	for b := 'a'; b <= 'z'; b++ {
		t[b], t[b-32] = true, true
	}
	for _, b := range "!#$%&'*+-.^_`|~" {
		t[b] = true
	}
	return t
}()

// trimOWS cuts optional white space from both ends.
func trimOWS(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t') {
		b = b[1:]
	}
	for len(b) > 0 && (b[len(b)-1] == ' ' || b[len(b)-1] == '\t') {
		b = b[:len(b)-1]
	}
	return b
}

// equalFold compares ASCII without regard to case; low is lower case.
func equalFold(b []byte, low string) bool {
	if len(b) != len(low) {
		return false
	}
	for i := range b {
		c := b[i]
		if 'A' <= c && c <= 'Z' {
			c |= 0x20
		}
		if c != low[i] {
			return false
		}
	}
	return true
}

// hasToken tells whether a comma-separated list has a token, any case.
func hasToken(list []byte, low string) bool {
	for len(list) > 0 {
		var t []byte
		if i := bytes.IndexByte(list, ','); i >= 0 {
			t, list = list[:i], list[i+1:]
		} else {
			t, list = list, nil
		}
		if equalFold(trimOWS(t), low) {
			return true
		}
	}
	return false
}

// named tells whether a Connection header's list names the header.
func named(connection, name []byte) bool {
	if len(connection) == 0 {
		return false
	}
	for len(connection) > 0 {
		var t []byte
		if i := bytes.IndexByte(connection, ','); i >= 0 {
			t, connection = connection[:i], connection[i+1:]
		} else {
			t, connection = connection, nil
		}
		if bytes.EqualFold(trimOWS(t), name) {
			return true
		}
	}
	return false
}

// parseDigits reads a decimal number of at most 18 digits.
func parseDigits(b []byte) (int64, bool) {
	if len(b) == 0 || len(b) > 18 {
		return 0, false
	}
	var n int64
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int64(c-'0')
	}
	return n, true
}

// nextLine cuts one CRLF line off a head. ok is false when the line does not
// end in CRLF or has a bare CR in it.
func nextLine(head []byte) (line, rest []byte, ok bool) {
	i := bytes.IndexByte(head, '\n')
	if i < 1 || head[i-1] != '\r' {
		return nil, nil, false
	}
	line = head[:i-1]
	if bytes.IndexByte(line, '\r') >= 0 {
		return nil, nil, false
	}
	return line, head[i+1:], true
}
