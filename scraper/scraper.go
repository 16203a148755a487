// Package scraper reads the replicas' own word: their /metrics pages, their
// /health, and what models they serve; and it finds out which replicas there
// are (sources.go). What it learns goes to a Sink; it decides nothing.
package scraper

import (
	"context"
	"crypto/tls"
	"errors"
	"hash/fnv"
	"math"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/internal/mutant"
	"github.com/penstock/penstock/internal/ownfault"
	"github.com/penstock/penstock/telemetry"
)

// Sink takes what was learned. Its methods are called from many goroutines and
// must not block for long: each call is made by the loop of one replica.
type Sink interface {
	// Observe gives a new sample; or, marked Broken, the last good one again
	// (its At unchanged) when a scrape failed. Before a first good page nothing
	// is given.
	Observe(id fleet.ID, s fleet.Sample)
	Evidence(id fleet.ID, e fleet.Evidence)
}

// Options of a Scraper. Zero values mean the defaults.
type Options struct {
	Interval       time.Duration // between scrapes of one replica; default 250 ms
	Timeout        time.Duration // of one scrape; default 2 s (a loaded vLLM takes up to 0.4 s)
	ProbeInterval  time.Duration // between health probes of a replica in use; default 1 s
	ProbeEager     time.Duration // between probes of one that is not (see Eager); default 250 ms
	ProbeTimeout   time.Duration // of one probe; default 2 s
	ModelsInterval time.Duration // between reads of /v1/models; default 10 s
	ModelsRetry    time.Duration // the same while it fails; default 1 s
	ModelsTimeout  time.Duration // of one read; default 5 s
	MaxPage        int           // most bytes of an answer; default 2 MiB
	Seed           uint64        // moves the offsets of this process, so that several routers do not scrape in step

	Now   func() float64            // the process's clock, seconds; required
	Sink  Sink                      // required
	Info  func(id fleet.ID, i Info) // a replica's models or limits were learned or changed; optional
	Eager func(id fleet.ID) bool    // true: probe at ProbeEager (the replica is ejected); optional
	Reg   *telemetry.Registry       // required
	Log   *zap.Logger               // default: none
	Dial  Dialer                    // default: net.Dialer
	TLS   *tls.Config               // for https replicas; default: the system's roots
}

func (o *Options) setDefaults() {
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	def(&o.Interval, 250*time.Millisecond)
	def(&o.Timeout, 2*time.Second)
	def(&o.ProbeInterval, time.Second)
	def(&o.ProbeEager, 250*time.Millisecond)
	def(&o.ProbeTimeout, 2*time.Second)
	def(&o.ModelsInterval, 10*time.Second)
	def(&o.ModelsRetry, time.Second)
	def(&o.ModelsTimeout, 5*time.Second)
	if o.MaxPage <= 0 {
		o.MaxPage = 2 << 20
	}
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	if o.Dial == nil {
		o.Dial = (&net.Dialer{}).DialContext
	}
	if o.TLS == nil {
		o.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	if o.Now == nil || o.Sink == nil || o.Reg == nil {
		panic("BUG: scraper needs Now, Sink and Reg")
	}
}

// Replica is where one replica is. Names are resolved before (see Source).
type Replica struct {
	ID       fleet.ID
	Name     string // host:port, for people, logs and metric labels
	Addr     string // ip:port to connect to
	Host     string // Host header and TLS name; default Name
	TLS      bool   // https
	BasePath string // before /metrics, /health and /v1/models; usually empty
	APIKey   string // sent as a bearer token when not empty; never logged
}

// Scraper runs the loops of all replicas.
type Scraper struct {
	o      Options
	start  time.Time
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu       sync.Mutex
	replicas map[fleet.ID]*replica
	series   map[string]*series

	oneProber sync.Mutex // only for the fault blocked-probe of a mutant build
}

// New returns a Scraper without replicas.
func New(o Options) *Scraper {
	o.setDefaults()
	s := &Scraper{o: o, start: time.Now(), replicas: map[fleet.ID]*replica{}, series: map[string]*series{}}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// Add starts scraping r. A second Add of one ID panics "BUG:".
func (s *Scraper) Add(r Replica) {
	if r.Host == "" {
		r.Host = r.Name
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.replicas[r.ID] != nil {
		panic("BUG: replica is scraped already: " + r.Name)
	}
	if s.ctx.Err() != nil {
		return
	}
	p := &replica{Replica: r, s: s, added: s.o.Now(), kick: make(chan struct{}, 1), log: s.o.Log.With(zap.String("replica", r.Name))}
	p.ctx, p.cancel = context.WithCancel(s.ctx)
	s.replicas[r.ID] = p
	p.m = s.join(p)
	// Three loops, each with its own connection and time-outs: an answer that
	// never comes delays neither another replica nor another question.
	s.wg.Go(p.scrapeLoop)
	s.wg.Go(p.probeLoop)
	s.wg.Go(p.modelsLoop)
}

// Remove stops scraping a replica and drops its series. It does not wait for
// an answer under way, whose result is thrown away.
func (s *Scraper) Remove(id fleet.ID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.replicas[id]
	if p == nil {
		return
	}
	delete(s.replicas, id)
	p.cancel()
	s.leave(p)
}

// Close stops all loops and waits for them.
func (s *Scraper) Close() {
	s.cancel()
	s.wg.Wait()
}

// replica is one replica's state.
type replica struct {
	Replica
	s      *Scraper
	ctx    context.Context
	cancel context.CancelFunc
	log    *zap.Logger
	m      *series
	added  float64
	kick   chan struct{} // read /v1/models now
	alive  atomic.Bool   // its last probe was answered 200

	mu     sync.Mutex
	sample fleet.Sample // the last good one; valid when seen
	seen   bool
	status Status
	info   Info
	known  bool // info is set
}

// Status is how scraping a replica goes, for the console.
type Status struct {
	Scrape, Probe, Models string  // result of the last try, in metrics' words; empty = none yet
	Error                 string  // of the last failed try, empty when all are well
	Age                   float64 // of the last good sample, seconds; since the replica was added if none
	Seen                  bool    // there was a good sample
	Alive                 bool    // the last health probe was answered 200
}

// Status of a replica; ok is false when it is not scraped.
func (s *Scraper) Status(id fleet.ID) (st Status, ok bool) {
	s.mu.Lock()
	p := s.replicas[id]
	s.mu.Unlock()
	if p == nil {
		return st, false
	}
	age := p.age()
	p.mu.Lock()
	defer p.mu.Unlock()
	st = p.status
	st.Age, st.Seen, st.Alive = age, p.seen, p.alive.Load()
	return st, true
}

func (p *replica) age() float64 {
	now := p.s.o.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.seen {
		return now - p.added
	}
	return now - p.sample.At
}

// field reads one field of the last good sample for a gauge.
func (p *replica) field(f func(*fleet.Sample) float64) float64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.seen {
		return math.NaN()
	}
	return f(&p.sample)
}

// offset spreads the replicas over an interval by a hash of their names:
// stable, so that a restart does not bunch them.
func (p *replica) offset(kind string, interval time.Duration) time.Duration {
	h := fnv.New64a()
	var seed [8]byte
	for i := range seed {
		seed[i] = byte(p.s.o.Seed >> (8 * i))
	}
	_, _ = h.Write(seed[:])
	_, _ = h.Write([]byte(kind))
	_, _ = h.Write([]byte(p.Name))
	// FNV's low bits of short names that differ in their last byte are close
	// together; mix before taking the rest.
	v := h.Sum64()
	v ^= v >> 33
	v *= 0xff51afd7ed558ccd
	v ^= v >> 33
	return time.Duration(v % uint64(interval))
}

// tick sleeps until the next moment offset + k*interval since the start of the
// process; moments that passed meanwhile are left out, not made up for. It
// tells whether to go on.
func (p *replica) tick(t *time.Timer, offset, interval time.Duration) bool {
	now := time.Since(p.s.start)
	k := (now - offset) / interval
	if now >= offset {
		k++
	}
	t.Reset(offset + k*interval - now)
	select {
	case <-p.ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

func stoppedTimer() *time.Timer {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return t
}

func (p *replica) scrapeLoop() {
	o := &p.s.o
	c := newClient(o, p.Replica, "/metrics", o.MaxPage, true)
	defer c.close()
	t, offset := stoppedTimer(), p.offset("scrape", o.Interval)
	defer t.Stop()
	q := quiet{log: p.log, what: "metrics page"}
	var refused Refused
	for p.tick(t, offset, o.Interval) {
		began := time.Now()
		sample, r, result, err := p.scrape(c)
		if p.ctx.Err() != nil {
			return // removed meanwhile: nobody wants to know
		}
		p.m.took.Update(time.Since(began).Seconds())
		p.m.scrapes[result].Inc()
		p.note(func(st *Status) *string { return &st.Scrape }, scrapeWords[result], err)
		if err != nil {
			q.failed(err)
			// The last good sample stays, with its age, and is marked.
			p.mu.Lock()
			last, seen := p.sample, p.seen
			p.mu.Unlock()
			if last.Broken = true; seen {
				o.Sink.Observe(p.ID, last)
			}
			if !ownfault.Is(err) {
				o.Sink.Evidence(p.ID, fleet.EvidenceScrapeFailed)
			}
			continue
		}
		q.worked()
		if r&^refused != 0 {
			p.log.Warn("metrics page has impossible values (NaN, infinite, negative or too large); these are ignored until they are good again",
				zap.Strings("values", r.Words()))
		}
		refused = r
		p.mu.Lock()
		p.sample, p.seen = sample, true
		p.mu.Unlock()
		o.Sink.Observe(p.ID, sample)
		o.Sink.Evidence(p.ID, fleet.EvidenceScrapeOK)
	}
}

// scrape reads one page.
func (p *replica) scrape(c *client) (s fleet.Sample, r Refused, result int, err error) {
	status, body, err := c.get(p.ctx, p.s.o.Timeout)
	if err != nil {
		return s, 0, resultOf(err), err
	}
	if status != http.StatusOK {
		return s, 0, scrapeStatus, &statusError{status}
	}
	if r, err = Parse(body, &s); err != nil {
		return s, 0, scrapeParse, err
	}
	s.At = p.s.o.Now()
	return s, r, scrapeOK, nil
}

// resultOf puts a failed get in a word of the metrics' closed set: an answer
// that began and was cut or malformed is "parse".
func resultOf(err error) int {
	var de *dialError
	var le *lostError
	switch {
	case isTimeout(err):
		return scrapeTimeout
	case errors.As(err, &de), errors.As(err, &le):
		return scrapeRefused
	}
	return scrapeParse
}

func (p *replica) probeLoop() {
	o := &p.s.o
	c := newClient(o, p.Replica, "/health", 64<<10, true)
	defer c.close()
	t, offset := stoppedTimer(), p.offset("probe", o.ProbeEager)
	defer t.Stop()
	q := quiet{log: p.log, what: "health probe"}
	since, bad := o.ProbeInterval, false // the first is due at once
	for p.tick(t, offset, o.ProbeEager) {
		since += o.ProbeEager
		if since < o.ProbeInterval && !bad && (o.Eager == nil || !o.Eager(p.ID)) {
			continue
		}
		since = 0
		result, evidence, err := p.probe(c)
		if p.ctx.Err() != nil {
			return
		}
		p.m.probes[result].Inc()
		p.note(func(st *Status) *string { return &st.Probe }, probeWords[result], err)
		p.alive.Store(err == nil)
		if err != nil {
			q.failed(err)
		} else if q.worked(); bad {
			p.rediscover() // it may be another server, with other models
		}
		bad = err != nil
		if !ownfault.Is(err) {
			o.Sink.Evidence(p.ID, evidence)
		}
	}
}

func (p *replica) probe(c *client) (result int, e fleet.Evidence, err error) {
	if mutant.On("blocked-probe") { // one prober for all: a target that never answers holds up the others
		p.s.oneProber.Lock()
		defer p.s.oneProber.Unlock()
	}
	status, _, err := c.get(p.ctx, p.s.o.ProbeTimeout)
	if err == nil {
		if status == http.StatusOK {
			return probeOK, fleet.EvidenceProbeOK, nil
		}
		return probeFailed, fleet.EvidenceProbeFailed, &statusError{status}
	}
	switch resultOf(err) {
	case scrapeTimeout:
		return probeTimeout, fleet.EvidenceProbeFailed, err
	case scrapeRefused:
		return probeRefused, fleet.EvidenceProbeRefused, err
	}
	return probeFailed, fleet.EvidenceProbeFailed, err
}

// rediscover makes the discovery loop read /v1/models soon.
func (p *replica) rediscover() {
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

// note keeps the result of one try for the console.
func (p *replica) note(field func(*Status) *string, result string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	*field(&p.status) = result
	switch {
	case err != nil:
		p.status.Error = err.Error()
	case p.status.Scrape == "ok" && p.status.Probe == "ok" && p.status.Models == "ok":
		p.status.Error = ""
	}
}
