package admission

import "github.com/penstock/penstock/fleet"

// Stats are a pool's totals. Once nothing is in flight or held,
// Placed = Finished + Failed + Cancelled, and
// Offered = Placed + Left + sum(Shed).
type Stats struct {
	Offered   uint64 // calls of Admit
	Placed    uint64 // attempts sent to a replica
	Finished  uint64
	Failed    uint64
	Cancelled uint64
	Left      uint64 // held ones whose client went away
	EverHeld  uint64 // requests that were held
	Shed      [ReasonCount]uint64
	Revoked   uint64 // tickets taken from a dead, hung or draining replica
	Panics    uint64 // decisions made fail-open, on an ejected replica
	Ejections [fleet.EvidenceCount]uint64

	ShadowAgree uint64 // decisions in which the shadow policy chose the same replica
	ShadowAll   uint64

	Held      int
	HeldBytes int
	HeldWork  float64 // token-work
	DrainRate float64 // token-work per second that leaves for replicas
	Replicas  int
	Classes   []ClassStats // by class; shared with the pool: read under its lock
}

// ClassStats is one class's part.
type ClassStats struct {
	Placed uint64
	Shed   uint64
	Held   int
}

// ReplicaInfo is what is known of one replica beside the view, for metrics.
type ReplicaInfo struct {
	Ratio      float64 // running mean of observed over predicted TTFT, 1 = right
	RatioITL   float64 // the same of ITL
	TTFT       float64 // running means, seconds
	Predicted  float64
	ITL        float64
	PredictITL float64
	Samples    int     // first tokens learned from
	HitTrust   float64 // share of the expected prefix hits that came true
	Blocks     int     // fingerprints in the prefix index
	OtherReqs  int     // requests there that came by another road
	Sign       float64 // when it last showed that it works (seconds)
}

// Info tells what was learned of one replica.
func (p *Pool) Info(id fleet.ID) (ReplicaInfo, bool) {
	r := p.byID[id]
	if r == nil {
		return ReplicaInfo{}, false
	}
	l := &r.learn
	return ReplicaInfo{Ratio: l.ratio(), RatioITL: l.ratioITL(), TTFT: l.obs, Predicted: l.pred, ITL: l.obsITL, PredictITL: l.predITL,
		Samples: l.n, HitTrust: l.trust(), Blocks: p.index.lru[r.slot].count,
		OtherReqs: p.view.Replicas[r.i].Other.Requests, Sign: r.sign}, true
}
