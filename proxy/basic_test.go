package proxy

import (
	"strings"
	"testing"
)

func TestAnswersPassThrough(t *testing.T) {
	r := newFakeReplica(t, ok)
	g := newRig(t, []*fakeReplica{r})
	a := g.do(chat(plainBody))
	if a.status != 200 || a.body != answerOK {
		t.Fatalf("plain: %d %q", a.status, a.body)
	}
	a = g.do(chat(sseBody))
	want := frameD(1) + frameD(2) + frameD(3) + frameFin + frameUse + frameDone
	if a.status != 200 || a.body != want || a.err != nil {
		t.Fatalf("stream: %d %q %v", a.status, a.body, a.err)
	}
	if a.headers.Get("X-Request-Id") == "" || a.headers.Get("Traceparent") == "" {
		t.Error("no identity in", a.headers)
	}
	g.settled()
	if n := g.metric(`penstock_prompt_tokens_total{replica="` + r.addr() + `"}`); n != 14 {
		t.Errorf("prompt tokens counted: %v, want 14", n)
	}
	if !strings.Contains(g.logs.String(), `"outcome":"finished"`) {
		t.Error("no access line:", g.logs)
	}
}
