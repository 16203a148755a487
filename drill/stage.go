package drill

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/penstock/penstock/bench/model"
	"github.com/penstock/penstock/bench/replica"
	"github.com/penstock/penstock/internal/freeport"
)

// stage is everything a drill runs on: replicas, services, router processes.
// All of it is on the loopback and ends with close.
type stage struct {
	sc       *Scenario
	dir      string
	binary   string
	env      []string
	replicas map[string]*actor
	order    []string // replica names, in the file's order
	services map[string]*service
	routers  []*router
	vars     map[string]string
	net      *network // of several routers
	ports    []func() // each gives one port back
}

// actor is one emulated replica. It keeps its address over a kill and heal.
type actor struct {
	name string
	addr string
	srv  *replica.Server
}

// requests is how many inference requests reached the replica.
func (a *actor) requests() int { return a.srv.Counts().Requests }

// fault injects what the scenario says; hang_probes is both kinds of probe.
func (a *actor) fault(m map[string]any) error {
	if m["mode"] == "hang_probes" {
		return errors.Join(a.srv.Fault(replica.Fault{Mode: replica.HangHealth}), a.srv.Fault(replica.Fault{Mode: replica.HangMetrics}))
	}
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	var f replica.Fault
	if err := json.Unmarshal(b, &f); err != nil {
		return err
	}
	return a.srv.Fault(f)
}

// service is a plain HTTP service on a fixed address.
type service struct {
	name, addr string
	srv        *http.Server
	hits       atomic.Int64
	hang       atomic.Bool
}

func (s *service) up() error {
	if s.srv != nil {
		return nil
	}
	ln, err := net.Listen("tcp", s.addr)
	if err != nil {
		return err
	}
	s.srv = &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.hits.Add(1)
		if s.hang.Load() {
			<-r.Context().Done()
			return
		}
		fmt.Fprintf(w, `{"service":%q,"path":%q}`, s.name, r.URL.Path)
	})}
	go func() { _ = s.srv.Serve(ln) }() // ends when it is closed
	return nil
}

func (s *service) down() {
	if s.srv != nil {
		s.srv.Close()
		s.srv = nil
	}
}

// router is one router process.
type router struct {
	cmd           *exec.Cmd
	public, admin string
	log           *os.File
	config        string
	exited        chan struct{}
}

// freeAddr returns an address that is the stage's until it is closed: what is
// down there stays refused.
func (st *stage) freeAddr() (string, error) {
	addr, release, err := freeport.Reserve()
	if err == nil {
		st.ports = append(st.ports, release)
	}
	return addr, err
}

func newStage(sc *Scenario, binary string, env []string) (st *stage, err error) {
	dir, err := os.MkdirTemp("", "penstock-drill-"+sc.Name+"-")
	if err != nil {
		return nil, err
	}
	st = &stage{sc: sc, dir: dir, binary: binary, env: env, replicas: map[string]*actor{}, services: map[string]*service{}, vars: map[string]string{
		"dir": dir, "now": time.Now().Format(time.RFC3339), "long_ago": time.Now().Add(-25 * time.Hour).Format(time.RFC3339)}}
	defer func() {
		if err != nil {
			st.close()
		}
	}()
	for _, g := range sc.Replicas {
		for i := range max(g.Count, 1) {
			if err := st.addReplica(g, fmt.Sprintf("%s%d", g.Name, i)); err != nil {
				return st, err
			}
		}
	}
	for _, spec := range sc.Services {
		addr, err := st.freeAddr()
		if err != nil {
			return st, err
		}
		s := &service{name: spec.Name, addr: addr}
		st.services[spec.Name], st.vars[spec.Name] = s, "http://"+addr
		if err := s.up(); err != nil {
			return st, err
		}
	}
	if err := st.makeNetwork(); err != nil {
		return st, err
	}
	for name, text := range sc.Files {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700); err != nil {
			return st, err
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(st.expand(text)), 0o600); err != nil {
			return st, err
		}
	}
	return st, nil
}

func (st *stage) addReplica(g ReplicaGroup, name string) error {
	addr, err := st.freeAddr()
	if err != nil {
		return err
	}
	profile := g.Profile
	if profile == "" {
		profile = "h100-8b"
	}
	p, ok := model.ByName(profile)
	if !ok {
		return fmt.Errorf("replica group %s: no profile %q", g.Name, profile)
	}
	if g.MaxSeqs > 0 {
		p.MaxSeqs = g.MaxSeqs
	}
	modelName := g.Model
	if modelName == "" {
		modelName = "m1"
	}
	speed := g.Speed
	if speed == 0 {
		speed = 1
	}
	srv, err := replica.Start(replica.Options{Listen: addr, Profile: &p, Model: modelName, Speed: speed, MaxModelLen: g.MaxLen})
	if err != nil {
		return fmt.Errorf("replica %s: %w", name, err)
	}
	st.replicas[name], st.vars[name], st.vars[name+".name"] = &actor{name, addr, srv}, "http://"+addr, addr
	st.order = append(st.order, name)
	if g.Down {
		return srv.Fault(replica.Fault{Mode: replica.Refuse})
	}
	return nil
}

// expand replaces ${a0}, ${dir} and the like.
func (st *stage) expand(s string) string {
	for k, v := range st.vars {
		s = strings.ReplaceAll(s, "${"+k+"}", v)
	}
	return s
}

// startRouter writes the configuration and starts a router process on it.
func (st *stage) startRouter(i int) error {
	pub, err := st.freeAddr()
	if err != nil {
		return err
	}
	adm, err := st.freeAddr()
	if err != nil {
		return err
	}
	r := &router{public: "http://" + pub, admin: "http://" + adm, config: filepath.Join(st.dir, fmt.Sprintf("router%d.yaml", i)), exited: make(chan struct{})}
	text := fmt.Sprintf("listen: %q\nadmin: %q\n", pub, adm) + strings.ReplaceAll(st.expand(st.sc.Config), "${peers}", st.peersOf(i))
	if err := os.WriteFile(r.config, []byte(text), 0o600); err != nil {
		return err
	}
	for _, sub := range st.sc.Prepare {
		cmd := exec.Command(st.binary, sub, r.config)
		cmd.Env = append(os.Environ(), st.env...)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("prepare %s: %w: %s", sub, err, tail(out, 800))
		}
	}
	if r.log, err = os.Create(filepath.Join(st.dir, fmt.Sprintf("router%d.log", i))); err != nil {
		return err
	}
	r.cmd = exec.Command(st.binary, "serve", "--config", r.config)
	r.cmd.Env = append(os.Environ(), st.env...)
	r.cmd.Stdout, r.cmd.Stderr = r.log, r.log
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := r.cmd.Start(); err != nil {
		return fmt.Errorf("start router: %w", err)
	}
	go func() { _ = r.cmd.Wait(); close(r.exited) }()
	st.routers = append(st.routers, r)
	return r.waitUp()
}

func (r *router) waitUp() error {
	for range 200 {
		select {
		case <-r.exited:
			b, _ := os.ReadFile(r.log.Name())
			return fmt.Errorf("router ended at start: %s", tail(b, 1500))
		default:
		}
		if resp, err := http.Get(r.public + "/healthz"); err == nil {
			resp.Body.Close()
			return nil
		}
		time.Sleep(50 * time.Millisecond)
	}
	return errors.New("router did not answer /healthz within 10 s")
}

func tail(b []byte, n int) []byte { return b[max(0, len(b)-n):] }

// check runs `penstock check` on the scenario's configuration.
func (st *stage) check(config string) (string, int, error) {
	f := filepath.Join(st.dir, "check.yaml")
	if err := os.WriteFile(f, []byte(st.expand(config)), 0o600); err != nil {
		return "", 0, err
	}
	cmd := exec.Command(st.binary, "check", f)
	cmd.Env = append(os.Environ(), st.env...)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return "", 0, err
	}
	return string(out), cmd.ProcessState.ExitCode(), nil
}

// signals are what a step's `router` can be.
var signals = map[string]syscall.Signal{"kill": syscall.SIGKILL, "stop": syscall.SIGSTOP, "cont": syscall.SIGCONT, "term": syscall.SIGTERM}

// act does one step.
func (st *stage) act(ctx context.Context, s Step) error {
	switch {
	case s.Replica != "":
		return st.actReplica(s)
	case s.Service != "":
		sv := st.services[s.Service]
		if s.Heal {
			sv.hang.Store(false)
			return sv.up()
		}
		if s.Fault["mode"] == "hang" {
			sv.hang.Store(true)
			return nil
		}
		sv.down()
		return nil
	case s.Config != "":
		r := st.routers[0]
		text := fmt.Sprintf("listen: %q\nadmin: %q\n", strings.TrimPrefix(r.public, "http://"), strings.TrimPrefix(r.admin, "http://")) + st.expand(s.Config)
		if err := os.WriteFile(r.config, []byte(text), 0o600); err != nil {
			return err
		}
		return r.cmd.Process.Signal(syscall.SIGHUP)
	case s.Remove:
		if err := os.Remove(st.routers[0].config); err != nil {
			return err
		}
		return st.routers[0].cmd.Process.Signal(syscall.SIGHUP)
	case s.Admin != "":
		method, path, _ := strings.Cut(st.expand(s.Admin), " ")
		req, err := http.NewRequestWithContext(ctx, method, st.routers[s.Which].admin+path, nil)
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode/100 != 2 {
			return fmt.Errorf("%s %s: %s", method, path, resp.Status)
		}
		return nil
	case s.Router != "":
		return st.routers[s.Which].cmd.Process.Signal(signals[s.Router])
	case s.Network != "":
		return st.net.act(s.Network)
	}
	return errors.New("a step needs replica, service, config, admin or router")
}

func (st *stage) actReplica(s Step) error {
	var errs []error
	for _, n := range st.order {
		switch {
		case !s.hits(n):
		case s.Heal:
			errs = append(errs, st.replicas[n].srv.Heal())
		default:
			errs = append(errs, st.replicas[n].fault(s.Fault))
		}
	}
	return errors.Join(errs...)
}

// metrics reads the first router's metrics page into name{labels} -> value.
func (r *router) metrics() (map[string]float64, error) {
	c := http.Client{Timeout: 2 * time.Second}
	resp, err := c.Get(r.admin + "/metrics")
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	m := map[string]float64{}
	for line := range strings.Lines(string(b)) {
		line = strings.TrimSpace(line)
		if i := strings.LastIndexByte(line, ' '); i > 0 && line[0] != '#' {
			if v, err := strconv.ParseFloat(line[i+1:], 64); err == nil {
				m[line[:i]] = v
			}
		}
	}
	return m, nil
}

// sum adds the series of one metric that carry all the labels.
func sum(m map[string]float64, name string, labels map[string]string) (total float64, found bool) {
	for k, v := range m {
		base, rest, _ := strings.Cut(k, "{")
		if base != name {
			continue
		}
		all := true
		for l, want := range labels {
			all = all && strings.Contains(rest, l+`="`+want+`"`)
		}
		if all {
			total, found = total+v, true
		}
	}
	return total, found
}

func (st *stage) close() {
	st.net.close()
	for _, r := range st.routers {
		_ = r.cmd.Process.Signal(syscall.SIGTERM)
		time.Sleep(200 * time.Millisecond)
		_ = r.cmd.Process.Signal(syscall.SIGTERM) // the second one ends now
		select {
		case <-r.exited:
		case <-time.After(5 * time.Second):
			_ = r.cmd.Process.Kill()
			<-r.exited
		}
		r.log.Close()
	}
	for _, a := range st.replicas {
		a.srv.Close()
	}
	for _, s := range st.services {
		s.down()
	}
	for _, release := range st.ports {
		release()
	}
	if os.Getenv("PENSTOCK_DRILL_KEEP") == "" { // kept for a look at the routers' logs
		_ = os.RemoveAll(st.dir)
	}
}
