// Package model is the replica model that the emulated replica and the
// simulator share: one engine at iteration level, with vLLM's scheduling
// (continuous batching, chunked prefill, first come first served), its paged
// KV cache with prefix reuse, and a step-time law fitted to measured silicon.
//
// It is pure: virtual time is an argument (seconds), there is no goroutine,
// clock, random source or I/O, and equal inputs give equal outputs.
//
// Decode-only stretches are advanced in bulk, so the cost of a request does
// not grow with the number of its output tokens.
package model

import "sort"

// Profile is the hardware and engine configuration of one replica. Times are
// seconds; capacities tokens. The step law is
//
//	T = max(A + C*n, PA + PB*tokens) + D*ctx + 2*PQ*sum(chunk*(ctx+chunk/2)) + Overhead
//
// with n sequences and `tokens` tokens in the step, ctx the KV tokens read by
// decoding sequences. The dense part is a maximum, not a sum: below the knee
// the step is bound by reading the weights, above it by arithmetic.
type Profile struct {
	Name     string
	A        float64 // weight-bound floor of a step, s
	C        float64 // per sequence, s
	D        float64 // per KV token read, s
	PA       float64 // compute-bound floor, s
	PB       float64 // per token computed, s
	PQ       float64 // half the attention cost per (chunk token x context token), s
	Overhead float64 // scheduler and sampling per step, s; 1 ms measured

	KVTokens    int // KV cache size, tokens
	MaxSeqs     int // --max-num-seqs
	MaxBatched  int // --max-num-batched-tokens
	BlockTokens int // 16 on CUDA
	MaxModelLen int // longest prompt + output

	FrontBase     float64 // front end (HTTP, tokenizer) per request, s; ~15 ms measured
	FrontPerToken float64 // per prompt token, s; ~13 µs measured
}

func ms(name string, a, c, d, pa, pb, pq float64, kv, seqs, batched int) Profile {
	return Profile{Name: name, A: a / 1e3, C: c / 1e3, D: d / 1e3, PA: pa / 1e3, PB: pb / 1e3, PQ: pq / 1e3, Overhead: 1e-3,
		KVTokens: kv, MaxSeqs: seqs, MaxBatched: batched, BlockTokens: 16, MaxModelLen: 131072,
		FrontBase: 15e-3, FrontPerToken: 13e-6}
}

// profiles is the table of bench.md (its figures are in ms).
var profiles = []Profile{
	ms("h100-8b", 6.36, .0113, 4.2e-5, 4.0, .0168, 9.2e-7, 446652, 1024, 8192),
	ms("h100-32b-tp2", 13.5, .0264, 4.3e-5, 9.8, .0427, 1.9e-6, 307328, 1024, 8192),
	ms("h100-70b-tp4", 15.2, .0321, 2.7e-5, 9.8, .0543, 1.9e-6, 461376, 1024, 8192),
	ms("a100-8b", 11.7, .0276, 8.5e-5, 8.7, .0532, 1.7e-6, 443334, 256, 2048),
	ms("a100-70b-tp4", 27.7, .103, 5.3e-5, 16.5, .161, 3e-7, 450790, 256, 2048),
	ms("h200-8b", 4.86, .0124, 3.0e-5, 2.7, .0177, 8e-7, 890494, 1024, 8192),
	ms("l40s-8b", 22.0, .0413, 1.9e-4, 14.6, .0511, 4.3e-6, 187129, 256, 2048),
}

// ByName returns a copy of the named profile of the table.
func ByName(name string) (Profile, bool) {
	for _, p := range profiles {
		if p.Name == name {
			return p, true
		}
	}
	return Profile{}, false
}

// Names lists the profiles of the table, sorted.
func Names() []string {
	var out []string
	for _, p := range profiles {
		out = append(out, p.Name)
	}
	sort.Strings(out)
	return out
}

// StepTime is the step law: n sequences, tokens computed, ctx KV tokens read
// by decoding sequences, attn = sum over prefill chunks of chunk*(ctx+chunk/2).
// Seconds.
func (p *Profile) StepTime(n, tokens int, ctx, attn float64) float64 {
	return max(p.A+p.C*float64(n), p.PA+p.PB*float64(tokens)) + p.D*ctx + 2*p.PQ*attn + p.Overhead
}

// FrontEnd is the latency before a request reaches the engine, seconds.
func (p *Profile) FrontEnd(prompt int) float64 { return p.FrontBase + p.FrontPerToken*float64(prompt) }

// Blocks is the number of KV blocks of the cache.
func (p *Profile) Blocks() int { return p.KVTokens / p.BlockTokens }
