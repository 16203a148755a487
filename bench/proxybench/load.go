//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"sort"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func unsafeBytes(s string) []byte { return unsafe.Slice(unsafe.StringData(s), len(s)) }

// loadOptions is one measurement.
type loadOptions struct {
	URL     string
	Mode    string        // closed, rate, streams
	Conns   int           // closed: connections; streams: streams at a time
	Rate    float64       // rate: requests per second
	Prompt  int           // bytes of the prompt
	Tokens  int           // streams: events per stream
	Warm    time.Duration // not counted
	For     time.Duration // counted
	PIDs    []int         // whose CPU time is counted
	Stagger time.Duration // streams: time over which they are opened
}

// loadResult is what a measurement saw.
type loadResult struct {
	Requests int     `json:"requests"` // answered 200 in the window
	Errors   int     `json:"errors"`
	Chunks   int     `json:"chunks"` // events in the window
	Seconds  float64 `json:"seconds"`
	CPU      float64 `json:"cpu"`     // seconds of the proxy in the window
	RSS      int     `json:"rss"`     // bytes at the end of the window
	P50      float64 `json:"p50"`     // seconds
	P99      float64 `json:"p99"`     // seconds
	Streams  int     `json:"streams"` // open at the end of the window
	OwnCPU   float64 `json:"own_cpu"` // of the load, to show that it was not the limit
}

// lconn is one client connection.
type lconn struct {
	fd     int
	req    []byte // the whole request, patched per use
	count  int    // where its counter is
	off    int    // sent so far
	busy   bool
	sent   time.Time
	head   []byte // an answer's head that is not whole yet
	inBody bool
	left   int // bytes of body to come; < 0 = until the final chunk
	tail   [8]byte
	tailN  int
}

type loader struct {
	*loop
	o         loadOptions
	conns     map[int]*lconn
	idle      []*lconn
	seq       int
	measuring bool
	res       loadResult
	lat       []float64
	scratch   [256 << 10]byte
}

func loadCommand(args []string) error {
	var o loadOptions
	fs := flag.NewFlagSet("load", flag.ExitOnError)
	fs.StringVar(&o.URL, "url", "127.0.0.1:7101", "where to send, host:port")
	fs.StringVar(&o.Mode, "mode", "closed", "closed, rate or streams")
	fs.IntVar(&o.Conns, "conns", 64, "connections, or streams at a time")
	fs.Float64Var(&o.Rate, "rate", 500, "requests per second in mode rate")
	fs.IntVar(&o.Prompt, "prompt", 400, "bytes of prompt")
	fs.IntVar(&o.Tokens, "tokens", 128, "events per stream")
	fs.DurationVar(&o.Warm, "warm", time.Second, "time before the window")
	fs.DurationVar(&o.For, "for", 4*time.Second, "the window")
	fs.DurationVar(&o.Stagger, "stagger", time.Second, "time over which streams are opened")
	pids := fs.String("pids", "", "processes whose CPU time counts")
	_ = fs.Parse(args) // exits by itself
	for _, p := range strings.FieldsFunc(*pids, func(r rune) bool { return r == ',' }) {
		n, err := strconv.Atoi(p)
		if err != nil {
			return fmt.Errorf("-pids %q: %w", *pids, err)
		}
		o.PIDs = append(o.PIDs, n)
	}
	quietRuntime()
	l, err := newLoop()
	if err != nil {
		return err
	}
	ld := &loader{loop: l, o: o, conns: map[int]*lconn{}, lat: make([]float64, 0, 1<<20)}
	if err := ld.run(); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(ld.res)
}

// request builds one conversation's request: a shared system prompt, a text of
// its own, and a counter at the prompt's end, so that prompts share prefixes
// as chat turns do and no two are equal.
func (l *loader) request(i int) (req []byte, count int) {
	words := fmt.Sprintf("conversation %06d speaks of pumps and gates and water in the channel; ", i%64)
	text := strings.Repeat(words, l.o.Prompt/len(words)+1)[:l.o.Prompt]
	body := `{"model":"` + model + `","messages":[{"role":"system","content":"You are a helper."},{"role":"user","content":"` + text + ` turn 00000000"}]`
	if l.o.Mode == "streams" {
		body += `,"stream":true,"max_tokens":` + strconv.Itoa(l.o.Tokens)
	}
	body += "}"
	r := "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nUser-Agent: proxybench\r\nAccept: */*\r\nContent-Type: application/json\r\nContent-Length: " + strconv.Itoa(len(body)) + "\r\n\r\n" + body
	return []byte(r), strings.LastIndex(r, "00000000")
}

func (l *loader) open() (*lconn, error) {
	fd, err := connect(l.o.URL)
	if err != nil {
		return nil, err
	}
	c := &lconn{fd: fd}
	c.req, c.count = l.request(len(l.conns))
	l.conns[fd] = c
	return c, l.add(fd, unix.EPOLLIN)
}

func (l *loader) begin(c *lconn) {
	l.seq++
	for i, n := 7, l.seq; i >= 0; i, n = i-1, n/10 {
		c.req[c.count+i] = byte('0' + n%10)
	}
	c.off, c.busy, c.sent = 0, true, time.Now()
	l.push(c)
}

func (l *loader) push(c *lconn) {
	n, err := unix.Write(c.fd, c.req[c.off:])
	if err != nil && err != unix.EAGAIN {
		l.fail(c)
		return
	}
	blocked := c.off > 0
	if c.off += max(n, 0); c.off < len(c.req) {
		l.mod(c.fd, unix.EPOLLIN|unix.EPOLLOUT)
	} else if blocked {
		l.mod(c.fd, unix.EPOLLIN)
	}
}

// fail drops a connection and, in the closed modes, opens another.
func (l *loader) fail(c *lconn) {
	if c.busy {
		l.res.Errors++
	}
	delete(l.conns, c.fd)
	_ = unix.Close(c.fd)
	for i, x := range l.idle {
		if x == c {
			l.idle = append(l.idle[:i], l.idle[i+1:]...)
			break
		}
	}
	if l.o.Mode != "rate" && l.res.Errors < 1000 {
		if n, err := l.open(); err == nil {
			l.begin(n)
		}
	}
}

// read takes what came on a connection.
func (l *loader) read(c *lconn) {
	n, err := unix.Read(c.fd, l.scratch[:])
	if err == unix.EAGAIN || err == unix.EINTR {
		return
	}
	if n <= 0 {
		l.fail(c)
		return
	}
	b := l.scratch[:n]
	if !c.inBody {
		if b = l.headOf(c, b); b == nil {
			return
		}
	}
	if l.o.Mode == "streams" && l.measuring {
		l.res.Chunks += bytes.Count(b, []byte("data: "))
	}
	if c.left >= 0 {
		c.left -= len(b)
		if c.left <= 0 {
			l.done(c)
		}
		return
	}
	if c.final(b) {
		l.done(c)
	}
}

// headOf reads an answer's head and returns the body bytes behind it; nil =
// the head is not whole, or the answer was an error.
func (l *loader) headOf(c *lconn, b []byte) []byte {
	if len(c.head) > 0 {
		c.head = append(c.head, b...)
		b = append([]byte(nil), c.head...)
	}
	i := bytes.Index(b, []byte("\r\n\r\n"))
	if i < 0 {
		c.head = append(c.head[:0], b...)
		return nil
	}
	if !bytes.HasPrefix(b, []byte("HTTP/1.1 200")) {
		if l.res.Errors == 0 {
			fmt.Fprintf(os.Stderr, "load: first error: %.300q\n", b)
		}
		l.fail(c)
		return nil
	}
	c.head, c.inBody, c.tailN = c.head[:0], true, 0
	c.left = -1
	if v, ok := headerValue(b[:i+2], "content-length"); ok {
		c.left, _ = strconv.Atoi(v)
	}
	return b[i+4:]
}

// final tells whether the final chunk has come. Answers end their last chunk
// with "\n\r\n" before it, so the mark cannot be inside of data.
func (c *lconn) final(b []byte) bool {
	const mark = "\r\n0\r\n\r\n"
	if len(b) >= len(mark) {
		c.tailN = copy(c.tail[:], b[len(b)-len(mark):])
	} else {
		joined := append(append(make([]byte, 0, 16), c.tail[:c.tailN]...), b...)
		c.tailN = copy(c.tail[:], joined[max(0, len(joined)-len(mark)):])
	}
	return string(c.tail[:c.tailN]) == mark
}

func (l *loader) done(c *lconn) {
	c.inBody, c.busy = false, false
	if l.measuring {
		l.res.Requests++
		if l.o.Mode != "streams" {
			l.lat = append(l.lat, time.Since(c.sent).Seconds())
		}
	}
	if l.o.Mode == "rate" {
		l.idle = append(l.idle, c)
		return
	}
	l.begin(c)
}

// run drives the load through warm-up and window.
func (l *loader) run() error {
	timer, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("timerfd: %w", err)
	}
	gap := 50 * time.Millisecond
	switch l.o.Mode {
	case "rate":
		gap = time.Duration(float64(time.Second) / l.o.Rate)
	case "streams":
		gap = max(time.Millisecond, l.o.Stagger/time.Duration(l.o.Conns))
	}
	ts := unix.NsecToTimespec(gap.Nanoseconds())
	if err := unix.TimerfdSettime(timer, 0, &unix.ItimerSpec{Interval: ts, Value: ts}, nil); err != nil {
		return fmt.Errorf("timerfd: %w", err)
	}
	if err := l.add(timer, unix.EPOLLIN); err != nil {
		return fmt.Errorf("epoll add: %w", err)
	}
	if l.o.Mode == "closed" {
		for range l.o.Conns {
			c, err := l.open()
			if err != nil {
				return err
			}
			l.begin(c)
		}
	}
	start := time.Now()
	for {
		now := time.Since(start)
		if !l.measuring && now >= l.o.Warm {
			l.measuring = true
			l.res.CPU, l.res.OwnCPU, l.res.Seconds = -cpuOf(l.o.PIDs), -cpuOf([]int{os.Getpid()}), -time.Since(start).Seconds()
		}
		if now >= l.o.Warm+l.o.For {
			break
		}
		events, err := l.wait(20 * time.Millisecond)
		if err != nil {
			return err
		}
		for i := range events {
			if fd := int(events[i].Fd); fd == timer {
				if err := l.tick(timer, time.Since(start)); err != nil {
					return err
				}
			} else if c := l.conns[fd]; c != nil {
				if events[i].Events&unix.EPOLLOUT != 0 {
					l.push(c)
				}
				if events[i].Events&(unix.EPOLLIN|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
					l.read(c)
				}
			}
		}
	}
	l.finish(start)
	return nil
}

// tick sends what is due.
func (l *loader) tick(timer int, now time.Duration) error {
	var b [8]byte
	_, _ = unix.Read(timer, b[:])
	due := 0
	switch l.o.Mode {
	case "rate":
		due = int(now.Seconds()*l.o.Rate) - l.seq
	case "streams":
		due = min(l.o.Conns, 1+int(float64(l.o.Conns)*now.Seconds()/l.o.Stagger.Seconds())) - len(l.conns)
	}
	for range due {
		var c *lconn
		if n := len(l.idle); n > 0 {
			c, l.idle = l.idle[n-1], l.idle[:n-1]
		} else {
			var err error
			if c, err = l.open(); err != nil {
				return err
			}
		}
		l.begin(c)
	}
	return nil
}

func (l *loader) finish(start time.Time) {
	l.res.CPU += cpuOf(l.o.PIDs)
	l.res.OwnCPU += cpuOf([]int{os.Getpid()})
	l.res.Seconds += time.Since(start).Seconds()
	l.res.RSS = rssOf(l.o.PIDs)
	for _, c := range l.conns {
		if c.busy {
			l.res.Streams++
		}
	}
	sort.Float64s(l.lat)
	if n := len(l.lat); n > 0 {
		l.res.P50, l.res.P99 = l.lat[n/2], l.lat[n*99/100]
	}
}
