package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"
	"go.uber.org/zap"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/internal/mutant"
	"github.com/penstock/penstock/ladder"
	"github.com/penstock/penstock/telemetry"
	"github.com/penstock/penstock/tenant"
	"github.com/penstock/penstock/wire"
)

// Proxy is the data path of one router.
type Proxy struct {
	opt     Options
	log     *zap.Logger
	access  *zap.Logger
	reg     *telemetry.Registry
	now     func() float64
	srv     *fasthttp.Server
	watch   *watcher
	metrics *proxyMetrics

	pools    []*pool
	ladders  []*ladderRoute
	services []*service
	storms   storms
	limiter  *tenant.Limiter // nil = no limits
	cache    *ladder.Cache   // nil when no route has a cached tier
	repMu    sync.Mutex      // over byID and the making of routes
	byID     map[fleet.ID]*replica
	routes   atomic.Pointer[routes]
	models   interner
	tenants  interner
	classes  map[string]int

	requestHeader, tenantHeader       []byte
	requestHeaderLow, tenantHeaderLow string

	connID   atomic.Uint64
	open     atomic.Int64
	waits    atomic.Int64 // client connections whose write waits
	inFlight atomic.Int64

	// What a reload changes while requests run; see live.go.
	maxInFlight atomic.Int64
	deadlines   atomic.Pointer[[]time.Duration] // by class

	draining atomic.Bool
	stopping atomic.Bool

	resolveFn func(string) string // resolve, bound once

	receiving atomic.Int64 // bytes of larger bodies that are coming

	connMu sync.Mutex
	conns  map[*clientConn]struct{}

	stop    chan struct{}
	stopped sync.WaitGroup
	once    sync.Once
}

func orDuration(v *time.Duration, d time.Duration) {
	if *v == 0 {
		*v = d
	}
}

func orInt(v *int, d int) {
	if *v == 0 {
		*v = d
	}
}

// defaults fills in what was left zero; see Options.
func (o *Options) defaults() {
	orInt(&o.MaxBody, 32<<20)
	orInt(&o.MaxHeader, 16<<10)
	if o.ReceiveBytes == 0 {
		o.ReceiveBytes = 1 << 30
	}
	o.ReceiveBytes = max(o.ReceiveBytes, int64(o.MaxBody))
	orInt(&o.MaxInFlight, 65536)
	orInt(&o.MaxConnections, 262144)
	orInt(&o.BufferAnswer, 1<<20)
	orInt(&o.UpstreamIdleMax, 256)
	orInt(&o.Attempts, 2)
	orInt(&o.CacheBytes, 64<<20)
	orInt(&o.DecisionLog, 256)
	orDuration(&o.HeaderTimeout, 10*time.Second)
	orDuration(&o.BodyTimeout, time.Minute)
	orDuration(&o.IdleTimeout, 75*time.Second)
	orDuration(&o.WriteTimeout, 30*time.Second)
	orDuration(&o.ConnectTimeout, 2*time.Second)
	orDuration(&o.FirstToken, 10*time.Second)
	orDuration(&o.StallTimeout, time.Minute)
	orDuration(&o.UpstreamIdle, 3*time.Second)
	if o.FirstTokenFactor == 0 {
		o.FirstTokenFactor = 4
	}
	if o.TenantHeader == "" {
		o.TenantHeader = "X-Sandbox-ID"
	}
	if o.RequestHeader == "" {
		o.RequestHeader = "X-Request-ID"
	}
	o.Classes = append([]ClassOptions(nil), o.Classes...)
	if len(o.Classes) == 0 {
		o.Classes = []ClassOptions{{Name: "standard"}}
	}
	for i := range o.Classes {
		orDuration(&o.Classes[i].Deadline, defaultDeadline)
	}
}

// New makes a Proxy. It serves nothing yet; replicas are added by AddReplica.
func New(o Options) (*Proxy, error) {
	o.defaults()
	p := &Proxy{opt: o, log: o.Log, reg: o.Metrics, now: o.Now, byID: make(map[fleet.ID]*replica), classes: make(map[string]int),
		conns: make(map[*clientConn]struct{}), stop: make(chan struct{}),
		requestHeader: []byte(o.RequestHeader), tenantHeader: []byte(o.TenantHeader),
		requestHeaderLow: strings.ToLower(o.RequestHeader), tenantHeaderLow: strings.ToLower(o.TenantHeader)}
	if p.log == nil {
		p.log = zap.NewNop()
	}
	if p.access = o.Access; p.access == nil {
		p.access = p.log
	}
	if p.reg == nil {
		p.reg = telemetry.New()
	}
	if p.now == nil {
		began := time.Now()
		p.now = func() float64 { return time.Since(began).Seconds() }
	}
	for i, c := range o.Classes {
		if _, twice := p.classes[c.Name]; twice {
			return nil, fmt.Errorf("classes: %q is given twice", c.Name)
		}
		p.classes[c.Name] = i
	}
	if !isToken(p.requestHeader) || !isToken(p.tenantHeader) {
		return nil, fmt.Errorf("header names %q, %q: not valid in HTTP", o.RequestHeader, o.TenantHeader)
	}
	p.resolveFn = p.resolve
	p.SetMaxInFlight(o.MaxInFlight)
	if err := p.SetClasses(o.Classes); err != nil {
		return nil, err
	}
	p.metrics = newProxyMetrics(p.reg, p)
	for _, po := range o.Pools {
		if po.Core == nil || po.Name == "" {
			return nil, fmt.Errorf("pool %q: a name and a core are needed", po.Name)
		}
		if p.poolNamed(po.Name) != nil {
			return nil, fmt.Errorf("pools: %q is given twice", po.Name)
		}
		p.pools = append(p.pools, newPool(p, po))
	}
	p.storms.guard = admission.NewStormGuard(admission.StormConfig{Window: stormWindow})
	p.addLadders()
	for _, so := range o.Services {
		s, err := newService(so, p.reg, o.MaxBody)
		if err != nil {
			return nil, err
		}
		p.services = append(p.services, s)
	}
	if o.Limits != (tenant.Limits{}) {
		p.limiter = tenant.NewLimiter(o.Limits)
		p.reg.Gauge(telemetry.TenantPlaces, func() float64 { return float64(p.limiter.InFlight()) })
	}
	p.reroute()
	w, err := newWatcher()
	if err != nil {
		return nil, err
	}
	p.watch = w
	p.srv = p.server()
	p.stopped.Add(1)
	go p.sweep()
	for _, lr := range p.ladders {
		p.stopped.Add(1)
		go p.canaries(lr)
	}
	return p, nil
}

// server is fasthttp's part: it reads requests, and calls handle for each in
// the connection's goroutine.
func (p *Proxy) server() *fasthttp.Server {
	return &fasthttp.Server{
		Name:                         "penstock",
		Handler:                      p.handle,
		ErrorHandler:                 p.handleError,
		HeaderReceived:               p.headerReceived,
		ExpectHandler:                p.handleExpect,
		ReadBufferSize:               p.opt.MaxHeader,
		WriteBufferSize:              512, // what fasthttp writes is dropped, see clientConn
		ReadTimeout:                  p.opt.HeaderTimeout,
		IdleTimeout:                  p.opt.IdleTimeout,
		MaxRequestBodySize:           p.opt.MaxBody,
		Concurrency:                  p.opt.MaxConnections + 1,
		ReduceMemoryUsage:            true, // no read buffer is held while a stream runs or a connection idles
		NoDefaultServerHeader:        true,
		NoDefaultDate:                true,
		NoDefaultContentType:         true,
		DisablePreParseMultipartForm: true,
		SecureErrorLogMessage:        true,
		Logger:                       dropLogger{},
	}
}

// dropLogger: fasthttp's messages quote what clients sent.
type dropLogger struct{}

func (dropLogger) Printf(string, ...any) {}

// Now is the clock that samples and cores use, seconds.
func (p *Proxy) Now() float64 { return p.now() }

// Serve accepts clients from ln until Shutdown.
func (p *Proxy) Serve(ln net.Listener) error {
	tuneListener(ln, p.opt.WriteTimeout)
	err := p.srv.Serve(&proxyListener{ln, p})
	if p.stopping.Load() {
		return nil
	}
	return err
}

func (p *Proxy) sweep() {
	defer p.stopped.Done()
	t := time.NewTicker(time.Second)
	defer t.Stop()
	var reps []*replica
	for {
		select {
		case <-p.stop:
			return
		case now := <-t.C:
			reps = reps[:0]
			p.repMu.Lock()
			for _, r := range p.byID {
				reps = append(reps, r)
			}
			p.repMu.Unlock()
			for _, r := range reps {
				r.sweep(now)
			}
		}
	}
}

// handleExpect decides on "Expect: 100-continue" before the body comes.
func (p *Proxy) handleExpect(ctx *fasthttp.RequestCtx) int {
	c := ctx.Conn().(*clientConn)
	f := &c.flight
	f.begin()
	e := c.head(&ctx.Request.Header)
	if e == nil {
		e = f.precheck()
	}
	if e == nil && ctx.Request.Header.ContentLength() > p.opt.MaxBody {
		e = p.tooLarge()
	}
	if e == nil && c.noRoom {
		e = errNoRoom()
	}
	if e != nil {
		c.received()
		p.inFlight.Add(1) // account takes it away
		f.closeConn, c.linger = true, true
		f.outcome = outcomeRefused
		f.fail(e)
		f.end(ctx)
		return fasthttp.StatusExpectationFailed
	}
	f.finish()
	c.headErr, c.headRead = nil, true
	if c.send([]byte("HTTP/1.1 100 Continue\r\n\r\n")) != nil {
		return fasthttp.StatusExpectationFailed
	}
	return fasthttp.StatusContinue
}

func (p *Proxy) tooLarge() *wire.Error {
	return wire.NewError(wire.CodeRequestTooLarge, "the request body is larger than %d bytes (max_body)", p.opt.MaxBody)
}

// handleError answers what fasthttp could not read as a request.
func (p *Proxy) handleError(ctx *fasthttp.RequestCtx, err error) {
	c, ok := ctx.Conn().(*clientConn)
	if !ok || !c.got {
		return // nothing came: nobody asked
	}
	f := &c.flight
	f.begin()
	p.inFlight.Add(1)
	c.received()
	whole := c.headRead // else it is the head that could not be read
	bad := c.head(&ctx.Request.Header)
	f.classifyPath()
	f.closeConn, c.linger = true, true
	f.outcome = outcomeRefused
	var small *fasthttp.ErrSmallBuffer
	var ne net.Error
	var e *wire.Error
	switch {
	case errors.As(err, &small):
		e = badRequest("the request's head is too large")
		e.Status = fasthttp.StatusRequestHeaderFieldsTooLarge
	case whole && bad != nil:
		e = bad
	case c.noRoom:
		e = errNoRoom()
		f.outcome = outcomeShed
	case errors.Is(err, fasthttp.ErrBodyTooLarge):
		e = p.tooLarge()
	case errors.As(err, &ne) && ne.Timeout():
		e = badRequest("the request did not come in time")
		e.Status = fasthttp.StatusRequestTimeout
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		e = badRequest("the request ended early")
	default:
		e = badRequest("the request is not valid HTTP")
	}
	f.fail(e)
	f.end(ctx)
}

// handle serves one request.
func (p *Proxy) handle(ctx *fasthttp.RequestCtx) {
	c, ok := ctx.Conn().(*clientConn)
	if !ok {
		panic("BUG: a connection that is not from the proxy's listener")
	}
	f := &c.flight
	n := p.inFlight.Add(1)
	f.begin()
	defer f.end(ctx)
	defer f.rescue()
	c.received()
	if e := c.head(&ctx.Request.Header); e != nil {
		f.closeConn, c.linger = true, true
		f.outcome = outcomeRefused
		f.fail(e)
		return
	}
	f.closeConn = ctx.Request.Header.ConnectionClose()
	f.takeBody(&ctx.Request)
	if n > p.maxInFlight.Load() && f.inference() && !mutant.On("no-in-flight-limit") {
		f.outcome = outcomeShed
		f.fail(wire.NewError(wire.CodeConcurrencyLimit, "the router has as many requests as it takes"))
		return
	}
	f.dispatch()
}

// rescue turns a panic into an answer. The place is given back first.
func (f *flight) rescue() {
	v := recover()
	if v == nil {
		return
	}
	f.p.log.Error("BUG: panic while serving a request", zap.Any("panic", v), zap.String("request_id", string(f.req.id)), zap.ByteString("stack", debug.Stack()))
	if f.pool != nil {
		f.release(result{kind: failed, evidence: fleet.EvidenceOK})
	}
	f.outcome = outcomeFailed
	f.closeConn = true
	if !f.wrote {
		f.fail(wire.NewError(wire.CodeInternal, "the router failed on this request"))
	}
}

// end closes the request's books, whatever became of it.
func (f *flight) end(ctx *fasthttp.RequestCtx) {
	f.finish()
	if f.limited {
		f.limited = false
		f.p.limiter.Return(f.tenantName())
	}
	f.account()
	f.p.inFlight.Add(-1)
	// fasthttp's own answer is dropped by clientConn.Write: keep it small.
	ctx.Response.SkipBody = true
	if f.closeConn {
		ctx.SetConnectionClose()
	}
	f.returnBody(&ctx.Request)
}

// refuseConnection answers a client that is one too many.
func (p *Proxy) refuseConnection(c net.Conn) {
	_ = c.SetDeadline(time.Now().Add(time.Second))
	e := wire.NewError(wire.CodeConcurrencyLimit, "the router has as many connections as it takes")
	body := e.AppendBody(nil, wire.KindNone)
	after, ms, should := e.RetryHeaders()
	_, _ = fmt.Fprintf(c, "HTTP/1.1 503 Service Unavailable\r\nServer: penstock\r\nContent-Type: application/json\r\nConnection: close\r\n"+
		"Retry-After: %s\r\nretry-after-ms: %s\r\nx-should-retry: %s\r\nContent-Length: %d\r\n\r\n%s", after, ms, should, len(body), body)
	_ = c.Close()
}

// StartDrain makes /readyz say 503 from now on; requests are still served.
func (p *Proxy) StartDrain() { p.draining.Store(true) }

// InFlight is the number of requests inside the router.
func (p *Proxy) InFlight() int { return int(p.inFlight.Load()) }

// Shutdown stops accepting, lets requests and streams end, and returns when
// all have. When ctx ends first, what still runs is cut: streams get an error
// event, held requests a 503.
func (p *Proxy) Shutdown(ctx context.Context) error {
	p.StartDrain()
	done := make(chan error, 1)
	inner, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() { done <- p.srv.ShutdownWithContext(inner) }()
	var err error
	select {
	case err = <-done:
	case <-ctx.Done():
		p.stopping.Store(true)
		p.connMu.Lock()
		for c := range p.conns {
			c.flight.cancel(causeShutdown)
		}
		p.connMu.Unlock()
		select {
		case err = <-done:
		case <-time.After(cutGrace):
			cancel()
			<-done
			err = ctx.Err()
			p.connMu.Lock()
			for c := range p.conns {
				_ = c.Conn.Close()
			}
			p.connMu.Unlock()
			// So that each is counted and has its line in the access log.
			for end := time.Now().Add(cutGrace / 4); p.inFlight.Load() > 0 && time.Now().Before(end); {
				time.Sleep(time.Millisecond)
			}
		}
	}
	p.stopping.Store(true)
	for _, s := range p.services {
		s.client.CloseIdleConnections()
	}
	p.close()
	return err
}

// cutGrace is how long cut requests have for their last words.
const cutGrace = 2 * time.Second

func (p *Proxy) close() {
	p.once.Do(func() {
		close(p.stop)
		p.stopped.Wait()
		for _, pl := range p.pools {
			pl.close()
		}
		p.watch.close()
	})
}
