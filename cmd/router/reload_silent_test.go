package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/penstock/penstock/bench/replica"
)

// silentFleet is a router whose two replicas both stand still with requests.
type silentFleet struct {
	*reloader
	replicas []*replica.Server
	sent     atomic.Int64
	asked    atomic.Int64 // requests that replicas got
	answers  chan string  // "" = whole and well
	n        int
	files    int // that were open before
}

// replicaOf starts a replica that counts what it is asked.
func (s *silentFleet) replicaOf(t *testing.T) *replica.Server {
	r, err := replica.Start(replica.Options{Model: "m1", Speed: 5, OnRequest: func(string, http.Header, []byte) { s.asked.Add(1) }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return r
}

func (s *silentFleet) conf(hangAfter, rest string, replicas ...*replica.Server) string {
	var urls []string
	for _, r := range replicas {
		urls = append(urls, fmt.Sprintf("%q", r.URL()))
	}
	return fmt.Sprintf("pools:\n  - name: main\n    models: [m1]\n    replicas: {static: [%s]}\n%sclasses: [{name: only, deadline: 20m}]\n"+
		"timeouts: {first_token: 1h, upstream_idle: 200ms}\nhealth: {hang_after: %s}\n", strings.Join(urls, ", "), rest, hangAfter)
}

// metric is the sum of a metric's series.
func (s *silentFleet) metric(name string) (sum float64) {
	_, page := get(s.admin + "/metrics")
	for l := range strings.Lines(page) {
		if strings.HasPrefix(l, name) {
			var v float64
			_, _ = fmt.Sscan(l[strings.LastIndexByte(l, ' ')+1:], &v)
			sum += v
		}
	}
	return sum
}

func (s *silentFleet) openFiles() int {
	d, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", s.cmd.Process.Pid))
	if err != nil {
		return 0 // not Linux
	}
	return len(d)
}

// serving tells whether a goroutine of the router is still with a request.
func (s *silentFleet) serving() bool {
	_, page := get(s.admin + "/debug/pprof/goroutine?debug=2")
	if !strings.Contains(page, "net/http.") {
		s.t.Fatalf("no goroutines are told: %s", page)
	}
	return strings.Contains(page, "proxy.(*flight)")
}

func newSilentFleet(t *testing.T) *silentFleet {
	s := &silentFleet{answers: make(chan string, 64)}
	s.replicas = []*replica.Server{s.replicaOf(t), s.replicaOf(t)}
	s.reloader = startReloader(t, s.conf("3s", "", s.replicas...))
	// Both have work while their pages are read: one whose counters were never
	// seen to move is given far more time before it counts as hung.
	s.until("the counters of both moved", func() bool {
		for range 4 {
			s.send(true)
		}
		s.answered()
		read := s.metric("penstock_scrapes_total{")
		return s.replicas[0].Counts().Requests >= 8 && s.replicas[1].Counts().Requests >= 8 && read >= 8
	})
	s.files = s.openFiles()
	for _, r := range s.replicas {
		if err := r.Fault(replica.Fault{Mode: replica.Freeze}); err != nil {
			t.Fatal(err)
		}
	}
	s.asked.Store(0)
	for i := range 16 {
		s.send(i%2 == 0)
	}
	s.until("all are at replicas", func() bool { return s.asked.Load() == 16 })
	if !s.serving() {
		t.Fatal("no goroutine is with a request")
	}
	s.until("both are known to hang", func() bool {
		_, page := get(s.admin + "/metrics")
		return strings.Count(page, `state="ejected"} 1`) == 2
	})
	return s
}

// send makes one request whose answer, or what is wrong with it, comes to answers.
func (s *silentFleet) send(stream bool) {
	s.n++
	i := s.sent.Add(1)
	go func() {
		resp, err := http.Post(s.api+"/v1/chat/completions", "application/json",
			strings.NewReader(fmt.Sprintf(`{"model":"m1","stream":%v,"max_tokens":5,"messages":[{"role":"user","content":"w%d"}]}`, stream, i)))
		if err != nil {
			s.answers <- err.Error()
			return
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		text := string(body)
		if err != nil || resp.StatusCode != 200 || stream != strings.Contains(text, "[DONE]") || strings.Contains(text, `"error"`) || strings.Count(text, "finish_reason\":\"length") != 1 {
			s.answers <- fmt.Sprintf("request %d: %d %v %s", i, resp.StatusCode, err, text)
			return
		}
		s.answers <- ""
	}()
}

// answered waits for all answers.
func (s *silentFleet) answered() {
	s.t.Helper()
	s.until("all are answered", func() bool {
		for ; s.n > 0; s.n-- {
			select {
			case a := <-s.answers:
				if a != "" {
					s.t.Error(a)
				}
			default:
				return false
			}
		}
		return true
	})
}

// settled waits for the books to be at zero.
func (s *silentFleet) settled() {
	s.t.Helper()
	s.until("nothing is in flight, no file is left open and no goroutine runs on", func() bool {
		sum := 0.0
		for _, name := range []string{"penstock_requests_in_flight", "penstock_held_requests", "penstock_replica_requests_in_flight{", "penstock_replica_prefill_tokens{"} {
			sum += s.metric(name)
		}
		http.DefaultClient.CloseIdleConnections()
		return sum == 0 && s.openFiles() <= s.files+4 && !s.serving()
	})
	s.stop()
}

// A reload while both replicas stand still, of what does not concern where the
// requests are: each stays where it is and has its answer when the fleet goes on.
func TestAReloadLeavesTheRequestsOfASilentFleet(t *testing.T) {
	s := newSilentFleet(t)
	for i := range 4 {
		s.reload(s.conf("1h", fmt.Sprintf("    aliases: [chat%d]\n    api_key: k%d\n    labels: {region: r%d}\n    objective: {ttft: 30s}\n    headroom: %d%%\n", i, i, i, i), s.replicas...))
	}
	for _, r := range s.replicas {
		if err := r.Heal(); err != nil {
			t.Fatal(err)
		}
	}
	s.answered()
	s.settled()
	if n := s.asked.Load(); n != 16 {
		t.Errorf("replicas were asked %d times for 16 requests", n)
	}
}

// A reload that takes silent replicas out and brings one that works: their
// requests are answered by that one.
func TestAReloadReplacesSilentReplicas(t *testing.T) {
	for _, stay := range []int{0, 1} {
		s := newSilentFleet(t)
		s.reload(s.conf("3s", "", append(s.replicas[:stay:stay], s.replicaOf(t))...))
		s.answered()
		s.settled()
	}
}
