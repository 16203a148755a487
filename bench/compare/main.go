package compare

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/penstock/penstock/bench/sim"
	"github.com/penstock/penstock/internal/cli"
)

func names(all []Scenario) (out []string) {
	for _, s := range all {
		out = append(out, s.Name)
	}
	return out
}

// pick selects scenarios by name.
func pick(list string) ([]Scenario, error) {
	all := Suite()
	if list == "" {
		return all, nil
	}
	var out []Scenario
	for _, n := range strings.Split(list, ",") {
		found := false
		for _, s := range all {
			if s.Name == n {
				out, found = append(out, s), true
			}
		}
		if !found {
			return nil, fmt.Errorf("unknown scenario %q (known: %s)", n, strings.Join(names(all), ", "))
		}
	}
	return out, nil
}

// Main is `penstock bench compare`.
func Main(args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("bench compare", flag.ContinueOnError)
	fs.SetOutput(stderr)
	var o Options
	scenarios := fs.String("scenarios", "", "some of: "+strings.Join(names(Suite()), ", ")+" (default all)")
	policies := fs.String("policies", "", "policies, separated by commas; the first is what the others are compared with; of "+strings.Join(policyFlags(), ", ")+"; +hold behind one of another router gives it Penstock's admission (default all)")
	fs.IntVar(&o.Seeds, "seeds", 3, "seeds per cell")
	fs.BoolVar(&o.Tuning, "tuning", false, "use the seeds that the policy was tuned on (1, 2, ...) instead of the held-out ones (1001, 1002, ...)")
	fs.Float64Var(&o.Scale, "scale", 1, "length of the runs")
	fs.IntVar(&o.Workers, "workers", 0, "simulations at a time (0 = processors)")
	fs.StringVar(&o.Env.Traces, "traces", "", "folder with the Mooncake and Azure traces")
	out := map[string]*string{}
	for _, f := range []string{"json", "csv", "html", "doc"} {
		out[f] = fs.String(f, "", "write the result as "+f+" to this file")
	}
	parts := fs.String("parts", "", "of suite, learning (ours with learned scales and without, over more seeds) and findings (experiments beside the suite); default all, and suite alone with --scenarios or --policies")
	from := fs.String("from", "", "instead of running, join the results in these JSON files, separated by commas")
	quiet := fs.Bool("quiet", false, "no progress")
	capacity := fs.Bool("capacity", false, "instead of the suite, sweep the rate of its usual stream: goodput and knee of each policy")
	if code := cli.Parse(fs, args, 0); code >= 0 {
		return code
	}
	err := o.check(out)
	if err == nil {
		o.Scenarios, err = pick(*scenarios)
	}
	if err == nil && *policies != "" {
		o.Policies, err = ParsePolicies(*policies)
	}
	if err == nil {
		err = checkParts(*parts, *capacity, *from)
	}
	if err != nil {
		fmt.Fprintln(stderr, "bench compare:", err)
		return 2
	}
	if *capacity {
		if err := Capacity(o, capacityRates, stdout); err != nil {
			fmt.Fprintln(stderr, "bench compare: --capacity:", err)
			return 1
		}
		return 0
	}
	if !*quiet {
		o.Progress = func(done, all int, what string) { fmt.Fprintf(stderr, "\r\033[K%d/%d %s", done, all, what) }
	}
	var res *Outcome
	if *from != "" {
		res, err = join(strings.Split(*from, ","))
	} else {
		if *parts == "" && *scenarios == "" && *policies == "" {
			*parts = "suite,learning,findings"
		}
		res, err = run(o, *parts)
	}
	if !*quiet {
		fmt.Fprint(stderr, "\r\033[K")
	}
	if err != nil {
		fmt.Fprintln(stderr, "bench compare:", err)
		return 1
	}
	res.Table(stdout)
	for kind, path := range out {
		if *path == "" {
			continue
		}
		if err := write(res, kind, *path); err != nil {
			fmt.Fprintf(stderr, "bench compare: --%s: %v\n", kind, err)
			return 1
		}
	}
	return 0
}

// checkParts refuses an unknown part before the ones in front of it have run,
// and parts where nothing would look at them.
func checkParts(parts string, capacity bool, from string) error {
	if parts == "" {
		return nil
	}
	if capacity || from != "" {
		return errors.New("--parts: has no meaning with --capacity or --from")
	}
	for _, p := range strings.Split(parts, ",") {
		switch p {
		case "suite", "learning", "findings":
		default:
			return fmt.Errorf("--parts: unknown part %q (known: suite, learning, findings)", p)
		}
	}
	return nil
}

// check refuses what would be found after minutes, or would run nothing.
func (o *Options) check(out map[string]*string) error {
	switch {
	case o.Seeds < 1:
		return fmt.Errorf("--seeds: %d is less than 1", o.Seeds)
	case !(o.Scale > 0) || o.Scale > 100:
		return fmt.Errorf("--scale: %g is not over 0 and up to 100", o.Scale)
	case o.Workers < 0:
		return fmt.Errorf("--workers: %d is less than 0", o.Workers)
	}
	for kind, path := range out {
		if *path == "" {
			continue
		}
		if i, err := os.Stat(filepath.Dir(*path)); err != nil || !i.IsDir() {
			return fmt.Errorf("--%s: %s: its folder is not there", kind, *path)
		}
	}
	return nil
}

// join reads results of parts of the suite and puts them in the suite's order.
func join(paths []string) (*Outcome, error) {
	var out *Outcome
	var rows, learning, findings map[string]Row
	for _, p := range paths {
		b, err := os.ReadFile(p)
		if err != nil {
			return nil, err
		}
		var part Outcome
		if err := json.Unmarshal(b, &part); err != nil {
			return nil, fmt.Errorf("%s: %w", p, err)
		}
		if out == nil {
			out = &Outcome{Seeds: part.Seeds, Tuning: part.Tuning, Scale: part.Scale}
		}
		if part.Seeds != out.Seeds || part.Tuning != out.Tuning || part.Scale != out.Scale {
			return nil, fmt.Errorf("%s: seeds or length are not those of %s", p, paths[0])
		}
		rows, learning, findings = collect(rows, part.Rows), collect(learning, part.Learning), collect(findings, part.Findings)
	}
	for _, s := range Suite() {
		out.Rows, out.Learning = inOrderOf(s, out.Rows, rows), inOrderOf(s, out.Learning, learning)
	}
	for _, e := range experiments() {
		out.Findings = inOrderOf(e.Scenario, out.Findings, findings)
	}
	return out, nil
}

func collect(into map[string]Row, rows []Row) map[string]Row {
	if into == nil {
		into = map[string]Row{}
	}
	for _, r := range rows {
		into[r.Scenario] = r
	}
	return into
}

func inOrderOf(s Scenario, out []Row, from map[string]Row) []Row {
	if r, ok := from[s.Name]; ok {
		out = append(out, r)
	}
	return out
}

// run runs the parts of the comparison that are asked for.
func run(o Options, parts string) (*Outcome, error) {
	o.defaults()
	out := &Outcome{Seeds: o.Seeds, Tuning: o.Tuning, Scale: o.Scale}
	if parts == "" {
		parts = "suite"
	}
	for _, p := range strings.Split(parts, ",") {
		var err error
		switch p {
		case "suite":
			var all *Outcome
			if all, err = Run(o); err == nil {
				out.Rows = all.Rows
			}
		case "learning":
			out.Learning, err = learningRows(o)
		case "findings":
			out.Findings, err = findings(o)
		default:
			panic("BUG: the part " + p + " was not checked")
		}
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

func write(res *Outcome, kind, path string) (err error) {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() {
		if e := f.Close(); err == nil {
			err = e
		}
	}()
	switch kind {
	case "json":
		e := json.NewEncoder(f)
		e.SetIndent("", " ")
		return e.Encode(res)
	case "csv":
		return res.CSV(f)
	case "html":
		return res.HTML(f)
	}
	res.Markdown(f)
	return nil
}

// SimMain is `penstock bench sim`: one scenario, one policy, in detail.
func SimMain(args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("bench sim", flag.ContinueOnError)
	fs.SetOutput(stderr)
	var e Env
	scenario := fs.String("scenario", "near_saturation", "one of: "+strings.Join(names(Suite()), ", "))
	policy := fs.String("policy", "penstock", "one of: "+strings.Join(policyFlags(), ", ")+"; +hold behind one of another router gives it Penstock's admission")
	seed := fs.Uint64("seed", 1, "seed")
	scale := fs.Float64("scale", 1, "length of the run")
	bin := fs.Float64("timeline", 0, "width of timeline bins, s (0 = none)")
	fs.StringVar(&e.Traces, "traces", "", "folder with the traces")
	out := fs.String("json", "", "write the report to this file")
	if code := cli.Parse(fs, args, 0); code >= 0 {
		return code
	}
	s, err := pick(*scenario)
	var ps []Policy
	if err == nil {
		ps, err = ParsePolicies(*policy)
	}
	var c sim.Config
	if err == nil {
		c, err = s[0].Build(&e, *seed, *scale)
	}
	if err != nil {
		fmt.Fprintln(stderr, "bench sim:", err)
		return 2
	}
	c.Name, c.Timeline = s[0].Name+" / "+ps[0].Name, *bin
	ps[0].apply(&c, nil)
	rep, err := sim.Run(c)
	if err != nil {
		fmt.Fprintln(stderr, "bench sim:", err)
		return 1
	}
	rep.Table(stdout)
	for _, b := range rep.Timeline {
		fmt.Fprintf(stdout, "%7.1f s  offered %5d  good %5d  shed %5d  TTFT p95 %.3f s\n", b.At, b.Offered, b.Good, b.Shed, b.TTFTp95)
	}
	if *out != "" {
		b, _ := json.MarshalIndent(rep, "", " ")
		if err := os.WriteFile(*out, append(b, '\n'), 0o644); err != nil {
			fmt.Fprintln(stderr, "bench sim: --json:", err)
			return 1
		}
	}
	return 0
}
