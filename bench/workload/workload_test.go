package workload

import (
	"math"
	"strings"
	"testing"
)

func TestArrivalRatesAndBurstiness(t *testing.T) {
	for _, c := range []struct {
		s  Spec
		cv float64
	}{
		{Spec{Rate: 100, Arrival: Poisson}, 1},
		{Spec{Rate: 100, Arrival: Constant}, 0},
		{Spec{Rate: 100, Arrival: Gamma, CV: 3}, 3},
	} {
		c.s.Duration, c.s.Prompt, c.s.Out, c.s.Seed = 400, Dist{Mean: 10}, Dist{Mean: 10}, 3
		r, err := Generate(c.s)
		if err != nil {
			t.Fatal(err)
		}
		if got := float64(len(r)) / 400; math.Abs(got-100) > 6 {
			t.Errorf("%s: %g requests/s, want 100", c.s.Arrival, got)
		}
		var sum, sq float64
		for i := 1; i < len(r); i++ {
			d := r[i].At - r[i-1].At
			sum, sq = sum+d, sq+d*d
		}
		n := float64(len(r) - 1)
		if cv := math.Sqrt(max(0, sq/n-sum/n*sum/n)) / (sum / n); math.Abs(cv-c.cv) > 0.15*c.cv+0.01 {
			t.Errorf("%s: CV %g, want %g", c.s.Arrival, cv, c.cv)
		}
	}
}

func TestRampDoublesTheRate(t *testing.T) {
	r, err := Generate(Spec{Rate: 50, RateEnd: 150, Arrival: Ramp, Duration: 200, Prompt: Dist{Mean: 1}, Out: Dist{Mean: 1}})
	if err != nil {
		t.Fatal(err)
	}
	early, late := 0, 0
	for _, q := range r {
		if q.At < 20 {
			early++
		}
		if q.At > 180 {
			late++
		}
	}
	if math.Abs(float64(early)/20-55) > 8 || math.Abs(float64(late)/20-145) > 12 {
		t.Errorf("rates %g and %g", float64(early)/20, float64(late)/20)
	}
}

// A turn's prompt is the turn before, its answer, and new text; hashes chain.
func TestConversationsGrow(t *testing.T) {
	r, err := Generate(Spec{Rate: 10, Duration: 50, Turns: 4, Families: 3, PrefixTokens: 100, Prompt: Dist{Mean: 50, CV: 0.5}, Out: Dist{Mean: 20, CV: 0.5}})
	if err != nil {
		t.Fatal(err)
	}
	last := map[int]Request{}
	for _, q := range r {
		tokens := 0
		for _, s := range q.Segs {
			tokens += s.Tokens
		}
		if tokens != q.Prompt {
			t.Fatalf("segments have %d tokens, prompt %d", tokens, q.Prompt)
		}
		if p, ok := last[q.Session]; ok {
			if q.Turn != p.Turn+1 || q.At <= p.At {
				t.Fatalf("turn %d at %g after turn %d at %g", q.Turn, q.At, p.Turn, p.At)
			}
			for i, s := range p.Segs {
				if q.Segs[i] != s {
					t.Fatal("the prefix changed")
				}
			}
			if a := q.Segs[len(p.Segs)]; a.Hash != p.OutHash || a.Tokens != p.Out {
				t.Fatal("the answer is not in the next prompt")
			}
		}
		last[q.Session] = q
	}
}

func TestSameSeedSameStream(t *testing.T) {
	s := Spec{Rate: 20, Duration: 10, Prompt: Dist{Mean: 100, CV: 1}, Out: Dist{Mean: 100, CV: 1}, Seed: 5}
	a, _ := Generate(s)
	b, _ := Generate(s)
	s.Seed = 6
	c, _ := Generate(s)
	if len(a) != len(b) || a[7].Prompt != b[7].Prompt || a[7].At != b[7].At || a[7].At == c[7].At {
		t.Fatal("streams differ by something else than the seed")
	}
}

func TestReadsBothTraceFormats(t *testing.T) {
	m, err := mooncake(strings.NewReader(`{"timestamp": 3000, "input_length": 1100, "output_length": 52, "hash_ids": [0, 7, 8]}` + "\n"))
	if err != nil || len(m) != 1 {
		t.Fatal(m, err)
	}
	if q := m[0]; q.At != 3 || q.Prompt != 1100 || q.Out != 52 || len(q.Segs) != 3 || q.Segs[2].Tokens != 1100-1024 {
		t.Fatalf("%+v", q)
	}
	a, err := azure(strings.NewReader("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.9799600,3180,8\n"))
	if err != nil || len(a) != 2 || math.Abs(a[1].At-1) > 1e-6 || a[1].Prompt != 3180 {
		t.Fatal(a, err)
	}
	if got := Cut(a, TraceOptions{Speed: 2}); math.Abs(got[1].At-0.5) > 1e-6 {
		t.Fatalf("at double speed the second comes at %g", got[1].At)
	}
}

func TestTextHasFourBytesPerToken(t *testing.T) {
	if s := Text(7, 100); len(s) != 400 || s != Text(7, 100) || s == Text(8, 100) {
		t.Fatalf("%d bytes: %q", len(s), s)
	}
}
