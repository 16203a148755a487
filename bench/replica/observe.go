package replica

import (
	"time"

	"github.com/penstock/penstock/bench/model"
)

// buildPage makes the metrics page and says where each value comes from.
func (s *Server) buildPage() {
	stat := func(f func(st *model.Stats) float64) func() float64 {
		return func() float64 { st := s.eng.Stats(s.now()); return f(&st) }
	}
	gauge := func(f func(st *model.Stats) float64) func() float64 {
		g := stat(f)
		return func() float64 {
			if s.draining {
				return 0
			}
			return g()
		}
	}
	hits := stat(func(st *model.Stats) float64 { return st.PrefixHits })
	scalar := map[string]func() float64{
		"vllm:num_requests_running":                           gauge(func(st *model.Stats) float64 { return float64(st.Running) }),
		"vllm:num_requests_waiting":                           gauge(func(st *model.Stats) float64 { return float64(st.Waiting) }),
		"vllm:num_requests_waiting_by_reason{capacity}":       gauge(func(st *model.Stats) float64 { return float64(st.Waiting) }),
		"vllm:kv_cache_usage_perc":                            gauge(func(st *model.Stats) float64 { return st.KVUsage }),
		"vllm:prefix_cache_queries_total":                     stat(func(st *model.Stats) float64 { return st.PrefixQueries }),
		"vllm:prefix_cache_hits_total":                        hits,
		"vllm:num_preemptions_total":                          stat(func(st *model.Stats) float64 { return st.Preemptions }),
		"vllm:prompt_tokens_total":                            stat(func(st *model.Stats) float64 { return st.PromptTokens }),
		"vllm:generation_tokens_total":                        stat(func(st *model.Stats) float64 { return st.OutputTokens }),
		"vllm:prompt_tokens_by_source_total{local_compute}":   stat(func(st *model.Stats) float64 { return max(0, st.PromptTokens-st.PrefixHits) }),
		"vllm:prompt_tokens_by_source_total{local_cache_hit}": hits,
		"vllm:prompt_tokens_cached_total":                     hits,
		"vllm:prompt_tokens_cached_by_source_total{device}":   hits,
		"vllm:request_success_total{length}":                  func() float64 { return s.ended },
		"vllm:request_success_total{stop}":                    func() float64 { return s.stopped },
		"vllm:admission_rejections_total{max_num_queued_reqs}": func() float64 {
			return s.rejected
		},
	}
	p := s.opt.Profile
	cache := [3]string{itoa(p.BlockTokens), itoa(p.Blocks()), itoa(p.Blocks() * p.BlockTokens)}
	s.page = newPage(s.opt.Model, cache, float64(time.Now().UnixNano())/1e9, scalar)
	iterations := s.page.hist["iteration_tokens_total"]
	s.eng.OnStep = func(_, tokens int, _ float64) { iterations.observe(float64(tokens)) }
}

func (s *Server) metrics(k *conn, info *reqInfo) {
	s.mu.Lock()
	broken := s.hasFault(BrokenMetrics)
	b := s.frozen
	if b == nil {
		b = s.page.render(s.hasFault(NaNMetrics))
	}
	s.mu.Unlock()
	if broken {
		k.replyError(info, statusError(500))
		return
	}
	k.reply(info, 200, "text/plain; version=1.0.0; charset=utf-8", b, "")
}

func (s *Server) observeFirst(c *choice) {
	h := s.page.hist
	h["time_to_first_token_seconds"].observe(s.wall(c.seq.FirstAt - c.seq.Arrived))
	h["request_queue_time_seconds"].observe(s.wall(c.seq.Started - c.seq.Queued))
	h["request_prefill_time_seconds"].observe(s.wall(c.seq.FirstAt - c.seq.Started))
	h["request_prompt_tokens"].observe(float64(c.seq.Prompt))
	h["request_prefill_kv_computed_tokens"].observe(float64(c.seq.Prompt - c.seq.Cached))
}

// observeEnd counts a sequence that ended by itself; an aborted one counts
// nowhere, as in vLLM.
func (s *Server) observeEnd(c *choice) {
	if c.seq.Ended != model.Length {
		return
	}
	h, q := s.page.hist, &c.seq
	if c.reason == "length" {
		s.ended++
	} else {
		s.stopped++
	}
	h["e2e_request_latency_seconds"].observe(s.wall(q.EndAt - q.Arrived))
	h["request_inference_time_seconds"].observe(s.wall(q.EndAt - q.Started))
	h["request_decode_time_seconds"].observe(s.wall(q.EndAt - q.FirstAt))
	h["request_generation_tokens"].observe(float64(q.Out))
	h["request_max_num_generation_tokens"].observe(float64(q.Out))
	h["request_params_n"].observe(float64(c.job.req.n))
	h["request_num_preemptions"].observe(float64(q.Preempts))
	if m := c.job.req.maxOut; m > 0 {
		h["request_params_max_tokens"].observe(float64(m))
	}
	if q.Out > 1 {
		h["request_time_per_output_token_seconds"].observe(s.wall((q.EndAt - q.FirstAt) / float64(q.Out-1)))
	}
}
