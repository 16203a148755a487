package tenant

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"
)

func TestARefusalSaysWhenTheNextIsAllowed(t *testing.T) {
	l := NewLimiter(Limits{Rate: 10, Burst: 2})
	now := 5.0
	for i := range 2 {
		if ok, _ := l.Take("a", now); !ok {
			t.Fatalf("request %d of the burst was refused", i)
		}
	}
	ok, wait := l.Take("a", now)
	if ok {
		t.Fatal("over the burst")
	}
	if ok, _ := l.Take("a", now+wait*0.9); ok {
		t.Fatal("allowed before the time that was told")
	}
	if ok, _ := l.Take("a", now+wait+1e-9); !ok {
		t.Fatal("refused at the time that was told")
	}
	if ok, _ := l.Take("b", now); !ok {
		t.Fatal("another tenant pays")
	}
}

func TestNeverMoreThanRateBurstAndParallel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		lim := Limits{Rate: rapid.Float64Range(0.5, 50).Draw(t, "rate"), Burst: float64(rapid.IntRange(1, 20).Draw(t, "burst")), Parallel: rapid.IntRange(1, 10).Draw(t, "parallel")}
		l := NewLimiter(lim)
		now, got, flying := 0.0, 0.0, 0
		for i := range rapid.IntRange(1, 300).Draw(t, "steps") {
			now += rapid.Float64Range(0, 0.2).Draw(t, fmt.Sprint("dt", i))
			if flying > 0 && rapid.Bool().Draw(t, "return") {
				l.Return("a")
				flying--
			}
			if ok, _ := l.Take("a", now); ok {
				got++
				flying++
			}
			if flying > lim.Parallel || got > lim.Burst+now*lim.Rate+1e-6 {
				t.Fatalf("%v at a time, %v in %v s", flying, got, now)
			}
		}
		for ; flying > 0; flying-- {
			l.Return("a")
		}
		if l.InFlight() != 0 {
			t.Fatal("a place leaked")
		}
	})
}

func TestMemoryIsBounded(t *testing.T) {
	l := NewLimiter(Limits{Rate: 0.001, Burst: 5}) // no bucket is full again
	for i := range 3 * maxTenants {
		name := fmt.Sprint(i)
		if ok, _ := l.Take(name, float64(i)); ok {
			l.Return(name)
		}
	}
	if len(l.m) > maxTenants {
		t.Fatalf("%d tenants remembered", len(l.m))
	}
}
