# Penstock. `make run` shows it, `make test` proves it; both need only Go.
GO      ?= go
BIN     := bin/penstock
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo tip)
LDFLAGS := -s -w -X main.version=$(VERSION)
# Rooms whose goroutines share memory, or whose rules every request hangs on.
CORE    := ./fleet/... ./scorer/... ./admission/... ./wire/... ./config/... ./telemetry/... ./scraper/... ./ring/... ./proxy/... ./cmd/...
FUZZTIME ?= 20s
GOLANGCI := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.6.2

.DEFAULT_GOAL := build
.PHONY: peers build run test fmt vet race apptest fuzz bench bench-proxy real drill drill-mutants lint vuln check docs cover clean help

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | column -t -s "$$(printf '\t')"

build: ## bin/penstock
	@mkdir -p bin
	@CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $(BIN) ./cmd/router

run: build ## router, three emulated replicas and light traffic on the loopback; Ctrl-C ends all
	@exec ./$(BIN) demo

test: fmt vet ## every test that needs nothing but Go
	$(GO) test -timeout 10m ./...

fmt: ## fails when a file is not gofmt'ed
	@bad=$$(git ls-files '*.go' | xargs gofmt -l); if [ -n "$$bad" ]; then echo "not gofmt'ed:"; echo "$$bad"; exit 1; fi

vet: ## go vet
	$(GO) vet ./...

race: ## tests of the core rooms under the race detector (needs a C compiler)
	CGO_ENABLED=1 $(GO) test -race -timeout 10m $(filter-out ./ring/...,$(CORE))
	@# Go 1.26's runtime itself crashes now and then in a timer's channel inside a synctest bubble under -race
	@# (runtime.(*timer).maybeRunChan), and its race detector by a check of its own: only these, without a failed
	@# test or a data race, are run once more.
	@# Each test has a process of its own: the more goes on in one, the more often they crash (4 of 7 runs one evening).
	@dir=$$(mktemp -d); log=$$dir/log; trap 'rm -rf $$dir' EXIT; \
	CGO_ENABLED=1 $(GO) test -race -c -o $$dir/ring.test ./ring || exit 1; cd ring; \
	for t in $$($$dir/ring.test -test.list .); do ok=; for try in 1 2; do \
	  $$dir/ring.test -test.timeout 10m -test.run "^$$t\$$" >$$log 2>&1 && { ok=1; break; }; \
	  echo "ring $$t"; cat $$log; \
	  { { grep -q '^SIGSEGV' $$log && grep -q maybeRunChan $$log || grep -q 'ThreadSanitizer: CHECK failed' $$log; } \
	    && ! grep -qE -e '--- FAIL' -e 'DATA RACE' $$log; } || break; \
	done; [ -n "$$ok" ] || exit 1; done; echo "ok ring, each test by itself"

apptest: build ## black-box tests on the built binary, each public fault case included
	PENSTOCK_BIN=$(CURDIR)/$(BIN) $(GO) test -count=1 -timeout 10m ./apptest/...

fuzz: ## every fuzz target for FUZZTIME (20s), and 1,000 cases of each property
	@set -e; for pkg in $$($(GO) list ./...); do \
	  dir=$$($(GO) list -f '{{.Dir}}' $$pkg); \
	  for f in $$(grep -hoE '^func (Fuzz[A-Za-z0-9_]+)' $$dir/*_test.go 2>/dev/null | sed 's/func //' | sort -u); do \
	    echo "== $$pkg $$f"; $(GO) test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) $$pkg; \
	  done; \
	  if grep -lq 'pgregory.net/rapid' $$dir/*_test.go 2>/dev/null; then echo "== $$pkg properties"; $(GO) test -count=1 -timeout 20m $$pkg -rapid.checks=1000; fi; \
	done

bench: ## micro-benchmarks (pick, scan, observe ...)
	$(GO) test -run '^$$' -bench . -benchmem ./fleet/... ./scorer/... ./admission/... ./wire/... ./scraper/... ./ring/... ./proxy/...

bench-proxy: build ## side by side with nginx, haproxy and vllm-router on this machine
	@bench/proxybench/run.sh $(BENCHFLAGS)

real: build ## acceptance run against three real vLLM replicas (CPU build; some GB from PyPI at the first time)
	@apptest/real/run.sh

drill: build ## every failure drill against the built binary
	./$(BIN) drill all

peers: build ## 1, 3 and 8 router processes as one, against emulated replicas (minutes; wants a quiet machine)
	PENSTOCK_BIN=$(CURDIR)/$(BIN) PENSTOCK_PEERS=1 $(GO) test -count=1 -v -timeout 10m ./apptest/peers/

drill-mutants: ## each drill that claims to catch a fault, on a router that has it (about ten minutes)
	PENSTOCK_MUTATION=1 $(GO) test -count=1 -timeout 40m -v -run DrillsCatch ./drill

docs: ## the generated pages of docs/
	$(GO) run ./cmd/router docs --dir docs

lint: ## golangci-lint, from the Go proxy
	$(GO) run $(GOLANGCI) run ./...

vuln: ## known vulnerabilities in what is linked (asks vuln.go.dev)
	$(GO) run golang.org/x/vuln/cmd/govulncheck@latest ./...

check: test race lint ## all that a change has to pass

cover: ## coverage by room
	$(GO) test -cover ./...

clean:
	rm -rf bin
