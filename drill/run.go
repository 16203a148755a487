package drill

import (
	"context"
	"fmt"
	"hash/fnv"
	"sort"
	"strings"
	"sync"
	"time"
)

// Options of a run.
type Options struct {
	Binary string   // the router binary, default: this very program
	Env    []string // more environment for it, such as PENSTOCK_MUTANT=NAME
	Log    func(format string, args ...any)
}

// Event is one line of the report's timeline.
type Event struct {
	At   float64 `json:"at"`
	What string  `json:"what"`
}

// Result of one assertion.
type Result struct {
	Check string `json:"check"`
	Why   string `json:"why,omitempty"`
	OK    bool   `json:"ok"`
	Seen  string `json:"seen"`
}

// Point is one reading of the router's metrics while the drill ran.
type point struct {
	at float64
	m  map[string]float64
}

// Report of one drill.
type Report struct {
	Name     string    `json:"name"`
	Title    string    `json:"title"`
	OK       bool      `json:"ok"`
	Err      string    `json:"err,omitempty"`
	Seconds  float64   `json:"seconds"`
	Started  time.Time `json:"started"`
	Results  []Result  `json:"results"`
	Timeline []Event   `json:"timeline"`
	// StoodStill is the share of the time in which the machine did not let the
	// drill run.
	StoodStill float64 `json:"stood_still"`

	Phases  []Phase  `json:"phases"`  // what clients saw between the injector's acts
	Buckets []Bucket `json:"buckets"` // and second by second
	Sample  []*Call  `json:"sample,omitempty"`
}

// Bucket counts what clients saw of requests sent in one second.
type Bucket struct {
	Second   int     `json:"second"`
	OK       int     `json:"ok"`
	Degraded int     `json:"degraded"`
	Refused  int     `json:"refused"` // honest 429 or 503
	Failed   int     `json:"failed"`
	Left     int     `json:"left"`
	TTFTp95  float64 `json:"ttft_p95"`
}

// record is what the checks look at.
type record struct {
	st     *stage
	calls  []*Call
	points []point
	final  map[string]float64   // router 0's page at the end; nil = it does not answer
	others []map[string]float64 // those of the routers after it
	sights []sight              // of several routers
	stills []still              // when the machine stood still
	lags   []lag                // how late each step was
}

// Run plays one scenario and judges it.
func Run(ctx context.Context, sc *Scenario, o Options) *Report {
	rep := &Report{Name: sc.Name, Title: sc.Title, Started: time.Now(), OK: true}
	defer func() {
		rep.Seconds = time.Since(rep.Started).Seconds()
		rep.OK = rep.OK && rep.Err == "" // what could not be played shows nothing
	}()
	st, err := newStage(sc, o.Binary, o.Env)
	if err != nil {
		rep.Err = err.Error()
		return rep
	}
	defer st.close()
	if sc.Refused != "" {
		if rep.judgeRefusal(st); rep.Err != "" || len(sc.Load) == 0 {
			return rep
		}
	}
	rec, err := play(ctx, st, rep)
	if err != nil {
		rep.Err = err.Error()
		return rep
	}
	rep.judge(rec)
	if end := rec.end(); end > 0 {
		rep.StoodStill = rec.stoodStill(0, end) / end
	}
	return rep
}

func play(ctx context.Context, st *stage, rep *Report) (*record, error) {
	sc := st.sc
	for i := range max(sc.Routers, 1) {
		if err := st.startRouter(i); err != nil {
			return nil, err
		}
	}
	settle := time.Duration(sc.Settle)
	if settle == 0 {
		settle = time.Second
	}
	sleep(ctx, settle)
	start := time.Now()
	rec := &record{st: st}
	log := func(at float64, format string, a ...any) {
		rep.Timeline = append(rep.Timeline, Event{at, fmt.Sprintf(format, a...)})
	}
	var mu sync.Mutex
	watchCtx, stopWatch := context.WithCancel(ctx)
	var watch sync.WaitGroup
	if !sc.Unwatched {
		watch.Go(func() { watchMetrics(watchCtx, st, start, rec, &mu, log) })
	}
	watch.Go(func() { watchMachine(watchCtx, start, rec, &mu) })
	if len(st.routers) > 1 {
		watch.Go(func() { watchPeers(watchCtx, st, start, rec, &mu) })
	}
	var loads sync.WaitGroup
	h := fnv.New64()
	h.Write([]byte(sc.Name))
	for i := range sc.Load {
		via := i % len(st.routers)
		_, _ = fmt.Sscanf(sc.Load[i].Via, "r%d", &via)
		d := newDriver(&sc.Load[i], st.routers[min(via, len(st.routers)-1)].public, start, h.Sum64()+uint64(i))
		loads.Go(func() {
			calls := d.run(ctx)
			mu.Lock()
			rec.calls = append(rec.calls, calls...)
			mu.Unlock()
		})
	}
	steps := append([]Step(nil), sc.Steps...)
	sort.SliceStable(steps, func(i, j int) bool { return steps[i].At < steps[j].At })
	var stepErr error
	for _, s := range steps {
		sleep(ctx, time.Until(start.Add(time.Duration(s.At))))
		if ctx.Err() != nil {
			break
		}
		if err := st.act(ctx, s); err != nil && stepErr == nil {
			stepErr = fmt.Errorf("step at %v: %w", time.Duration(s.At), err)
		}
		mu.Lock()
		at := time.Since(start).Seconds()
		log(at, "injector: %s", s.describe())
		rec.lags = append(rec.lags, lag{s.At.S(), max(0, at-s.At.S())})
		mu.Unlock()
	}
	loads.Wait()
	settleAccounts(ctx, st)
	stopWatch()
	watch.Wait()
	for i, r := range st.routers {
		m, _ := r.metrics()
		if i == 0 {
			rec.final = m
		} else {
			rec.others = append(rec.others, m)
		}
	}
	if stepErr == nil {
		stepErr = ctx.Err()
	}
	return rec, stepErr
}

// settleAccounts gives the last endings up to 3 s to be accounted, in all routers.
func settleAccounts(ctx context.Context, st *stage) {
	for range 30 {
		busy := false
		for i, r := range st.routers {
			if st.sc.ended(i) {
				continue
			}
			m, err := r.metrics()
			v, _ := sum(m, "penstock_requests_in_flight", nil)
			busy = busy || err == nil && v != 0
		}
		if !busy {
			sleep(ctx, 400*time.Millisecond) // one more scrape
			return
		}
		sleep(ctx, 100*time.Millisecond)
	}
}

// ended tells whether the scenario's last act on router i leaves it without life.
func (s *Scenario) ended(i int) bool {
	last := Step{At: -1}
	for _, t := range s.Steps {
		if t.Router != "" && t.Which == i && t.At >= last.At {
			last = t
		}
	}
	return last.Router != "" && last.Router != "cont"
}

func (t *Step) describe() string {
	switch {
	case t.Note != "":
		return t.Note
	case t.Heal:
		return t.Replica + t.Service + " healed"
	case t.Replica != "" || t.Service != "":
		return t.Replica + t.Service + ": " + faultWords(t.Fault)
	case t.Config != "":
		return "configuration rewritten, SIGHUP"
	case t.Remove:
		return "configuration removed, SIGHUP"
	}
	if t.Router != "" {
		return fmt.Sprintf("router %d: %s", t.Which, t.Router)
	}
	if t.Admin != "" && t.Which > 0 {
		return fmt.Sprintf("router %d: %s", t.Which, t.Admin)
	}
	return t.Admin + t.Network
}

// faultWords says a fault as its file does: "cut (after 2, count 600)".
func faultWords(f map[string]any) string {
	var more []string
	for k, v := range f {
		if k != "mode" {
			more = append(more, fmt.Sprintf("%s %v", strings.ReplaceAll(k, "_", " "), v))
		}
	}
	sort.Strings(more)
	words := strings.ReplaceAll(fmt.Sprint(f["mode"]), "_", " ")
	if len(more) > 0 {
		words += " (" + strings.Join(more, ", ") + ")"
	}
	return words
}

// watchMetrics reads the router's metrics every 100 ms and writes state
// changes into the timeline.
func watchMetrics(ctx context.Context, st *stage, start time.Time, rec *record, mu *sync.Mutex, log func(float64, string, ...any)) {
	states := map[string]float64{}
	for ctx.Err() == nil {
		m, err := st.routers[0].metrics()
		at := time.Since(start).Seconds()
		mu.Lock()
		if err == nil {
			rec.points = append(rec.points, point{at, m})
			for _, k := range sortedKeys(m) {
				if isState(k) && m[k] != states[k] {
					if m[k] == 1 && len(rec.points) > 1 {
						log(at, "router: %s", st.stateWords(k))
					}
					states[k] = m[k]
				}
			}
		}
		mu.Unlock()
		sleep(ctx, 100*time.Millisecond)
	}
}
