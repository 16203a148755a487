package apptest

import (
	"encoding/json"
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// page writes a vLLM metrics page with the gauges that placement looks at.
func page(waiting, running, kv string) string {
	l := `{engine="0",model_name="m1"} `
	return "# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting" + l + waiting +
		"\n# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running" + l + running +
		"\n# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc" + l + kv + "\n"
}

func fixed(s string) func() string { return func() string { return s } }

// busyPage is what P12's replicas say for ever.
var busyPage = page("2", "2", "0.3")

// fleet3 starts three replicas that take 1 s each; first describes U1.
func fleet3(t *testing.T, first mockOpts) []*mock {
	slow := func(c *conn) { time.Sleep(time.Second); c.ok() }
	if first.Handle == nil {
		first.Handle = slow
	}
	other := mockOpts{Handle: slow, Metrics: fixed(busyPage)}
	return []*mock{newMock(t, first), newMock(t, other), newMock(t, other)}
}

// burst sends 45 requests within 100 ms and returns how many each replica got.
func burst(t *testing.T, r *router, us []*mock) []int {
	t.Helper()
	before := make([]int, len(us))
	for i, u := range us {
		before[i] = u.count()
	}
	for _, a := range parallel(45, func(i int) answer {
		time.Sleep(time.Duration(i) * 2 * time.Millisecond)
		return r.post(chat, reqBody)
	}) {
		wantOK(t, a)
	}
	got := make([]int, len(us))
	for i, u := range us {
		got[i] = u.count() - before[i]
	}
	return got
}

// TestCaseP12LoadData: stale, frozen, lying or missing metrics never decide
// alone, because the router's own account is added.
func TestCaseP12LoadData(t *testing.T) {
	t.Parallel()
	for name, v := range map[string]struct {
		first mockOpts
		// most that U1 and the others may get of a burst of 45, and U1 over 5 bursts
		u1, others, u1Total int
	}{
		"a equal and frozen":       {mockOpts{Metrics: fixed(busyPage)}, 27, 27, 225},
		"b U1 claims to be idle":   {mockOpts{Metrics: fixed(page("0", "0", "0.05"))}, 35, 45, 225},
		"c U1 metrics black-holed": {mockOpts{Metrics: fixed(busyPage), Blackhole: "/metrics"}, 27, 27, 75 * 12 / 10},
		"d U1 metrics 500":         {mockOpts{Metrics: fixed("500")}, 27, 27, 75 * 12 / 10},
		"e U1 says NaN":            {mockOpts{Metrics: fixed(page("NaN", "NaN", "NaN"))}, 27, 27, 225},
		"e U1 says less than 0":    {mockOpts{Metrics: fixed(page("-5", "-3", "-1"))}, 27, 27, 225},
		"e U1 says +Inf":           {mockOpts{Metrics: fixed(page("+Inf", "1e300", "7"))}, 27, 27, 225},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			us := fleet3(t, v.first)
			r := start(t, "", us...)
			total := 0
			for i := range 5 {
				got := burst(t, r, us)
				total += got[0]
				if got[0] > v.u1 || got[1] > v.others || got[2] > v.others {
					t.Errorf("burst %d: replicas got %v of 45", i, got)
				}
			}
			if total > v.u1Total {
				t.Errorf("U1 got %d of 225, want at most %d", total, v.u1Total)
			}
			t.Logf("U1 got %d of 225", total)
			if v.first.Blackhole != "" || v.first.Metrics() == "500" {
				checkStaleness(t, r, us)
			}
			if name[0] == 'e' {
				n := 0
				for _, line := range strings.Split(r.log.String(), "\n") {
					if strings.Contains(line, us[0].Addr) && strings.Contains(line, "impossible values") {
						n++
					}
				}
				if n < 1 || n > 10 {
					t.Errorf("the log tells of the lying replica's page %d times: a standing fault is logged once", n)
				}
			}
		})
	}
}

// checkStaleness: U1's missing page is visible, and delays nobody's scrape.
func checkStaleness(t *testing.T, r *router, us []*mock) {
	t.Helper()
	for i, u := range us {
		s := r.series("penstock_scrape_age_seconds", u.Addr)
		if len(s) != 1 {
			t.Errorf("scrape age of U%d: series %v", i+1, s)
			continue
		}
		if i == 0 {
			if age := r.metrics()[s[0]]; !(age > 2 || math.IsNaN(age)) {
				t.Errorf("U1 never gave a page and its scrape age is %v", age)
			}
			continue
		}
		// One that waited for U1 would never be young.
		r.eventually(10*time.Second, fmt.Sprintf("U%d's page is young", i+1), func() bool { return r.metrics()[s[0]] < 2 })
	}
	if n := len(us[1].asked("/metrics")); n < 5 {
		t.Errorf("U2 was scraped %d times in 5 bursts", n)
	}
}

// TestCaseP12BackAfter503: one 503 does not take a replica out for long.
func TestCaseP12BackAfter503(t *testing.T) {
	t.Parallel()
	var once atomic.Bool
	us := fleet3(t, mockOpts{Metrics: fixed(busyPage), Handle: func(c *conn) {
		if once.CompareAndSwap(false, true) {
			c.json(503, `{"error":{"message":"busy"}}`, "")
			return
		}
		time.Sleep(time.Second)
		c.ok()
	}})
	r := start(t, "", us...)
	burst(t, r, us)
	if !once.Load() {
		t.Fatal("U1 got nothing of a burst of 45")
	}
	n := us[0].count()
	r.eventually(20*time.Second, "U1 is used again", func() bool {
		parallel(6, func(int) bool { wantOK(t, r.post(chat, reqBody)); return true })
		return us[0].count() > n+3
	})
}

// TestCaseP12Removal: a replica that leaves discovery gets nothing more, and
// its series go.
func TestCaseP12Removal(t *testing.T) {
	t.Parallel()
	us := fleet3(t, mockOpts{Metrics: fixed(busyPage)})
	targets := filepath.Join(t.TempDir(), "targets.json")
	write := func(ms ...*mock) {
		var addrs []string
		for _, m := range ms {
			addrs = append(addrs, m.Addr)
		}
		b, _ := json.Marshal([]map[string]any{{"targets": addrs, "labels": map[string]string{}}})
		writeFile(t, targets, string(b))
	}
	write(us...)
	r := startConfig(t, fmt.Sprintf("pools:\n  - name: main\n    replicas: {file: %q}\n", targets))
	r.eventually(10*time.Second, "all three are known", func() bool {
		return len(r.series("penstock_scrape_age_seconds")) == 3
	})
	if got := burst(t, r, us); got[2] == 0 {
		t.Errorf("U3 got nothing of a burst: %v", got)
	}
	write(us[0], us[1])
	r.eventually(20*time.Second, "U3's series are gone", func() bool { return len(r.series("", us[2].Addr)) == 0 })
	n := us[2].count()
	for range 2 {
		burst(t, r, us[:2])
	}
	if us[2].count() != n {
		t.Errorf("U3 got requests after its removal")
	}
}
