package proxy

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
)

// While an operator has drained all replicas, no queue drains either: what
// clients are told must not grow with how many of them come.
func TestRetryAfterWithAllReplicasDrained(t *testing.T) {
	r := newFakeReplica(t, ok)
	g := newRig(t, []*fakeReplica{r})
	for range 3 {
		g.do(chat(plainBody))
	}
	g.p.DrainReplica(1, true)
	for i := range 300 {
		body := strings.Replace(plainBody, `"hi"`, fmt.Sprintf(`"%d %s"`, i, strings.Repeat("word ", 200)), 1)
		a := g.do(chat(body))
		after, err := strconv.Atoi(a.headers.Get("Retry-After"))
		if a.status != 503 || err != nil || after < 1 || after > 3 {
			t.Fatalf("request %d: %d, Retry-After %q: %s", i, a.status, a.headers.Get("Retry-After"), a.body)
		}
	}
	g.p.DrainReplica(1, false)
	if a := g.do(chat(plainBody)); a.status != 200 {
		t.Errorf("after the drain: %d %s", a.status, a.body)
	}
	g.settled()
}
