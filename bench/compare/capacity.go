package compare

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/penstock/penstock/bench/sim"
)

// kneeGoodput is the goodput down to which a fleet is said to carry a rate.
const kneeGoodput = 0.99

// Capacity sweeps the suite's usual stream over rates for each policy and
// writes the goodput, and the knee: the highest rate with goodput >= 0.99.
func Capacity(o Options, rates []float64, w io.Writer) error {
	if o.Policies == nil {
		o.Policies = DefaultPolicies()
	}
	scale := o.Scale
	if scale <= 0 {
		scale = 1
	}
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprint(t, "policy")
	for _, r := range rates {
		fmt.Fprintf(t, "\t%.0f/s", r)
	}
	fmt.Fprintln(t, "\tknee")
	for _, p := range o.Policies {
		fmt.Fprint(t, p.Name)
		knee := 0.0
		for _, rate := range rates {
			c, err := configOf(shared(rate, 60*scale), 1, hosts("h100-8b", 8))
			if err != nil {
				return err
			}
			p.apply(&c, o.Tune)
			rep, err := sim.Run(c)
			if err != nil {
				return err
			}
			if rep.Goodput >= kneeGoodput {
				knee = rate
			}
			fmt.Fprintf(t, "\t%.3f", rep.Goodput)
		}
		fmt.Fprintf(t, "\t%.0f\n", knee)
	}
	return t.Flush()
}

// capacityRates are around the knee of the suite's fleet.
var capacityRates = []float64{240, 280, 300, 320, 330, 340, 350, 360, 380}
