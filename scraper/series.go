package scraper

import (
	"fmt"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"go.uber.org/zap"

	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/telemetry"
)

// Results of a scrape and of a probe: the closed sets of telemetry/defs.go.
const (
	scrapeOK = iota
	scrapeTimeout
	scrapeRefused
	scrapeStatus
	scrapeParse
)

const (
	probeOK = iota
	probeFailed
	probeRefused
	probeTimeout
)

var (
	scrapeWords = [...]string{"ok", "timeout", "refused", "status", "parse"}
	probeWords  = [...]string{"ok", "failed", "refused", "timeout"}

	// From the 18 ms of an idle vLLM's page to the time-out.
	tookBounds = []float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5}

	gauges = []struct {
		def *telemetry.Def
		get func(*replica) float64
	}{
		{telemetry.ScrapeAge, (*replica).age},
		{telemetry.ReplicaWaiting, func(p *replica) float64 { return p.field(func(s *fleet.Sample) float64 { return s.Waiting }) }},
		{telemetry.ReplicaRunning, func(p *replica) float64 { return p.field(func(s *fleet.Sample) float64 { return s.Running }) }},
		{telemetry.ReplicaKVUsage, func(p *replica) float64 { return p.field(func(s *fleet.Sample) float64 { return s.KVUsage }) }},
		{telemetry.ReplicaPreempt, func(p *replica) float64 { return p.field(func(s *fleet.Sample) float64 { return s.Preemptions }) }},
	}
)

// series are the metrics of one replica name. Two pools may list one replica:
// it is then scraped twice under one name, and the series stay until both are
// gone.
type series struct {
	refs    int
	scrapes [len(scrapeWords)]*metrics.Counter
	probes  [len(probeWords)]*metrics.Counter
	took    *metrics.PrometheusHistogram
	newest  *replica // whose sample the gauges show; under Scraper.mu
}

// join returns the series of p's name, made if need be. Under s.mu.
func (s *Scraper) join(p *replica) *series {
	m := s.series[p.Name]
	if m == nil {
		m = &series{took: s.o.Reg.Histogram(telemetry.ScrapeSeconds, tookBounds, p.Name)}
		for i, w := range scrapeWords {
			m.scrapes[i] = s.o.Reg.Counter(telemetry.Scrapes, p.Name, w)
		}
		for i, w := range probeWords {
			m.probes[i] = s.o.Reg.Counter(telemetry.Probes, p.Name, w)
		}
		for _, g := range gauges {
			s.o.Reg.Gauge(g.def, func() float64 {
				s.mu.Lock()
				newest := m.newest
				s.mu.Unlock()
				return g.get(newest)
			}, p.Name)
		}
		s.series[p.Name] = m
	}
	m.refs++
	m.newest = p
	return m
}

// leave gives up p's part of the series and drops them with the last one.
func (s *Scraper) leave(p *replica) {
	m := p.m
	if m.refs--; m.refs > 0 {
		for _, other := range s.replicas {
			if other.Name == p.Name && m.newest == p {
				m.newest = other
			}
		}
		return
	}
	delete(s.series, p.Name)
	reg := s.o.Reg
	for _, w := range scrapeWords {
		reg.Drop(telemetry.Scrapes, p.Name, w)
	}
	for _, w := range probeWords {
		reg.Drop(telemetry.Probes, p.Name, w)
	}
	reg.Drop(telemetry.ScrapeSeconds, p.Name)
	for _, g := range gauges {
		reg.Drop(g.def, p.Name)
	}
}

// statusError is an answer with a status that is not 200.
type statusError struct{ status int }

func (e *statusError) Error() string {
	if e.status == 401 || e.status == 403 {
		return fmt.Sprintf("answered %d: it wants another API key (set api_key_file of its pool)", e.status)
	}
	return fmt.Sprintf("answered %d", e.status)
}

// logEvery is how often a failure that goes on is logged again.
const logEvery = time.Minute

// quiet logs the first failure, then one a minute, and the recovery.
type quiet struct {
	log     *zap.Logger
	what    string
	failing bool
	since   time.Time
	logged  time.Time
	count   int
}

func (q *quiet) failed(err error) {
	now := time.Now()
	if !q.failing {
		q.failing, q.since, q.count = true, now, 0
	} else if q.count++; now.Sub(q.logged) < logEvery {
		return
	}
	q.logged = now
	q.log.Warn(q.what+" failed", zap.Error(err), zap.Int("more_failures", q.count), zap.Duration("for", now.Sub(q.since)))
}

func (q *quiet) worked() {
	if q.failing {
		q.log.Info(q.what+" works again", zap.Duration("after", time.Since(q.since)), zap.Int("failures", q.count+1))
	}
	q.failing = false
}
