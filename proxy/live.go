package proxy

import (
	"fmt"
	"time"
)

// goals are what answers of a pool are measured against, seconds.
type goals struct{ ttft, ttftPer1K, itl float64 }

// goalsOf takes the goals from a pool's options, defaults filled in.
func goalsOf(o *PoolOptions) *goals {
	g := &goals{o.TTFTObjective, o.TTFTPer1K, o.ITLObjective}
	if g.ttft == 0 {
		g.ttft = 0.5
	}
	if g.itl == 0 {
		g.itl = 0.05
	}
	return g
}

// SetPool changes, while requests run, what a pool is called for and measured
// against: its models, aliases and objectives. Other fields of o are not
// looked at. Requests that have been routed go on as they were.
func (p *Proxy) SetPool(o PoolOptions) error {
	pl := p.poolNamed(o.Name)
	if pl == nil {
		return fmt.Errorf("there is no pool %q", o.Name)
	}
	p.repMu.Lock()
	defer p.repMu.Unlock()
	pl.opt.Models, pl.opt.Aliases, pl.opt.AliasOf = o.Models, o.Aliases, o.AliasOf
	pl.goals.Store(goalsOf(&o))
	p.reroute()
	return nil
}

// SetClasses changes the classes' deadlines. The classes are those of the
// start, in the same order.
func (p *Proxy) SetClasses(classes []ClassOptions) error {
	if len(classes) != len(p.opt.Classes) {
		return fmt.Errorf("classes: there are %d, and were %d at the start", len(classes), len(p.opt.Classes))
	}
	d := make([]time.Duration, len(classes))
	for i := range classes {
		if d[i] = classes[i].Deadline; d[i] == 0 {
			d[i] = defaultDeadline
		}
	}
	p.deadlines.Store(&d)
	return nil
}

// defaultDeadline is that of a class without one.
const defaultDeadline = 5 * time.Minute

// SetMaxInFlight changes the router's own bound of requests inside it.
func (p *Proxy) SetMaxInFlight(n int) { p.maxInFlight.Store(int64(n)) }
