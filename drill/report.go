package drill

import (
	"bytes"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"net/http"
	"os"
	"sort"
	"strings"
	"time"
)

func checkLog(r *record, e *Expect) (bool, string) {
	b, err := os.ReadFile(r.st.routers[0].log.Name())
	if err != nil {
		return false, err.Error()
	}
	n := float64(strings.Count(string(b), e.Value))
	return inRange(e, n), fmt.Sprintf("the log holds %q %g times; wanted %s", e.Value, n, limits(e))
}

// admin: a page of the admin listener holds `value` at the end.
func checkAdmin(r *record, e *Expect) (bool, string) {
	client := http.Client{Timeout: 5 * time.Second} // the router may have been stopped
	resp, err := client.Get(r.st.routers[0].admin + e.Of)
	if err != nil {
		return false, err.Error()
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return false, err.Error()
	}
	if !bytes.Contains(b, []byte(e.Value)) {
		return false, fmt.Sprintf("%s does not say %q", e.Of, e.Value)
	}
	return true, fmt.Sprintf("%s says %q", e.Of, e.Value)
}

// judgeRefusal plays a drill whose fault is in the configuration: `penstock
// check` refuses it for that fault, and takes the same without it.
func (rep *Report) judgeRefusal(st *stage) {
	out, code, err := st.check(st.sc.Config)
	if err != nil {
		rep.Err = err.Error()
		return
	}
	good, goodCode, err := st.check(st.sc.Control)
	if err != nil {
		rep.Err = err.Error()
		return
	}
	say := func(code int, out string) string {
		return fmt.Sprintf("exit status %d: %s", code, strings.ReplaceAll(strings.TrimSpace(out), st.dir+"/", ""))
	}
	rep.Results = []Result{
		{Check: "refuses", Why: "`penstock check` refuses the configuration", OK: code != 0 && strings.Contains(out, st.sc.Refused), Seen: say(code, out)},
		{Check: "takes", Why: "and takes the same without the fault", OK: goodCode == 0, Seen: say(goodCode, good)},
	}
	rep.OK = rep.Results[0].OK && rep.Results[1].OK
}

func (rep *Report) judge(rec *record) {
	for i := range rec.st.sc.Expect {
		e := &rec.st.sc.Expect[i]
		ok, seen := checks[e.Check](rec, e)
		name := e.Check
		for _, s := range []string{e.Load, e.Of, e.State, e.Metric} {
			if s != "" {
				name += " " + s
			}
		}
		rep.Results = append(rep.Results, Result{Check: name, Why: e.Why, OK: ok, Seen: seen})
		rep.OK = rep.OK && ok
	}
	sort.SliceStable(rep.Timeline, func(i, j int) bool { return rep.Timeline[i].At < rep.Timeline[j].At })
	rep.Buckets, rep.Phases = buckets(rec.calls), phases(rec.calls, rec.st.sc.Steps)
	for _, c := range rec.calls {
		if !c.OK() && !c.Left && len(rep.Sample) < 20 {
			rep.Sample = append(rep.Sample, c)
		}
	}
}

func buckets(calls []*Call) []Bucket {
	last := 0
	for _, c := range calls {
		last = max(last, int(c.Sent))
	}
	if len(calls) == 0 {
		return nil
	}
	b, ttft := make([]Bucket, last+1), make([][]float64, last+1)
	for _, c := range calls {
		s := int(c.Sent)
		k := &b[s]
		switch {
		case c.Left:
			k.Left++
		case c.OK():
			k.OK++
			ttft[s] = append(ttft[s], c.First-c.Sent)
			if c.Header["X-Degraded"] != "" {
				k.Degraded++
			}
		case c.Honest():
			k.Refused++
		default:
			k.Failed++
		}
	}
	for i := range b {
		b[i].Second = i
		if len(ttft[i]) > 0 {
			b[i].TTFTp95 = quantile(ttft[i], .95)
		}
	}
	return b
}

// Text writes the report for a terminal.
func (rep *Report) Text(w io.Writer) {
	word := "ok"
	if !rep.OK {
		word = "FAILED"
	}
	fmt.Fprintf(w, "drill %s: %s (%.1f s)\n  %s\n", rep.Name, word, rep.Seconds, rep.Title)
	if rep.Err != "" {
		fmt.Fprintf(w, "  error: %s\n", rep.Err)
	}
	for _, r := range rep.Results {
		mark := "ok  "
		if !r.OK {
			mark = "FAIL"
		}
		if r.Why != "" {
			fmt.Fprintf(w, "  %s %s\n         %s\n", mark, r.Why, r.Seen)
		} else {
			fmt.Fprintf(w, "  %s %s\n", mark, r.Seen)
		}
	}
	if rep.StoodStill > 0.01 {
		fmt.Fprintf(w, "  the machine stood still for %.0f %% of the time: figures in seconds say little\n", 100*rep.StoodStill)
	}
	phaseTable(w, rep.Phases)
	if len(rep.Timeline) > 0 {
		fmt.Fprintln(w, "  timeline")
		for _, e := range rep.Timeline {
			fmt.Fprintf(w, "    %7.2f s  %s\n", e.At, e.What)
		}
	}
}

// JSON writes the reports for programs.
func JSON(w io.Writer, reps []*Report) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(reps)
}

var page = template.Must(template.New("drills").Funcs(template.FuncMap{
	"bars": func(b []Bucket) template.HTML {
		var s strings.Builder
		top := 1
		for _, k := range b {
			top = max(top, k.OK+k.Refused+k.Failed+k.Left)
		}
		fmt.Fprintf(&s, `<svg viewBox="0 0 %d 100" preserveAspectRatio="none" width="100%%" height="90" role="img" aria-label="answers by second">`, max(len(b), 1)*10)
		for i, k := range b {
			y := 100.0
			for _, p := range []struct {
				n int
				c string
			}{{k.OK - k.Degraded, "#3a7"}, {k.Degraded, "#da3"}, {k.Refused, "#79c"}, {k.Left, "#bbb"}, {k.Failed, "#c33"}} {
				h := float64(p.n) / float64(top) * 100
				y -= h
				fmt.Fprintf(&s, `<rect x="%d" y="%.1f" width="9" height="%.1f" fill="%s"/>`, i*10, y, h, p.c)
			}
		}
		s.WriteString("</svg>")
		return template.HTML(s.String())
	},
}).Parse(`<!doctype html><html lang="en"><meta charset="utf-8"><title>Penstock drills</title>
<style>body{font:15px system-ui;max-width:62em;margin:2em auto;padding:0 1em}h2 small{font-weight:400;color:#666}.ok{color:#276}.FAIL{color:#b22;font-weight:700}table{border-collapse:collapse}td{padding:.15em .6em;vertical-align:top;border-top:1px solid #ddd}</style>
<h1>Penstock drills</h1><p>Bars: answers by the second in which they were asked for. Green answered, amber degraded, blue refused with a Retry-After, grey left by the client, red failed.</p>
{{range .}}<h2 id="{{.Name}}">{{.Name}} {{if .OK}}<span class="ok">ok</span>{{else}}<span class="FAIL">FAILED</span>{{end}} <small>{{.Title}}, {{printf "%.1f" .Seconds}} s</small></h2>
{{with .Err}}<p class="FAIL">{{.}}</p>{{end}}{{if .Buckets}}{{bars .Buckets}}{{end}}
{{if .Phases}}<table><tr><th>sent</th><th>tries</th><th>answered</th><th>degraded</th><th>refused</th><th>failed</th><th>left</th><th>TTFT p95</th></tr>{{range .Phases}}<tr><td>{{printf "%.1f to %.1f s" .From .To}}</td><td>{{.Asked}}</td><td>{{.OK}}</td><td>{{.Degraded}}</td><td>{{.Refused}}</td><td>{{.Failed}}</td><td>{{.Left}}</td><td>{{printf "%.3f s" .TTFTp95}}</td></tr>{{end}}</table>{{end}}
<table>{{range .Results}}<tr><td class="{{if .OK}}ok{{else}}FAIL{{end}}">{{if .OK}}ok{{else}}FAIL{{end}}</td><td>{{.Check}}</td><td>{{.Seen}}{{with .Why}}<br><em>{{.}}</em>{{end}}</td></tr>{{end}}</table>
{{if .Timeline}}<details open><summary>timeline</summary><table>{{range .Timeline}}<tr><td>{{printf "%.2f s" .At}}</td><td>{{.What}}</td></tr>{{end}}</table></details>{{end}}{{end}}</html>
`))

// HTML writes one self-contained page.
func HTML(w io.Writer, reps []*Report) error { return page.Execute(w, reps) }

// Failures renders docs/failures.md from the scenarios.
func Failures(w io.Writer, all []*Scenario) {
	fmt.Fprint(w, "# Failures\n\nGenerated from the drills (`penstock docs`); do not edit. Each row is a drill that ships in the binary: `penstock drill NAME` plays it\non the loopback and exits 0 only when each assertion held. `penstock drill all` plays them all.\n")
	for _, s := range all {
		fmt.Fprintf(w, "\n## %s\n\n%s.\n\n", s.Name, strings.TrimSuffix(s.Title, "."))
		for _, f := range [][2]string{{"Symptom", s.Symptom}, {"Mechanism", s.Mechanism}, {"Blast radius", s.BlastRadius}, {"First action", s.FirstAction}} {
			fmt.Fprintf(w, "- **%s**: %s\n", f[0], strings.Join(strings.Fields(f[1]), " "))
		}
		fmt.Fprint(w, "- **Proven by**:\n")
		if s.Refused != "" {
			fmt.Fprintf(w, "  - `penstock check` refuses the configuration with `%s`\n", s.Refused)
		}
		for _, e := range s.Expect {
			fmt.Fprintf(w, "  - %s\n", e.describe())
		}
		if len(s.Mutants) > 0 {
			fmt.Fprintf(w, "- **Shown to catch** (`go build -tags mutant`): %s\n", strings.Join(s.Mutants, ", "))
		}
	}
}

func (e Expect) describe() string {
	var parts []string
	if e.Load != "" {
		parts = append(parts, "requests of "+e.Load)
	}
	if e.Metric != "" {
		parts = append(parts, e.series())
	}
	for _, p := range []string{e.Of, e.State, e.Code, e.Header, e.Value} {
		if p != "" {
			parts = append(parts, p)
		}
	}
	if e.Status != 0 {
		parts = append(parts, fmt.Sprint(e.Status))
	}
	if s := strings.TrimSpace(e.span()); s != "" {
		parts = append(parts, s)
	}
	if e.Within > 0 {
		parts = append(parts, fmt.Sprintf("within %g s", e.Within.S()))
	}
	if e.Min != nil || e.Max != nil {
		parts = append(parts, limits(&e))
	}
	text := "`" + e.Check + "`"
	if len(parts) > 0 {
		text += " (" + strings.Join(parts, ", ") + ")"
	}
	if e.Why != "" {
		text += ": " + e.Why
	}
	return text
}
