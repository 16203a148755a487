package proxy

import (
	"bytes"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/valyala/fasthttp"

	"github.com/penstock/penstock/telemetry"
	"github.com/penstock/penstock/wire"
)

// ServiceOptions is one auxiliary service: a plain HTTP service that the
// router passes a path prefix to. It has its own breaker, connection limit
// and time-out, so that its outage touches no inference request.
type ServiceOptions struct {
	Name        string        // the error code is NAME_unavailable
	Prefix      string        // /retrieval/: requests whose path begins with it, which is passed on whole
	URL         string        // http://host:port
	Connections int           // at most; 0 = 64; more requests at a time are refused
	Timeout     time.Duration // for a whole answer; 0 = 5s
}

// The breaker of a service opens after this many failures in a row, for
// breakerOpen, doubling up to breakerMax; then one request is let through.
const (
	breakerFails = 3
	breakerOpen  = time.Second
	breakerMax   = 2 * time.Second
)

// serviceIdle is how long an idle connection to a service is kept. Servers
// close theirs too (uvicorn and Node after 5 s, gunicorn after 2 s), and what is
// sent on one that was just closed is lost: it is not repeated.
const serviceIdle = time.Second

// breaker is a service's. now is seconds.
type breaker struct {
	mu    sync.Mutex
	fails int
	opens int
	until float64
	trial bool
}

// allow tells whether a request may go; when not, wait is how long the
// breaker stays open.
func (b *breaker) allow(now float64) (ok bool, wait float64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.fails < breakerFails:
		return true, 0
	case now < b.until:
		return false, b.until - now
	case b.trial:
		return false, breakerOpen.Seconds()
	}
	b.trial = true
	return true, 0
}

func (b *breaker) report(now float64, good bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.trial = false
	if good {
		b.fails, b.opens = 0, 0
		return
	}
	if b.fails++; b.fails >= breakerFails {
		d := min(breakerOpen<<min(b.opens, 8), breakerMax)
		b.opens++
		b.until = now + d.Seconds()
	}
}

// service is one auxiliary service's route.
type service struct {
	o                   ServiceOptions
	client              *fasthttp.HostClient
	host                string
	prefix              []byte
	breaker             breaker
	ok, failed, refused *metrics.Counter
}

func newService(o ServiceOptions, reg *telemetry.Registry, maxBody int) (*service, error) {
	u, err := url.Parse(o.URL)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return nil, fmt.Errorf("services: %s: url %q is not http://host:port", o.Name, o.URL)
	}
	if !strings.HasPrefix(o.Prefix, "/") || len(o.Prefix) < 2 {
		return nil, fmt.Errorf("services: %s: prefix %q has to begin with / and name a path", o.Name, o.Prefix)
	}
	if o.Connections == 0 {
		o.Connections = 64
	}
	if o.Timeout == 0 {
		o.Timeout = 5 * time.Second
	}
	addr := u.Host
	if u.Port() == "" {
		addr += map[string]string{"http": ":80", "https": ":443"}[u.Scheme]
	}
	s := &service{o: o, host: u.Host, prefix: []byte(o.Prefix), client: &fasthttp.HostClient{
		Addr: addr, IsTLS: u.Scheme == "https", Name: "penstock", MaxConns: o.Connections, MaxResponseBodySize: max(maxBody, 1<<20),
		MaxIdleConnDuration: serviceIdle, ReadTimeout: o.Timeout, WriteTimeout: o.Timeout, NoDefaultUserAgentHeader: true, DisablePathNormalizing: true,
		RetryIfErr: func(*fasthttp.Request, int, error) (bool, bool) { return false, false }, // never repeated: it may have effects
	}}
	s.ok = reg.Counter(telemetry.ServiceRequests, o.Name, "ok")
	s.failed = reg.Counter(telemetry.ServiceRequests, o.Name, "error")
	s.refused = reg.Counter(telemetry.ServiceRequests, o.Name, "refused")
	return s, nil
}

// serve passes the request on. A non-nil error is the router's own answer.
func (s *service) serve(f *flight) *wire.Error {
	now := f.p.now
	ok, wait := s.breaker.allow(now())
	if !ok {
		s.refused.Inc()
		e := wire.ServiceUnavailable(s.o.Name, "service %s is down; it is tried again by itself", s.o.Name)
		e.RetryAfter = wait
		return e
	}
	good := false
	defer func() { s.breaker.report(now(), good) }()
	req, resp := fasthttp.AcquireRequest(), fasthttp.AcquireResponse()
	defer fasthttp.ReleaseRequest(req)
	defer fasthttp.ReleaseResponse(resp)
	s.request(f, req)
	err := s.client.Do(req, resp)
	if errors.Is(err, fasthttp.ErrNoFreeConns) {
		good = true // full is not broken
		s.refused.Inc()
		e := wire.ServiceUnavailable(s.o.Name, "service %s has no free connection of %d", s.o.Name, s.o.Connections)
		e.RetryAfter = 1
		return e
	}
	if err != nil {
		s.failed.Inc()
		e := wire.ServiceUnavailable(s.o.Name, "service %s did not answer", s.o.Name)
		var dial *fasthttp.ErrDialWithUpstream // it cannot have seen the request
		e.Retry = errors.As(err, &dial) || f.safeAgain()
		return e
	}
	if good = resp.StatusCode() < 500; good {
		s.ok.Inc()
	} else {
		s.failed.Inc()
	}
	resp.Header.SetNoDefaultContentType(true)
	f.reply(reply{status: resp.StatusCode(), ctype: string(resp.Header.ContentType()), headers: serviceHeaders(resp), body: resp.Body(), length: f.serviceLength(resp)})
	return nil
}

// serviceLength is what reply says of the length beyond the body's own.
func (f *flight) serviceLength(resp *fasthttp.Response) int {
	switch status := resp.StatusCode(); {
	case status == 204 || status == 304:
		return noLength
	case f.req.head:
		return max(resp.Header.ContentLength(), noLength)
	}
	return 0
}

// safeAgain tells whether a service may get the request a second time: by its
// method, or because the client says so.
func (f *flight) safeAgain() bool {
	return f.req.method != "POST" && f.req.method != "PATCH" || f.namesItself()
}

// climbs tells whether a path has a segment that leaves its folder, also one
// written so that only the service would see it (%2e, %2f, a backslash, a
// path parameter). A service is given its prefix and nothing above it.
func climbs(path []byte) bool {
	dots, only := 0, true // of the segment so far
	for i := 0; i < len(path); i++ {
		c := path[i]
		if c == '%' && i+2 < len(path) {
			if v, err := strconv.ParseUint(string(path[i+1:i+3]), 16, 8); err == nil {
				c, i = byte(v), i+2
			}
		}
		switch c {
		case '/', '\\', ';':
			if only && dots == 2 {
				return true
			}
			dots, only = 0, true
		case '.':
			dots++
		default:
			only = false
		}
	}
	return only && dots == 2
}

// request makes the service's request of what the flight owns. The client's
// credentials are for this router and are not in f.req.headers.
func (s *service) request(f *flight, req *fasthttp.Request) {
	req.Header.SetMethod(f.req.method)
	req.SetRequestURIBytes(f.req.uri)
	for rest := f.req.headers; len(rest) > 0; {
		i := bytes.IndexByte(rest, '\n') + 1
		line := bytes.TrimRight(rest[:i], "\r\n")
		rest = rest[i:]
		if name, value, ok := bytes.Cut(line, []byte(":")); ok {
			req.Header.AddBytesKV(name, bytes.TrimSpace(value))
		}
	}
	req.UseHostHeader = true
	req.SetHost(s.host)
	req.SetBodyRaw(f.req.body)
	req.SetTimeout(s.o.Timeout)
}

// serviceHeaders renders the answer's end-to-end headers.
func serviceHeaders(resp *fasthttp.Response) string {
	var b strings.Builder
	for k, v := range resp.Header.All() {
		switch classify(k) {
		case hHop, hConnection, hContentLength, hTransferEncoding, hServer, hDate, hContentType, hRequestID, hTraceparent, hTenant, hExpect:
			continue
		}
		b.Write(k)
		b.WriteString(": ")
		b.Write(v)
		b.WriteString("\r\n")
	}
	return b.String()
}
