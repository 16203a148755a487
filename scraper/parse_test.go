package scraper

import (
	"bytes"
	"errors"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/penstock/penstock/fleet"
)

// body returns what follows the head of a recorded answer.
func body(t testing.TB, file string) []byte {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	_, after, ok := bytes.Cut(b, []byte("\r\n\r\n"))
	if !ok {
		t.Fatalf("%s: no end of head", file)
	}
	return after
}

func pages(t testing.TB) []string {
	t.Helper()
	files, err := filepath.Glob("testdata/metrics_*.http")
	if err != nil || len(files) < 10 {
		t.Fatalf("recorded pages: %v, %v", files, err)
	}
	return files
}

func TestRecordedPagesReadAsTheReferenceParserReadsThem(t *testing.T) {
	for _, file := range pages(t) {
		text := body(t, file)
		o, err := readOracle(text)
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		want, _ := o.sample()
		var got fleet.Sample
		refused, err := Parse(text, &got)
		if err != nil || refused != 0 {
			t.Fatalf("%s: %v, refused %v", file, err, refused.Words())
		}
		if d := differ(got, want); d != "" {
			t.Errorf("%s: %s", file, d)
		}
		if got.Steps < 0 || got.Engines < 1 || got.BlockTokens < 0 || math.IsNaN(got.KVTokens) {
			t.Errorf("%s: %+v", file, got)
		}
	}
}

func TestLoadedPageHasTheReplicasOwnFigures(t *testing.T) {
	var s fleet.Sample
	if _, err := Parse(body(t, "testdata/metrics_loaded.http"), &s); err != nil {
		t.Fatal(err)
	}
	want := fleet.Sample{Engines: 1, Waiting: 12, Running: 8, KVUsage: 0.4339622641509434, KVTokens: 5120, BlockTokens: 32,
		PrefixQueries: 5454, PrefixHits: 1088, Preemptions: 0, PromptTokens: 5441, OutputTokens: 611,
		TTFTSum: 5.202604055404663, TTFTCount: 56, ITLSum: 4.220677221001324, ITLCount: 555,
		QueueSum: 0.01590444599969487, QueueCount: 48, PrefillSum: 0.7828552459993716, PrefillCount: 48, Steps: 537}
	if d := differ(s, want); d != "" {
		t.Error(d)
	}
}

// Two engines of 160 blocks of 32 tokens each; the page says 320 blocks under
// both, and 5120 tokens under both.
func TestDataParallelEnginesAreSummed(t *testing.T) {
	text := body(t, "testdata/metrics_dp2_loaded.http")
	var s fleet.Sample
	if _, err := Parse(text, &s); err != nil {
		t.Fatal(err)
	}
	if s.Engines != 2 || s.Running != 16 || s.Waiting != 4 || s.KVTokens != 10240 || s.PrefixQueries != 261+248 || s.Steps != 252+92 {
		t.Errorf("%+v", s)
	}
	if mean := (0.26415094339622647 + 0.15094339622641506) / 2; math.Abs(s.KVUsage-mean) > 1e-12 {
		t.Errorf("KV use %v, want %v", s.KVUsage, mean)
	}
	// Versions before kv_cache_size_tokens: the same sum under both engines is one sum.
	old := bytes.ReplaceAll(text, []byte(`kv_cache_size_tokens="5120",`), nil)
	if _, err := Parse(old, &s); err != nil || s.KVTokens != 10240 {
		t.Errorf("KV tokens %v, %v", s.KVTokens, err)
	}
}

func TestKVUseIsWeighedByCapacity(t *testing.T) {
	text := "vllm:kv_cache_usage_perc{engine=\"0\"} 1\nvllm:kv_cache_usage_perc{engine=\"1\"} 0\n" +
		"vllm:cache_config_info{engine=\"0\",block_size=\"16\",num_gpu_blocks=\"300\"} 1\n" +
		"vllm:cache_config_info{engine=\"1\",block_size=\"16\",num_gpu_blocks=\"100\"} 1\n"
	var s fleet.Sample
	if _, err := Parse([]byte(text), &s); err != nil || s.KVUsage != 0.75 || s.KVTokens != 6400 {
		t.Errorf("%+v, %v", s, err)
	}
}

// The exposition of each generation, cut to what differs between them.
func TestEveryGenerationOfNames(t *testing.T) {
	const v1 = `{engine="0",model_name="m"} `
	cases := []struct{ name, page string }{
		{"v0 engine, 0.8.5", `
vllm:num_requests_running{model_name="m"} 3.0
vllm:num_requests_swapped{model_name="m"} 2.0
vllm:num_requests_waiting{model_name="m"} 5.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.25
vllm:cpu_cache_usage_perc{model_name="m"} 0.9
vllm:gpu_prefix_cache_hit_rate{model_name="m"} -1.0
vllm:num_preemptions_total{model_name="m"} 1.0
vllm:prompt_tokens_total{model_name="m"} 70.0
vllm:generation_tokens_total{model_name="m"} 30.0
vllm:time_per_output_token_seconds_sum{model_name="m"} 0.5
vllm:time_per_output_token_seconds_count{model_name="m"} 10.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="100",cache_dtype="auto"} 1.0
`},
		{"V1, 0.8.5", `
vllm:num_requests_running` + v1 + `3
vllm:num_requests_waiting` + v1 + `7
vllm:gpu_cache_usage_perc` + v1 + `0.25
vllm:gpu_prefix_cache_queries` + v1 + `40
vllm:gpu_prefix_cache_hits` + v1 + `20
vllm:num_preemptions_total` + v1 + `1
vllm:prompt_tokens_total` + v1 + `70
vllm:generation_tokens_total` + v1 + `30
vllm:time_per_output_token_seconds_sum` + v1 + `0.5
vllm:time_per_output_token_seconds_count` + v1 + `10
vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1
`},
		{"0.9.2, old and new names together", `
vllm:num_requests_running` + v1 + `3
vllm:num_requests_waiting` + v1 + `7
vllm:gpu_cache_usage_perc` + v1 + `0.25
vllm:kv_cache_usage_perc` + v1 + `0.25
vllm:gpu_prefix_cache_queries_total` + v1 + `40
vllm:gpu_prefix_cache_hits_total` + v1 + `20
vllm:prefix_cache_queries_total` + v1 + `40
vllm:prefix_cache_hits_total` + v1 + `20
vllm:num_preemptions_total` + v1 + `1
vllm:prompt_tokens_total` + v1 + `70
vllm:generation_tokens_total` + v1 + `30
vllm:time_per_output_token_seconds_sum` + v1 + `0.5
vllm:time_per_output_token_seconds_count` + v1 + `10
vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1
`},
		{"0.15 and 0.20", `
vllm:num_requests_running` + v1 + `3
vllm:num_requests_waiting` + v1 + `7
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 7
vllm:kv_cache_usage_perc` + v1 + `0.25
vllm:prefix_cache_queries_total` + v1 + `40
vllm:prefix_cache_hits_total` + v1 + `20
vllm:external_prefix_cache_queries_total` + v1 + `1000
vllm:external_prefix_cache_hits_total` + v1 + `1000
vllm:num_preemptions_total` + v1 + `1
vllm:prompt_tokens_total` + v1 + `70
vllm:prompt_tokens_cached_total` + v1 + `20
vllm:generation_tokens_total` + v1 + `30
vllm:inter_token_latency_seconds_sum` + v1 + `0.5
vllm:inter_token_latency_seconds_count` + v1 + `10
vllm:request_time_per_output_token_seconds_sum` + v1 + `9
vllm:request_time_per_output_token_seconds_count` + v1 + `9
vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1
`},
	}
	for i, c := range cases {
		var s fleet.Sample
		refused, err := Parse([]byte(c.page[1:]), &s)
		if err != nil || refused != 0 {
			t.Errorf("%s: %v, refused %v", c.name, err, refused.Words())
			continue
		}
		want := fleet.Sample{Engines: 1, Waiting: 7, Running: 3, KVUsage: 0.25, KVTokens: 1600, BlockTokens: 16,
			PrefixQueries: 40, PrefixHits: 20, Preemptions: 1, PromptTokens: 70, OutputTokens: 30,
			TTFTSum: -1, TTFTCount: -1, ITLSum: 0.5, ITLCount: 10, QueueSum: -1, QueueCount: -1, PrefillSum: -1, PrefillCount: -1, Steps: -1}
		if i == 0 { // only a rate over an unsaid window, nothing to take deltas of
			want.PrefixQueries, want.PrefixHits = -1, -1
		}
		if d := differ(s, want); d != "" {
			t.Errorf("%s: %s", c.name, d)
		}
	}
}

func TestImpossibleValuesAreRefusedFamilyByFamily(t *testing.T) {
	page := func(running, waiting, kv, prompt string) []byte {
		return []byte("vllm:num_requests_running{engine=\"0\"} " + running + "\nvllm:num_requests_waiting{engine=\"0\"} " + waiting +
			"\nvllm:kv_cache_usage_perc{engine=\"0\"} " + kv + "\nvllm:prompt_tokens_total{engine=\"0\"} " + prompt + "\n")
	}
	cases := []struct {
		page    []byte
		refused Refused
	}{
		{page("1", "2", "0.5", "9"), 0},
		{page("NaN", "2", "0.5", "9"), RefusedRunning},
		{page("1", "-2", "0.5", "9"), RefusedWaiting},
		{page("1", "2", "+Inf", "9"), RefusedKVUsage},
		{page("1", "2", "37", "9"), RefusedKVUsage},
		{page("1", "2", "0.5", "-Inf"), RefusedPromptTokens},
		{page("1e300", "2e19", "0.5", "1e16"), RefusedRunning | RefusedWaiting | RefusedPromptTokens},
		{page("NaN", "NaN", "NaN", "NaN"), RefusedRunning | RefusedWaiting | RefusedKVUsage | RefusedPromptTokens},
	}
	for _, c := range cases {
		var s fleet.Sample
		refused, err := Parse(c.page, &s)
		if err != nil || refused != c.refused {
			t.Errorf("%s: refused %v, want %v, %v", c.page, refused.Words(), c.refused.Words(), err)
		}
		check := func(r Refused, v, missing, want float64) {
			if refused&r != 0 {
				want = missing
			}
			if v != want && !(math.IsNaN(v) && math.IsNaN(want)) {
				t.Errorf("%s: %v is %v, want %v", c.page, r.Words(), v, want)
			}
		}
		check(RefusedRunning, s.Running, math.NaN(), 1)
		check(RefusedWaiting, s.Waiting, math.NaN(), 2)
		check(RefusedKVUsage, s.KVUsage, math.NaN(), 0.5)
		check(RefusedPromptTokens, s.PromptTokens, -1, 9)
	}
}

func TestFormsThatTheTextFormatPermits(t *testing.T) {
	for _, page := range []string{
		"vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 8\n",
		"vllm:num_requests_running{model_name=\"m\",engine=\"0\"} 8.0\n",
		"vllm:num_requests_running 8\n",
		"vllm:num_requests_running{} 8\n",
		"vllm:num_requests_running{engine=\"0\",} 8\n",
		"vllm:num_requests_running { engine = \"0\" , model_name = \"m\" }  8 1700000000000\n",
		" \tvllm:num_requests_running{engine=\"0\"}\t8e0\t-1\n",
		"vllm:num_requests_running{model_name=\"a} 9\\\"b\\\\\",engine=\"0\"} 8\n",
		"vllm:num_requests_running{model_name=\"\\\\\\\\\",engine=\"0\"} 80e-1\n",
		"vllm:num_requests_running{engine=\"0\"} 8.0\r\n",
		"# HELP x y\r\n\r\nvllm:num_requests_running{engine=\"0\"} 8.0 12\r\n",
		"vllm:num_requests_running{engine=\"0\",model_name=\"a # {b}\"} 8\n",
		"vllm:num_requests_running{model_name=\" # {\",engine=\"0\"} 8\n",
		"vllm:num_requests_running{engine=\"0\"} 8 # {trace_id=\"a\",engine=\"1\"} 0.67 1700000000.123\n# EOF\n",
		"vllm:num_requests_running 8 # {} 1\n",
	} {
		var s fleet.Sample
		if _, err := Parse([]byte(page), &s); err != nil || s.Running != 8 || s.Engines != 1 {
			t.Errorf("%q: running %v, engines %d, %v", page, s.Running, s.Engines, err)
		}
	}
}

// A size that no server has counts as not said: it would not fit the accounts.
func TestAbsurdSizesAreNotSaid(t *testing.T) {
	for _, labels := range []string{`block_size="16",num_gpu_blocks="1e300"`, `block_size="1e12",num_gpu_blocks="1e12"`, `kv_cache_size_tokens="1e18"`} {
		var s fleet.Sample
		page := "vllm:num_requests_running{engine=\"0\"} 8\nvllm:cache_config_info{engine=\"0\"," + labels + "} 1\n"
		if _, err := Parse([]byte(page), &s); err != nil || !math.IsNaN(s.KVTokens) || s.Running != 8 {
			t.Errorf("%s: %v KV tokens, %v", labels, s.KVTokens, err)
		}
	}
}

func TestUnusablePagesAreErrorsAndChangeNothing(t *testing.T) {
	whole := body(t, "testdata/metrics_loaded.http")
	cut := bytes.Index(whole, []byte("vllm:kv_cache_usage_perc{")) + 30
	for _, c := range []struct {
		page string
		want error
	}{
		{"", ErrForeign},
		{"# HELP vllm:num_requests_running x\n", ErrForeign},
		{"<html>gateway time-out</html>\n", ErrForeign},
		{"vllm:num_requests_waiting_by_reason 5\n", ErrForeign},
		{"vllm:num_requests_running{engine=\"0\"} 8", ErrTruncated},
		{string(whole[:cut]), ErrTruncated},
		{"vllm:num_requests_running{engine=\"0\"} eight\n", ErrValue},
		{"vllm:num_requests_running{engine=\"0\"} 8 soon\n", ErrValue},
		{"vllm:num_requests_running{engine=\"0\"}\n", ErrValue},
		{"vllm:num_requests_running{engine=\"0\" 8\n", ErrLabels},
		{"vllm:num_requests_running{engine=0} 8\n", ErrLabels},
	} {
		s := fleet.Sample{Running: 42}
		if _, err := Parse([]byte(c.page), &s); !errors.Is(err, c.want) {
			t.Errorf("%.60q: %v, want %v", c.page, err, c.want)
		}
		if d := differ(s, fleet.Sample{Running: 42}); d != "" {
			t.Errorf("%.60q changed the sample: %s", c.page, d)
		}
	}
}

func TestParseDoesNotAllocate(t *testing.T) {
	text := body(t, "testdata/metrics_dp2_loaded.http")
	var s fleet.Sample
	if n := testing.AllocsPerRun(50, func() { _, _ = Parse(text, &s) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// FuzzParse: no panic on anything, and where prometheus/common accepts a page,
// the same sample. Comments are dropped first, because type comments change how
// that parser groups series (and drop doubles), which a scan by line does not.
func FuzzParse(f *testing.F) {
	for _, file := range pages(f) {
		text := body(f, file)
		var b bytes.Buffer
		for line := range bytes.Lines(text) {
			// Short seeds: a fuzzer spends its time on what matters in them.
			name, _, _ := bytes.Cut(bytes.TrimPrefix(line, vllmPrefix), []byte("{"))
			if bytes.HasPrefix(line, vllmPrefix) && familyOf(name) != famNone {
				b.Write(line)
			}
		}
		f.Add(b.Bytes())
	}
	f.Add([]byte("vllm:num_requests_running{model_name=\"a} 9\\\"b\\\\\",engine=\"0\"} 8 17\n"))
	f.Add([]byte("vllm:kv_cache_usage_perc{engine=\"0\"} NaN\nvllm:gpu_cache_usage_perc 0.5\n"))
	f.Fuzz(func(t *testing.T, page []byte) {
		var got fleet.Sample
		_, _ = Parse(page, &got)
		var plain []byte
		for line := range bytes.Lines(page) {
			line = trimBlank(line)
			if bytes.HasPrefix(line, []byte("#")) {
				continue
			}
			// Quoted names are never needed for vLLM's, which are legal unquoted.
			if bytes.HasPrefix(line, []byte("{")) {
				return
			}
			plain = append(plain, line...)
		}
		o, oerr := readOracle(plain)
		if oerr != nil {
			return
		}
		want, load := o.sample()
		_, err := Parse(plain, &got)
		if !load {
			if !errors.Is(err, ErrForeign) {
				t.Fatalf("nothing wanted, yet %v", err)
			}
			return
		}
		if err != nil {
			if errors.Is(err, ErrEngines) {
				return
			}
			t.Fatalf("accepted by the reference parser, refused here: %v\n%q", err, plain)
		}
		if d := differ(got, want); d != "" {
			t.Fatalf("%s\n%q", d, plain)
		}
	})
}

// BenchmarkLines is the floor: finding the ends of lines and no more.
func BenchmarkLines(b *testing.B) {
	text := body(b, "testdata/metrics_loaded.http")
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		for rest := text; len(rest) > 0; {
			rest = rest[bytes.IndexByte(rest, '\n')+1:]
		}
	}
}

func BenchmarkParse(b *testing.B) {
	text := body(b, "testdata/metrics_loaded.http")
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	var s fleet.Sample
	for b.Loop() {
		if _, err := Parse(text, &s); err != nil {
			b.Fatal(err)
		}
	}
}
