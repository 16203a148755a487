package replica

import (
	"bufio"
	"fmt"
	"net"
	"sync"
	"syscall"
	"testing"
)

func processSeconds() float64 {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return float64(u.Utime.Sec+u.Stime.Sec) + float64(u.Utime.Usec+u.Stime.Usec)/1e6
}

// BenchmarkStreamedTokens: processor time of one streamed token event, readers
// in the same process included.
func BenchmarkStreamedTokens(b *testing.B) {
	s := start(b, Options{Speed: 10})
	const streams, tokens = 100, 200
	began, n := processSeconds(), 0
	b.ResetTimer()
	for range b.N {
		var wg sync.WaitGroup
		for range streams {
			wg.Add(1)
			go func() {
				defer wg.Done()
				c, err := net.Dial("tcp", s.Addr())
				if err != nil {
					b.Error(err)
					return
				}
				defer func() { _ = c.Close() }()
				body := fmt.Sprintf(`{"prompt":"some words here","max_tokens":%d,"stream":true}`, tokens)
				_, _ = fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
				br := bufio.NewReaderSize(c, 16<<10)
				for {
					if _, err := br.Discard(4096); err != nil {
						return
					}
				}
			}()
		}
		wg.Wait()
		n += streams * tokens
	}
	b.ReportMetric((processSeconds()-began)/float64(n)*1e6, "cpu-µs/token")
}
