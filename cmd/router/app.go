package main

import (
	"crypto/tls"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/config"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/proxy"
	"github.com/penstock/penstock/ring"
	"github.com/penstock/penstock/scraper"
	"github.com/penstock/penstock/telemetry"
)

// app is one running router: the rooms, put together.
type app struct {
	src   config.Source
	cfg   atomic.Pointer[config.Config]
	log   *zap.Logger
	level zap.AtomicLevel

	metrics *telemetry.Registry
	proxy   *proxy.Proxy
	scraper *scraper.Scraper
	labels  *labels
	budgets map[string]*admission.AttemptBudget // by pool; under the pool's mutex
	peers   atomic.Pointer[ring.Node]
	homes   map[string]*atomic.Pointer[home] // by pool; only with peers
	hints   sync.Map                         // replicas that peers have ejected: fleet.ID -> until when (s) that counts
	hash    atomic.Uint64                    // of the configuration in force, for peers
	began   time.Time

	public, adminLn net.Listener
	adminSrv        *http.Server
	cert            atomic.Pointer[tls.Certificate]
	failed          chan error
	ended           chan struct{} // closed when run is over

	reloadMu sync.Mutex             // one reload at a time
	refused  atomic.Pointer[string] // why the newest file is not in force; nil = it is
	static   map[string]*staticSource
	fleetMu  sync.Mutex // over what follows
	members  map[string]*member
	byID     map[fleet.ID]*member
	lastID   fleet.ID
	open     bool // replicas may join as soon as their models are known
	closers  []func()
	closing  sync.Once
}

// newApp makes the rooms; nothing is served yet.
func newApp(src config.Source, cfg *config.Config, logs loggers) (*app, error) {
	log := logs.log
	a := &app{src: src, log: log, level: logs.level, metrics: telemetry.New(), labels: newLabels(cfg), began: time.Now(),
		failed: make(chan error, 2), ended: make(chan struct{}), members: map[string]*member{}, byID: map[fleet.ID]*member{}, static: map[string]*staticSource{}}
	a.cfg.Store(cfg)
	a.hash.Store(cfg.Hash())
	a.budgets = budgetsOf(cfg)
	a.metrics.Gauge(telemetry.BuildInfo, func() float64 { return 1 }, versionText())
	for _, result := range []string{"ok", "refused"} {
		a.metrics.Counter(telemetry.ReloadTotal, result)
	}
	o := proxyOptions(cfg, a.budgets)
	o.Log, o.Access, o.Metrics, o.Now = log, logs.access, a.metrics, a.now
	if o.MaxConnections = connectionsFor(o.MaxConnections, openFiles()); o.MaxConnections < cfg.Limits.MaxConnections {
		log.Info("fewer client connections are taken than limits.max_connections says: the process may not open more files (LimitNOFILE, ulimit -n)",
			zap.Int("connections", o.MaxConnections), zap.Uint64("files", openFiles()))
	}
	if cfg.TLS.CertFile != "" {
		o.TLS = &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
			GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return a.cert.Load(), nil }}
	}
	if err := a.beside(cfg, &o); err != nil {
		return nil, err
	}
	if cfg.Peers != nil {
		a.peered(&o)
	}
	p, err := proxy.New(o)
	if err != nil {
		return nil, err
	}
	a.proxy = p
	a.scraper = scraper.New(scraper.Options{
		Interval: cfg.Scrape.Interval, Timeout: cfg.Scrape.Timeout, MaxPage: int(cfg.Scrape.MaxPage),
		ProbeInterval: cfg.Health.ProbeInterval, ProbeTimeout: cfg.Health.ProbeTimeout, ProbeEager: min(cfg.Health.ProbeInterval, 250*time.Millisecond),
		Seed: uint64(a.began.UnixNano()),
		Now:  a.now, Sink: p, Info: a.learned, Eager: a.ejected, Reg: a.metrics, Log: log,
	})
	return a, nil
}

// now is the process's one clock, seconds, monotonic.
func (a *app) now() float64 { return time.Since(a.began).Seconds() }

func (a *app) config() *config.Config { return a.cfg.Load() }

// close ends what is beside the proxy.
func (a *app) close() {
	a.closing.Do(func() {
		a.leavePeers()
		for _, f := range a.closers {
			f()
		}
		a.scraper.Close()
		if a.adminSrv != nil {
			a.adminSrv.Close()
		}
		for _, ln := range []net.Listener{a.public, a.adminLn} {
			if ln != nil {
				ln.Close()
			}
		}
	})
}
