package drill

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/penstock/penstock/bench/replica"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/ladder"
	"github.com/penstock/penstock/telemetry"
)

// What a scenario file may get wrong beside its YAML. A name with a slip in it
// matches nothing, and an assertion that nothing happens to it always holds;
// so every name is looked up before anything is played.

// unbounded are the checks that need no min or max to be able to fail.
var unbounded = []string{"state", "no_state", "accounts_zero", "admin", "views_agree"}

// replicaNames are the names of the replicas that the scenario starts.
func (s *Scenario) replicaNames() []string {
	var names []string
	for _, g := range s.Replicas {
		for i := range max(g.Count, 1) {
			names = append(names, fmt.Sprintf("%s%d", g.Name, i))
		}
	}
	return names
}

func (s *Scenario) hasService(name string) bool {
	return slices.ContainsFunc(s.Services, func(v ServiceSpec) bool { return v.Name == name })
}

// routerIndex reads r0, r1, ...
func (s *Scenario) routerIndex(name string) bool {
	for i := range max(s.Routers, 1) {
		if name == fmt.Sprintf("r%d", i) {
			return true
		}
	}
	return false
}

// mistake tells what is wrong with a load, or "".
func (s *Scenario) loadMistake(l *Load) string {
	switch {
	case l.Count <= 0 && l.For <= 0:
		return "neither count nor for: it would never end"
	case l.Rate <= 0 && l.Clients <= 0:
		return "set rate (open loop) or clients (closed loop)"
	case l.Via != "" && !s.routerIndex(l.Via):
		return fmt.Sprintf("via: no router %q; they are r0 to r%d", l.Via, max(s.Routers, 1)-1)
	}
	return ""
}

func (s *Scenario) stepMistake(t *Step) string {
	n := 0
	for _, has := range []bool{t.Replica != "", t.Service != "", t.Config != "", t.Remove, t.Admin != "", t.Router != "", t.Network != ""} {
		if has {
			n++
		}
	}
	switch {
	case n != 1:
		return "wants one of replica, service, config, remove, admin, router and network"
	case t.Which < 0 || t.Which >= max(s.Routers, 1):
		return fmt.Sprintf("which: no router %d; the first is 0", t.Which)
	case t.Router != "" && signals[t.Router] == 0:
		return fmt.Sprintf("router: %q is not kill, stop, cont or term", t.Router)
	case t.Network != "" && (!s.Relayed || s.Routers < 2):
		return "network: needs routers: 2 or more, and relayed: true"
	case t.Network != "" && t.Network != "split" && t.Network != "heal":
		return fmt.Sprintf("network: %q is not split or heal", t.Network)
	case t.Service != "" && !s.hasService(t.Service):
		return fmt.Sprintf("no service %q", t.Service)
	case t.Replica != "" && !slices.ContainsFunc(s.replicaNames(), t.hits):
		return fmt.Sprintf("no replica %q; there are: %s", t.Replica, strings.Join(s.replicaNames(), ", "))
	case t.Which != 0 && t.Router == "" && t.Admin == "":
		return "which: goes with router and admin"
	case t.Admin != "":
		return s.adminMistake(t.Admin)
	case (t.Replica != "" || t.Service != "") && t.Heal == (len(t.Fault) > 0):
		return "wants either fault or heal"
	case t.Service != "" && !t.Heal && t.Fault["mode"] != "kill" && t.Fault["mode"] != "hang":
		return "fault: a service knows the modes kill and hang"
	case t.Replica != "" && !t.Heal:
		return faultMistake(t.Fault)
	}
	return ""
}

// adminMistake tells what is wrong with a request to the admin listener, or "".
func (s *Scenario) adminMistake(request string) string {
	method, path, _ := strings.Cut(request, " ")
	if method != "GET" && method != "POST" || !strings.HasPrefix(path, "/") || strings.Contains(path, " ") {
		return fmt.Sprintf("admin: %q is not a method and a path: write it as POST /admin/v1/reload", request)
	}
	for _, n := range s.replicaNames() {
		path = strings.ReplaceAll(path, "${"+n+".name}", n)
	}
	if strings.Contains(path, "${") {
		return fmt.Sprintf("admin: %q: a replica's name is ${a0.name}; there are: %s", request, strings.Join(s.replicaNames(), ", "))
	}
	return ""
}

// hits tells whether the step's replica (a name, or "a*") means this one.
func (t *Step) hits(name string) bool {
	group, all := strings.CutSuffix(t.Replica, "*")
	return name == t.Replica || all && strings.HasPrefix(name, group)
}

func faultMistake(m map[string]any) string {
	if m["mode"] == "hang_probes" {
		return ""
	}
	b, err := json.Marshal(m)
	if err == nil {
		err = json.Unmarshal(b, &replica.Fault{})
	}
	if err != nil {
		return err.Error()
	}
	return ""
}

func (s *Scenario) expectMistake(e *Expect) string {
	switch e.Check {
	case "state", "no_state":
		if !isStateWord(e.State) {
			return fmt.Sprintf("no state %q", e.State)
		}
	case "peers":
		if !slices.Contains([]string{"fresh", "silent", "lost"}, e.State) {
			return fmt.Sprintf("state: %q is not fresh, silent or lost", e.State)
		}
	case "metric", "metric_reaches":
		if !isMetric(e.Metric) {
			return fmt.Sprintf("no metric %q; docs/metrics.md has them all", e.Metric)
		}
	case "header":
		if !slices.Contains(watched, e.Header) {
			return fmt.Sprintf("header: %q is not looked at; known: %s", e.Header, strings.Join(watched, ", "))
		}
	case "share", "replica_saw", "cancelled":
		if !slices.Contains(s.replicaNames(), e.Of) {
			return fmt.Sprintf("of: no replica %q; there are: %s", e.Of, strings.Join(s.replicaNames(), ", "))
		}
	case "service_hits":
		if !s.hasService(e.Of) {
			return fmt.Sprintf("of: no service %q", e.Of)
		}
	case "log", "admin":
		if e.Value == "" {
			return "value is missing"
		}
	}
	switch {
	case (e.Check == "peers" || e.Check == "peer_requests") && e.Of != "" && !s.routerIndex(e.Of):
		return fmt.Sprintf("of: no router %q", e.Of)
	case e.Min == nil && e.Max == nil && !slices.Contains(unbounded, e.Check):
		return "neither min nor max: it would hold whatever happens"
	case e.Min != nil && e.Max != nil && *e.Min > *e.Max:
		return "min is over max: it cannot hold"
	}
	return ""
}

func isStateWord(w string) bool {
	for _, p := range ladder.Phases {
		if w == p.String() {
			return true
		}
	}
	for st := fleet.StateUp; st <= fleet.StateDraining; st++ {
		if w == st.String() {
			return true
		}
	}
	return false
}

// isMetric tells whether the page can have the name: one of the table, or the
// Go runtime's or the process's own.
func isMetric(name string) bool {
	if strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") {
		return true
	}
	for _, d := range telemetry.Defs {
		if name == d.Name {
			return true
		}
		if rest, ok := strings.CutPrefix(name, d.Name); ok && d.Kind == telemetry.Histogram && slices.Contains([]string{"_bucket", "_sum", "_count"}, rest) {
			return true
		}
	}
	return false
}
