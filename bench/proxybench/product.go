//go:build linux

package main

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// product is one proxy to measure. command returns what to start; the listed
// files are written into dir before.
type product struct {
	name    string
	note    string // what a reader has to know of its settings
	version func() (string, error)
	command func(dir string, port int, upstreams []string) *exec.Cmd
	ready   string // path that answers 200 once it serves
}

// tools are the programs' places.
type tools struct {
	nginx, haproxy, vllmRouter, penstock string
}

// products lists all that can be measured, in the table's order.
func products(t tools) []product {
	list := []product{
		{name: "nginx", note: "1 worker, keep-alive to the replicas, no buffering of answers, no access log", ready: "/health",
			version: versionOf(t.nginx, "-v"), command: t.startNginx},
		{name: "haproxy", note: "1 thread, http-reuse always, no log", ready: "/health",
			version: versionOf(t.haproxy, "-v"), command: t.startHaproxy},
	}
	for _, policy := range []string{"round_robin", "cache_aware"} {
		list = append(list, product{name: "vllm-router " + policy, note: "as shipped, --policy " + policy + ", log level error; RSS has its Python launcher in it", ready: "/health",
			version: versionOf(filepath.Join(filepath.Dir(t.vllmRouter), "pip"), "show", "vllm-router"),
			command: func(_ string, port int, ups []string) *exec.Cmd { return t.startVLLMRouter(port, policy, ups) }})
	}
	return append(list, product{name: "penstock", note: "work-aware policy on, GOMAXPROCS=1 as the others have one thread, log level warn, /metrics of each replica read every 250 ms", ready: "/readyz",
		version: versionOf(t.penstock, "version"), command: t.startPenstock})
}

// versionOf runs a program and takes the first line that names a version.
func versionOf(bin string, args ...string) func() (string, error) {
	return func() (string, error) {
		out, err := exec.Command(bin, args...).CombinedOutput()
		if err != nil {
			return "", fmt.Errorf("%s: %w", bin, err)
		}
		for _, l := range strings.Split(string(out), "\n") {
			if strings.Contains(strings.ToLower(l), "version") {
				l = strings.TrimPrefix(strings.TrimSpace(l), "nginx version: ")
				l = strings.TrimPrefix(l, "Version: ")
				return strings.Join(strings.Fields(l)[:min(3, len(strings.Fields(l)))], " "), nil
			}
		}
		return strings.TrimSpace(strings.SplitN(string(out), "\n", 2)[0]), nil
	}
}

func (t tools) startNginx(dir string, port int, ups []string) *exec.Cmd {
	var servers string
	for _, u := range ups {
		servers += "    server " + u + " max_fails=0;\n"
	}
	conf := fmt.Sprintf(`daemon off; worker_processes 1; pid %[1]s/nginx.pid; error_log %[1]s/error.log; 
events { worker_connections %[4]d; }
http {
  access_log off; client_body_temp_path %[1]s/b; proxy_temp_path %[1]s/p; fastcgi_temp_path %[1]s/f; uwsgi_temp_path %[1]s/u; scgi_temp_path %[1]s/s;
  keepalive_requests 1000000000; client_body_buffer_size 1m; client_max_body_size 64m;
  upstream replicas {
%[3]s    keepalive 1024; keepalive_requests 1000000000;
  }
  server {
    listen 127.0.0.1:%[2]d backlog=4096;
    location / {
      proxy_pass http://replicas; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
      proxy_read_timeout 300s;
    }
  }
}
`, dir, port, servers, fileLimit())
	must(os.WriteFile(filepath.Join(dir, "nginx.conf"), []byte(conf), 0o600))
	return exec.Command(t.nginx, "-c", filepath.Join(dir, "nginx.conf"), "-p", dir)
}

func (t tools) startHaproxy(dir string, port int, ups []string) *exec.Cmd {
	var servers string
	for i, u := range ups {
		servers += fmt.Sprintf("  server r%d %s\n", i, u)
	}
	conf := fmt.Sprintf(`global
  nbthread 1
  maxconn %d
defaults
  mode http
  option http-keep-alive
  http-reuse always
  timeout connect 5s
  timeout client 300s
  timeout server 300s
frontend f
  bind 127.0.0.1:%d backlog 4096
  default_backend b
backend b
  balance roundrobin
%s`, fileLimit()/2-60, port, servers)
	must(os.WriteFile(filepath.Join(dir, "haproxy.cfg"), []byte(conf), 0o600))
	return exec.Command(t.haproxy, "-db", "-f", filepath.Join(dir, "haproxy.cfg"))
}

func (t tools) startVLLMRouter(port int, policy string, ups []string) *exec.Cmd {
	args := []string{"--host", "127.0.0.1", "--port", fmt.Sprint(port), "--policy", policy, "--log-level", "error",
		"--prometheus-port", fmt.Sprint(port + 1), "--max-concurrent-requests", "20000", "--worker-urls"}
	for _, u := range ups {
		args = append(args, "http://"+u)
	}
	return exec.Command(t.vllmRouter, args...)
}

// startPenstock gives the replicas a profile with room for all the streams of
// the test: the replicas here are no GPUs, and holding requests back is not
// what is measured.
func (t tools) startPenstock(dir string, port int, ups []string) *exec.Cmd {
	conf := fmt.Sprintf(`listen: "127.0.0.1:%d"
admin: "127.0.0.1:%d"
pools:
  - name: bench
    profile: {base: h100-8b, max_seqs: 100000, kv_tokens: 1000000000}
    objective: {ttft: 10s, itl: 10s}
    replicas: {static: ["http://%s"]}
log: {level: warn}
`, port, port+1, strings.Join(ups, `", "http://`))
	must(os.WriteFile(filepath.Join(dir, "penstock.yaml"), []byte(conf), 0o600))
	cmd := exec.Command(t.penstock, "serve", "--config", filepath.Join(dir, "penstock.yaml"))
	cmd.Env = append(os.Environ(), "GOMAXPROCS=1", "PENSTOCK_TIMEOUTS_DRAIN_DELAY=0s")
	return cmd
}

func must(err error) {
	if err != nil {
		panic(err) // only temp-dir writes of this tool itself come here
	}
}

// running is a started product.
type running struct {
	cmd  *exec.Cmd
	port int
	pids []int
	log  bytes.Buffer
	done chan struct{}
}

// launch starts a product on core 0 and waits until it serves.
func launch(p product, dir string, port int, ups []string) (*running, error) {
	inner := p.command(dir, port, ups)
	cmd := exec.Command("taskset", append([]string{"-c", "0", inner.Path}, inner.Args[1:]...)...)
	cmd.Env = inner.Env
	r := &running{cmd: cmd, port: port, done: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = &r.log, &r.log
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", p.name, err)
	}
	go func() { _ = cmd.Wait(); close(r.done) }()
	url := fmt.Sprintf("http://127.0.0.1:%d%s", port, p.ready)
	for range 600 {
		select {
		case <-r.done:
			return nil, fmt.Errorf("%s left at once: %s", p.name, r.log.String())
		case <-time.After(50 * time.Millisecond):
		}
		resp, err := http.Get(url)
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == 200 {
				r.pids = family(cmd.Process.Pid)
				return r, nil
			}
		}
	}
	r.stop()
	return nil, fmt.Errorf("%s did not serve %s within 30 s: %s", p.name, url, r.log.String())
}

// stop ends the product, kindly first.
func (r *running) stop() {
	for _, sig := range []os.Signal{unix.SIGTERM, unix.SIGTERM, unix.SIGKILL} {
		_ = r.cmd.Process.Signal(sig)
		select {
		case <-r.done:
			return
		case <-time.After(3 * time.Second):
		}
	}
}

// raiseFiles lets this process and its children open as many files as may be.
func raiseFiles() error {
	lim := unix.Rlimit{Cur: 100000, Max: 100000}
	if unix.Setrlimit(unix.RLIMIT_NOFILE, &lim) != nil {
		_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &lim)
		lim.Cur = lim.Max
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
			return fmt.Errorf("limit of open files: %w", err)
		}
	}
	if lim.Cur < 4096 {
		return errors.New("at least 4096 open files are needed: raise ulimit -n")
	}
	return nil
}

// fileLimit is how many files a process may open.
func fileLimit() int {
	var lim unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &lim)
	return int(min(lim.Cur, 60000))
}

// manyStreams is 10,000, or as many as the limit of open files allows a proxy
// that has two connections per stream (nginx wants a tenth of it free).
func manyStreams() int { return min(10000, (fileLimit()-2000)/2) }
