package load

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/bench/workload"
)

// runner is one run in progress.
type runner struct {
	opt    Options
	client *http.Client
	start  time.Time

	flight      atomic.Int64
	sent, ended atomic.Int64
	wg          sync.WaitGroup
	mu          sync.Mutex
	rec         *recorder
}

// Run sends the requests and waits for their ends. Cancelling ctx stops
// sending and cancels what is out; the report covers what ended. The number
// of requests and the time of each are bounded by Options.
func Run(ctx context.Context, o Options) (*Report, error) {
	if err := o.fill(); err != nil {
		return nil, err
	}
	dial := net.Dialer{Timeout: 5 * time.Second}
	tr := &http.Transport{DialContext: dial.DialContext, MaxIdleConnsPerHost: o.MaxInFlight, DisableCompression: true,
		IdleConnTimeout: 4 * time.Second, WriteBufferSize: 16 << 10, ReadBufferSize: 16 << 10}
	defer tr.CloseIdleConnections()
	r := &runner{opt: o, client: &http.Client{Transport: tr}, start: time.Now(), rec: newRecorder(&o)}
	stop := make(chan struct{})
	defer close(stop)
	if r.opt.Model == "" {
		if err := r.askModel(ctx); err != nil {
			return nil, fmt.Errorf("load: no model was given: %w", err)
		}
		r.start = time.Now()
	}
	if o.OnProgress != nil {
		go r.progress(stop)
	}
	if o.Concurrency > 0 {
		r.closed(ctx)
	} else {
		r.open(ctx)
	}
	r.wg.Wait()
	return r.rec.report(&r.opt, time.Since(r.start)), nil
}

// askModel takes the first model that the server lists.
func (r *runner) askModel(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, min(r.opt.Timeout, 10*time.Second))
	defer cancel()
	req, err := r.request(ctx, http.MethodGet, "/v1/models", nil)
	if err != nil {
		return err
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	b, err := io.ReadAll(io.LimitReader(resp.Body, 8<<20))
	switch {
	case err != nil:
		return err
	case resp.StatusCode != http.StatusOK:
		return fmt.Errorf("GET /v1/models: status %d: %s", resp.StatusCode, b[:min(len(b), 200)])
	case json.Unmarshal(b, &list) != nil || len(list.Data) == 0 || list.Data[0].ID == "":
		return errors.New("GET /v1/models lists none")
	}
	r.opt.Model = list.Data[0].ID
	return nil
}

func (r *runner) progress(stop chan struct{}) {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for {
		select {
		case <-stop:
			return
		case <-t.C:
			r.opt.OnProgress(time.Since(r.start), int(r.sent.Load()), int(r.ended.Load()))
		}
	}
}

func (r *runner) now() float64 { return time.Since(r.start).Seconds() }

// open sends each request at its time, whatever became of the ones before.
func (r *runner) open(ctx context.Context) {
	t := time.NewTimer(0)
	defer t.Stop()
	<-t.C
	for i := range r.opt.Requests {
		q := &r.opt.Requests[i]
		if d := time.Duration((q.At - r.now()) * float64(time.Second)); d > 0 {
			t.Reset(d)
			select {
			case <-t.C:
			case <-ctx.Done():
				return
			}
		}
		if ctx.Err() != nil {
			return
		}
		if r.flight.Load() >= int64(r.opt.MaxInFlight) {
			r.add(Record{Index: i, At: q.At, Outcome: ClientLimit, Request: q})
			continue
		}
		r.launch(func() { r.one(ctx, i, q, q.At) })
	}
}

// closed keeps Concurrency requests out until the time is over.
func (r *runner) closed(ctx context.Context) {
	var next atomic.Int64
	for range r.opt.Concurrency {
		r.launch(func() {
			for ctx.Err() == nil && r.now() < r.opt.Spec.Duration {
				i := int(next.Add(1)) - 1
				if i >= len(r.opt.Requests) {
					return
				}
				r.one(ctx, i, &r.opt.Requests[i], r.now())
			}
		})
	}
}

func (r *runner) launch(f func()) {
	r.flight.Add(1)
	r.wg.Add(1)
	go func() {
		defer r.wg.Done()
		defer r.flight.Add(-1)
		f()
	}()
}

// one sends a request until it is answered or its retries are used up.
func (r *runner) one(ctx context.Context, i int, q *workload.Request, at float64) {
	ctx, cancel := context.WithTimeout(ctx, r.opt.Timeout)
	defer cancel()
	body := r.body(q)
	rec := Record{Index: i, At: at, Request: q}
	r.sent.Add(1)
	for {
		rec.Attempts++
		r.attempt(ctx, body, &rec)
		if rec.Outcome != Refused || rec.Attempts > r.opt.Retries {
			break
		}
		wait := time.Duration(max(rec.RetryAfter, 0.1) * float64(time.Second))
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			rec.Outcome = Timeout
		}
		if rec.Outcome == Timeout {
			break
		}
	}
	rec.End = r.now()
	if rec.Outcome == Connection && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		rec.Outcome = Timeout
	}
	r.ended.Add(1)
	if errors.Is(ctx.Err(), context.Canceled) && rec.Outcome != OK {
		return // the run was stopped: says nothing of the server
	}
	r.add(rec)
}

func (r *runner) add(rec Record) {
	rec.Good = r.opt.good(&rec)
	r.mu.Lock()
	r.rec.add(&rec)
	r.mu.Unlock()
	if r.opt.OnRecord != nil {
		r.opt.OnRecord(rec)
	}
}

func (o *Options) good(r *Record) bool {
	limit := o.TTFT.Seconds() + o.TTFTPer1K.Seconds()*float64(r.Prompt)/1000
	return r.Outcome == OK && (o.TTFT == 0 || r.TTFT() <= limit) && (o.TPOT == 0 || r.TPOT() <= o.TPOT.Seconds())
}
