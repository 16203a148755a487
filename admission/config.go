package admission

import (
	"fmt"
	"math"

	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/scorer"
)

// Objective is what an answer must keep to be worth its while. Seconds; a zero
// field means no objective of that kind.
type Objective struct {
	TTFT      float64 // from arrival at the router to the first token
	TTFTPer1k float64 // added for each 1,000 prompt tokens
	ITL       float64 // gap between output tokens
}

// Limit is the allowed time to the first token of a prompt.
func (o Objective) Limit(prompt int) float64 {
	if o.TTFT <= 0 {
		return math.Inf(1)
	}
	return o.TTFT + o.TTFTPer1k*float64(prompt)/1000
}

// Class is one priority band; the first of Config.Classes is the most
// important.
type Class struct {
	Name      string
	Wait      float64   // longest time held at the router, seconds; 0 = never held, negative = as long as the objective allows
	Deadline  float64   // seconds after arrival when its answer is worth nothing; 0 = none (used when Work.Deadline is 0)
	Objective Objective // replaces the pool's, field by field where not zero
	Patient   bool      // is served though its objective was missed, as long as Wait allows
	MinShare  float64   // share of the work it gets however busy the classes above are, 0..1; default 0.02 below the top
	Weights   map[uint32]float64
}

// Config of a Pool. The zero value works: one patient class, generic hardware,
// learned scales, the default policy.
type Config struct {
	Objective Objective
	Classes   []Class
	Policy    string // a name of scorer.Names; default "work"
	Shadow    string // a second policy that decides, is counted, and does not act; default none
	NoHold    bool   // place at once whatever is predicted (what other routers do); default false

	// Headroom is the share of the pool's token-work that classes below the
	// top leave free, 0..1; default 0. HeadroomN1 keeps what the loss of the
	// largest replica would need instead.
	Headroom   float64
	HeadroomN1 bool

	Cap          int     // most requests outstanding at one replica, this router's and its peers'; 0 = none
	MaxHeld      int     // most requests held; default 10,000
	MaxHeldBytes int     // most bytes of them; default 256 MiB
	MaxHeldWork  float64 // most token-work of them; default 0 = no bound
	LookAhead    int     // held requests looked at, in order, in each band; default 32
	WarmWait     float64 // longest wait for a warmer replica while another would do, seconds; default 0.005
	PeerWait     float64 // the same while peers hold requests that may be warm there, at most; default 0.25

	// TTFT objective by which requests are held (not shed) when none is given:
	// generous, since nothing is known of what the users expect.
	SoftTTFT      float64 // default 2
	SoftTTFTPer1k float64 // default 1

	HangAfter    float64 // no byte and no counter for so long means hung, seconds; default 4
	Health       fleet.HealthRules
	SlowRatio    float64 // first tokens this many times later than the fleet's median eject; default 5
	MaxEjected   float64 // most of the fleet that slowness may eject, 0..1; default 0.34
	TrialEvery   float64 // least time between trial requests to one replica; default 0.25
	Learn        float64 // exponent of one calibration step; default 0.03
	NoLearn      bool    // keep the profile's coefficients as they are
	StalePeers   bool    // take peers' accounts as they came, however old: what the correction is worth (bench compare)
	KnownOut     bool    // Work.MaxOut is the true output length: what knowing it would be worth (bench compare)
	Params       scorer.Params
	Bonus        float64 // share of the possible saving that the ring's choice is worth, 0..1; default 0.5
	OutPrior     float64 // expected output tokens before anything is learned; default 200
	BlockDefault float64 // prompt tokens per fingerprint when Work.Tokens is 0; default 16
}

func orDefault[T int | float64](p *T, v T) {
	if *p == 0 {
		*p = v
	}
}

// Defaults fills the fields that are zero.
func (c *Config) Defaults() {
	if len(c.Classes) == 0 {
		c.Classes = []Class{{Name: "standard", Wait: 30}}
	}
	if c.Policy == "" {
		c.Policy = scorer.DefaultPolicy
	}
	orDefault(&c.MaxHeld, 10_000)
	orDefault(&c.MaxHeldBytes, 256<<20)
	orDefault(&c.LookAhead, 32)
	orDefault(&c.WarmWait, 0.005)
	orDefault(&c.PeerWait, 0.25)
	orDefault(&c.SoftTTFT, 2)
	orDefault(&c.SoftTTFTPer1k, 1)
	orDefault(&c.HangAfter, 4)
	c.Health.Defaults()
	orDefault(&c.SlowRatio, 5)
	orDefault(&c.MaxEjected, 0.34)
	orDefault(&c.TrialEvery, 0.25)
	orDefault(&c.Learn, 0.03)
	orDefault(&c.Params.WTTFT, scorer.DefaultParams.WTTFT)
	orDefault(&c.Params.WHarm, scorer.DefaultParams.WHarm)
	orDefault(&c.Params.WMiss, scorer.DefaultParams.WMiss)
	orDefault(&c.Bonus, 0.5)
	orDefault(&c.OutPrior, 200)
	orDefault(&c.BlockDefault, 16)
	classes := make([]Class, len(c.Classes))
	copy(classes, c.Classes)
	c.Classes = classes
	for i := range c.Classes {
		cl := &c.Classes[i]
		if cl.Objective.TTFT == 0 {
			cl.Objective.TTFT = c.Objective.TTFT
		}
		if cl.Objective.TTFTPer1k == 0 {
			cl.Objective.TTFTPer1k = c.Objective.TTFTPer1k
		}
		if cl.Objective.ITL == 0 {
			cl.Objective.ITL = c.Objective.ITL
		}
		if i > 0 {
			orDefault(&cl.MinShare, 0.02)
		}
		if cl.Objective.TTFT == 0 {
			// Nobody said what is too late: hold by a generous guess, and do
			// not shed by it.
			cl.Patient = true
			cl.Objective.TTFT = c.SoftTTFT
			orDefault(&cl.Objective.TTFTPer1k, c.SoftTTFTPer1k)
		}
	}
}

// Validate says what is wrong with the configuration; the error names the
// setting.
func (c *Config) Validate() error {
	share := func(name string, v float64) error {
		if !(v >= 0 && v < 1) {
			return fmt.Errorf("%s: %v is not a share between 0 and 1", name, v)
		}
		return nil
	}
	if c.Policy != "" && scorer.Find(c.Policy) == nil {
		return fmt.Errorf("policy: %q is not known (known: %v)", c.Policy, scorer.Names())
	}
	if c.Shadow != "" && scorer.Find(c.Shadow) == nil {
		return fmt.Errorf("shadow: %q is not known (known: %v)", c.Shadow, scorer.Names())
	}
	if err := share("headroom", c.Headroom); err != nil {
		return err
	}
	if err := share("max_ejected", c.MaxEjected); err != nil {
		return err
	}
	if len(c.Classes) > 64 {
		return fmt.Errorf("classes: %d are too many (at most 64)", len(c.Classes))
	}
	total := 0.0
	for i := range c.Classes {
		cl := &c.Classes[i]
		if err := share("classes["+cl.Name+"].min_share", cl.MinShare); err != nil {
			return err
		}
		total += cl.MinShare
		if cl.Deadline < 0 || math.IsNaN(cl.Wait) {
			return fmt.Errorf("classes[%s]: wait and deadline must be durations", cl.Name)
		}
		for j := 0; j < i; j++ {
			if c.Classes[j].Name == cl.Name {
				return fmt.Errorf("classes[%s]: the name is given twice", cl.Name)
			}
		}
	}
	if total >= 1 {
		return fmt.Errorf("classes: the minimum shares add up to %v, must be under 1", total)
	}
	for _, o := range []struct {
		name string
		v    float64
	}{{"objective.ttft", c.Objective.TTFT}, {"objective.ttft_per_1k", c.Objective.TTFTPer1k}, {"objective.itl", c.Objective.ITL}} {
		if o.v < 0 || math.IsNaN(o.v) {
			return fmt.Errorf("%s: %v is not a duration", o.name, o.v)
		}
	}
	for _, n := range []struct {
		name string
		v    int
	}{{"cap", c.Cap}, {"max_held", c.MaxHeld}, {"max_held_bytes", c.MaxHeldBytes}, {"look_ahead", c.LookAhead}} {
		if n.v < 0 {
			return fmt.Errorf("%s: %d is negative", n.name, n.v)
		}
	}
	return nil
}
