package drill

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A drill that cannot fail proves nothing. With PENSTOCK_MUTATION=1 (make
// drill-mutants; about ten minutes) the router is built with known faults in
// it (-tags mutant, package internal/mutant); each drill that claims to catch
// one must fail on it, and pass on the same binary without it.
// PENSTOCK_MUTATION=NAME,NAME plays only these drills.
func TestDrillsCatchTheirMutants(t *testing.T) {
	only := os.Getenv("PENSTOCK_MUTATION")
	if only == "" {
		t.Skip("set PENSTOCK_MUTATION=1")
	}
	binary := build(t, "mutant")
	all, err := All()
	if err != nil {
		t.Fatal(err)
	}
	caught := map[string]bool{}
	for _, sc := range all {
		if len(sc.Mutants) == 0 || only != "1" && !strings.Contains(","+only+",", ","+sc.Name+",") {
			continue
		}
		t.Run(sc.Name, func(t *testing.T) {
			if rep := playOn(t, sc, binary, ""); !rep.OK {
				t.Fatalf("fails without any fault:\n%s", text(rep))
			}
			for _, m := range sc.Mutants {
				rep := playOn(t, sc, binary, m)
				if rep.OK {
					t.Errorf("does not see the fault %s:\n%s", m, text(rep))
					continue
				}
				if rep.Err != "" {
					t.Errorf("with the fault %s the drill could not be played, which shows nothing: %s", m, rep.Err)
					continue
				}
				caught[m] = true
				t.Logf("the fault %s is caught: %s", m, failed(rep))
			}
		})
	}
	if only == "1" && len(caught) < 10 {
		t.Errorf("only %d faults are caught: %v", len(caught), caught)
	}
}

// Each fault that a scenario names is somewhere in the router's code, and the
// other way round.
func TestMutantsAndScenariosAgree(t *testing.T) {
	all, err := All()
	if err != nil {
		t.Fatal(err)
	}
	claimed := map[string]string{}
	for _, sc := range all {
		for _, m := range sc.Mutants {
			claimed[m] = sc.Name
		}
	}
	for _, m := range []string{"tenant-bleed", "tool-index-collision", "leaked-permit", "blocked-probe", "retry-storm"} {
		if claimed[m] != m {
			t.Errorf("the drill %s does not claim its own fault", m)
		}
	}
	if len(claimed) < 10 {
		t.Errorf("only %d faults", len(claimed))
	}
	code := map[string]bool{}
	err = filepath.WalkDir("..", func(path string, d os.DirEntry, err error) error {
		if d != nil && d.IsDir() && d.Name() == ".git" {
			return filepath.SkipDir // a work of git's own comes and goes there
		}
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return nil // another's file that is gone by now
		}
		for _, part := range strings.Split(string(b), `mutant.On("`)[1:] {
			name, _, _ := strings.Cut(part, `"`)
			code[name] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for m, sc := range claimed {
		if !code[m] {
			t.Errorf("drill %s claims the fault %s, which is nowhere in the code", sc, m)
		}
	}
	for m := range code {
		if claimed[m] == "" {
			t.Errorf("the code has the fault %s, which no drill claims to catch", m)
		}
	}
}

func build(t *testing.T, tags string) string {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "penstock")
	out, err := exec.Command("go", "build", "-tags", tags, "-o", binary, "../cmd/router").CombinedOutput()
	if err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return binary
}

func playOn(t *testing.T, sc *Scenario, binary, mutant string) *Report {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	o := Options{Binary: binary}
	if mutant != "" {
		o.Env = []string{"PENSTOCK_MUTANT=" + mutant}
	}
	return Run(ctx, sc, o)
}

func text(rep *Report) string {
	var b strings.Builder
	rep.Text(&b)
	return b.String()
}

func failed(rep *Report) string {
	var s []string
	for _, r := range rep.Results {
		if !r.OK {
			s = append(s, fmt.Sprintf("%s: %s", r.Check, r.Seen))
		}
	}
	return strings.Join(s, "; ")
}
