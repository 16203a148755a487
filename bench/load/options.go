// Package load drives any OpenAI-compatible server and measures what its
// clients see: an open loop with times from the intended send (no coordinated
// omission), or a closed one with fixed concurrency.
package load

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/penstock/penstock/bench/workload"
)

// Options of one run. Zero fields have the default that they name.
type Options struct {
	URL     string // base URL, http only
	Model   string // default: the first one that the server lists
	API     string // "chat" (default) or "completions"
	Whole   bool   // ask for whole answers instead of streams
	APIKey  string
	Headers map[string]string

	// Requests to send, in order of time; when nil they are made of Spec.
	Requests []workload.Request
	Spec     workload.Spec // default 10/s for 30 s, prompts of 300 and answers of 100 tokens
	// Concurrency > 0 makes the loop closed: so many requests at a time, one
	// after the other, for Spec.Duration; arrival times are not used.
	Concurrency int

	Warmup      time.Duration // requests of this first time are sent and not counted
	Timeout     time.Duration // of one request; default 120 s
	MaxInFlight int           // a request that would be more is counted as "client_limit" and not sent; default 20,000
	Retries     int           // how often a 429 or 503 is sent again after its Retry-After; default 0
	TTFT        time.Duration // objective of goodput; 0 = none
	TTFTPer1K   time.Duration // added to TTFT for each 1,000 prompt tokens
	TPOT        time.Duration // objective of goodput; 0 = none
	AllowRemote bool          // a target that is not on loopback is refused without it

	// OnRecord, when set, is told of each request's end; from many goroutines.
	OnRecord func(Record)
	// OnProgress, when set, is called each second.
	OnProgress func(elapsed time.Duration, sent, ended int)
}

func (o *Options) fill() error {
	u, err := url.Parse(o.URL)
	if err != nil || u.Scheme != "http" || u.Host == "" {
		return fmt.Errorf("load: url %q: want http://host:port", o.URL)
	}
	if !o.AllowRemote {
		if ip := net.ParseIP(u.Hostname()); u.Hostname() != "localhost" && (ip == nil || !ip.IsLoopback()) {
			return fmt.Errorf("load: url %q: not on loopback; give --allow-remote when that is meant", o.URL)
		}
	}
	if o.TTFTPer1K > 0 && o.TTFT <= 0 {
		return fmt.Errorf("load: ttft_per_1k %s: is added to ttft, which is not given", o.TTFTPer1K)
	}
	switch o.API {
	case "":
		o.API = "chat"
	case "chat", "completions":
	default:
		return fmt.Errorf("load: api %q: want chat or completions", o.API)
	}
	if o.Timeout <= 0 {
		o.Timeout = 120 * time.Second
	}
	if o.MaxInFlight <= 0 {
		o.MaxInFlight = 20_000
	}
	if o.Concurrency < 0 || o.Concurrency > o.MaxInFlight {
		return fmt.Errorf("load: concurrency %d: want 0 to %d", o.Concurrency, o.MaxInFlight)
	}
	if o.Requests != nil {
		return nil
	}
	s := &o.Spec
	if s.Rate == 0 {
		s.Rate = 10
	}
	if s.Duration == 0 {
		s.Duration = 30
	}
	if s.Duration > 86400 {
		return fmt.Errorf("load: duration %gs: at most a day", s.Duration)
	}
	if s.Prompt.Mean == 0 {
		s.Prompt.Mean = 300
	}
	if s.Out.Mean == 0 {
		s.Out.Mean = 100
	}
	if o.Concurrency > 0 { // as many as can be needed, cut by time
		s.Rate = max(s.Rate, float64(o.Concurrency)*50)
		if s.Max == 0 {
			s.Max = 1_000_000
		}
	}
	o.Requests, err = workload.Generate(*s)
	if err != nil {
		return fmt.Errorf("load: %w", err)
	}
	return nil
}

// Outcome of one request; a closed set.
type Outcome string

// The outcomes.
const (
	OK          Outcome = "ok"
	Refused     Outcome = "refused" // 429 or 503
	Status      Outcome = "status"  // another status than 200
	Broken      Outcome = "broken"  // an error event, or an end without finish
	Connection  Outcome = "connection"
	Timeout     Outcome = "timeout"
	ClientLimit Outcome = "client_limit" // MaxInFlight was reached: not sent
)

// Record is what became of one request. Times are seconds from the start of
// the run; 0 = it did not happen.
type Record struct {
	Index      int
	At         float64 // intended send time
	Sent       float64 // the first time
	Last       float64 // the last time; more than Sent when it was sent again
	First      float64 // first content event
	End        float64
	Outcome    Outcome
	Status     int     // HTTP status, 0 = none came
	Error      string  // for people
	RetryAfter float64 // seconds, from the last 429 or 503
	Attempts   int     // sends, 1 without retries
	Prompt     int     // usage, else as meant
	Cached     int
	Out        int       // usage, else content events
	Gaps       []float64 // between content events, seconds
	Text       string    // the answer's text, when OnRecord is set
	Good       bool      // within the objectives
	Request    *workload.Request
}

// TTFT is from the intended send time to the first content event, seconds.
func (r *Record) TTFT() float64 { return r.First - r.At }

// E2E is from the intended send time to the end, seconds.
func (r *Record) E2E() float64 { return r.End - r.At }

// TPOT is (end - first) / (output tokens - 1), seconds; 0 for a single token.
func (r *Record) TPOT() float64 {
	if r.Out < 2 {
		return 0
	}
	return (r.End - r.First) / float64(r.Out-1)
}

// addHeader takes a header of each request as it is written on the wire.
func (o *Options) addHeader(line string) error {
	name, value, ok := strings.Cut(line, ":")
	if name = strings.TrimSpace(name); !ok || name == "" || strings.ContainsAny(name, " \t") {
		return errors.New("must be a name and a value, as 'X-Request-Class: background'")
	}
	if o.Headers == nil {
		o.Headers = map[string]string{}
	}
	o.Headers[name] = strings.TrimSpace(value)
	return nil
}
