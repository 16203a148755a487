package main

import (
	"encoding/json"
	"net/http"
	"net/http/pprof"

	"github.com/VictoriaMetrics/metrics"
)

// adminMux is the admin listener: metrics, liveness, readiness, pprof, reload,
// and the console with its API where it is there.
func (a *app) adminMux() *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		a.metrics.Write(w)
		metrics.WriteProcessMetrics(w)
	})
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_, _ = w.Write([]byte("ok\n"))
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		ok, body := a.proxy.Ready()
		w.Header().Set("Content-Type", "application/json")
		if !ok {
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_, _ = w.Write(body)
	})
	mux.HandleFunc("POST /admin/v1/reload", func(w http.ResponseWriter, _ *http.Request) {
		live, restart, err := a.reload("admin API")
		w.Header().Set("Content-Type", "application/json")
		out := struct {
			OK      bool     `json:"ok"`
			Applied []string `json:"applied"`
			Restart []string `json:"needs_restart"`
			Error   string   `json:"error,omitempty"`
		}{err == nil, append([]string{}, live...), append([]string{}, restart...), ""}
		if err != nil {
			out.Error = err.Error()
			w.WriteHeader(http.StatusUnprocessableEntity)
		}
		_ = json.NewEncoder(w).Encode(out)
	})
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	return mux
}
