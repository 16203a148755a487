package load

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/penstock/penstock/bench/replica"
	"github.com/penstock/penstock/bench/workload"
	"github.com/penstock/penstock/internal/freeport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func target(t *testing.T, o replica.Options) *replica.Server {
	t.Helper()
	o.Listen = freeport.Addr(t) // one that is killed stays refused
	s, err := replica.Start(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func small(url string) Options {
	return Options{URL: url, Model: "tiny", Spec: workload.Spec{Rate: 100, Duration: 1, Prompt: workload.Dist{Mean: 100, CV: 0.5}, Out: workload.Dist{Mean: 10}, Families: 2, PrefixTokens: 200, Seed: 1}}
}

func TestOpenLoopCountsEveryRequestOnce(t *testing.T) {
	for _, api := range []string{"chat", "completions"} {
		s := target(t, replica.Options{Speed: 10})
		o := small(s.URL())
		o.API = api
		o.TTFT = 10 * time.Second
		var mu sync.Mutex
		seen := map[int]int{}
		o.OnRecord = func(r Record) {
			mu.Lock()
			defer mu.Unlock()
			seen[r.Index]++
			if r.Out != 10 || len(r.Gaps) != 9 || len(strings.Fields(r.Text)) != 10 || r.TTFT() <= 0 || r.E2E() < r.TTFT() {
				t.Errorf("%s: record %+v", api, r)
			}
		}
		rep, err := Run(context.Background(), o)
		if err != nil {
			t.Fatal(err)
		}
		if rep.OK != rep.Offered || rep.Good != rep.Offered || rep.Offered < 60 || len(seen) != rep.Offered {
			t.Errorf("%s: %+v", api, rep)
		}
		if c := s.Counts(); c.Finished != rep.Offered || rep.CachedPct < 20 {
			t.Errorf("%s: the server finished %d of %d, cached %.0f %%", api, c.Finished, rep.Offered, rep.CachedPct)
		}
	}
}

func TestWholeAnswersAndClosedLoop(t *testing.T) {
	s := target(t, replica.Options{Speed: 20})
	o := small(s.URL())
	o.Whole, o.Concurrency, o.Spec.Max = true, 4, 40
	rep, err := Run(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	if rep.OK != 40 || rep.TPOT.Count != 0 {
		t.Errorf("%+v", rep)
	}
}

// Times count from the intended send: a server that stops for a while makes
// every request of that while late, not only the ones that were out.
func TestNoCoordinatedOmission(t *testing.T) {
	var s *replica.Server
	var first sync.Once
	s = target(t, replica.Options{Speed: 20, OnRequest: func(string, http.Header, []byte) {
		// From the first request on, however long the load takes to begin.
		first.Do(func() { _ = s.Fault(replica.Fault{Mode: replica.Freeze, For: 700 * time.Millisecond}) })
	}})
	o := small(s.URL())
	o.Spec.Arrival = workload.Constant
	rep, err := Run(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	if rep.TTFT.P50 < 0.05 || rep.OK != rep.Offered {
		t.Errorf("the median request waited %g s of a stop of 0.7 s: %+v", rep.TTFT.P50, rep)
	}
}

func TestOutcomesAreToldApart(t *testing.T) {
	for _, c := range []struct {
		fault replica.Fault
		want  Outcome
	}{
		{replica.Fault{Mode: replica.Status, Status: 503, RetryAfter: 3}, Refused},
		{replica.Fault{Mode: replica.Status, Status: 500}, Status},
		{replica.Fault{Mode: replica.Cut, After: 2}, Broken},
		{replica.Fault{Mode: replica.ErrorEvent, After: 1}, Broken},
		{replica.Fault{Mode: replica.NoDone}, Broken},
		{replica.Fault{Mode: replica.AbortOne, After: 1}, Broken},
		{replica.Fault{Mode: replica.Kill}, Connection},
		{replica.Fault{Mode: replica.Hang}, Timeout},
	} {
		s := target(t, replica.Options{Speed: 20})
		_ = s.Fault(c.fault)
		o := small(s.URL())
		o.Spec.Max, o.Timeout = 5, 20*time.Second
		if c.want == Timeout {
			o.Timeout = 300 * time.Millisecond
		}
		rep, err := Run(context.Background(), o)
		if err != nil {
			t.Fatal(err)
		}
		if rep.Outcomes[string(c.want)] != 5 {
			t.Errorf("%s: %v", c.fault.Mode, rep.Outcomes)
		}
	}
}

// The lag of a send is the generator's own: what it was told to wait is not in it.
func TestRetriesObeyRetryAfter(t *testing.T) {
	s := target(t, replica.Options{Speed: 20})
	_ = s.Fault(replica.Fault{Mode: replica.Status, Status: 503, RetryAfter: 1, Count: 1})
	o := small(s.URL())
	o.Spec.Max, o.Retries = 1, 1
	var rec Record
	o.OnRecord = func(r Record) { rec = r }
	rep, err := Run(context.Background(), o)
	if err != nil || rep.OK != 1 || rep.E2E.Max < 1 {
		t.Fatalf("%v %+v", err, rep)
	}
	if rep.Retried != 1 || rep.Resent.Count != 1 || rep.Resent.Max < 1 || rec.Last-rec.Sent < 1 || rep.SendLag.Count != 1 || rep.SendLag.Max > rec.Last-rec.At-0.9 {
		t.Errorf("sent at %g, first %g, again %g: send lag %+v, sent again %+v", rec.At, rec.Sent, rec.Last, rep.SendLag, rep.Resent)
	}
	var table bytes.Buffer
	rep.Table(&table)
	if !strings.Contains(table.String(), "sent again 1") {
		t.Error(table.String())
	}
}

// Without --model it asks for what the server has.
func TestTheModelIsAsked(t *testing.T) {
	s := target(t, replica.Options{Speed: 20, Model: "some/model-8b", APIKey: "k"})
	o := small(s.URL())
	o.Model, o.Spec.Max, o.APIKey = "", 3, "k"
	rep, err := Run(context.Background(), o)
	if err != nil || rep.OK != 3 || rep.Model != "some/model-8b" {
		t.Fatalf("%v %+v", err, rep)
	}
	o.APIKey = "wrong"
	if _, err = Run(context.Background(), o); err == nil || !strings.Contains(err.Error(), "GET /v1/models: status 401") {
		t.Errorf("a server that does not tell: %v", err)
	}
}

// A long prompt has more time, as in the router's configuration.
func TestTheObjectiveGrowsWithThePrompt(t *testing.T) {
	o := Options{TTFT: time.Second, TTFTPer1K: 100 * time.Millisecond}
	for _, c := range []struct {
		prompt int
		ttft   float64
		good   bool
	}{{10, 0.9, true}, {10, 1.1, false}, {2000, 1.1, true}, {2000, 1.3, false}} {
		if good := o.good(&Record{Outcome: OK, Prompt: c.prompt, First: c.ttft, End: 2}); good != c.good {
			t.Errorf("%d tokens after %g s: good %v", c.prompt, c.ttft, good)
		}
	}
	if err := (&Options{URL: "http://127.0.0.1:1", TTFTPer1K: time.Second}).fill(); err == nil || !strings.Contains(err.Error(), "is added to ttft, which is not given") {
		t.Errorf("ttft_per_1k alone: %v", err)
	}
}

func TestRefusesRemoteTargets(t *testing.T) {
	for _, u := range []string{"http://192.0.2.1:80", "http://example.com", "https://127.0.0.1", "127.0.0.1:80"} {
		if _, err := Run(context.Background(), Options{URL: u}); err == nil {
			t.Errorf("%s was taken", u)
		}
	}
}

// How much of a trace is left out is told, and nothing when it is whole.
func TestMainTellsHowMuchOfATraceIsSent(t *testing.T) {
	s := target(t, replica.Options{Speed: 20})
	path := filepath.Join(t.TempDir(), "trace.jsonl")
	line := `{"timestamp": %d, "input_length": 20, "output_length": 2, "hash_ids": []}` + "\n"
	if err := os.WriteFile(path, fmt.Appendf(nil, line+line+line, 0, 10, 2000), 0o600); err != nil {
		t.Fatal(err)
	}
	for args, want := range map[string]string{
		"--duration 1s":                 "2 of the trace's 3 requests are sent (--duration 1s, --requests 0)\n",
		"--duration 9s --requests 1":    "1 of the trace's 3 requests are sent (--duration 9s, --requests 1)\n",
		"--duration 1s --trace-speed 4": "",
	} {
		var out, errs bytes.Buffer
		code := Main(append(strings.Fields(args), "--url", s.URL(), "--trace", path, "--quiet"), &out, &errs)
		if code != 0 || errs.String() != want {
			t.Errorf("%s: %d, %q, want %q\n%s", args, code, errs.String(), want, out.String())
		}
	}
}

func TestMainWritesTableAndJSON(t *testing.T) {
	s := target(t, replica.Options{Speed: 20})
	path := filepath.Join(t.TempDir(), "r.json")
	var out, errs bytes.Buffer
	if code := Main([]string{"--url", s.URL(), "--rate", "50", "--duration", "300ms", "--turns", "2", "--gap", "0.1", "--json", path, "--quiet"}, &out, &errs); code != 0 {
		t.Fatal(code, out.String(), errs.String())
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var r Report
	if err := json.Unmarshal(b, &r); err != nil || r.OK == 0 || !strings.Contains(out.String(), "TTFT") {
		t.Fatalf("%v %+v\n%s", err, r, out.String())
	}
	if code := Main([]string{"--rate", "x"}, &out, &errs); code != 2 {
		t.Error("wrong usage", code)
	}
}

// Each request has the headers that were asked for, so that a class can be tried.
func TestHeadersAreSent(t *testing.T) {
	got := make(chan string, 10)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got <- r.Header.Get("X-Request-Class") + "/" + r.Header.Get("X-Sandbox-ID")
		w.WriteHeader(http.StatusBadRequest)
	}))
	defer srv.Close()
	var out bytes.Buffer
	args := []string{"--url", srv.URL, "--model", "m", "--requests", "1", "--quiet", "--header", "X-Request-Class: background", "--header", "X-Sandbox-ID:t1"}
	Main(args, &out, &out)
	select {
	case h := <-got:
		if h != "background/t1" {
			t.Errorf("headers %q", h)
		}
	default:
		t.Fatalf("no request was sent:\n%s", &out)
	}
	out.Reset()
	if code := Main([]string{"--header", "background"}, &out, &out); code != 2 || !strings.Contains(out.String(), "must be a name and a value") {
		t.Errorf("status %d:\n%s", code, &out)
	}
}
