package apptest

import (
	"io"
	"net/http"
	"sync/atomic"
	"testing"
	"time"
)

// warming streams 12 events; a replica's first requests are slow, as those of
// a cold engine are.
func warming(slowFirst int32) func(*conn) {
	var n atomic.Int32
	return func(c *conn) {
		ttft, gap := 5*time.Millisecond, 4*time.Millisecond
		if n.Add(1) <= slowFirst {
			ttft, gap = 500*time.Millisecond, 80*time.Millisecond
		}
		c.sseHead()
		time.Sleep(ttft)
		for i := range 12 {
			c.chunk(frame(i))
			time.Sleep(gap)
		}
		c.chunk(frameFin)
		c.chunk(frameUse)
		c.chunk(frameDone)
		c.end()
	}
}

// TestColdStartIsForgotten: replicas that were slow at first and are as good
// as the third now get their part of the load again; what was learned of them
// cannot be corrected by traffic that they do not get.
func TestColdStartIsForgotten(t *testing.T) {
	t.Parallel()
	us := []*mock{replica(t, warming(4)), replica(t, warming(4)), replica(t, warming(0))}
	r := start(t, "", us...)
	load := func(d time.Duration) {
		end := time.Now().Add(d)
		parallel(6, func(int) bool {
			for time.Now().Before(end) {
				wantOK(t, r.post(chat, reqStream))
			}
			return true
		})
	}
	// After 12 s on a quiet machine, where the cold starts make all of the
	// difference; on a loaded one what it adds itself has to fade too.
	load(8 * time.Second)
	for range 10 {
		before := [3]int{us[0].count(), us[1].count(), us[2].count()}
		load(4 * time.Second)
		total, least, got := 0, us[0].count(), [3]int{}
		for i, u := range us {
			got[i] = u.count() - before[i]
			total += got[i]
			least = min(least, got[i])
		}
		t.Logf("in 4 s the replicas got %v", got)
		if least*10 >= total {
			return
		}
	}
	t.Errorf("a replica never got a tenth of the requests of 4 s: %s", httpGet(t, r.Admin+"/admin/v1/replicas"))
}

func httpGet(t *testing.T, url string) []byte {
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
