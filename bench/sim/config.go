// Package sim is a discrete-event simulator of a fleet in virtual time. The
// replicas are those of bench/model; the routers are the very admission.Pool
// that the daemon runs, with samples and peers' accounts as old as they are
// there. Equal configurations give equal results.
package sim

import (
	"fmt"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/bench/model"
	"github.com/penstock/penstock/bench/workload"
	"github.com/penstock/penstock/fleet"
)

// ReplicaSpec is one simulated replica.
type ReplicaSpec struct {
	Profile model.Profile
	// Prior is what the routers believe of it; nil = ToFleet(Profile), the truth
	// as far as the routers' model can say it.
	Prior *fleet.Profile
	// Unknown gives the routers no profile at all: generic, learned.
	Unknown bool
	Slow    float64 // factor on its step times, told to nobody; 0 = 1
	// Absent replicas are not there at the start; a Join event brings them.
	Absent bool
}

// ToFleet converts a replica's step law to the routers' linear one: exact for
// decode steps, and for full prefill batches.
func ToFleet(p model.Profile) *fleet.Profile {
	b := float64(p.MaxBatched)
	return &fleet.Profile{Name: p.Name, Base: p.A + p.Overhead, PerSeq: p.C, PerKV: p.D,
		PerPrefill: max(p.PB/2, (p.PA+p.PB*b-p.A)/b), PerAttn: 2 * p.PQ,
		KVTokens: p.Blocks() * p.BlockTokens, MaxSeqs: p.MaxSeqs, MaxBatched: p.MaxBatched, BlockTokens: p.BlockTokens, MaxModelLen: p.MaxModelLen}
}

// Scale multiplies the time coefficients of a profile: a wrong prior.
func Scale(p *fleet.Profile, f float64) *fleet.Profile {
	q := *p
	q.Base, q.PerPrefill, q.PerSeq, q.PerKV, q.PerAttn = f*q.Base, f*q.PerPrefill, f*q.PerSeq, f*q.PerKV, f*q.PerAttn
	return &q
}

// EventKind is something that happens to a replica; a closed set.
type EventKind uint8

// The kinds of events.
const (
	Kill   EventKind = iota + 1 // the process dies: connections break, the cache is lost
	Revive                      // it is back, with an empty cache, and probes find it
	Slow                        // its steps take Factor times as long from now on
	Freeze                      // hung: accepts, computes nothing
	Thaw
	Join  // discovery brings it (or back)
	Leave // discovery takes it away; what runs there may finish
)

// Event is a failure or change at a time.
type Event struct {
	At      float64
	Kind    EventKind
	Replica int
	Factor  float64
}

// RetryMode is what clients do with a refusal.
type RetryMode uint8

// The retry modes.
const (
	NoRetry RetryMode = iota
	Naive             // again after about half a second, whatever was said
	Obey              // again after Retry-After
)

// Client is how clients behave.
type Client struct {
	Patience float64 // leaves without a first token after so long, s; 0 = never
	Retry    RetryMode
	Retries  int // most retries of one request
}

// Objective is what makes an answer good. Zero fields do not count.
type Objective struct {
	TTFT      float64 // s, from the intended send
	TTFTPer1k float64 // s more per 1,000 prompt tokens
	TPOT      float64 // s
}

// Config of one simulation.
type Config struct {
	Name     string
	Replicas []ReplicaSpec
	Requests []workload.Request
	Routers  int              // default 1; a request goes to one of them at random
	Pool     admission.Config // of every router
	Goal     Objective
	Events   []Event
	Client   Client
	Seed     uint64

	ScrapeEvery    float64 // s, default 0.25 with ±20 % jitter; negative = never
	ScrapeAge      float64 // s from the reading to the router's knowing; default 0.02
	ProbeEvery     float64 // s between health probes; default 1, negative = never
	GossipEvery    float64 // s, default 0.2; only with several routers
	GossipAge      float64 // s on the way, ±10 %; default 0.002
	GossipLoss     float64 // share of the accounts told that are lost, from GossipLossFrom (s) on
	GossipLossFrom float64
	NoForward      bool    // late accounts are taken as they were made, not brought forward
	Net            float64 // s of network and proxy, both ways together; added to every answer; default 0.001
	BlockTokens    int     // prompt tokens per router fingerprint; default 128
	NoBlocks       bool    // routers see no fingerprints
	NoHot          bool    // nor tell each other which prefixes are where
	NoPrefer       bool    // several routers do not agree on a home for new prefixes
	KnownOut       bool    // routers are told true output lengths (an oracle)
	Warmup         float64 // s: requests before it are not counted
	Cooldown       float64 // s of simulated time after the last arrival; default 120
	Attempts       int     // most attempts of one request; default 3
	Timeline       float64 // width of a timeline bin, s; 0 = no timeline
	CheckHeld      bool    // look at every event for held requests that a replica would take (Report.Withheld); slow
	OnResult       func(*Result)
}

func (c *Config) defaults() error {
	set := func(p *float64, v float64) {
		if *p == 0 {
			*p = v
		}
	}
	set(&c.ScrapeEvery, 0.25)
	set(&c.ScrapeAge, 0.02)
	set(&c.ProbeEvery, 1)
	set(&c.GossipEvery, 0.2)
	set(&c.GossipAge, 0.002)
	set(&c.Net, 0.001)
	set(&c.Cooldown, 120)
	if c.Routers == 0 {
		c.Routers = 1
	}
	if c.BlockTokens == 0 {
		c.BlockTokens = 128
	}
	if c.Attempts == 0 {
		c.Attempts = 3
	}
	if len(c.Replicas) == 0 {
		return fmt.Errorf("sim: no replicas")
	}
	for _, e := range c.Events {
		if e.Replica < 0 || e.Replica >= len(c.Replicas) {
			return fmt.Errorf("sim: event for replica %d of %d", e.Replica, len(c.Replicas))
		}
	}
	cfg := c.Pool
	return cfg.Validate()
}

// Outcome of one request; a closed set.
type Outcome uint8

// The outcomes.
const (
	OK     Outcome = iota + 1
	Shed           // refused, and given up
	Broken         // the replica failed after the first token
	Failed         // every attempt failed before it
	Left           // the client's patience ended
	Open           // not ended when the simulation was
)

var outcomeWords = [...]string{"", "ok", "shed", "broken", "failed", "left", "open"}

func (o Outcome) String() string { return outcomeWords[o] }

// Result is what became of one request.
type Result struct {
	Request  *workload.Request
	Outcome  Outcome
	Good     bool
	TTFT     float64 // s; set with OK
	Admitted float64 // TTFT from the last offer: without the waits that a Retry-After asked for
	TPOT     float64
	E2E      float64
	Ended    float64 // when
	Replica  int     // the last one, -1 = none
	Router   int
	Attempts int
	Offers   int     // times it was offered: 1 + retries
	Cached   int     // prompt tokens from the cache
	Held     float64 // s at the router
	Predict  float64 // TTFT predicted at its placement, s
	Retry    float64 // the last Retry-After, s
	Reason   admission.Reason
}
