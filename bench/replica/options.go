// Package replica is an emulated vLLM 0.32 server on the replica model of
// bench/model in real time: its API and error shapes byte for byte, its
// metrics page, its way of stopping, and faults on demand. It computes
// nothing: the answer echoes the words of the last user message, so that
// whoever reads an answer can tell whose it is.
//
// It listens on loopback addresses only.
package replica

import (
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/penstock/penstock/bench/model"
)

// Options of one emulated replica. The zero value of each field is its default.
type Options struct {
	// Listen is the address, host:port on loopback; default 127.0.0.1:0.
	Listen string
	// Model is the served model's name; default "tiny".
	Model string
	// Aliases are further names that it answers to (LoRA adapters, say).
	Aliases []string
	// Profile is the hardware; default model.ByName("h100-8b").
	Profile *model.Profile
	// Speed multiplies time: 10 makes a replica ten times as fast; default 1.
	Speed float64
	// MaxModelLen is the longest prompt + output, tokens; default the profile's,
	// never above its KV cache.
	MaxModelLen int
	// APIKey, when set, is asked for on all paths under /v1 as vLLM does.
	APIKey string
	// MaxQueued is --max-num-queued-reqs: with so many waiting a new request
	// gets 503. 0 = no limit, as in vLLM.
	MaxQueued int
	// DefaultOut is how many tokens an answer has when the request gives no
	// limit; such an answer ends with "stop". Default 64.
	DefaultOut int
	// Pooling makes it serve /v1/embeddings, rerank and score instead of 404.
	Pooling bool
	// Dev serves /sleep, /wake_up, /reset_prefix_cache as VLLM_SERVER_DEV_MODE does.
	Dev bool
	// Version is what /version says; default "0.32.0".
	Version string
	// IdleClose closes a keep-alive connection without a request; default 5 s (uvicorn).
	IdleClose time.Duration
	// OnRequest, when set, sees each inference request before any fault acts.
	// It must not keep header or body.
	OnRequest func(path string, header http.Header, body []byte)
}

func (o *Options) fill() error {
	if o.Listen == "" {
		o.Listen = "127.0.0.1:0"
	}
	host, _, err := net.SplitHostPort(o.Listen)
	if err != nil {
		return fmt.Errorf("replica: listen address %q: %w", o.Listen, err)
	}
	if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return fmt.Errorf("replica: listen address %q: an emulated replica listens on loopback only", o.Listen)
	}
	if o.Model == "" {
		o.Model = "tiny"
	}
	if o.Profile == nil {
		p, _ := model.ByName("h100-8b")
		o.Profile = &p
	}
	if o.Speed == 0 {
		o.Speed = 1
	}
	if o.Speed < 0 {
		return fmt.Errorf("replica: speed %g: must be above 0", o.Speed)
	}
	if o.MaxModelLen == 0 {
		o.MaxModelLen = o.Profile.MaxModelLen
	}
	o.MaxModelLen = min(o.MaxModelLen, o.Profile.Blocks()*o.Profile.BlockTokens)
	if o.DefaultOut == 0 {
		o.DefaultOut = 64
	}
	if o.Version == "" {
		o.Version = "0.32.0"
	}
	if o.IdleClose == 0 {
		o.IdleClose = 5 * time.Second
	}
	return nil
}

// Counts is what a replica has seen since it started.
type Counts struct {
	Connections int // accepted
	Requests    int // inference requests whose body was read, refused ones included
	Finished    int // answers given whole
	Aborted     int // clients that left before their answer was whole
	Refused     int // 4xx and 5xx answers to inference requests
	Running     int // inference requests in it now
}
