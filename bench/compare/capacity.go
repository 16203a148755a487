package compare

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/penstock/penstock/bench/sim"
)

// kneeGoodput is the mean goodput down to which a fleet is said to carry a rate.
const kneeGoodput = 0.99

// Capacity sweeps the suite's usual stream over rates for each policy, and
// writes the mean goodput over the seeds, and the knee: the highest rate up to
// which all rates have a goodput of kneeGoodput. Runs are twice as long as the
// suite's, and counted from 30 s on: over capacity it takes a while until
// enough has piled up to be missed.
func Capacity(o Options, rates []float64, w io.Writer) error {
	o.defaults()
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprint(t, "policy")
	for _, r := range rates {
		fmt.Fprintf(t, "\t%.0f/s", r)
	}
	fmt.Fprintln(t, "\tknee")
	for _, p := range o.Policies {
		fmt.Fprint(t, p.Name)
		knee, over := 0.0, false
		for _, rate := range rates {
			sum := 0.0
			for seed := range o.Seeds {
				c, err := configOf(shared(rate, 30+120*o.Scale), o.seed(seed), hosts("h100-8b", 8))
				if err != nil {
					return err
				}
				c.Warmup = 30
				p.apply(&c, o.Tune)
				rep, err := sim.Run(c)
				if err != nil {
					return err
				}
				sum += rep.Goodput
			}
			g := sum / float64(o.Seeds)
			if over = over || g < kneeGoodput; !over {
				knee = rate
			}
			fmt.Fprintf(t, "\t%.3f", g)
		}
		fmt.Fprintf(t, "\t%.0f\n", knee)
	}
	return t.Flush()
}

// capacityRates are around the knee of the suite's fleet, and 1.15 times it.
var capacityRates = []float64{300, 320, 330, 335, 340, 345, 350, 360, 397}
