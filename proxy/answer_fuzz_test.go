package proxy

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"net/http/httputil"
	"testing"
)

// What the dechunker makes of chunked bytes, however they are cut, is what
// net/http makes of them; where net/http sees an error, it must not see an end.
func FuzzDechunk(f *testing.F) {
	f.Add([]byte("5\r\nhello\r\n0\r\n\r\n"), uint8(3))
	f.Add([]byte("5;a=\"b\"\r\nhello\r\n00\r\nX: y\r\n\r\n"), uint8(1))
	f.Add([]byte("FFFFFFFFFFFFFFFF\r\nx"), uint8(7))
	f.Add([]byte("1\r\na\r\n1\r\nb\r\n0\r\n\r\nrest"), uint8(200))
	f.Fuzz(func(t *testing.T, raw []byte, cut uint8) {
		var d dechunker
		var got []byte
		var bad error
		for rest := raw; len(rest) > 0 && bad == nil && !d.ended(); {
			p := rest[:min(len(rest), int(cut)+1)]
			rest = rest[len(p):]
			n, _ := d.whole(p, func(data []byte) bool { got = append(got, data...); return true })
			for p = p[n:]; len(p) > 0 && bad == nil && !d.ended(); {
				var data []byte
				var k int
				data, k, bad = d.next(p)
				got = append(got, data...)
				p = p[k:]
			}
		}
		want, err := io.ReadAll(httputil.NewChunkedReader(bytes.NewReader(raw)))
		if d.ended() && err != nil {
			t.Fatalf("an end where net/http has %v: %q", err, raw)
		}
		if d.ended() && !bytes.Equal(got, want) {
			t.Fatalf("got %q, want %q", got, want)
		}
	})
}

// A head that is taken is one that net/http takes, with the same status and framing.
func FuzzAnswerHead(f *testing.F) {
	f.Add([]byte("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"))
	f.Add([]byte("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close, X\r\n\r\n"))
	f.Add([]byte("HTTP/1.0 404 Not Found\r\n\r\n"))
	f.Add([]byte("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		i := bytes.Index(raw, headEnd)
		if i < 0 {
			return
		}
		var h answerHead
		if h.parse(raw[:i+2], false) != nil {
			return
		}
		resp, err := http.ReadResponse(bufio.NewReader(bytes.NewReader(raw)), &http.Request{Method: "POST"})
		if err != nil {
			// net/http is stricter on some values; framing is what matters.
			return
		}
		if resp.StatusCode != h.status {
			t.Fatalf("status %d, net/http %d", h.status, resp.StatusCode)
		}
		chunked := len(resp.TransferEncoding) > 0
		if chunked != (h.framing == framingChunked) && h.framing != framingNone {
			t.Fatalf("chunked: %v, net/http %v: %q", h.framing == framingChunked, chunked, raw)
		}
		if h.framing == framingLength && resp.ContentLength != h.length {
			t.Fatalf("length %d, net/http %d: %q", h.length, resp.ContentLength, raw)
		}
	})
}
