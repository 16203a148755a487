package fleet

import (
	"os/exec"
	"strings"
	"testing"
)

// The pure rooms are the same code in the daemon and in virtual time: nothing
// in them may reach a clock, the network, a file, a lock or a log by itself.
func TestPureRoomsImportNoIO(t *testing.T) {
	const module = "github.com/penstock/penstock/"
	rooms := []string{"fleet", "scorer", "admission"}
	allowed := map[string]bool{}
	// In a normal build it is one constant and imports nothing (checked below).
	allowed[module+"internal/mutant"] = true
	if out, err := exec.Command("go", "list", "-f", `{{join .Imports " "}}`, module+"internal/mutant").Output(); err != nil || strings.TrimSpace(string(out)) != "" {
		t.Errorf("internal/mutant imports %s (%v)", out, err)
	}
	for _, r := range rooms {
		allowed[module+r] = true
	}
	forbidden := map[string]bool{"net": true, "net/http": true, "os": true, "time": true, "sync": true, "sync/atomic": true,
		"math/rand": true, "math/rand/v2": true, "log": true, "log/slog": true, "crypto/rand": true, "context": true}
	for _, room := range rooms {
		// What the room's own files import: the standard library's inner
		// dependencies (fmt needs os) are not the room's doing.
		out, err := exec.Command("go", "list", "-f", `{{join .Imports "\n"}}`, module+room).Output()
		if err != nil {
			t.Fatalf("go list %s: %v", room, err)
		}
		for _, imp := range strings.Fields(string(out)) {
			if forbidden[imp] || strings.Contains(imp, ".") && !allowed[imp] {
				t.Errorf("%s imports %s", room, imp)
			}
		}
		// And through them, nothing from outside the standard library.
		out, err = exec.Command("go", "list", "-deps", module+room).Output()
		if err != nil {
			t.Fatalf("go list -deps %s: %v", room, err)
		}
		for _, dep := range strings.Fields(string(out)) {
			if strings.Contains(strings.SplitN(dep, "/", 2)[0], ".") && !allowed[dep] {
				t.Errorf("%s depends on %s", room, dep)
			}
			if dep == "net" || dep == "net/http" {
				t.Errorf("%s depends on %s", room, dep)
			}
		}
	}
}
