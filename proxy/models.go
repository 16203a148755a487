package proxy

import (
	"encoding/json"
	"sort"
	"sync"

	"github.com/penstock/penstock/wire"
)

// interner gives names small numbers. Number 0 is "no name", and what every
// name past the bound gets: names come from clients.
type interner struct {
	mu  sync.RWMutex
	ids map[string]uint32
}

// internBound is the most names; beyond it they share number 0.
const internBound = 1 << 16

func (in *interner) id(name string) uint32 {
	in.mu.RLock()
	id := in.ids[name]
	in.mu.RUnlock()
	if id != 0 || name == "" {
		return id
	}
	return in.add(name)
}

// idBytes is id without making a string for a name that is known.
func (in *interner) idBytes(name []byte) uint32 {
	if len(name) == 0 {
		return 0
	}
	in.mu.RLock()
	id := in.ids[string(name)]
	in.mu.RUnlock()
	if id != 0 {
		return id
	}
	return in.add(string(name))
}

func (in *interner) add(name string) uint32 {
	in.mu.Lock()
	defer in.mu.Unlock()
	if id := in.ids[name]; id != 0 {
		return id
	}
	if len(in.ids) >= internBound {
		return 0
	}
	if in.ids == nil {
		in.ids = make(map[string]uint32)
	}
	id := uint32(len(in.ids) + 1)
	in.ids[name] = id
	return id
}

// route is where requests for one model name go.
type route struct {
	name  string
	pools []target
	info  ModelInfo

	ladder *ladderRoute // nil = none declared
	rungs  []rung
}

// target is a pool that serves a route, and under which name there.
type target struct {
	pool   *pool
	served string // "" = as asked
	id     uint32
	root   string // what a replica says the model is (a path or name); it may answer by it
}

// routes is the table of all names; replaced as a whole when anything changes.
type routes struct {
	byName map[string]*route
	any    []target        // pools that take any name: nothing is known of what they serve
	unread map[string]bool // aliases whose model is not known yet: no replica has told what it serves
	list   []byte          // the body of GET /v1/models
}

// reroute builds the table anew. Under repMu.
func (p *Proxy) reroute() {
	t := &routes{byName: make(map[string]*route), unread: make(map[string]bool)}
	for _, pl := range p.pools {
		p.routePool(t, pl)
	}
	p.routeLadders(t)
	for a := range t.unread { // another pool or a ladder has it
		if t.byName[a] != nil {
			delete(t.unread, a)
		}
	}
	t.list = t.render()
	p.routes.Store(t)
}

func (p *Proxy) routePool(t *routes, pl *pool) {
	infos := make(map[string]ModelInfo)
	var found []string
	for _, r := range p.byID {
		if r.pool != pl {
			continue
		}
		for _, m := range r.models {
			if _, ok := infos[m.ID]; !ok {
				infos[m.ID] = m
				found = append(found, m.ID)
			}
		}
		for _, m := range r.spec.Models {
			if _, ok := infos[m]; !ok {
				infos[m] = ModelInfo{ID: m}
				found = append(found, m)
			}
		}
	}
	sort.Strings(found)
	names := pl.opt.Models
	if len(names) == 0 {
		names = found
	}
	for _, n := range names {
		info, ok := infos[n]
		if !ok {
			info = ModelInfo{ID: n}
		}
		t.add(n, info, target{pl, "", p.models.id(n), info.Root}, ok)
	}
	// Adapters loaded beside the configured models are served, too.
	for _, n := range found {
		if infos[n].Parent != "" {
			t.add(n, infos[n], target{pl, "", p.models.id(n), infos[n].Root}, true)
		}
	}
	first := p.firstModel(names, infos)
	for _, a := range pl.opt.Aliases {
		to, listed := first, len(found) > 0
		if m := pl.opt.AliasOf[a]; m != "" {
			_, listed = infos[m]
			to = m
		}
		if to == "" {
			t.unread[a] = true
			continue
		}
		info := infos[to]
		served := target{pl, to, p.models.id(to), info.Root}
		info.Root, info.ID = to, a
		t.add(a, info, served, listed)
	}
	if len(names) == 0 {
		t.any = append(t.any, target{pool: pl})
	}
}

// firstModel is what aliases stand for: the first configured model, else the
// first served one that is not an adapter.
func (p *Proxy) firstModel(names []string, infos map[string]ModelInfo) string {
	for _, n := range names {
		if infos[n].Parent == "" {
			return n
		}
	}
	return ""
}

// add gives a name one more pool. listed tells that a live replica serves it.
func (t *routes) add(name string, info ModelInfo, to target, listed bool) {
	r := t.byName[name]
	if r == nil {
		r = &route{name: name}
		t.byName[name] = r
	}
	for _, x := range r.pools {
		if x.pool == to.pool {
			return
		}
	}
	if listed && r.info.ID == "" {
		r.info = info
	}
	r.pools = append(r.pools, to)
}

// lookup finds the pools for a model name.
func (t *routes) lookup(name string) []target {
	if r := t.byName[name]; r != nil {
		return r.pools
	}
	return t.any
}

// resolve names the served model behind an alias; for prefix fingerprints.
func (p *Proxy) resolve(name string) string {
	r := p.routes.Load().byName[name]
	switch {
	case r == nil:
	case len(r.rungs) > 0 && r.rungs[0].ok:
		return r.rungs[0].to.model(name)
	case len(r.pools) > 0 && r.pools[0].served != "":
		return r.pools[0].served
	}
	return name
}

// modelEntry is one entry of GET /v1/models, in vLLM's and OpenAI's shape.
type modelEntry struct {
	ID          string  `json:"id"`
	Object      string  `json:"object"`
	Created     int64   `json:"created"`
	OwnedBy     string  `json:"owned_by"`
	Root        string  `json:"root"`
	Parent      *string `json:"parent"`
	MaxModelLen int     `json:"max_model_len,omitempty"`
}

// render makes the list: each name that a live replica serves, once, sorted.
func (t *routes) render() []byte {
	list := struct {
		Object string       `json:"object"`
		Data   []modelEntry `json:"data"`
	}{"list", []modelEntry{}}
	for _, r := range t.byName {
		if r.info.ID == "" {
			continue
		}
		e := modelEntry{r.info.ID, "model", r.info.Created, r.info.OwnedBy, r.info.Root, nil, r.info.MaxModelLen}
		if e.OwnedBy == "" {
			e.OwnedBy = "penstock"
		}
		if e.Root == "" {
			e.Root = e.ID
		}
		if r.info.Parent != "" {
			parent := r.info.Parent
			e.Parent = &parent
		}
		list.Data = append(list.Data, e)
	}
	sort.Slice(list.Data, func(i, j int) bool { return list.Data[i].ID < list.Data[j].ID })
	b, err := json.Marshal(&list)
	if err != nil {
		panic("BUG: models: " + err.Error())
	}
	return b
}

// Models is what GET /v1/models lists now.
func (p *Proxy) Models() []byte { return p.routes.Load().list }

func errModel(name string) *wire.Error {
	if len(name) > 200 {
		name = name[:200]
	}
	e := wire.NewError(wire.CodeModelNotFound, "the model %q does not exist or is not served here", name)
	e.Param = "model"
	return e
}
