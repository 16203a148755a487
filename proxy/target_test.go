package proxy

import (
	"strings"
	"sync"
	"testing"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/wire"
)

// A whole URL as request target is taken for its path and query (RFC 9112,
// 3.2.2): the same path is authorised, routed and sent to the replica.
func TestAURLIsTakenForItsPath(t *testing.T) {
	var mu sync.Mutex
	var paths []string
	r := newFakeReplica(t, ok)
	g := newRig(t, []*fakeReplica{r}, func(o *Options, _ *admission.Config) {
		o.Auth = func(c Credentials) (Identity, *wire.Error) {
			mu.Lock()
			paths = append(paths, c.Path)
			mu.Unlock()
			return Identity{}, nil
		}
	})
	for target, want := range map[string]string{
		"http://any.host/v1/models":         `"m1"`,
		"https://[::1]:8443/v1/models?a=//": `"m1"`,
		"HTTP://any.host:80/healthz":        "ok",
		"http://any.host":                   `"code":"not_found"`,
		"http://any.host?/v1/models":        `"code":"not_found"`,
		"http://any.host//v1/models":        `"code":"not_found"`,
	} {
		if a := g.do("GET " + target + " HTTP/1.1\r\nHost: router\r\n\r\n"); !strings.Contains(a.body, want) || a.close {
			t.Errorf("%s: %d close=%v %s", target, a.status, a.close, a.body)
		}
	}
	if a := g.do(post("http://any.host/v1/chat/completions?x=1", plainBody)); a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	if q := r.requests(); len(q) != 1 || q[0].line != "POST /v1/chat/completions?x=1 HTTP/1.1" || q[0].header("Host") != r.addr() {
		t.Errorf("the replica got %+v", q)
	}
	mu.Lock()
	defer mu.Unlock()
	if got := strings.Join(paths, " "); got != "/v1/models /v1/models /v1/chat/completions" {
		t.Errorf("authorised: %s", got)
	}
	g.settled()
}
