package proxy

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"time"

	"go.uber.org/zap"

	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/ladder"
)

// canaryEvery is how often a degraded route's primary is tried by the router
// itself, canaryTimeout how long it may take.
const (
	canaryEvery   = time.Second
	canaryTimeout = 3 * time.Second
)

// canaries gathers health evidence for routes that are degraded: one tiny
// request a second (one output token) to a living replica of the primary.
// /health alone does not tell: a brownout answers it with 200.
func (p *Proxy) canaries(lr *ladderRoute) {
	defer p.stopped.Done()
	client := &http.Client{Timeout: canaryTimeout, Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true}}
	t := time.NewTicker(canaryEvery)
	defer t.Stop()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		<-p.stop
		cancel()
	}()
	told := false
	for n := 0; ; n++ {
		select {
		case <-p.stop:
			return
		case <-t.C:
		}
		lr.mu.Lock()
		healthy := lr.st.Phase() == ladder.PrimaryHealthy
		stalled := lr.st.Stalled(p.now())
		lr.mu.Unlock()
		if stalled && !told {
			p.log.Warn("ALERT_RECOVERY_PROBE_STALLED: the primary is well and the route has not come back to it", zap.String("route", lr.opt.Model))
		}
		told = stalled
		if healthy {
			continue
		}
		good := p.canary(ctx, client, lr, n)
		if ctx.Err() == nil {
			now := p.now()
			lr.tell(func(s *ladder.State) bool { return s.Probe(now, good) })
		}
	}
}

// canary tries one living replica of the route's primary, the next each time.
func (p *Proxy) canary(ctx context.Context, client *http.Client, lr *ladderRoute, n int) bool {
	r := p.routes.Load().byName[lr.opt.Model]
	if r == nil || len(r.rungs) == 0 || !r.rungs[0].ok {
		return false
	}
	to := &r.rungs[0].to
	var live []*replica
	to.pool.mu.Lock()
	for _, v := range to.pool.core.View().Replicas {
		if rep := to.pool.replicas[v.ID]; rep != nil && v.Health.State != fleet.StateEjected && v.Health.State != fleet.StateDraining {
			live = append(live, rep)
		}
	}
	to.pool.mu.Unlock()
	if len(live) == 0 {
		return false
	}
	rep := live[n%len(live)]
	scheme := "http"
	if rep.spec.TLS != nil {
		scheme = "https"
	}
	body := fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":"ping"}],"max_tokens":1}`, to.model(lr.opt.Model))
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, scheme+"://"+rep.spec.Addr+rep.spec.BasePath+"/v1/chat/completions", bytes.NewReader([]byte(body)))
	if err != nil {
		return false
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "penstock-canary")
	if rep.spec.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+rep.spec.APIKey)
	}
	began := time.Now()
	resp, err := client.Do(req)
	if err != nil {
		return false
	}
	_, err = io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<20))
	_ = resp.Body.Close()
	if err != nil || resp.StatusCode >= 500 || resp.StatusCode == 429 {
		return false
	}
	limit := lr.opt.Rules.FirstByteP95
	return limit == 0 || time.Since(began).Seconds() <= limit
}
