package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/penstock/penstock/telemetry"
)

// Rules that hold over the whole repository.

func TestPagesAreTheGeneratedOnes(t *testing.T) {
	for name, text := range pages() {
		got, err := os.ReadFile(filepath.Join("../../docs", name))
		if err != nil {
			t.Error(err)
		} else if string(got) != text {
			t.Errorf("docs/%s is not what the code generates: run make docs", name)
		}
	}
}

// metricUse finds penstock_... with its label matchers in an expression.
var metricUse = regexp.MustCompile(`(penstock_[a-z0-9_]+)(\{[^}]*\})?`)

func TestAlertsAndDashboardUseWhatThereIs(t *testing.T) {
	defs := map[string]*telemetry.Def{}
	for _, d := range telemetry.Defs {
		defs[d.Name] = d
		if d.Kind == telemetry.Histogram {
			for _, suffix := range []string{"_bucket", "_sum", "_count"} {
				defs[d.Name+suffix] = d
			}
		}
	}
	own := []string{"instance", "job", "le"}
	for _, file := range []string{"alerts.yaml", "grafana.json"} {
		data, err := os.ReadFile(filepath.Join("../../deploy", file))
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(file, ".json") && !json.Valid(data) {
			t.Errorf("%s is not JSON", file)
		}
		uses := metricUse.FindAllStringSubmatch(strings.ReplaceAll(string(data), `\"`, `"`), -1)
		if len(uses) < 10 {
			t.Errorf("%s: only %d metrics found", file, len(uses))
		}
		for _, u := range uses {
			d := defs[u[1]]
			if d == nil {
				t.Errorf("%s uses %s, which telemetry does not define", file, u[1])
				continue
			}
			for _, m := range regexp.MustCompile(`([a-z_]+)\s*(=~|!~|!=|=)`).FindAllStringSubmatch(u[2], -1) {
				if !slices.Contains(d.Labels, m[1]) && !slices.Contains(own, m[1]) {
					t.Errorf("%s: %s has no label %q", file, u[1], m[1])
				}
			}
		}
	}
}

// The pure rooms decide; they do no I/O, know no clock and draw no lots.
func TestPureRoomsImportNothingImpure(t *testing.T) {
	const module = "github.com/penstock/penstock/"
	forbidden := []string{"net", "net/http", "os", "os/exec", "syscall", "math/rand", "math/rand/v2", "time",
		"go.uber.org/zap", "github.com/VictoriaMetrics/metrics", "github.com/valyala/fasthttp"}
	for _, room := range []string{"fleet", "scorer", "admission", "bench/model"} {
		// Direct imports of the room and of all that it needs of ours: what the
		// standard library uses inside (strconv, sort) is its own affair.
		out, err := exec.Command("go", "list", "-deps", "-f", `{{.ImportPath}} {{join .Imports " "}}`, module+room).Output()
		if err != nil {
			t.Fatalf("go list %s: %v", room, err)
		}
		for _, line := range strings.Split(strings.TrimSpace(string(out)), "\n") {
			pkg, imports, _ := strings.Cut(line, " ")
			if !strings.HasPrefix(pkg, module) {
				continue
			}
			for _, imp := range strings.Fields(imports) {
				if slices.Contains(forbidden, imp) {
					t.Errorf("%s is pure, and %s imports %s", room, pkg, imp)
				}
			}
		}
	}
}

// I/O rooms do not import each other; what one needs of another is a small
// interface that cmd fills.
func TestRoomsImportOnlyWhatTheyMay(t *testing.T) {
	const module = "github.com/penstock/penstock/"
	may := map[string][]string{
		"fleet": {}, "scorer": {"fleet"}, "admission": {"fleet", "scorer"}, "wire": {}, "telemetry": {},
		"config": {"fleet"}, "ladder": {"fleet", "admission"}, "tenant": {"wire"},
		"scraper": {"fleet", "telemetry"}, "ring": {"fleet", "telemetry"},
		"proxy":       {"fleet", "scorer", "admission", "wire", "telemetry", "ladder", "tenant", "internal/mutant"},
		"console":     {"fleet", "admission", "telemetry"},
		"bench/model": {}, "bench/replica": {"bench/model", "wire", "fleet", "telemetry"},
	}
	for room, allowed := range may {
		out, err := exec.Command("go", "list", "-f", `{{join .Imports "\n"}}`, module+room).Output()
		if err != nil {
			t.Errorf("go list %s: %v", room, err)
			continue
		}
		for _, imp := range strings.Fields(string(out)) {
			if ours, ok := strings.CutPrefix(imp, module); ok && !slices.Contains(allowed, ours) && !strings.HasPrefix(ours, "internal/") {
				t.Errorf("%s imports %s; docs/architecture.md allows it only %v", room, ours, allowed)
			}
		}
	}
}
