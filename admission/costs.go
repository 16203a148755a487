package admission

import (
	"math"

	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/scorer"
)

// Cost is what one replica was predicted to cost the request decided last, in
// seconds (Hit: prompt tokens). All are NaN for a replica that was no candidate.
type Cost struct {
	TTFT, Own, Harm, Cost, Hit float64
}

// costsKept is how many replicas' costs are remembered, the first of the view:
// people look at them.
const costsKept = 16

// noCosts begins a decision about w.
func (p *Pool) noCosts(w *fleet.Work) {
	p.costOf = w
	if n := min(costsKept, len(p.view.Replicas)); len(p.costs) != n {
		p.costs = make([]Cost, n)
	}
	nan := math.NaN()
	for i := range p.costs {
		p.costs[i] = Cost{nan, nan, nan, nan, nan}
	}
}

func (p *Pool) keepCost(i int, pr *scorer.Prediction, cost float64) {
	if i >= len(p.costs) {
		return
	}
	p.costs[i] = Cost{pr.TTFT, pr.Own, pr.Harm, cost, p.hits[i]}
}

// Costs is what the decision made last about w was made from, by index of
// View().Replicas, for the first 16 of them; nil when another was made since, or none by cost. It is
// valid until the next call.
func (p *Pool) Costs(w *fleet.Work) []Cost {
	if p.costOf != w || len(p.costs) != min(costsKept, len(p.view.Replicas)) {
		return nil
	}
	return p.costs
}
