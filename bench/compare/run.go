package compare

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/bench/sim"
)

// Options of a comparison.
type Options struct {
	Scenarios []Scenario // default Suite
	Policies  []Policy   // default DefaultPolicies
	Seeds     int        // default 3
	Tuning    bool       // the seeds that the policy was tuned on, instead of the held-out ones
	Scale     float64    // length of the runs, default 1
	Workers   int        // default GOMAXPROCS
	Env       Env
	// Tune changes the configuration of our own policy's pools; for the tuning of it.
	Tune func(*admission.Config)
	// Progress, when set, is called after each simulation.
	Progress func(done, all int, what string)
}

// heldOut is what the seeds of reports lie above. Seeds 1, 2, 3 ... are for
// tuning: every constant of the policy was chosen on them, so a figure measured
// on them flatters it.
const heldOut = 1000

func (o *Options) seed(i int) uint64 {
	if o.Tuning {
		return uint64(i) + 1
	}
	return heldOut + uint64(i) + 1
}

// Value is a mean over seeds with the half-width of its 95 % confidence
// interval.
type Value struct{ Mean, CI float64 }

// Cell is one policy in one scenario.
type Cell struct {
	Policy   string
	Goodput  Value
	Refused  Value
	Long     Value // goodput of the tenth of the requests with the longest prompts
	TTFTp50  Value // s
	TTFTp95  Value
	TTFTp99  Value
	Offered  Value // TTFT p95 over all that were offered; a request that got no first token counts as never
	TPOTp50  Value
	TPOTp95  Value
	HitRate  Value
	Lost     Value // share that broke, failed or never ended
	Spread   Value // largest share of a replica x their number
	Preempts Value
	// Behind is the goodput of the first policy (ours) less this one's, over
	// the same seeds: over 0 = ours is better.
	Behind Value
	Diffs  []float64     // the same by seed
	Runs   []*sim.Report `json:"-"`
}

// Row is one scenario.
type Row struct {
	Scenario, Title, Note string
	Ideal                 float64
	Requests              int
	Cells                 []Cell
	Skipped               string // why it did not run
}

// Outcome of the comparison.
type Outcome struct {
	Seeds  int
	Tuning bool // on the seeds that the policy was tuned on
	Scale  float64
	Rows   []Row
	// Learning is ours with learned scales and without, over more seeds; Findings
	// are experiments beside the suite (findings.go).
	Learning []Row
	Findings []Row
}

type job struct{ row, cell, seed int }

func (o *Options) defaults() {
	if o.Scenarios == nil {
		o.Scenarios = Suite()
	}
	if o.Policies == nil {
		o.Policies = DefaultPolicies()
	}
	if o.Seeds <= 0 {
		o.Seeds = 3
	}
	if o.Scale <= 0 {
		o.Scale = 1
	}
	if o.Workers <= 0 {
		o.Workers = runtime.GOMAXPROCS(0)
	}
}

// Run simulates everything, in parallel.
func Run(o Options) (*Outcome, error) {
	o.defaults()
	out := &Outcome{Seeds: o.Seeds, Tuning: o.Tuning, Scale: o.Scale}
	configs := make([][]sim.Config, len(o.Scenarios))
	var jobs []job
	for i, s := range o.Scenarios {
		row := Row{Scenario: s.Name, Title: s.Title, Note: s.Note, Ideal: s.Ideal}
		for seed := range o.Seeds {
			c, err := s.Build(&o.Env, o.seed(seed), o.Scale)
			if errors.Is(err, errNoTraces) {
				row.Skipped = err.Error()
				break
			}
			if err != nil {
				return nil, fmt.Errorf("scenario %s: %w", s.Name, err)
			}
			configs[i] = append(configs[i], c)
			row.Requests += len(c.Requests) / o.Seeds
		}
		if row.Skipped == "" {
			for p := range o.Policies {
				row.Cells = append(row.Cells, Cell{Policy: o.Policies[p].Name, Runs: make([]*sim.Report, o.Seeds)})
				for seed := range o.Seeds {
					jobs = append(jobs, job{i, p, seed})
				}
			}
		}
		out.Rows = append(out.Rows, row)
	}
	if err := o.runAll(out, configs, jobs); err != nil {
		return nil, err
	}
	for i := range out.Rows {
		out.Rows[i].summarise()
	}
	return out, nil
}

func (o *Options) runAll(out *Outcome, configs [][]sim.Config, jobs []job) error {
	var (
		mu    sync.Mutex
		wg    sync.WaitGroup
		first error
		done  int
		next  = make(chan job)
	)
	for range o.Workers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for j := range next {
				c := configs[j.row][j.seed]
				p := o.Policies[j.cell]
				c.Name = o.Scenarios[j.row].Name + " / " + p.Name
				p.apply(&c, o.Tune)
				rep, err := sim.Run(c)
				if err == nil && rep.Books != "" {
					err = fmt.Errorf("%s, seed %d: the accounts do not add up: %s", c.Name, o.seed(j.seed), rep.Books)
				}
				mu.Lock()
				if err != nil && first == nil {
					first = err
				}
				out.Rows[j.row].Cells[j.cell].Runs[j.seed] = rep
				done++
				if o.Progress != nil {
					o.Progress(done, len(jobs), c.Name)
				}
				mu.Unlock()
			}
		}()
	}
	for _, j := range jobs {
		next <- j
	}
	close(next)
	wg.Wait()
	return first
}

func (r *Row) summarise() {
	for i := range r.Cells {
		c := &r.Cells[i]
		of := func(f func(*sim.Report) float64) Value {
			x := make([]float64, len(c.Runs))
			for k, rep := range c.Runs {
				x[k] = f(rep)
			}
			return mean(x)
		}
		c.Goodput = of(func(r *sim.Report) float64 { return r.Goodput })
		c.Refused = of(func(r *sim.Report) float64 { return r.Refused })
		c.Long = of(func(r *sim.Report) float64 { return r.Long })
		c.TTFTp50 = of(func(r *sim.Report) float64 { return r.TTFT.P50 })
		c.TTFTp95 = of(func(r *sim.Report) float64 { return r.TTFT.P95 })
		c.TTFTp99 = of(func(r *sim.Report) float64 { return r.TTFT.P99 })
		c.Offered = of(func(r *sim.Report) float64 { return r.OfferedP95 })
		c.TPOTp50 = of(func(r *sim.Report) float64 { return r.TPOT.P50 })
		c.TPOTp95 = of(func(r *sim.Report) float64 { return r.TPOT.P95 })
		c.HitRate = of(func(r *sim.Report) float64 { return r.HitRate })
		c.Preempts = of(func(r *sim.Report) float64 { return r.Preempts })
		c.Lost = of(func(r *sim.Report) float64 {
			return float64(r.Outcomes[sim.Broken]+r.Outcomes[sim.Failed]+r.Outcomes[sim.Open]) / float64(max(1, r.Offered))
		})
		c.Spread = of(func(r *sim.Report) float64 {
			most := 0.0
			for _, s := range r.Shares {
				most = max(most, s)
			}
			return most * float64(len(r.Shares))
		})
		x := make([]float64, len(c.Runs))
		for k := range c.Runs {
			x[k] = r.Cells[0].Runs[k].Goodput - c.Runs[k].Goodput
		}
		c.Behind, c.Diffs = mean(x), x
	}
}

// t95 is Student's two-sided 95 % factor by degrees of freedom.
var t95 = []float64{0, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09}

func mean(x []float64) Value {
	n := float64(len(x))
	sum, sq := 0.0, 0.0
	for _, v := range x {
		sum += v
	}
	m := sum / n
	if n < 2 {
		return Value{Mean: m}
	}
	for _, v := range x {
		sq += (v - m) * (v - m)
	}
	t := 1.96
	if d := len(x) - 1; d < len(t95) {
		t = t95[d]
	}
	return Value{m, t * math.Sqrt(sq/(n-1)/n)}
}

// best is the index of the cell with the highest goodput.
func (r *Row) best() int {
	b := 0
	for i := range r.Cells {
		if r.Cells[i].Goodput.Mean > r.Cells[b].Goodput.Mean {
			b = i
		}
	}
	return b
}

// tie is how far goodput may be under the best of a scenario to tie with it.
const tie = 0.01

// bestTTFT is the lowest TTFT p95 among the cells whose goodput ties with the
// best.
func (r *Row) bestTTFT() int {
	return r.leastTied(func(c *Cell) float64 { return c.TTFTp95.Mean })
}

func (r *Row) leastTied(of func(*Cell) float64) int {
	top, b := r.Cells[r.best()].Goodput.Mean, -1
	for i := range r.Cells {
		if r.Cells[i].Goodput.Mean >= top-tie && (b < 0 || of(&r.Cells[i]) < of(&r.Cells[b])) {
			b = i
		}
	}
	return b
}
