package scraper

// family is one exposed name that is wanted. Names of one thing across vLLM
// versions are apart here and are chosen between at the end, because one page
// may have several of them (0.9.2 has gpu_cache_usage_perc and
// kv_cache_usage_perc): summing them would count twice.
type family uint8

const (
	famNone family = iota
	famRunning
	famWaiting
	famSwapped
	famKV
	famGPUKV
	famQueriesTotal
	famQueries
	famGPUQueriesTotal
	famGPUQueries
	famHitsTotal
	famHits
	famGPUHitsTotal
	famGPUHits
	famPreemptTotal
	famPreempt
	famPromptTotal
	famPrompt
	famOutputTotal
	famOutput
	famTTFTSum
	famTTFTCount
	famITLSum
	famITLCount
	famTPOTSum
	famTPOTCount
	famQueueSum
	famQueueCount
	famPrefillSum
	famPrefillCount
	famSteps
	famConfig
	famCount
)

// familyOf finds a name (without "vllm:"). The compiler turns the switch into
// a search by length and content, which does not allocate.
func familyOf(name []byte) family {
	switch string(name) {
	case "num_requests_running":
		return famRunning
	case "num_requests_waiting":
		return famWaiting
	case "num_requests_swapped": // v0 engine
		return famSwapped
	case "kv_cache_usage_perc":
		return famKV
	case "gpu_cache_usage_perc":
		return famGPUKV
	case "prefix_cache_queries_total":
		return famQueriesTotal
	case "prefix_cache_queries":
		return famQueries
	case "gpu_prefix_cache_queries_total":
		return famGPUQueriesTotal
	case "gpu_prefix_cache_queries":
		return famGPUQueries
	case "prefix_cache_hits_total":
		return famHitsTotal
	case "prefix_cache_hits":
		return famHits
	case "gpu_prefix_cache_hits_total":
		return famGPUHitsTotal
	case "gpu_prefix_cache_hits":
		return famGPUHits
	case "num_preemptions_total":
		return famPreemptTotal
	case "num_preemptions":
		return famPreempt
	case "prompt_tokens_total":
		return famPromptTotal
	case "prompt_tokens":
		return famPrompt
	case "generation_tokens_total":
		return famOutputTotal
	case "generation_tokens":
		return famOutput
	case "time_to_first_token_seconds_sum":
		return famTTFTSum
	case "time_to_first_token_seconds_count":
		return famTTFTCount
	case "inter_token_latency_seconds_sum":
		return famITLSum
	case "inter_token_latency_seconds_count":
		return famITLCount
	case "time_per_output_token_seconds_sum": // up to 0.9
		return famTPOTSum
	case "time_per_output_token_seconds_count":
		return famTPOTCount
	case "request_queue_time_seconds_sum":
		return famQueueSum
	case "request_queue_time_seconds_count":
		return famQueueCount
	case "request_prefill_time_seconds_sum":
		return famPrefillSum
	case "request_prefill_time_seconds_count":
		return famPrefillCount
	case "iteration_tokens_total_count": // a histogram in spite of its name
		return famSteps
	case "cache_config_info":
		return famConfig
	}
	return famNone
}
