package proxy

import (
	"bytes"
	"encoding/json"
	"time"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/internal/mutant"
	"github.com/penstock/penstock/wire"
)

// inference tells whether the request's path is one of the API's that go to a
// replica, and notes which.
func (f *flight) inference() bool {
	if f.req.path == "" {
		f.classifyPath()
	}
	k := f.req.kind
	return k != wire.KindNone && k != wire.KindModels
}

// The router's own paths.
const (
	pathHealth = "/healthz"
	pathReady  = "/readyz"

	pathService = "service" // any path of an auxiliary service
)

// classifyPath finds what the path is. Routing, authorisation and forwarding
// all go by this one string, cut at the query, nothing decoded.
func (f *flight) classifyPath() {
	q := &f.req
	uri := q.uri
	for i, b := range uri {
		if b == '?' {
			uri = uri[:i]
			break
		}
	}
	for _, p := range apiPaths {
		if string(uri) == p.path {
			q.path, q.kind = p.path, p.kind
			return
		}
	}
	for _, s := range f.p.services {
		if bytes.HasPrefix(uri, s.prefix) && !climbs(uri) {
			q.path, q.service = pathService, s
			return
		}
	}
	q.path = "other"
}

// apiPaths are the paths of contract.md. The most used come first.
var apiPaths = func() (t []struct {
	path string
	kind wire.Kind
}) {
	for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
		"/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score", "/v1/audio/transcriptions", "/v1/audio/translations",
		"/tokenize", "/detokenize", "/v1/models", pathHealth, pathReady} {
		k, _ := wire.KindOf(path)
		t = append(t, struct {
			path string
			kind wire.Kind
		}{path, k})
	}
	return t
}()

// precheck refuses what needs no look at the body: path, method, credentials.
func (f *flight) precheck() *wire.Error {
	q := &f.req
	if q.path == "" {
		f.classifyPath()
	}
	switch {
	case q.path == "other":
		return wire.NewError(wire.CodeNotFound, "no such path; the README lists those of the API, such as /v1/chat/completions")
	case q.service != nil:
		if q.method == "" {
			return f.wrongMethod()
		}
	case q.kind == wire.KindNone || q.kind == wire.KindModels:
		if q.method != "GET" && q.method != "HEAD" {
			return f.wrongMethod()
		}
		if q.kind == wire.KindNone {
			return nil // health needs no credentials
		}
	case q.method != q.kind.Method():
		return f.wrongMethod()
	}
	if auth := f.p.opt.Auth; auth != nil {
		id, e := auth(Credentials{Authorization: string(q.authorization), APIKey: string(q.apiKey), Tenant: string(q.tenant),
			Class: string(q.class), Path: q.path, RemoteIP: f.conn.remoteIP()})
		if e != nil {
			return e
		}
		q.identity = id
	}
	return nil
}

// dispatch answers the request: by itself, or by a replica.
func (f *flight) dispatch() {
	q := &f.req
	if e := f.precheck(); e != nil {
		f.outcome = outcomeRefused
		f.fail(e)
		return
	}
	switch q.path {
	case pathHealth:
		f.outcome = outcomeLocal
		f.reply(reply{status: 200, ctype: "text/plain; charset=utf-8", body: []byte("ok\n")})
		return
	case pathReady:
		f.outcome = outcomeLocal
		f.ready()
		return
	case "/v1/models":
		f.outcome = outcomeLocal
		f.reply(reply{status: 200, ctype: "application/json", body: f.p.Models()})
		return
	}
	if e := f.takeLimit(); e != nil {
		f.outcome = outcomeRefused
		f.fail(e)
		return
	}
	if q.service != nil {
		f.outcome = outcomeLocal
		if e := q.service.serve(f); e != nil {
			f.fail(e)
		}
		return
	}
	if e := f.body.Scan(q.kind, string(q.ctype), q.body); e != nil {
		f.outcome = outcomeRefused
		f.fail(e)
		return
	}
	if e := f.checkStorm(); e != nil {
		f.outcome = outcomeRefused
		f.fail(e)
		return
	}
	f.setClass()
	f.setDeadlines()
	table := f.table()
	if table == nil {
		return
	}
	f.targets = table.lookup(f.body.Model)
	onLadder := table.byName[f.body.Model]
	if onLadder != nil && onLadder.ladder == nil {
		onLadder = nil
	}
	if len(f.targets) == 0 && onLadder == nil {
		f.outcome = outcomeRefused
		f.fail(errModel(f.body.Model))
		return
	}
	if q.identity.Tenant != "" {
		f.tenantID = f.p.tenants.id(q.identity.Tenant)
	} else {
		f.tenantID = f.p.tenants.idBytes(q.tenant)
	}
	if onLadder != nil && !f.beginLadder(onLadder) {
		return
	}
	f.serve()
}

// A request for an alias waits so long until a replica has told which model it
// stands for: sent as it is, a replica would not know the name.
const (
	unreadWait = 5 * time.Second
	unreadLook = 10 * time.Millisecond
)

// table is the routes of now; nil when the request was answered instead.
func (f *flight) table() *routes {
	t := f.p.routes.Load()
	if !t.unread[f.body.Model] {
		return t
	}
	for began := f.p.now(); t.unread[f.body.Model]; t = f.p.routes.Load() {
		switch {
		case f.late():
			f.expire()
			return nil
		case f.p.now()-began > unreadWait.Seconds():
			f.refuse(admission.Decision{Verdict: admission.Shed, Reason: admission.ReasonNoReplica, RetryAfter: 2}, result{})
			return nil
		case f.why() != causeNone || !f.pause(unreadLook):
			f.cancelledWhile(phaseHeld)
			return nil
		}
	}
	return t
}

// takeLimit takes one place of the tenant's limit; end gives it back.
func (f *flight) takeLimit() *wire.Error {
	l := f.p.limiter
	if l == nil || mutant.On("no-tenant-limit") {
		return nil
	}
	name := f.tenantName()
	ok, wait := l.Take(name, f.p.now())
	if ok {
		f.limited = true
		return nil
	}
	f.p.metrics.limited.Inc()
	e := wire.NewError(wire.CodeRateLimited, "tenant %q sends more than it may", name)
	e.RetryAfter = wait
	return e
}

// setClass takes the class that the tenant has, lowered by the header or by
// the body's service_tier, never raised.
func (f *flight) setClass() {
	q := &f.req
	best := min(max(q.identity.Class, 0), len(f.p.opt.Classes)-1)
	q.classIndex = best
	if len(q.class) > 0 {
		if i, ok := f.p.classes[string(q.class)]; ok {
			q.classIndex = max(best, i)
			return
		}
		// A slip is no reason to refuse, but whoever made it must be able to find it.
		q.unknownClass = true
		f.p.metrics.unknownClass.Inc()
	}
	if f.body.ServiceTier == "flex" {
		q.classIndex = len(f.p.opt.Classes) - 1
	}
}

// poolState is one line of /readyz.
type poolState struct {
	Pool     string `json:"pool"`
	Ready    bool   `json:"ready"`
	Replicas int    `json:"replicas"`
	Live     int    `json:"live"`
	Why      string `json:"why,omitempty"`
}

// Ready tells whether each pool has a replica that can be reached, and why not.
func (p *Proxy) Ready() (ok bool, body []byte) {
	ok = !p.draining.Load()
	out := struct {
		Status string      `json:"status"`
		Pools  []poolState `json:"pools"`
	}{"ok", []poolState{}}
	for _, pl := range p.pools {
		s := pl.state()
		ok = ok && s.Ready
		out.Pools = append(out.Pools, s)
	}
	if !ok {
		out.Status = wire.CodeNotReady
	}
	if p.draining.Load() {
		out.Status = "draining"
	}
	b, err := json.Marshal(&out)
	if err != nil {
		panic("BUG: ready: " + err.Error())
	}
	return ok, b
}

func (pl *pool) state() poolState {
	pl.mu.Lock()
	defer pl.mu.Unlock()
	s := poolState{Pool: pl.name}
	for i := range pl.core.View().Replicas {
		v := &pl.core.View().Replicas[i]
		s.Replicas++
		switch v.Health.State {
		case fleet.StateEjected, fleet.StateDraining:
			s.Why = v.Name + ": " + v.Health.State.String() + " (" + v.Health.Reason.String() + ")"
		default:
			s.Live++
		}
	}
	s.Ready = s.Live > 0
	switch {
	case s.Ready:
		s.Why = ""
	case s.Replicas == 0:
		s.Why = "no replica has answered yet"
	}
	return s
}

// ready answers /readyz: the state of the pools, in the error shape when 503.
func (f *flight) ready() {
	ok, body := f.p.Ready()
	if ok {
		f.reply(reply{status: 200, ctype: "application/json", body: body})
		return
	}
	e := wire.NewError(wire.CodeNotReady, "not ready")
	b := e.AppendBody(nil, wire.KindNone)
	b = append(append(b[:len(b)-1], `,"detail":`...), body...)
	b = append(b, '}')
	headers := ""
	e.EachHeader(func(n, v string) { headers += n + ": " + v + "\r\n" })
	f.errCode = e.Code
	f.reply(reply{status: e.Status, ctype: "application/json", headers: headers, body: b})
}
