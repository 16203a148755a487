package replica

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"go.uber.org/goleak"

	"github.com/penstock/penstock/internal/freeport"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("net/http.(*persistConn).readLoop"), goleak.IgnoreTopFunction("net/http.(*persistConn).writeLoop"))
}

// client without keep-alive: each request sees the replica's present state.
func client(t testing.TB) *http.Client {
	tr := &http.Transport{DisableKeepAlives: true}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 20 * time.Second}
}

const chatBody = `{"model":"tiny","messages":[{"role":"user","content":"alpha beta gamma"}],"max_tokens":7}`

func streamBody(extra string) string {
	return `{"model":"tiny","messages":[{"role":"user","content":"alpha beta gamma"}],"max_tokens":7,"stream":true` + extra + `}`
}

func post(t testing.TB, s *Server, path, body string, header ...string) (int, string, http.Header, error) {
	t.Helper()
	req, _ := http.NewRequest("POST", s.URL()+path, strings.NewReader(body))
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := client(t).Do(req)
	if err != nil {
		return 0, "", nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), resp.Header, err
}

func get(t testing.TB, s *Server, path string) (int, string) {
	t.Helper()
	resp, err := client(t).Get(s.URL() + path)
	if err != nil {
		return 0, err.Error()
	}
	defer func() { _ = resp.Body.Close() }()
	b, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b)
}

// waitFor polls until ok; a state that has to come, not a time.
func waitFor(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("never happened: %s", what)
}

func TestAnswerEchoesTheLastUserMessage(t *testing.T) {
	s := start(t, Options{Speed: 20})
	_, body, _, err := post(t, s, "/v1/chat/completions", chatBody)
	if err != nil || !strings.Contains(body, `"content":"alpha beta gamma alpha beta gamma alpha"`) || !strings.Contains(body, `"finish_reason":"length"`) {
		t.Fatalf("%v %s", err, body)
	}
	_, body, _, _ = post(t, s, "/v1/chat/completions", `{"messages":[{"role":"user","content":"x y"}]}`)
	if !strings.Contains(body, `"completion_tokens":64`) || !strings.Contains(body, `"finish_reason":"stop"`) {
		t.Fatalf("an answer without a limit: %s", body)
	}
}

func TestPrefixHitsShowInUsage(t *testing.T) {
	s := start(t, Options{Speed: 20})
	prompt := strings.Repeat("abcd", 100) // 100 tokens, 6 full blocks
	body := fmt.Sprintf(`{"prompt":%q,"max_tokens":1}`, prompt)
	salted := fmt.Sprintf(`{"prompt":%q,"max_tokens":1,"cache_salt":"t1"}`, prompt)
	for i, c := range []struct {
		body string
		want int
	}{{body, 0}, {body, 96}, {salted, 0}, {salted, 96}} {
		_, got, _, _ := post(t, s, "/v1/completions", c.body)
		if !strings.Contains(got, fmt.Sprintf(`"cached_tokens":%d,`, c.want)) {
			t.Fatalf("request %d: want %d cached tokens: %s", i, c.want, got)
		}
	}
}

func TestHeadersComeBeforeTheWork(t *testing.T) {
	s := start(t, Options{})
	if err := s.Fault(Fault{Mode: Freeze}); err != nil {
		t.Fatal(err)
	}
	req, _ := http.NewRequest("POST", s.URL()+"/v1/chat/completions", strings.NewReader(streamBody("")))
	resp, err := client(t).Do(req)
	if err != nil {
		t.Fatal("a frozen engine's API server did not send the headers:", err)
	}
	if code, _ := get(t, s, "/health"); code != 200 {
		t.Fatalf("/health of a frozen engine: %d", code)
	}
	if err := s.Heal(); err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if err != nil || !bytes.Contains(b, []byte("[DONE]")) {
		t.Fatalf("after the thaw: %v %q", err, b)
	}
}

func TestClientLeavingFreesTheSequence(t *testing.T) {
	s := start(t, Options{})
	for _, stream := range []string{"true", "false"} {
		before := s.Counts().Aborted
		c, err := net.Dial("tcp", s.Addr())
		if err != nil {
			t.Fatal(err)
		}
		body := `{"prompt":"x","max_tokens":100000,"stream":` + stream + `}`
		_, _ = fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		waitFor(t, "the sequence runs", func() bool { return s.Stats().Running == 1 })
		_ = c.Close()
		waitFor(t, "the sequence left", func() bool { return s.Stats().Running == 0 && s.Counts().Running == 0 })
		if got := s.Counts().Aborted; got != before+1 {
			t.Fatalf("aborted %d, want %d", got, before+1)
		}
	}
	_, page := get(t, s, "/metrics")
	if !strings.Contains(page, `vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 0.0`) {
		t.Fatal("an aborted request is counted nowhere in vLLM")
	}
}

// The page must parse, have the families of a real one, and its values must
// be those of the work done.
func TestMetricsPage(t *testing.T) {
	s := start(t, Options{Speed: 20, Model: "m/1"})
	for i := 0; i < 3; i++ {
		if code, b, _, err := post(t, s, "/v1/completions", fmt.Sprintf(`{"prompt":%q,"max_tokens":5}`, strings.Repeat("abcd", 100))); code != 200 {
			t.Fatal(code, b, err)
		}
	}
	_, text := get(t, s, "/metrics")
	got := families(t, text)
	raw, err := os.ReadFile("testdata/metrics_loaded.http")
	if err != nil {
		t.Fatal(err)
	}
	_, body, _ := strings.Cut(string(raw), "\r\n\r\n")
	for name, f := range families(t, body) {
		g := got[name]
		switch {
		case strings.HasPrefix(name, "http_") || strings.HasPrefix(name, "vllm:tool_call_parser") || strings.HasPrefix(name, "vllm:sleep_mode") ||
			strings.HasPrefix(name, "vllm:estimated_") || strings.HasPrefix(name, "vllm:lora_"): // depend on flags and use
		case g == nil:
			t.Errorf("no family %s", name)
		case g.GetType() != f.GetType() || g.GetHelp() != f.GetHelp():
			t.Errorf("%s: %v %q, want %v %q", name, g.GetType(), g.GetHelp(), f.GetType(), f.GetHelp())
		}
	}
	hist := func(name string) *dto.Histogram { return got[name].Metric[0].Histogram }
	counter := func(name string) float64 { return got[name].Metric[0].Counter.GetValue() }
	if counter("vllm:prompt_tokens_total") != 300 || counter("vllm:generation_tokens_total") != 15 || counter("vllm:prefix_cache_hits_total") != 192 || counter("vllm:prefix_cache_queries_total") != 300 {
		t.Errorf("token counters: prompt %g generation %g hits %g", counter("vllm:prompt_tokens_total"), counter("vllm:generation_tokens_total"), counter("vllm:prefix_cache_hits_total"))
	}
	if h := hist("vllm:time_to_first_token_seconds"); h.GetSampleCount() != 3 || h.GetSampleSum() <= 0 {
		t.Errorf("TTFT %v", h)
	}
	if h := hist("vllm:inter_token_latency_seconds"); h.GetSampleCount() != 12 {
		t.Errorf("ITL %v", h)
	}
	if h := hist("vllm:iteration_tokens_total"); h.GetSampleSum() != 300-192+12 {
		t.Errorf("iteration tokens %v", h)
	}
	info := map[string]string{}
	for _, l := range got["vllm:cache_config_info"].Metric[0].Label {
		info[l.GetName()] = l.GetValue()
	}
	if info["block_size"] != "16" || info["num_gpu_blocks"] != "27915" {
		t.Errorf("cache_config_info block_size %s, blocks %s", info["block_size"], info["num_gpu_blocks"])
	}
	if l := got["vllm:num_requests_running"].Metric[0].Label; l[1].GetValue() != "m/1" {
		t.Errorf("labels %v", l)
	}
}

func families(t *testing.T, text string) map[string]*dto.MetricFamily {
	t.Helper()
	p := expfmt.NewTextParser(model.UTF8Validation)
	m, err := p.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestSpoiledAndFrozenMetrics(t *testing.T) {
	s := start(t, Options{Speed: 20})
	_ = s.Fault(Fault{Mode: FreezeMetrics})
	_, a := get(t, s, "/metrics")
	_, _, _, _ = post(t, s, "/v1/chat/completions", chatBody)
	if _, b := get(t, s, "/metrics"); a != b {
		t.Error("the frozen page moved")
	}
	_ = s.Heal()
	if _, b := get(t, s, "/metrics"); a == b {
		t.Error("the page is still frozen")
	}
	_ = s.Fault(Fault{Mode: NaNMetrics})
	_, b := get(t, s, "/metrics")
	f := families(t, b)
	if v := f["vllm:num_requests_running"].Metric[0].Gauge.GetValue(); !math.IsNaN(v) {
		t.Errorf("running = %g, want NaN", v)
	}
	if v := f["vllm:kv_cache_usage_perc"].Metric[0].Gauge.GetValue(); v != -1 {
		t.Errorf("KV use = %g, want -1", v)
	}
}

func TestRequestFaults(t *testing.T) {
	s := start(t, Options{Speed: 20})
	chat := "/v1/chat/completions"
	code, body, h, _ := post(t, s, chat, chatBody, "X-Fault", "status=503;retry_after=3")
	if code != 503 || h.Get("Retry-After") != "3" || !strings.Contains(body, "currently busy") {
		t.Errorf("status: %d %v %s", code, h, body)
	}
	if _, _, _, err := post(t, s, chat, chatBody, "X-Fault", "reset"); !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, io.EOF) {
		t.Errorf("reset: %v", err)
	}
	_, body, _, err := post(t, s, chat, streamBody(""), "X-Fault", "cut=3")
	if n := strings.Count(body, `"delta":{"content":`); n != 3 || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("cut: %d content events, %v", n, err)
	}
	if _, body, _, err := post(t, s, chat, chatBody, "X-Fault", "cut=1"); err == nil || len(body) == 0 {
		t.Errorf("cut of a whole answer: %v %q", err, body)
	}
	_, body, _, err = post(t, s, chat, streamBody(""), "X-Fault", "no_done")
	if strings.Contains(body, "[DONE]") || !strings.Contains(body, `"finish_reason":"length"`) || err != nil {
		t.Errorf("no_done: %v %s", err, body)
	}
	_, body, _, _ = post(t, s, chat, streamBody(""), "X-Fault", "missing_finish")
	if strings.Contains(body, `"finish_reason":"`) || !strings.Contains(body, "[DONE]") {
		t.Errorf("missing_finish: %s", body)
	}
	if _, body, _, _ = post(t, s, chat, streamBody(""), "X-Fault", "wrong_model"); !strings.Contains(body, `"model":"another-model"`) {
		t.Errorf("wrong_model: %s", body)
	}
	if _, body, _, _ = post(t, s, chat, streamBody(""), "X-Fault", "id_change"); !strings.Contains(body, `-changed"`) {
		t.Errorf("id_change: %s", body)
	}
	if _, body, _, _ = post(t, s, chat, streamBody(""), "X-Fault", "tool_collision"); !strings.Contains(body, `"index":0,"function":{"name":"alpha"`) || !strings.Contains(body, `"index":0,"function":{"name":"beta"`) {
		t.Errorf("tool_collision: %s", body)
	}
	if _, body, _, _ = post(t, s, chat, streamBody(""), "X-Fault", "only_done"); body != "data: [DONE]\n\n" {
		t.Errorf("only_done: %q", body)
	}
	if _, body, _, _ = post(t, s, chat, streamBody(""), "X-Fault", "abort_one=2"); !strings.Contains(body, `"finish_reason":"abort"`) {
		t.Errorf("abort_one: %q", body)
	}
	if _, body, _, _ = post(t, s, chat, streamBody(""), "X-Fault", "garble=2"); !strings.Contains(body, "\x00\x01\xff\xfegarbage") {
		t.Errorf("garble: %q", body)
	}
	if _, body, _, _ = post(t, s, chat, streamBody(`,"x_fault":"error_event=1"`)); !strings.Contains(body, `data: {"error": {"message": "EngineCore`) {
		t.Errorf("error_event: %q", body)
	}
	if code, body, _, _ = post(t, s, chat, chatBody, "X-Fault", "delay_ms=1"); code != 200 {
		t.Errorf("delay: %d %s", code, body)
	}
	if code, body, _, _ = post(t, s, chat, chatBody, "X-Fault", "nonsense"); code != 400 {
		t.Errorf("an unknown fault: %d %s", code, body)
	}
	if c := s.Counts(); c.Running != 0 {
		t.Errorf("%d requests left inside", c.Running)
	}
}

func TestInjectedFaultCountsDown(t *testing.T) {
	s := start(t, Options{Speed: 20})
	if code, b, _, err := post(t, s, "/fault", `{"status":500,"count":2}`); code != 200 {
		t.Fatal(code, b, err)
	}
	var codes []int
	for i := 0; i < 3; i++ {
		code, _, _, _ := post(t, s, "/v1/chat/completions", chatBody)
		codes = append(codes, code)
	}
	if fmt.Sprint(codes) != "[500 500 200]" {
		t.Fatal(codes)
	}
	for _, good := range []string{`{"mode":"hang"}`, `{"slow":10}`, `{"cut":{"after":3}}`, `{"delay_ms":500,"for":"10s"}`, `{"mode":"drain","count":1}`} {
		var f Fault
		if err := json.Unmarshal([]byte(good), &f); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
	for _, bad := range []string{`{"mode":"hung"}`, `{"slow":"x"}`, `{}`, `{"for":"10"}`} {
		var f Fault
		if err := json.Unmarshal([]byte(bad), &f); err == nil {
			t.Errorf("%s was taken: %+v", bad, f)
		}
	}
}

// hold starts a long stream and returns its connection after the first content.
func hold(t *testing.T, s *Server) (net.Conn, *bufio.Reader) {
	t.Helper()
	c, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	body := `{"prompt":"word","max_tokens":50000,"stream":true}`
	_, _ = fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	br := bufio.NewReader(c)
	for {
		line, err := br.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(line, `"text":" word"`) {
			return c, br
		}
	}
}

func TestDrainAndAbortAndKill(t *testing.T) {
	s := start(t, Options{Listen: freeport.Addr(t)}) // while it is dead nobody else answers there
	_, br := hold(t, s)
	_ = s.Fault(Fault{Mode: Drain})
	if code, b, _, _ := post(t, s, "/v1/completions", `{"prompt":"x","max_tokens":1}`); code != 500 || !strings.Contains(b, "cannot schedule new futures after shutdown") {
		t.Errorf("a new request while draining: %d %s", code, b)
	}
	if code, b, _, _ := post(t, s, "/v1/completions", `{"prompt":[1,2],"max_tokens":1}`); code != 200 || !strings.Contains(b, `"finish_reason":"abort"`) {
		t.Errorf("a new token-id request while draining: %d %s", code, b)
	}
	if code, _ := get(t, s, "/health"); code != 200 {
		t.Errorf("/health while draining: %d", code)
	}
	if _, page := get(t, s, "/metrics"); !strings.Contains(page, `vllm:num_requests_running{engine="0",model_name="tiny"} 0.0`) {
		t.Error("the gauges do not fall to 0")
	}
	if s.Stats().Running != 1 {
		t.Error("the running request does not go on")
	}
	_ = s.Heal()
	_ = s.Fault(Fault{Mode: Abort})
	rest, _ := io.ReadAll(io.LimitReader(br, 1<<20))
	_ = rest
	if !bytes.Contains(rest, []byte(`"finish_reason":"abort"`)) || !bytes.Contains(rest, []byte("[DONE]\n\n\r\n0\r\n\r\n")) {
		t.Errorf("the aborted stream ends with %q", tail(rest))
	}
	waitFor(t, "the port closes", func() bool { _, err := net.Dial("tcp", s.Addr()); return errors.Is(err, syscall.ECONNREFUSED) })
	if err := s.Heal(); err != nil {
		t.Fatal(err)
	}
	_, br = hold(t, s)
	_ = s.Fault(Fault{Mode: Kill})
	rest, err := io.ReadAll(br)
	if bytes.Contains(rest, []byte("[DONE]")) || bytes.HasSuffix(rest, []byte("0\r\n\r\n")) {
		t.Errorf("a killed replica ended its stream: %v %q", err, tail(rest))
	}
	if _, err := net.Dial("tcp", s.Addr()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial after the kill: %v", err)
	}
	if err := s.Heal(); err != nil {
		t.Fatal(err)
	}
	if code, b, _, err := post(t, s, "/v1/chat/completions", chatBody); code != 200 {
		t.Errorf("after the restart: %d %s %v", code, b, err)
	}
}

func tail(b []byte) []byte { return b[max(0, len(b)-300):] }

func TestQueueFullIs503(t *testing.T) {
	p := Options{MaxQueued: 1}
	s := start(t, p)
	_ = s.Fault(Fault{Mode: Freeze})
	c := client(t)
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		resp, err := c.Post(s.URL()+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"x","max_tokens":1}`))
		if err == nil {
			_ = resp.Body.Close()
		}
	}()
	waitFor(t, "one waits", func() bool { return s.Counts().Running == 1 })
	if code, b, _, _ := post(t, s, "/v1/completions", `{"prompt":"x","max_tokens":1}`); code != 503 || !strings.Contains(b, "currently busy") {
		t.Errorf("%d %s", code, b)
	}
	_ = s.Heal()
	wg.Wait()
}

func TestKeepAliveServesAndIdleCloses(t *testing.T) {
	s := start(t, Options{Speed: 20, IdleClose: 2 * time.Second}) // not sooner: on a loaded machine the next request takes its time
	c, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	br := bufio.NewReader(c)
	for i := 0; i < 3; i++ {
		_, _ = fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(chatBody), chatBody)
		resp, err := http.ReadResponse(br, nil)
		if err != nil || resp.StatusCode != 200 {
			t.Fatal(i, err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
	}
	if _, err := br.ReadByte(); err != io.EOF {
		t.Fatalf("an idle connection: %v, want EOF", err)
	}
	if s.Counts().Connections != 1 {
		t.Fatal("keep-alive was not used")
	}
}

func TestManyStreams(t *testing.T) {
	s := start(t, Options{Speed: 5})
	tr := &http.Transport{MaxIdleConnsPerHost: 500}
	defer tr.CloseIdleConnections()
	c := &http.Client{Transport: tr}
	var wg sync.WaitGroup
	bad := make(chan string, 500)
	for i := 0; i < 500; i++ {
		wg.Add(1)
		go func() {
			defer wg.Done()
			word := fmt.Sprintf("anchor%d", i)
			resp, err := c.Post(s.URL()+"/v1/completions", "application/json", strings.NewReader(fmt.Sprintf(`{"prompt":%q,"max_tokens":40,"stream":true}`, word)))
			if err != nil {
				bad <- err.Error()
				return
			}
			b, err := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			if n := strings.Count(string(b), word+`"`); err != nil || n != 40 || !strings.HasSuffix(string(b), "[DONE]\n\n") {
				bad <- fmt.Sprint(i, err, n)
			}
		}()
	}
	wg.Wait()
	close(bad)
	for e := range bad {
		t.Error(e)
	}
	if c := s.Counts(); c.Finished != 500 || c.Running != 0 {
		t.Errorf("%+v", c)
	}
}

func TestRefusesToListenOutsideLoopback(t *testing.T) {
	if s, err := Start(Options{Listen: "0.0.0.0:0"}); err == nil {
		_ = s.Close()
		t.Fatal("it listens on every interface")
	}
}
