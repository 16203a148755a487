package ladder

import (
	"bytes"
	"testing"

	"pgregory.net/rapid"
)

func TestAStaleAnswerIsAMiss(t *testing.T) {
	c := NewCache(1 << 20)
	c.Put(Key{1, 1}, []byte("answer"), 100)
	if b, age, ok := c.Get(Key{1, 1}, 10, 110); !ok || string(b) != "answer" || age != 10 {
		t.Fatalf("at its ceiling: %q %v %v", b, age, ok)
	}
	if _, _, ok := c.Get(Key{1, 1}, 10, 110.01); ok {
		t.Fatal("an answer past its staleness was given")
	}
	if c.Bytes() != 0 {
		t.Fatal("a stale answer was kept")
	}
}

func TestCacheIsBoundedAndGivesOnlyItsOwn(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := NewCache(1000)
		want := map[Key][]byte{}
		for i, n := range rapid.SliceOfN(rapid.IntRange(0, 200), 1, 200).Draw(t, "sizes") {
			k := Key{uint64(n), uint64(i % 7)}
			b := bytes.Repeat([]byte{byte(i)}, n)
			c.Put(k, b, float64(i))
			if n <= 125 {
				want[k] = b
			}
			if c.Bytes() > 1000 {
				t.Fatalf("%d bytes held", c.Bytes())
			}
			if got, _, ok := c.Get(k, 1e9, float64(i)); ok && !bytes.Equal(got, want[k]) {
				t.Fatal("another request's answer")
			}
		}
	})
}

func TestStaticAnswerIsCheckedAtLoad(t *testing.T) {
	good := `{"id":"x","object":"chat.completion","created":1,"model":"none","choices":[{"index":0,"message":{"role":"assistant","content":"busy, come back"},"finish_reason":"stop"}]}`
	s, err := NewStatic("busy.json", []byte(good))
	if err != nil || !bytes.Contains(s.Stream, []byte("busy, come back")) || !bytes.HasSuffix(s.Stream, []byte("data: [DONE]\n\n")) {
		t.Fatalf("%v %s", err, s.Stream)
	}
	for _, bad := range []string{"", "[]", `{"object":"chat.completion"}`, `{"object":"list","choices":[]}`} {
		if _, err := NewStatic("busy.json", []byte(bad)); err == nil {
			t.Errorf("%q was taken as a static answer", bad)
		}
	}
}
