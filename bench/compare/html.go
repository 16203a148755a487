package compare

import (
	"fmt"
	"html"
	"io"
	"strings"
)

// HTML writes one self-contained page with inline SVG; it loads nothing.
func (o *Outcome) HTML(w io.Writer) error {
	var b strings.Builder
	b.WriteString(`<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Policies compared</title><style>
body{font:14px/1.45 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#1b1f24;background:#fff}
table{border-collapse:collapse;margin:.6em 0}td,th{padding:.2em .6em;text-align:right;border-bottom:1px solid #ddd;white-space:nowrap}td:first-child,th:first-child{text-align:left}
.best{font-weight:700}.ours{background:#eef5ff}.note{color:#555}svg{max-width:100%;height:auto}pre{background:#f6f6f6;padding:.7em;overflow:auto}
@media(prefers-color-scheme:dark){body{background:#14171a;color:#dde}td,th{border-color:#333}.ours{background:#1c2733}.note{color:#9aa}pre{background:#1d2125}text{fill:#dde}}
</style></head><body><h1>Policies compared</h1>`)
	whiskers := "whiskers are 95 % confidence intervals"
	if o.Seeds == 1 {
		whiskers = oneSeed
	}
	fmt.Fprintf(&b, `<p class="note">%d seeds per cell, runs of %gx length; %s. Goodput is over requests offered; TTFT and TPOT are of answered requests.</p><pre>`, o.Seeds, o.Scale, whiskers)
	var v strings.Builder
	o.verdict(&v)
	b.WriteString(html.EscapeString(v.String()) + "</pre>")
	for i := range o.Rows {
		r := &o.Rows[i]
		fmt.Fprintf(&b, `<h2 id="%s">%s</h2><p class="note">%s</p>`, r.Scenario, html.EscapeString(r.Title), html.EscapeString(r.Note))
		if r.Skipped != "" {
			fmt.Fprintf(&b, "<p>not run: %s</p>", html.EscapeString(r.Skipped))
			continue
		}
		r.bars(&b)
		o.htmlTable(&b, r)
	}
	b.WriteString("</body></html>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

func (o *Outcome) htmlTable(b *strings.Builder, r *Row) {
	b.WriteString("<table><tr><th>policy<th>goodput<th>±<th>refused<th>long<th>TTFT p50<th>p95<th>p99 ms<th>TPOT p50<th>p95 ms<th>hits<th>lost<th>spread</tr>")
	best := r.best()
	for _, k := range r.order() {
		c := &r.Cells[k]
		class := ""
		if k == 0 {
			class = "ours"
		}
		if k == best {
			class += " best"
		}
		fmt.Fprintf(b, `<tr class="%s"><td>%s<td>%.3f<td>%s<td>%.3f<td>%.3f<td>%.0f<td>%.0f<td>%.0f<td>%.1f<td>%.1f<td>%.2f<td>%.3f<td>%.2f</tr>`, class, html.EscapeString(c.Policy),
			c.Goodput.Mean, o.halfWidth(c.Goodput), c.Refused.Mean, c.Long.Mean, 1e3*c.TTFTp50.Mean, 1e3*c.TTFTp95.Mean, 1e3*c.TTFTp99.Mean, 1e3*c.TPOTp50.Mean, 1e3*c.TPOTp95.Mean, c.HitRate.Mean, c.Lost.Mean, c.Spread.Mean)
	}
	b.WriteString("</table>")
}

// bars draws goodput (left) and TTFT p95 (right, relative to the slowest).
func (r *Row) bars(b *strings.Builder) {
	const rowH, left, width, gap = 20, 190, 360, 60
	h := rowH*len(r.Cells) + 30
	fmt.Fprintf(b, `<svg viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-label="goodput and TTFT by policy" font-size="12">`, left+2*width+gap+60, h, left+2*width+gap+60, h)
	fmt.Fprintf(b, `<text x="%d" y="14">goodput</text><text x="%d" y="14">TTFT p95</text>`, left, left+width+gap)
	slowest := 1e-9
	for i := range r.Cells {
		slowest = max(slowest, r.Cells[i].TTFTp95.Mean)
	}
	for row, k := range r.order() {
		c := &r.Cells[k]
		y := 22 + row*rowH
		color := "#8aa4c0"
		if k == 0 {
			color = "#1f6feb"
		}
		g := c.Goodput.Mean * width
		fmt.Fprintf(b, `<text x="%d" y="%d" text-anchor="end">%s</text><rect x="%d" y="%d" width="%.1f" height="14" fill="%s"/>`, left-8, y+12, html.EscapeString(c.Policy), left, y, g, color)
		if c.Goodput.CI > 0 {
			lo, hi := max(0, c.Goodput.Mean-c.Goodput.CI)*width, min(1, c.Goodput.Mean+c.Goodput.CI)*width
			fmt.Fprintf(b, `<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="#d1242f" stroke-width="2"/>`, left+lo, y+7, left+hi, y+7)
		}
		fmt.Fprintf(b, `<text x="%.1f" y="%d">%.3f</text>`, left+min(g, width-36)+4, y+12, c.Goodput.Mean)
		t := c.TTFTp95.Mean / slowest * width
		fmt.Fprintf(b, `<rect x="%d" y="%d" width="%.1f" height="14" fill="%s"/><text x="%.1f" y="%d">%.0f ms</text>`, left+width+gap, y, t, color, float64(left+width+gap)+t+4, y+12, 1e3*c.TTFTp95.Mean)
	}
	if r.Ideal > 0 {
		x := left + r.Ideal*width
		fmt.Fprintf(b, `<line x1="%.1f" y1="18" x2="%.1f" y2="%d" stroke="#2da44e" stroke-dasharray="4 3"/>`, x, x, h)
	}
	b.WriteString("</svg>")
}
