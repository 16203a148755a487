package proxy

import (
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
)

// TestServeForBench serves on PENSTOCK_BENCH_LISTEN for PENSTOCK_BENCH_REPLICAS
// (host:port,...) until the file PENSTOCK_BENCH_STOP is there: a way to load
// the data path alone from outside, and to profile it.
func TestServeForBench(t *testing.T) {
	addr := os.Getenv("PENSTOCK_BENCH_LISTEN")
	if addr == "" {
		t.Skip("PENSTOCK_BENCH_LISTEN is not set")
	}
	p, err := New(Options{Pools: []PoolOptions{{Name: "p", Core: admission.New(admission.Config{}), Models: []string{"m1"}}}})
	if err != nil {
		t.Fatal(err)
	}
	roomy := fleet.Generic()
	roomy.KVTokens, roomy.MaxSeqs = 100_000_000, 100_000
	for i, a := range strings.Split(os.Getenv("PENSTOCK_BENCH_REPLICAS"), ",") {
		if err := p.AddReplica("p", ReplicaSpec{ID: fleet.ID(i + 1), Addr: a, Warm: true, Profile: &roomy}); err != nil {
			t.Fatal(err)
		}
	}
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = p.Serve(ln) }()
	for {
		if _, err := os.Stat(os.Getenv("PENSTOCK_BENCH_STOP")); err == nil {
			return
		}
		time.Sleep(200 * time.Millisecond)
	}
}
