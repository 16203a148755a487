package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/penstock/penstock/config"
)

// serve is `penstock serve`.
func serve(ctx context.Context, args []string, _, stderr io.Writer) int {
	src, code := parseServe(args, stderr, os.Getenv)
	if code >= 0 {
		return code
	}
	if src.File == "" && len(src.Replicas) == 0 {
		fmt.Fprintln(stderr, "penstock serve: there are no replicas: give --replica URL (repeat it), or --config FILE; see penstock serve --help")
		return 2
	}
	cfg, err := load(src)
	if err != nil {
		fmt.Fprintln(stderr, err)
		return 1
	}
	logs, err := newLoggers(cfg.Log)
	if err != nil {
		fmt.Fprintln(stderr, "penstock serve:", err)
		return 1
	}
	log := logs.log
	defer log.Sync() //nolint:errcheck // standard error may not be syncable
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGTERM, os.Interrupt, syscall.SIGHUP)
	defer signal.Stop(signals)
	a, err := newApp(src, cfg, logs)
	if err != nil {
		log.Error("cannot start", zap.Error(err))
		return 1
	}
	if err := a.listen(); err != nil {
		log.Error("cannot start", zap.Error(err))
		a.close()
		return 1
	}
	if err := a.start(); err != nil {
		log.Error("cannot start", zap.Error(err))
		a.shutdown(0)
		return 1
	}
	a.banner()
	return a.run(ctx, signals)
}

// run serves until a signal to end, and returns the exit status.
func (a *app) run(ctx context.Context, signals <-chan os.Signal) int {
	defer close(a.ended)
	for {
		select {
		case <-ctx.Done():
			return a.drain(signals)
		case err := <-a.failed:
			a.log.Error("a listener failed", zap.Error(err))
			a.shutdown(0)
			return 1
		case s := <-signals:
			if s == syscall.SIGHUP {
				a.reload("SIGHUP") //nolint:errcheck // logged and counted there
				continue
			}
			return a.drain(signals)
		}
	}
}

// drain leaves in good order: /readyz is 503 at once, new requests are served
// for drain_delay more so that the balancer notices first, running answers
// get drain_timeout. With nothing running it leaves early; a second signal
// ends now.
func (a *app) drain(signals <-chan os.Signal) int {
	t := &a.config().Timeouts
	a.log.Info("draining", zap.Duration("drain_delay", t.DrainDelay), zap.Duration("drain_timeout", t.DrainTimeout), zap.Int("requests", a.proxy.InFlight()))
	a.proxy.StartDrain()
	hurry := make(chan struct{})
	done := make(chan struct{})
	defer close(done)
	go func() {
		for {
			select {
			case <-done:
				return
			case s := <-signals:
				if s != syscall.SIGHUP {
					a.log.Warn("second signal: ending now", zap.Int("requests", a.proxy.InFlight()))
					close(hurry)
					return
				}
			}
		}
	}()
	delay := time.NewTimer(t.DrainDelay)
	defer delay.Stop()
	select {
	case <-delay.C:
	case <-hurry:
	}
	limit := t.DrainTimeout
	select {
	case <-hurry:
		limit = 0
	default:
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	go func() {
		select {
		case <-hurry:
			cancel()
		case <-done:
		}
	}()
	if err := a.proxy.Shutdown(ctx); err != nil {
		a.log.Warn("requests were cut at the end", zap.Error(err))
	}
	a.close()
	a.log.Info("stopped")
	return 0
}

// shutdown ends at once, or after limit.
func (a *app) shutdown(limit time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	_ = a.proxy.Shutdown(ctx)
	a.close()
}

// listen opens both listeners, so that a taken port is told before anything
// is started.
func (a *app) listen() error {
	c := a.config()
	var err error
	if a.public, err = listenOn(c.Listen, "listen"); err != nil {
		return err
	}
	if c.Admin != "off" {
		if a.adminLn, err = listenOn(c.Admin, "admin"); err != nil {
			return errors.Join(err, a.public.Close())
		}
	}
	if c.TLS.CertFile != "" {
		if err := a.loadCertificate(c); err != nil {
			return err
		}
	}
	return nil
}

func listenOn(addr, setting string) (net.Listener, error) {
	ln, err := net.Listen("tcp", addr)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("%s: %s is taken by another process; choose another with --%s", setting, addr, setting)
	}
	if errors.Is(err, syscall.EACCES) {
		return nil, fmt.Errorf("%s: %s needs a privilege (ports under 1024: CAP_NET_BIND_SERVICE); or choose another with --%s", setting, addr, setting)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", setting, err)
	}
	return ln, nil
}

// loadCertificate reads the listener's certificate; a reload does it again.
func (a *app) loadCertificate(c *config.Config) error {
	cert, err := tls.LoadX509KeyPair(c.TLS.CertFile, c.TLS.KeyFile)
	if err != nil {
		return fmt.Errorf("tls.cert_file %s: %w", c.TLS.CertFile, err)
	}
	a.cert.Store(&cert)
	return nil
}

// start serves both listeners and begins to look for replicas.
func (a *app) start() error {
	go func() {
		if err := a.proxy.Serve(a.public); err != nil {
			a.failed <- fmt.Errorf("listen: %w", err)
		}
	}()
	if a.adminLn != nil {
		a.adminSrv = &http.Server{Handler: a.adminHandler(), ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute}
		go func() {
			if err := a.adminSrv.Serve(a.adminLn); err != nil && !errors.Is(err, http.ErrServerClosed) {
				a.failed <- fmt.Errorf("admin: %w", err)
			}
		}()
	}
	a.reloadMu.Lock() // a reload needs the sources
	err := a.discover()
	a.reloadMu.Unlock()
	if err != nil {
		return err
	}
	return a.joinPeers()
}

// banner is the one line that tells what runs.
func (a *app) banner() {
	c := a.config()
	scheme := "http"
	if c.TLS.CertFile != "" {
		scheme = "https"
	}
	fields := []zap.Field{zap.String("version", versionText()), zap.String("api", baseURL(scheme, a.public.Addr()))}
	if a.adminLn != nil {
		fields = append(fields, zap.String("console", baseURL("http", a.adminLn.Addr())), zap.String("metrics", baseURL("http", a.adminLn.Addr())+"/metrics"))
	}
	if c.File != "" {
		fields = append(fields, zap.String("config", c.File))
	}
	for i := range c.Pools {
		p := &c.Pools[i]
		policy := p.Policy
		if policy == "" {
			policy = "work"
		}
		var from []string
		from = append(from, p.Replicas.Static...)
		for _, s := range []struct{ kind, where string }{{"file", p.Replicas.File}, {"http", p.Replicas.HTTP}} {
			if s.where != "" {
				from = append(from, s.kind+" "+s.where)
			}
		}
		if d := p.Replicas.DNS; d != nil {
			from = append(from, "dns "+d.Type+" "+d.Name)
		}
		fields = append(fields, zap.String("pool "+p.Name, "policy "+policy+", replicas "+strings.Join(from, ", ")))
	}
	a.log.Info("penstock serves", fields...)
	for _, w := range c.Warnings {
		a.log.Warn("configuration: " + w)
	}
}

// baseURL is a URL that can be pasted: an unspecified address is the loopback.
func baseURL(scheme string, addr net.Addr) string {
	host, port, err := net.SplitHostPort(addr.String())
	if err != nil {
		return scheme + "://" + addr.String()
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return scheme + "://" + net.JoinHostPort(host, port)
}
