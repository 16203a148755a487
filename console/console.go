// Package console is the admin listener: metrics, liveness, readiness, pprof,
// the admin API under /admin/v1/ and a page for people at /. It shows and
// passes on; what it shows comes from a Router.
//
// It asks for no credentials, so it belongs on the loopback (the default of
// the admin setting) or behind something that does. Requests that a browser
// makes on behalf of another site are refused, see protect.
package console

import (
	"embed"
	"io/fs"
	"net/http"
	"net/http/pprof"
	"strconv"
	"strings"

	"github.com/VictoriaMetrics/metrics"
	"go.uber.org/zap"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/telemetry"
)

// Router is what the console needs of the running router. Its methods are
// called from many goroutines; what they return is the console's own.
type Router interface {
	Now() float64                  // the process's clock, seconds
	Ready() (ok bool, body []byte) // the answer of /readyz
	Pools() []Pool
	Decisions() []Decision // the latest kept, in any order
	Requests() []Request   // in flight, in any order
	Config() any           // the configuration in use; it is shown by way of Redacted
	// Drain begins or ends an operator's drain; false when there is no such replica.
	Drain(id fleet.ID, on bool) bool
}

// Pool is a pool and its replicas.
type Pool struct {
	Name     string
	Models   []string // names by which clients reach it
	Aliases  []string
	Stats    admission.Stats // Classes is not read
	Replicas []Replica
	Waiting  []Waiting // replicas that have never told what they serve, and get nothing until they do
}

// Waiting is a replica that the pool is to have and that has not joined yet.
type Waiting struct {
	Name, Error string
}

// Replica is one replica as the decisions see it, and what else is known.
type Replica struct {
	fleet.Replica
	Served  []string // model names
	Info    admission.ReplicaInfo
	Learned bool // Info is set
	Scrape  Scrape
}

// Scrape is how reading a replica's own word goes.
type Scrape struct {
	Metrics, Probe, Models string  // result of the last try; empty = none yet
	Error                  string  // of the last failed try
	Age                    float64 // of the last good sample, seconds
	Seen                   bool    // there was a good sample
}

// Decision is one decision and why.
type Decision struct {
	At         float64 // process seconds
	Request    string  // its id
	Pool       string
	Verdict    string // placed, held, shed
	Replica    string
	Reason     string // of a shed
	Class      string
	Attempt    int
	Prompt     int     // tokens, estimated
	TTFT       float64 // predicted, seconds
	ITL        float64
	Own, Harm  float64 // seconds
	Hit        float64 // prompt tokens expected in the prefix cache
	HeldFor    float64 // seconds
	Observed   float64 // TTFT that came, seconds; 0 = none yet
	Candidates []Candidate
}

// Candidate is a replica that a decision could choose. A prediction that was
// not kept is NaN.
type Candidate struct {
	Replica               string
	State                 string
	Requests              int     // of the account then
	Prefill               float64 // uncached prompt tokens without a first token
	KV                    float64 // tokens held
	TTFT, Own, Harm, Cost float64 // predicted, seconds
	Hit                   float64 // tokens
}

// Request is one request in flight.
type Request struct {
	ID      string
	Path    string
	Model   string
	Tenant  string
	Class   string
	Phase   string // held, headers, first_token, streaming
	Pool    string
	Replica string
	Attempt int
	Prompt  int     // tokens, estimated
	Output  int     // tokens so far
	Age     float64 // since it came, seconds
	HeldFor float64 // seconds
}

// Options of the handler.
type Options struct {
	Router  Router
	Reg     *telemetry.Registry
	Log     *zap.Logger // default none
	Version string
	Started float64 // when the process began, on Router's clock
	// Hosts tells the names by which the listener may be asked now, beside
	// localhost and IP addresses. nil = none.
	Hosts func() []string
	// Also are further patterns of http.ServeMux, guarded as all others are.
	Also map[string]http.HandlerFunc
}

//go:embed page
var pageFiles embed.FS

type handler struct{ Options }

// New returns the handler of the admin listener.
func New(o Options) http.Handler {
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	if o.Hosts == nil {
		o.Hosts = func() []string { return nil }
	}
	h := &handler{o}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics", h.metrics)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_, _ = w.Write([]byte("ok\n"))
	})
	mux.HandleFunc("GET /readyz", h.ready)
	h.api(mux)
	for pattern, f := range o.Also {
		mux.HandleFunc(pattern, f)
	}
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	files, err := fs.Sub(pageFiles, "page")
	if err != nil {
		panic("BUG: embedded page: " + err.Error())
	}
	static := http.FileServerFS(files)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		page := r.URL.Path == "/" || strings.HasPrefix(r.URL.Path, "/console.")
		if page && (r.Method == http.MethodGet || r.Method == http.MethodHead) {
			static.ServeHTTP(w, r)
			return
		}
		allowed := methods(mux, r)
		if page {
			allowed = []string{http.MethodGet, http.MethodHead}
		}
		if allowed == nil {
			fail(w, http.StatusNotFound, "not_found", "no such path on the admin listener: "+r.Method+" "+r.URL.Path)
			return
		}
		w.Header().Set("Allow", strings.Join(allowed, ", "))
		fail(w, http.StatusMethodNotAllowed, "method_not_allowed", r.URL.Path+" is asked with "+strings.Join(allowed, " or ")+", not "+r.Method)
	})
	return protect(mux, o.Hosts)
}

// methods are those by which mux has a pattern of its own for r's path; it
// would tell itself, were there not the pattern for all that is left.
func methods(mux *http.ServeMux, r *http.Request) (allowed []string) {
	for _, m := range []string{http.MethodGet, http.MethodHead, http.MethodPost} {
		as := r.Clone(r.Context())
		as.Method = m
		if _, pattern := mux.Handler(as); pattern != "/" {
			allowed = append(allowed, m)
		}
	}
	return allowed
}

func (h *handler) metrics(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	h.Reg.Write(w)
	metrics.WriteProcessMetrics(w)
}

func (h *handler) ready(w http.ResponseWriter, _ *http.Request) {
	ok, body := h.Router.Ready()
	w.Header().Set("Content-Type", "application/json")
	if !ok {
		hd := w.Header()
		hd.Set("Retry-After", "1")
		hd.Set("retry-after-ms", "1000")
		hd.Set("x-should-retry", "true")
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_, _ = w.Write(body)
}

// drain answers POST /admin/v1/replicas/{id}/drain and /undrain. id is the
// replica's number, or its name, which may stand for one replica in several
// pools.
func (h *handler) drain(on bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		id := r.PathValue("id")
		number, err := strconv.ParseUint(id, 10, 32)
		var done []replicaJSON
		for _, p := range h.Router.Pools() {
			for i := range p.Replicas {
				rep := &p.Replicas[i]
				if (err == nil && rep.ID == fleet.ID(number) || rep.Name == id) && h.Router.Drain(rep.ID, on) {
					done = append(done, replicaJSON{ID: rep.ID, Name: rep.Name, Pool: p.Name})
				}
			}
		}
		if len(done) == 0 {
			fail(w, http.StatusNotFound, "not_found", "there is no replica "+strconv.Quote(id)+"; see /admin/v1/replicas")
			return
		}
		word := "drain"
		if !on {
			word = "end of drain"
		}
		for _, d := range done {
			h.Log.Info("operator asked for "+word, zap.String("replica", d.Name), zap.String("pool", d.Pool), zap.String("remote", r.RemoteAddr))
		}
		// As it is now, after the change.
		now := h.replicas("")
		out := now[:0]
		for _, n := range now {
			for _, d := range done {
				if n.ID == d.ID {
					out = append(out, n)
				}
			}
		}
		reply(w, map[string]any{"draining": on, "replicas": out})
	}
}
