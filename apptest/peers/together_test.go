package peers

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// peersTable is what `penstock peers` prints of router i, a line for each peer.
func (s *stage) peersTable(i int) map[string]string {
	out, err := exec.Command(s.binary, "peers", "--admin", s.admins[i]).CombinedOutput()
	if err != nil {
		s.t.Fatalf("penstock peers: %v: %s", err, out)
	}
	rows := map[string]string{}
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); len(f) > 3 {
			rows[f[0]] = line
		}
	}
	return rows
}

func (s *stage) log(name string) string {
	b, _ := os.ReadFile(filepath.Join(s.dir, name+".log"))
	return string(b)
}

// ask sends a chat request to router i.
func (s *stage) ask(i int, prompt string) (status int, body string) {
	s.t.Helper()
	resp, err := client.Post("http://"+s.publics[i]+"/v1/chat/completions", "application/json",
		strings.NewReader(fmt.Sprintf(`{"model":"m1","max_tokens":4,"messages":[{"role":"user","content":%q}]}`, prompt)))
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b)
}

// Routers find each other by a name (r1 and r2 know localhost only), a router
// whose file differs is named in the log, in the metric and in `penstock peers`,
// and one that is told to end leaves with its account.
func TestJoinByNameDriftAndLeave(t *testing.T) {
	s := startWith(t, 3, "", func(i int, gossip []string, text string) string {
		_, port, _ := strings.Cut(gossip[0], ":")
		if i == 0 {
			text = strings.Replace(text, gossip[0], "127.0.0.1:"+port, 1)
			return strings.Replace(text, "join: [\""+gossip[1]+"\"]", "join: []", 1)
		}
		if i == 2 {
			text = strings.Replace(text, "profile: {base: l40s-8b}", "profile: {base: l40s-8b}, objective: {ttft: 3s}", 1)
		}
		return strings.Replace(text, "join: [\""+gossip[(i+1)%3]+"\"]", "join: [\"localhost:"+port+"\"]", 1)
	})
	for i, drifts := range []int{1, 1, 2} {
		s.until(fmt.Sprintf("the drift metric of r%d", i), func() bool {
			return strings.Contains(s.get(s.admins[i]+"/metrics"), fmt.Sprintf("\npenstock_peer_config_drift %d\n", drifts))
		})
	}
	s.until("the warning in the log", func() bool {
		return strings.Contains(s.log("r0"), `configuration differs from this router's","router":"r2"`)
	})
	if strings.Contains(s.log("r0"), `configuration differs from this router's","router":"r1"`) {
		t.Error("r0 and r1 have the same configuration, and a warning says they differ")
	}
	rows := s.peersTable(0)
	if !strings.Contains(rows["r2"], "differs") || strings.Contains(rows["r1"], "differs") || !strings.Contains(rows["r1"], "fresh") {
		t.Errorf("penstock peers: %v", rows)
	}
	if err := s.procs["r1"].Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	s.until("r1 has left", func() bool { return strings.Contains(s.peersTable(0)["r1"], "left") && s.fresh(0) == 1 })
	if strings.Contains(s.log("r0"), "went silent") {
		t.Error("r1 left, and was taken for lost")
	}
}

// Whoever repeats a refused request goes through another router each time: the
// routers count together.
func TestARetryStormIsCountedByAllRouters(t *testing.T) {
	s := start(t, 3, "")
	replicas := s.procs["replicas"].Process
	if err := replicas.Kill(); err != nil {
		t.Fatal(err)
	}
	for i := range s.publics {
		s.until(fmt.Sprintf("r%d has no replica", i), func() bool {
			status, _ := s.ask(i, fmt.Sprint("are you there ", time.Now()))
			return status == http.StatusServiceUnavailable
		})
	}
	for n, i := range []int{0, 1, 2, 0} {
		if n > 0 {
			time.Sleep(3 * 200 * time.Millisecond) // some rounds of gossip
		}
		status, body := s.ask(i, "the same again")
		want := http.StatusServiceUnavailable
		if n == 3 { // the third repeat, of which r0 itself saw one
			want = http.StatusTooManyRequests
		}
		if status != want || n == 3 && !strings.Contains(body, "ERR_RETRY_STORM_DETECTED") {
			t.Errorf("time %d, by r%d: %d %s, want %d", n+1, i, status, body, want)
		}
	}
	if !strings.Contains(s.get(s.admins[0]+"/metrics"), "\npenstock_retry_storms_total 1\n") {
		t.Error("the storm is not counted")
	}
}
