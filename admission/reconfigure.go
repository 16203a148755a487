package admission

import (
	"fmt"
	"slices"
)

// Reconfigure changes what may change while requests run: objectives, the
// classes' waits, deadlines and shares, headroom, cap, bounds of the held queue
// and the time to a hang. The classes have to be the same ones in the same
// order, and the policies stay as they are. Requests that are held keep the
// times they were given; the next look at the queue goes by the new rules.
func (p *Pool) Reconfigure(cfg Config) error {
	cfg.Defaults()
	if err := cfg.Validate(); err != nil {
		return err
	}
	c := &p.cfg
	if len(cfg.Classes) != len(c.Classes) {
		return fmt.Errorf("classes: there are %d, and were %d at the start", len(cfg.Classes), len(c.Classes))
	}
	for i := range c.Classes {
		if c.Classes[i].Name != cfg.Classes[i].Name {
			return fmt.Errorf("classes: %q stands where %q was at the start", cfg.Classes[i].Name, c.Classes[i].Name)
		}
	}
	for i := range c.Classes {
		weights := c.Classes[i].Weights
		c.Classes[i] = cfg.Classes[i]
		c.Classes[i].Weights = weights
	}
	c.Objective = cfg.Objective
	c.Headroom, c.HeadroomN1, c.Cap = cfg.Headroom, cfg.HeadroomN1, cfg.Cap
	c.MaxHeld, c.MaxHeldBytes, c.HangAfter = cfg.MaxHeld, cfg.MaxHeldBytes, cfg.HangAfter
	p.setRoom()
	p.dirty = true
	return nil
}

// Reconfigure records Pool.Reconfigure, unless it is refused.
func (r *Recorder) Reconfigure(cfg Config) error {
	if err := r.Pool.Reconfigure(cfg); err != nil {
		return err
	}
	cfg.Classes = slices.Clone(cfg.Classes)
	r.tell(&Call{Op: OpReconfigure, Config: cfg})
	return nil
}
