package proxy

import "testing"

func TestServiceBreakerOpensClosesAndLetsOneTrialThrough(t *testing.T) {
	var b breaker
	for range breakerFails {
		if ok, _ := b.allow(1); !ok {
			t.Fatal("open too early")
		}
		b.report(1, false)
	}
	ok, wait := b.allow(1)
	if ok || wait <= 0 || wait > 1 {
		t.Fatalf("after %d failures: %v, wait %v", breakerFails, ok, wait)
	}
	if ok, _ := b.allow(1 + wait); !ok {
		t.Fatal("no trial at the time that was told")
	}
	if ok, _ := b.allow(1 + wait); ok {
		t.Fatal("two trials at a time")
	}
	b.report(3, false)
	if _, again := b.allow(3); again < wait {
		t.Fatalf("a failed trial has to open for longer: %v, then %v", wait, again)
	}
	if ok, _ := b.allow(30); !ok {
		t.Fatal("no second trial")
	}
	b.report(30, true)
	for range 10 {
		if ok, _ := b.allow(30); !ok {
			t.Fatal("not closed by a good answer")
		}
	}
}
