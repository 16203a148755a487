// Package proxy is the data path: it takes requests from clients (fasthttp
// reads them), asks the admission core where each may go, sends it to a
// replica over its own connection pool, and relays the answer byte for byte.
//
// One goroutine serves one client connection, and does the upstream I/O of
// its request too. What may be touched from outside of it (the disconnect
// watcher, a revocation, a shutdown) is the Flight, under its mutex.
package proxy

import (
	"crypto/tls"
	"time"

	"go.uber.org/zap"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/telemetry"
	"github.com/penstock/penstock/tenant"
	"github.com/penstock/penstock/wire"
)

// Core is what the proxy needs of admission.Pool. The proxy calls it under
// one mutex per pool; see admission for the meaning of each method.
type Core interface {
	Join(now float64, s admission.ReplicaSpec)
	Remove(now float64, id fleet.ID)
	Drain(now float64, id fleet.ID, on bool)
	Admit(now float64, t *admission.Ticket) admission.Decision
	First(now float64, t *admission.Ticket)
	Progress(now float64, t *admission.Ticket, tokens int)
	Done(now float64, t *admission.Ticket, e admission.End)
	Leave(now float64, t *admission.Ticket)
	Told(t *admission.Ticket, print uint64)
	Stood(now, seconds float64)
	Observe(now float64, id fleet.ID, s fleet.Sample)
	Evidence(now float64, id fleet.ID, e fleet.Evidence)
	Advance(now float64, out []*admission.Ticket) []*admission.Ticket
	Revoked(out []*admission.Ticket) []*admission.Ticket
	NextWake(now float64) float64
	Proven(now, since float64, w *fleet.Work) bool
	View() *fleet.View
	EstimatePrompt(model uint32, ascii, other int) int
	EstimateMedia(model uint32, parts int) int
}

// Budget bounds attempts over requests of a pool (degradation.md, 5). It is
// called under the pool's mutex. nil = no bound but AttemptsPerRequest.
type Budget interface {
	Request(now float64)                       // a request begins
	Repeated(now float64)                      // a client repeats one (X-Stainless-Retry-Count above 0)
	Retry(now float64) bool                    // may one more attempt than requests be sent?
	Unused()                                   // what Retry allowed last was not sent
	Later(now float64) (wait float64, ok bool) // in how many seconds may a client repeat what failed?
}

// Options says how a Proxy works. The zero value of a field means its
// default, given in its comment.
type Options struct {
	Log     *zap.Logger         // nil = no log
	Access  *zap.Logger         // one line per request, at info; nil = Log
	Metrics *telemetry.Registry // nil = an own one

	// Now is the process's clock in seconds; every Sample.At and all times
	// given to a Core are on it. nil = seconds since New, monotonic.
	Now func() float64

	Pools   []PoolOptions
	Routes  []RouteOptions // ladders, by model name; see package ladder
	Classes []ClassOptions // first is most important; nil = one class "standard", deadline 5m

	TenantHeader  string // the header with the tenant's sandbox, echoed on every answer; "" = X-Sandbox-ID
	RequestHeader string // the header with the request's id; "" = X-Request-ID

	// Auth, when given, decides who a request is of and what it may do. It is
	// called once per request, before the body is looked at (and before "100
	// Continue"). nil = everybody is welcome.
	Auth func(c Credentials) (Identity, *wire.Error)
	// PassAuth sends the client's own Authorization and x-api-key on to the
	// replica. Only heeded when Auth is nil and the replica has no API key of
	// its own. Default: client credentials are never passed on.
	PassAuth bool
	// TrustForwarded appends the peer's address to the X-Forwarded-For that
	// came; false (the default) replaces the header by the peer's address.
	TrustForwarded bool
	// ShowReplica adds X-Penstock-Replica with the replica's name to answers.
	ShowReplica bool

	// TolerateViolations passes on streams that break their protocol in a way
	// that could mislead a client (two tool calls under one index, say); they
	// are only counted then. Default: such a stream ends in stream_integrity.
	TolerateViolations bool
	// StrictIntegrity also ends streams whose violation other makes of engines
	// may show while all is well: another model's name, no finish reason.
	StrictIntegrity bool

	MaxBody        int   // bytes of a request body; 0 = 32 MiB; more is answered 413
	ReceiveBytes   int64 // bytes of larger request bodies (over 64 KiB) that are coming at a time; 0 = 1 GiB, at least MaxBody; more is answered 503 concurrency_limit
	MaxHeader      int   // bytes of a request's head, and of a replica's; 0 = 16 KiB; more is answered 431
	MaxInFlight    int   // requests inside the router, held ones included; 0 = 65536; more is answered 503 concurrency_limit
	MaxConnections int   // client connections; 0 = 262144
	BufferAnswer   int   // bytes of an answer that is not a stream, held back until it is whole so that a replica's death in it can still fail over; 0 = 1 MiB

	HeaderTimeout  time.Duration // reading a request's head; 0 = 10s
	BodyTimeout    time.Duration // reading a request's body in all; 0 = 60s
	IdleTimeout    time.Duration // an idle client connection; 0 = 75s (nginx's keepalive_timeout)
	WriteTimeout   time.Duration // one write to a client that does not read; 0 = 30s
	ConnectTimeout time.Duration // connecting to a replica; 0 = 2s
	// FirstToken bounds the wait for an attempt's first content event. The
	// deadline is max(FirstToken, FirstTokenFactor x predicted TTFT), and never
	// later than the request's own. 0 = 10s.
	FirstToken time.Duration
	// FirstTokenFactor: 0 = 4.
	FirstTokenFactor float64
	// AnswerTimeout is FirstToken for answers that come in one piece (not
	// streamed): these begin only when all tokens are made. 0 = the request's deadline.
	AnswerTimeout time.Duration
	// StallTimeout ends a stream that has begun and brought no byte for so
	// long. 0 = 60s.
	StallTimeout time.Duration
	// UpstreamIdle is how long an idle connection to a replica may be used
	// again. 0 = 3s (vLLM closes idle ones after exactly 5.0 s).
	UpstreamIdle time.Duration
	// UpstreamIdleMax bounds idle connections per replica. 0 = 256.
	UpstreamIdleMax int
	// Attempts is the most attempts of one request that may reach a replica.
	// 0 = 2. Refused connections do not count, as nothing was sent.
	Attempts int

	Services []ServiceOptions  // auxiliary services, by path prefix
	Limits   tenant.Limits     // each tenant's; the zero value is no limit
	Tracer   *telemetry.Tracer // nil = spans are not sent

	// PeerTries, when given, tells how often other routers saw the request of
	// that print since its degraded or shed answer, that one included. It is
	// asked only after PeersStorm, and must not block.
	PeerTries func(print uint64) int

	CacheBytes int // answers held for cached tiers; 0 = 64 MiB

	TLS *tls.Config // nil = plain HTTP. ALPN should be http/1.1 only.

	// DecisionLog is how many of the latest decisions are kept for reading;
	// 0 = 256, negative = none.
	DecisionLog int

	// Seed of the jitter of Retry-After; 0 = from the clock.
	Seed uint64
}

// PoolOptions is a set of interchangeable replicas.
type PoolOptions struct {
	Name    string
	Core    Core     // admission.New(...); the proxy owns it from here on
	Budget  Budget   // may be nil
	Models  []string // served names; empty = whatever its replicas serve
	Aliases []string // further names, rewritten to Models[0] (or the first model that a replica serves)
	// AliasOf names the model that an alias stands for where it is another
	// than that.
	AliasOf map[string]string
	// Prefer, when given, tells where all routers send a prompt with these
	// first blocks when nobody has it yet: the consistent hash's first and
	// second choice, 0 = none. It must not block.
	Prefer func(blocks []uint64) [2]fleet.ID
	// TTFTObjective and ITLObjective are what penstock_slo_requests_total
	// measures against, seconds (ttft + ttftPer1k x prompt/1000). 0 = 0.5, 0.05.
	TTFTObjective, TTFTPer1K, ITLObjective float64
	// SideEffects: its replicas act outside of the answer, so that a request
	// which one may have begun is not tried again (without an Idempotency-Key).
	SideEffects bool
}

// ClassOptions is one class of requests.
type ClassOptions struct {
	Name     string
	Deadline time.Duration // of a request that names none; 0 = 5m
	Exact    bool          // no tier changes its prompts
}

// ReplicaSpec is one replica of a pool.
type ReplicaSpec struct {
	ID       fleet.ID    // never used before, not 0
	Name     string      // for people, metrics and logs; "" = Addr
	Addr     string      // host:port, already resolved (names are resolved in discovery)
	Host     string      // value of the Host header; "" = Addr
	BasePath string      // put before the path of every request, no trailing slash
	TLS      *tls.Config // nil = plain
	APIKey   string      // sent as Authorization: Bearer; never logged
	Models   []string    // what it serves, as far as known
	Caps     uint64      // fleet.AbilityTools ...; 0 = all
	Region   uint64
	Domain   uint32
	Profile  *fleet.Profile
	Warm     bool // known at start-up: no slow start
}

// ModelInfo is one entry of a replica's GET /v1/models.
type ModelInfo struct {
	ID          string
	Created     int64
	OwnedBy     string
	Root        string // what it is (path or name), "" = same as ID
	Parent      string // base model of an adapter
	MaxModelLen int    // 0 = not known
}

// Credentials is what a client showed. Its strings are owned.
type Credentials struct {
	Authorization string
	APIKey        string // x-api-key
	Tenant        string // the tenant header
	Class         string // X-Request-Class
	Path          string
	RemoteIP      string
}

// Identity is who a request is of.
type Identity struct {
	Tenant string // "" = the value of the tenant header
	Class  int    // class it has when it asks for none; also the best it may ask for
}
