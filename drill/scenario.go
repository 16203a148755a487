// Package drill runs failure scenarios against a real router process with
// emulated replicas and a fault injector on the loopback, drives load, and
// judges what clients and operators saw. docs/failures.md is generated from
// the scenario files, so the written matrix cannot drift from what is proven.
package drill

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"sort"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

//go:embed scenarios/*.yaml
var scenarioFS embed.FS

// Scenario is one drill: fault, load, what must be seen, and for the reader
// symptom, mechanism, blast radius and first operator action.
type Scenario struct {
	Name        string `yaml:"name"`
	Title       string `yaml:"title"`
	Symptom     string `yaml:"symptom"`
	Mechanism   string `yaml:"mechanism"`
	BlastRadius string `yaml:"blast_radius"`
	FirstAction string `yaml:"first_action"`

	Replicas  []ReplicaGroup    `yaml:"replicas"`
	Services  []ServiceSpec     `yaml:"services"`  // plain HTTP services (auxiliary routes, trace collectors)
	Files     map[string]string `yaml:"files"`     // written into the drill's folder; ${dir} names it, ${now} and ${long_ago} (25 h) are times
	Config    string            `yaml:"config"`    // the router's file; ${a0} is replica a0's URL
	Prepare   []string          `yaml:"prepare"`   // subcommands run on the configuration before the router starts, such as validate-fallbacks
	Refused   string            `yaml:"refused"`   // `penstock check` has to refuse Config with this code or text
	Control   string            `yaml:"control"`   // and has to take this one, which differs in the one thing
	Routers   int               `yaml:"routers"`   // router processes; 0 = 1
	Relayed   bool              `yaml:"relayed"`   // routers reach each other through relays, so that a step can cut the network
	Unwatched bool              `yaml:"unwatched"` // the router's metrics are not read before the load is over
	Settle    Duration          `yaml:"settle"`    // calm time before load, default 1 s
	Load      []Load            `yaml:"load"`
	Steps     []Step            `yaml:"steps"`
	Expect    []Expect          `yaml:"expect"`
	Mutants   []string          `yaml:"mutants"` // faults of a -tags mutant build that this drill has to catch
}

// ReplicaGroup is a number of equal emulated replicas: NAME0, NAME1, ...
type ReplicaGroup struct {
	Name    string  `yaml:"name"`
	Count   int     `yaml:"count"`
	Profile string  `yaml:"profile"` // default h100-8b
	Model   string  `yaml:"model"`   // default m1
	Speed   float64 `yaml:"speed"`   // default 1
	Down    bool    `yaml:"down"`    // refuses connections until healed
	MaxSeqs int     `yaml:"max_seqs"`
	MaxLen  int     `yaml:"max_model_len"`
}

// ServiceSpec is a plain HTTP service that answers 200 with its name.
type ServiceSpec struct {
	Name string `yaml:"name"`
}

// Load is one stream of requests. Times count from the drill's start.
type Load struct {
	Name        string            `yaml:"name"`
	Path        string            `yaml:"path"`        // default /v1/chat/completions
	Method      string            `yaml:"method"`      // default POST
	Model       string            `yaml:"model"`       // default m1
	Rate        float64           `yaml:"rate"`        // requests per second, open loop; 0 = closed loop
	Clients     int               `yaml:"clients"`     // closed loop: this many at a time
	Count       int               `yaml:"count"`       // stop after this many; 0 = For decides
	From        Duration          `yaml:"from"`        // when it starts
	For         Duration          `yaml:"for"`         // how long it lasts
	Prompt      int               `yaml:"prompt"`      // prompt words, default 40
	MaxTokens   int               `yaml:"max_tokens"`  // default 16
	Stream      *bool             `yaml:"stream"`      // default true
	Headers     map[string]string `yaml:"headers"`     // ${n} is the request's number
	Body        string            `yaml:"body"`        // replaces the made body; ${n} as above
	Sessions    int               `yaml:"sessions"`    // conversations with anchor words of their own
	SameBody    bool              `yaml:"same_body"`   // every request the very same bytes
	Retry       bool              `yaml:"retry"`       // retries as the official SDKs do
	Leave       float64           `yaml:"leave"`       // share of clients that leave
	LeaveAfter  Duration          `yaml:"leave_after"` // when they leave after sending; 0 = at the first content event
	Timeout     Duration          `yaml:"timeout"`     // the client's own, default 60 s
	Via         string            `yaml:"via"`         // the router: r0, r1, ...; default: the loads take turns
	Tools       bool              `yaml:"tools"`       // asks for two parallel tool calls
	Temperature *float64          `yaml:"temperature"`
}

// Streams tells whether the load asks for streams.
func (l *Load) Streams() bool { return l.Stream == nil || *l.Stream }

// Step is one act of the injector or operator.
type Step struct {
	At      Duration       `yaml:"at"`
	Replica string         `yaml:"replica"` // a0; "a*" = all of the group
	Service string         `yaml:"service"`
	Fault   map[string]any `yaml:"fault"` // as POST /fault of the emulated replica
	Heal    bool           `yaml:"heal"`
	Config  string         `yaml:"config"`  // write this file and send SIGHUP
	Remove  bool           `yaml:"remove"`  // take the configuration file away and send SIGHUP
	Admin   string         `yaml:"admin"`   // "POST /admin/v1/..."; ${a0.name} is replica a0's name (host:port)
	Router  string         `yaml:"router"`  // kill, stop, cont, term
	Which   int            `yaml:"which"`   // the router process that router or admin is done to, from 0
	Network string         `yaml:"network"` // split (router 0 from the others), heal
	Note    string         `yaml:"note"`
}

// Expect is one assertion; Check names it, the rest are its arguments.
type Expect struct {
	Check  string             `yaml:"check"`
	Load   string             `yaml:"load"`   // only this load's requests
	After  Duration           `yaml:"after"`  // only requests sent after
	Before Duration           `yaml:"before"` // only requests sent before (0 = no bound)
	Metric string             `yaml:"metric"` // a sum over series that have all Labels
	Labels map[string]string  `yaml:"labels"`
	Status int                `yaml:"status"`
	Code   string             `yaml:"code"`
	State  string             `yaml:"state"`
	Header string             `yaml:"header"`
	Value  string             `yaml:"value"`
	Of     string             `yaml:"of"` // replica, route, or another load
	Within Duration           `yaml:"within"`
	Min    *float64           `yaml:"min"`
	Max    *float64           `yaml:"max"`
	Args   map[string]float64 `yaml:"args"`
	Why    string             `yaml:"why"` // what a reader should understand of it
}

// Duration is a time.Duration in YAML ("250ms").
type Duration time.Duration

// UnmarshalYAML reads 250ms, 5s, 2m.
func (d *Duration) UnmarshalYAML(n *yaml.Node) error {
	v, err := time.ParseDuration(n.Value)
	if err != nil {
		return fmt.Errorf("line %d: %q is not a duration such as 250ms or 5s", n.Line, n.Value)
	}
	*d = Duration(v)
	return nil
}

// S returns seconds.
func (d Duration) S() float64 { return time.Duration(d).Seconds() }

// Parse reads one scenario strictly; file is its name for errors.
func Parse(file string, data []byte) (*Scenario, error) {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	dec.KnownFields(true)
	s := &Scenario{}
	if err := dec.Decode(s); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if err := dec.Decode(new(any)); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: more than one document: one file is one drill", file)
	}
	return s, s.validate(file)
}

func (s *Scenario) validate(file string) error {
	var errs []error
	bad := func(format string, a ...any) { errs = append(errs, fmt.Errorf(file+": "+format, a...)) }
	for _, f := range [][2]string{{"name", s.Name}, {"title", s.Title}, {"symptom", s.Symptom}, {"mechanism", s.Mechanism},
		{"blast_radius", s.BlastRadius}, {"first_action", s.FirstAction}} {
		if strings.TrimSpace(f[1]) == "" {
			bad("%s is missing: a drill is also its page in docs/failures.md", f[0])
		}
	}
	if len(s.Expect) == 0 && s.Refused == "" {
		bad("expect is empty: a drill that asserts nothing cannot fail")
	}
	if (s.Refused == "") != (s.Control == "") {
		bad("refused and control belong together: a check that refuses everything shows nothing")
	}
	loads := map[string]bool{}
	for i, l := range s.Load {
		if l.Name == "" || loads[l.Name] {
			bad("load %d: name is missing or used twice", i)
		}
		loads[l.Name] = true
		if m := s.loadMistake(&l); m != "" {
			bad("load %s: %s", l.Name, m)
		}
	}
	for i := range s.Steps {
		if m := s.stepMistake(&s.Steps[i]); m != "" {
			bad("step %d (at %v): %s", i, time.Duration(s.Steps[i].At), m)
		}
	}
	for i := range s.Expect {
		e := &s.Expect[i]
		if _, ok := checks[e.Check]; !ok {
			bad("expect %d: no check %q; known: %s", i, e.Check, strings.Join(checkNames(), ", "))
			continue
		}
		if e.Load != "" && !loads[e.Load] {
			bad("expect %d: no load %q", i, e.Load)
		}
		if m := s.expectMistake(e); m != "" {
			bad("expect %d (%s): %s", i, e.Check, m)
		}
	}
	return errors.Join(errs...)
}

// All returns the shipped scenarios, sorted by name.
func All() ([]*Scenario, error) {
	names, err := fs.Glob(scenarioFS, "scenarios/*.yaml")
	if err != nil {
		return nil, err
	}
	sort.Strings(names)
	var all []*Scenario
	var errs []error
	for _, n := range names {
		data, err := scenarioFS.ReadFile(n)
		if err == nil {
			var s *Scenario
			if s, err = Parse(n, data); err == nil {
				if want := strings.TrimSuffix(path.Base(n), ".yaml"); s.Name != want {
					err = fmt.Errorf("%s: name is %q, the file says %q", n, s.Name, want)
				}
				all = append(all, s)
			}
		}
		errs = append(errs, err)
	}
	return all, errors.Join(errs...)
}

// Find returns one shipped scenario by name.
func Find(name string) (*Scenario, error) {
	all, err := All()
	if err != nil {
		return nil, err
	}
	var names []string
	for _, s := range all {
		if s.Name == name {
			return s, nil
		}
		names = append(names, s.Name)
	}
	return nil, fmt.Errorf("no drill %q; known: %s", name, strings.Join(names, ", "))
}
