package compare

import (
	"encoding/csv"
	"fmt"
	"io"
	"sort"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/penstock/penstock/bench/sim"
	"github.com/penstock/penstock/scorer"
)

// Table writes the comparison for people.
func (o *Outcome) Table(w io.Writer) {
	for i := range o.Rows {
		r := &o.Rows[i]
		fmt.Fprintf(w, "\n%s — %s\n  %s", r.Scenario, r.Title, r.Note)
		if r.Ideal > 0 {
			fmt.Fprintf(w, "; ideal goodput %.3f", r.Ideal)
		}
		fmt.Fprintln(w)
		if r.Skipped != "" {
			fmt.Fprintln(w, "  skipped:", r.Skipped)
			continue
		}
		t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
		fmt.Fprintln(t, "  policy\tgoodput\t±\trefused\tlong\tTTFT p50\tp95\tp99 ms\tTPOT p50\tp95 ms\thits\tlost\tspread")
		for _, k := range r.order() {
			c := &r.Cells[k]
			fmt.Fprintf(t, "  %s\t%.3f\t%s\t%.3f\t%.3f\t%.0f\t%.0f\t%.0f\t%.1f\t%.1f\t%.2f\t%.3f\t%.2f\n", c.Policy, c.Goodput.Mean, o.halfWidth(c.Goodput), c.Refused.Mean, c.Long.Mean,
				1e3*c.TTFTp50.Mean, 1e3*c.TTFTp95.Mean, 1e3*c.TTFTp99.Mean, 1e3*c.TPOTp50.Mean, 1e3*c.TPOTp95.Mean, c.HitRate.Mean, c.Lost.Mean, c.Spread.Mean)
		}
		_ = t.Flush()
	}
	fmt.Fprintln(w)
	o.verdict(w)
}

// oneSeed stands where an interval would be.
const oneSeed = "one seed: no interval"

// halfWidth is that of a goodput's interval.
func (o *Outcome) halfWidth(v Value) string {
	if o.Seeds == 1 {
		return "-"
	}
	return strconv.FormatFloat(v.CI, 'f', 3, 64)
}

// order is the cells by goodput, best first.
func (r *Row) order() []int {
	idx := make([]int, len(r.Cells))
	for i := range idx {
		idx[i] = i
	}
	sort.SliceStable(idx, func(a, b int) bool { return r.Cells[idx[a]].Goodput.Mean > r.Cells[idx[b]].Goodput.Mean })
	return idx
}

// verdict says where the first policy stands.
func (o *Outcome) verdict(w io.Writer) {
	ran, first, near, tied, slower, offered := 0, 0, 0, 0, 0, 0
	var losses []string
	for i := range o.Rows {
		r := &o.Rows[i]
		if r.Skipped != "" || len(r.Cells) < 2 {
			continue
		}
		ran++
		our, top := r.Cells[0].Goodput.Mean, r.Cells[r.best()].Goodput.Mean
		switch {
		case our >= top:
			first++
		case our >= top-tie:
			near++
		default:
			losses = append(losses, fmt.Sprintf("%s: goodput %.3f, %s has %.3f", r.Scenario, our, r.Cells[r.best()].Policy, top))
		}
		if b := r.bestTTFT(); our >= top-tie {
			tied++
			if p := r.Cells[0].TTFTp95.Mean; p > 1.1*r.Cells[b].TTFTp95.Mean {
				slower++
				losses = append(losses, fmt.Sprintf("%s: TTFT p95 %.0f ms, %s has %.0f ms at equal goodput", r.Scenario, 1e3*p, r.Cells[b].Policy, 1e3*r.Cells[b].TTFTp95.Mean))
			}
			if b, p := r.leastTied(func(c *Cell) float64 { return c.Offered.Mean }), r.Cells[0].Offered.Mean; p > 1.1*r.Cells[b].Offered.Mean {
				offered++
				losses = append(losses, fmt.Sprintf("%s: TTFT p95 over all offered %s ms, %s has %s ms at equal goodput", r.Scenario, waited(p), r.Cells[b].Policy, waited(r.Cells[b].Offered.Mean)))
			}
		}
	}
	if ran == 0 {
		return
	}
	fmt.Fprintf(w, "%s: first in goodput in %d of %d scenarios, within 1 %% of the first in %d more; TTFT p95 within 10 %% of the best in %d of the %d of these, over all offered in %d\n",
		o.first(), first, ran, near, tied-slower, tied, tied-offered)
	o.ranks(w)
	o.shares(w)
	for _, l := range losses {
		fmt.Fprintln(w, "  loss:", l)
	}
}

// shares says how much of the capacity share was reached where there is one.
func (o *Outcome) shares(w io.Writer) {
	for i := range o.Rows {
		if r := &o.Rows[i]; r.Ideal > 0 && len(r.Cells) > 0 {
			fmt.Fprintf(w, "  %s: %.1f %% of the capacity share (goodput %.3f of %.3f)\n", r.Scenario, 100*r.Cells[0].Goodput.Mean/r.Ideal, r.Cells[0].Goodput.Mean, r.Ideal)
		}
	}
}

func (o *Outcome) first() string {
	for i := range o.Rows {
		if len(o.Rows[i].Cells) > 0 {
			return o.Rows[i].Cells[0].Policy
		}
	}
	return ""
}

// rival tells a policy of another router from a variant of ours (without
// admission, without learning), which nobody else ships.
func rival(policy string) bool {
	return !strings.HasPrefix(policy, ours) && !strings.HasPrefix(policy, scorer.DefaultPolicy)
}

// standing is ours against the rivals of a scenario in goodput: best is the
// first of them by the mean, nil when none ran.
func (r *Row) standing() (best *Cell, ahead, behind bool) {
	ahead = true
	for i := range r.Cells {
		c := &r.Cells[i]
		if !rival(c.Policy) {
			continue
		}
		if best == nil || c.Goodput.Mean > best.Goodput.Mean {
			best = c
		}
		ahead = ahead && c.Behind.Mean-c.Behind.CI > 0
		behind = behind || c.Behind.Mean+c.Behind.CI < 0
	}
	return best, ahead && best != nil, behind
}

// ranks says how often ours is first among the policies that other routers ship.
func (o *Outcome) ranks(w io.Writer) {
	ran, first, ahead, behind := 0, 0, 0, 0
	for i := range o.Rows {
		best, a, b := o.Rows[i].standing()
		if best == nil || rival(o.Rows[i].Cells[0].Policy) {
			continue
		}
		ran++
		if o.Rows[i].Cells[0].Goodput.Mean >= best.Goodput.Mean {
			first++
		}
		if a {
			ahead++
		}
		if b {
			behind++
		}
	}
	if ran == 0 {
		return
	}
	fmt.Fprintf(w, "  among the policies that other routers ship: first in goodput by the mean in %d of %d scenarios; ", first, ran)
	if o.Seeds == 1 {
		fmt.Fprintln(w, oneSeed)
		return
	}
	fmt.Fprintf(w, "ahead of all of them beyond the seeds' interval in %d, tied in %d, behind one in %d\n", ahead, ran-ahead-behind, behind)
}

// rankTable is ours against the best rival, scenario by scenario.
func (o *Outcome) rankTable(w io.Writer) {
	fmt.Fprint(w, "\n## Among the policies that other routers ship\n\nRivals are the policies that another router ships (round_robin to preble in the table above). Ours without admission or without learning are no rivals:\n"+
		"they are ours with a part taken out, to show what the part is worth. The difference is in goodput over the same seeds, ours less that of the best rival by the mean, with its\n"+
		"95 % interval. Ahead: the interval against every rival is over nothing. Behind: against some rival it is under nothing. Tied: neither.\n\n| scenario | ours | best rival | difference | |\n|---|---|---|---|---|\n")
	for i := range o.Rows {
		r := &o.Rows[i]
		best, ahead, behind := r.standing()
		if best == nil {
			continue
		}
		word := "tied"
		switch {
		case behind:
			word = "**behind**"
		case ahead:
			word = "ahead"
		}
		diff := fmt.Sprintf("%+.4f ± %.4f", best.Behind.Mean, best.Behind.CI)
		if o.Seeds == 1 {
			diff, word = fmt.Sprintf("%+.4f", best.Behind.Mean), oneSeed
		}
		fmt.Fprintf(w, "| %s | %.4f | %s %.4f | %s | %s |\n", r.Scenario, r.Cells[0].Goodput.Mean, best.Policy, best.Goodput.Mean, diff, word)
	}
}

// CSV writes one line per scenario, policy and seed.
func (o *Outcome) CSV(w io.Writer) error {
	c := csv.NewWriter(w)
	head := "scenario,policy,seed,offered,goodput,refused,ttft_p50,ttft_p95,ttft_p99,tpot_p50,tpot_p95,e2e_p95,hit_rate,preemptions,attempts,predict_ratio"
	_ = c.Write(strings.Split(head, ","))
	f := func(v float64) string { return strconv.FormatFloat(v, 'g', 6, 64) }
	for i := range o.Rows {
		for _, cell := range o.Rows[i].Cells {
			for seed, r := range cell.Runs {
				_ = c.Write([]string{o.Rows[i].Scenario, cell.Policy, strconv.Itoa(seed + 1), strconv.Itoa(r.Offered), f(r.Goodput), f(r.Refused),
					f(r.TTFT.P50), f(r.TTFT.P95), f(r.TTFT.P99), f(r.TPOT.P50), f(r.TPOT.P95), f(r.E2E.P95), f(r.HitRate), f(r.Preempts), f(r.Attempts), f(r.Ratio)})
			}
		}
	}
	c.Flush()
	return c.Error()
}

// Markdown writes docs/policies.md: what was measured, losses included.
func (o *Outcome) Markdown(w io.Writer) {
	fmt.Fprintf(w, "# Policies compared\n\nGenerated by `penstock bench compare`; do not edit. %d seeds per cell, runs of %gx length; ± is the half-width of the 95 %% confidence interval.\n", o.Seeds, o.Scale)
	if o.Seeds == 1 {
		fmt.Fprint(w, "\n**One seed: no interval, so a difference may be chance.**\n")
	}
	if o.Tuning {
		fmt.Fprint(w, "\n**Measured on the seeds that the policy was tuned on: they flatter it.**\n")
	} else {
		fmt.Fprintf(w, "\nThe seeds are %d to %d. Everything was tuned on seeds 1, 2, 3 ... (`--tuning`); these here were not looked at while it was. The traces are one each: there a seed only moves the arrivals.\n", heldOut+1, heldOut+o.Seeds)
	}
	fmt.Fprintf(w, `
Every policy sees the same request streams, the same replicas (bench/model) and the same view, as old as it is in the daemon.
"penstock" is the default policy with admission (hold, late binding, shed); all others place at once, as their makers' routers do.
- **Goodput** is requests within their objectives / requests offered; a refused request is not good.
- **TTFT and TPOT** are of answered requests. **Offered p95** is TTFT over all that were offered, where a request that was refused, or
  never answered, counts as never: a policy cannot shorten it by refusing.
- **Goodput ties** when it is within 0.01 of the best in that scenario. Only then TTFT is compared: a policy that serves fewer within their
  objectives, by refusing or by being late, has it easier. Both TTFT p95 are compared; a loss is over 10 %% more than the least of those that tie.
- **Capacity share** is capacity / offered rate, given as "ideal". Capacity is the highest rate, in steps of 5 req/s, at which some policy keeps a mean goodput of 0.99
  in the steady state: over 120 s counted from 30 s on ("bench compare --capacity"). For the usual stream it is %.0f req/s with 8 x H100/8B. More than the
  ideal is possible for a policy that refuses the dearer requests.

`, sharedCapacity)
	fmt.Fprint(w, "## Verdict\n\n```\n")
	o.verdict(w)
	fmt.Fprint(w, "```\n\n## Goodput at a glance\n\n")
	o.glance(w)
	o.rankTable(w)
	o.learning(w)
	o.shapes(w)
	for i := range o.Rows {
		r := &o.Rows[i]
		fmt.Fprintf(w, "\n## %s (`%s`)\n\n%s.", r.Title, r.Scenario, r.Note)
		if r.Ideal > 0 {
			fmt.Fprintf(w, " Ideal goodput %.3f.", r.Ideal)
		}
		fmt.Fprintln(w)
		if r.Skipped != "" {
			fmt.Fprintf(w, "\nNot run: %s.\n", r.Skipped)
			continue
		}
		fmt.Fprint(w, "\n| policy | goodput | refused | long | TTFT p50 / p95 / p99 ms | offered p95 | TPOT p50 / p95 ms | hits | lost | spread |\n|---|---|---|---|---|---|---|---|---|---|\n")
		for _, k := range r.order() {
			c := &r.Cells[k]
			name := c.Policy
			if k == 0 {
				name = "**" + name + "**"
			}
			fmt.Fprintf(w, "| %s | %.3f ± %s | %.3f | %.3f | %.0f / %.0f / %.0f | %s | %.1f / %.1f | %.2f | %.3f | %.2f |\n", name, c.Goodput.Mean, o.halfWidth(c.Goodput), c.Refused.Mean, c.Long.Mean,
				1e3*c.TTFTp50.Mean, 1e3*c.TTFTp95.Mean, 1e3*c.TTFTp99.Mean, waited(c.Offered.Mean), 1e3*c.TPOTp50.Mean, 1e3*c.TPOTp95.Mean, c.HitRate.Mean, c.Lost.Mean, c.Spread.Mean)
		}
	}
	fmt.Fprint(w, "\nlong: the goodput of the tenth of the requests with the longest prompts; over capacity they pay for the others. spread: the busiest replica's share of the requests times the number of replicas (1 = even). lost: broken after the first token, failed on every attempt, or never ended.\n")
}

// waited writes a time in ms; a mean in which some seed's request was never
// answered is never.
func waited(s float64) string {
	if s > sim.Never/100 {
		return "never"
	}
	return strconv.FormatFloat(1e3*s, 'f', 0, 64)
}

// learning shows that what is learned does no worse than nothing learned: the
// difference in goodput over the same seeds, with its interval.
func (o *Outcome) learning(w io.Writer) {
	rows := o.Learning
	if rows == nil {
		rows = o.Rows
	}
	fmt.Fprint(w, "\n## Learned scales against none\n\nGoodput with learned scales less goodput without, over the same seeds; \"worse\" when all of the interval is under nothing.\n\n| scenario | difference | by seed | |\n|---|---|---|---|\n")
	for i := range rows {
		c := rows[i].cell(NoLearn)
		if c == nil {
			continue
		}
		word, diff := "no difference shown", fmt.Sprintf("%+.4f ± %.4f", c.Behind.Mean, c.Behind.CI)
		switch {
		case len(c.Diffs) == 1:
			word, diff = oneSeed, fmt.Sprintf("%+.4f", c.Behind.Mean)
		case c.Behind.Mean+c.Behind.CI < 0:
			word = "**worse**"
		case c.Behind.Mean-c.Behind.CI > 0:
			word = "better"
		case c.Behind.Mean == 0 && c.Behind.CI == 0:
			word = "equal"
		}
		var seeds []string
		for _, d := range c.Diffs {
			seeds = append(seeds, fmt.Sprintf("%+.3f", d))
		}
		fmt.Fprintf(w, "| %s | %s | %s | %s |\n", rows[i].Scenario, diff, strings.Join(seeds, " "), word)
	}
}

// glance is the table of goodputs, a row per policy.
func (o *Outcome) glance(w io.Writer) {
	var cols []*Row
	for i := range o.Rows {
		if o.Rows[i].Skipped == "" {
			cols = append(cols, &o.Rows[i])
		}
	}
	if len(cols) == 0 {
		return
	}
	fmt.Fprint(w, "| policy |")
	for _, r := range cols {
		fmt.Fprintf(w, " %s |", strings.ReplaceAll(r.Scenario, "_", " "))
	}
	fmt.Fprint(w, "\n|---|", strings.Repeat("---|", len(cols)), "\n")
	for k := range cols[0].Cells {
		fmt.Fprintf(w, "| %s |", cols[0].Cells[k].Policy)
		for _, r := range cols {
			mark := ""
			if r.Cells[k].Goodput.Mean >= r.Cells[r.best()].Goodput.Mean-1e-9 {
				mark = "**"
			}
			fmt.Fprintf(w, " %s%.3f%s |", mark, r.Cells[k].Goodput.Mean, mark)
		}
		fmt.Fprintln(w)
	}
}
