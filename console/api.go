package console

import (
	"encoding/json"
	"math"
	"net/http"
	"sort"
	"strconv"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/fleet"
)

// num is a figure in JSON; what is not known (NaN) is null, as JSON has no
// NaN and a 0 would be a lie.
type num float64

// MarshalJSON implements json.Marshaler.
func (n num) MarshalJSON() ([]byte, error) {
	f := float64(n)
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return []byte("null"), nil
	}
	// Six digits are more than any of these is good for.
	return strconv.AppendFloat(nil, f, 'g', 6, 64), nil
}

// api registers the admin API.
func (h *handler) api(mux *http.ServeMux) {
	mux.HandleFunc("GET /admin/v1/status", h.status)
	mux.HandleFunc("GET /admin/v1/pools", func(w http.ResponseWriter, _ *http.Request) {
		reply(w, map[string]any{"pools": h.pools()})
	})
	mux.HandleFunc("GET /admin/v1/replicas", func(w http.ResponseWriter, r *http.Request) {
		reply(w, map[string]any{"replicas": h.replicas(r.URL.Query().Get("pool"))})
	})
	mux.HandleFunc("GET /admin/v1/decisions", h.decisions)
	mux.HandleFunc("GET /admin/v1/requests", h.requests)
	mux.HandleFunc("GET /admin/v1/config", func(w http.ResponseWriter, _ *http.Request) {
		reply(w, map[string]any{"config": Redacted(h.Router.Config())})
	})
	mux.HandleFunc("POST /admin/v1/replicas/{id}/drain", h.drain(true))
	mux.HandleFunc("POST /admin/v1/replicas/{id}/undrain", h.drain(false))
}

func (h *handler) status(w http.ResponseWriter, _ *http.Request) {
	ok, body := h.Router.Ready()
	configError := "" // why the newest configuration was refused; empty: it is in force
	if c, ok := h.Router.(interface{ ConfigError() string }); ok {
		configError = c.ConfigError()
	}
	reply(w, map[string]any{
		"config_error":   configError,
		"version":        h.Version,
		"uptime_seconds": num(h.Router.Now() - h.Started),
		"ready":          ok,
		"readiness":      json.RawMessage(body),
		"in_flight":      h.inFlight(),
	})
}

// inFlight asks the router for the number, which is cheaper than the list and
// there even when the list is not.
func (h *handler) inFlight() int {
	if c, ok := h.Router.(interface{ InFlight() int }); ok {
		return c.InFlight()
	}
	return len(h.Router.Requests())
}

// poolJSON is a pool in GET /admin/v1/pools.
type poolJSON struct {
	Name      string            `json:"name"`
	Models    []string          `json:"models"`
	Aliases   []string          `json:"aliases"`
	Replicas  int               `json:"replicas"`
	States    map[string]int    `json:"states"`
	Waiting   []waitingJSON     `json:"never_answered"`
	Held      int               `json:"held_requests"`
	HeldWork  num               `json:"held_tokens"`
	HeldBytes int               `json:"held_bytes"`
	DrainRate num               `json:"drain_tokens_per_second"`
	Placed    uint64            `json:"placed"`
	Finished  uint64            `json:"finished"`
	Failed    uint64            `json:"failed"`
	Cancelled uint64            `json:"cancelled"`
	EverHeld  uint64            `json:"ever_held"`
	Left      uint64            `json:"left_while_held"`
	Revoked   uint64            `json:"revoked"`
	FailOpen  uint64            `json:"fail_open"`
	Shed      map[string]uint64 `json:"shed"`
	Ejections map[string]uint64 `json:"ejections"`
	Shadow    *shadowJSON       `json:"shadow,omitempty"`
}

// waitingJSON is a replica that has never told what it serves: it is in no other list.
type waitingJSON struct {
	Name  string `json:"name"`
	Error string `json:"error"`
}

// shadowJSON is how often the shadow policy chose as the one in use did.
type shadowJSON struct {
	Agreed    uint64 `json:"agreed"`
	Decisions uint64 `json:"decisions"`
}

func (h *handler) pools() []poolJSON {
	out := []poolJSON{}
	for _, p := range h.Router.Pools() {
		s := &p.Stats
		j := poolJSON{Name: p.Name, Models: list(p.Models), Aliases: list(p.Aliases), Replicas: len(p.Replicas), States: map[string]int{}, Waiting: []waitingJSON{},
			Held: s.Held, HeldWork: num(s.HeldWork), HeldBytes: s.HeldBytes, DrainRate: num(s.DrainRate), Placed: s.Placed, Finished: s.Finished,
			Failed: s.Failed, Cancelled: s.Cancelled, EverHeld: s.EverHeld, Left: s.Left, Revoked: s.Revoked, FailOpen: s.Panics,
			Shed: map[string]uint64{}, Ejections: map[string]uint64{}}
		for i := range p.Replicas {
			j.States[p.Replicas[i].Health.State.String()]++
		}
		for _, w := range p.Waiting {
			j.Waiting = append(j.Waiting, waitingJSON(w))
		}
		for i, n := range s.Shed {
			if n > 0 {
				j.Shed[admission.Reason(i).String()] = n
			}
		}
		for i, n := range s.Ejections {
			if n > 0 {
				j.Ejections[fleet.Evidence(i).String()] = n
			}
		}
		if s.ShadowAll > 0 {
			j.Shadow = &shadowJSON{s.ShadowAgree, s.ShadowAll}
		}
		out = append(out, j)
	}
	return out
}

// replicaJSON is a replica in GET /admin/v1/replicas.
type replicaJSON struct {
	ID        fleet.ID     `json:"id"`
	Name      string       `json:"name"`
	Pool      string       `json:"pool"`
	Models    []string     `json:"models"`
	State     string       `json:"state"`
	Reason    string       `json:"reason"` // evidence that led to the state; empty when up
	Since     num          `json:"state_seconds"`
	Until     num          `json:"state_ends_in_seconds"` // null = no fixed end
	Share     num          `json:"share"`
	Fails     int          `json:"consecutive_failures"`
	Flaps     int          `json:"flaps"`
	Own       accountJSON  `json:"account"`
	Peers     accountJSON  `json:"peers_account"`
	OtherReqs int          `json:"other_requests"` // there by another road, estimated
	Sample    sampleJSON   `json:"sample"`
	Scrape    scrapeJSON   `json:"scrape"`
	Learned   *learnedJSON `json:"learned"`
	Profile   *profileJSON `json:"profile"`
}

type accountJSON struct {
	Requests   int `json:"requests"`
	Prefilling int `json:"prefilling"`
	Prefill    num `json:"prefill_tokens"`
	KV         num `json:"kv_tokens"`
	Output     num `json:"output_tokens_to_come"`
}

type sampleJSON struct {
	Age         num  `json:"age_seconds"`
	Broken      bool `json:"broken"`
	Engines     int  `json:"engines"`
	Running     num  `json:"running"`
	Waiting     num  `json:"waiting"`
	KVUsage     num  `json:"kv_usage"`
	KVTokens    num  `json:"kv_tokens"`
	HitRate     num  `json:"prefix_hit_rate"`
	Preemptions num  `json:"preemptions"`
}

type scrapeJSON struct {
	Metrics string `json:"metrics"`
	Probe   string `json:"probe"`
	Models  string `json:"models"`
	Error   string `json:"error"`
}

type learnedJSON struct {
	ScalePrefill num `json:"prefill_scale"`
	ScaleDecode  num `json:"decode_scale"`
	Predicted    num `json:"ttft_predicted_seconds"`
	Observed     num `json:"ttft_observed_seconds"`
	Ratio        num `json:"ttft_observed_over_predicted"`
	PredictedITL num `json:"itl_predicted_seconds"`
	ObservedITL  num `json:"itl_observed_seconds"`
	RatioITL     num `json:"itl_observed_over_predicted"`
	Samples      int `json:"first_tokens"`
	HitTrust     num `json:"hit_trust"`
	Blocks       int `json:"prefix_fingerprints"`
}

type profileJSON struct {
	Name        string `json:"name"`
	KVTokens    int    `json:"kv_tokens"`
	MaxSeqs     int    `json:"max_seqs"`
	MaxBatched  int    `json:"max_batched"`
	BlockTokens int    `json:"block_tokens"`
	MaxModelLen *int   `json:"max_model_len"` // null = not known
}

// replicas lists the replicas of one pool, or of all.
func (h *handler) replicas(pool string) []replicaJSON {
	now := h.Router.Now()
	out := []replicaJSON{}
	for _, p := range h.Router.Pools() {
		if pool != "" && p.Name != pool {
			continue
		}
		for i := range p.Replicas {
			out = append(out, replicaOf(now, p.Name, &p.Replicas[i]))
		}
	}
	sort.SliceStable(out, func(i, j int) bool {
		if out[i].Pool != out[j].Pool {
			return out[i].Pool < out[j].Pool
		}
		return out[i].Name < out[j].Name
	})
	return out
}

func replicaOf(now float64, pool string, r *Replica) replicaJSON {
	h := &r.Health
	j := replicaJSON{ID: r.ID, Name: r.Name, Pool: pool, Models: list(r.Served), State: h.State.String(), Since: num(now - h.Since),
		Until: num(math.NaN()), Share: num(h.Share), Fails: h.Fails, Flaps: h.Flaps, Own: accountOf(r.Own), Peers: accountOf(r.Peers),
		Sample: sampleOf(r), Scrape: scrapeJSON{r.Scrape.Metrics, r.Scrape.Probe, r.Scrape.Models, r.Scrape.Error}}
	if h.State != fleet.StateUp {
		j.Reason = h.Reason.String()
	}
	if h.Until > now && !math.IsInf(h.Until, 0) {
		j.Until = num(h.Until - now)
	}
	if r.Learned {
		i := &r.Info
		j.OtherReqs = i.OtherReqs
		j.Learned = &learnedJSON{num(r.ScalePrefill), num(r.ScaleDecode), num(i.Predicted), num(i.TTFT), num(i.Ratio), num(i.PredictITL),
			num(i.ITL), num(i.RatioITL), i.Samples, num(i.HitTrust), i.Blocks}
	}
	if f := r.Profile; f != nil {
		j.Profile = &profileJSON{f.Name, f.KVTokens, f.MaxSeqs, f.MaxBatched, f.BlockTokens, nil}
		if n := f.MaxModelLen; n > 0 {
			j.Profile.MaxModelLen = &n
		}
	}
	return j
}

func accountOf(l fleet.Load) accountJSON {
	return accountJSON{l.Requests, l.Prefilling, num(l.PrefillTokens), num(l.KVTokens), num(l.OutTokens)}
}

func sampleOf(r *Replica) sampleJSON {
	s := &r.Sample
	j := sampleJSON{Age: num(r.Scrape.Age), Broken: s.Broken, Engines: s.Engines}
	nan := num(math.NaN())
	j.Running, j.Waiting, j.KVUsage, j.KVTokens, j.HitRate, j.Preemptions = nan, nan, nan, nan, nan, nan
	if !r.Scrape.Seen {
		return j
	}
	j.Running, j.Waiting, j.KVUsage, j.KVTokens = num(s.Running), num(s.Waiting), num(s.KVUsage), num(s.KVTokens)
	if s.PrefixQueries > 0 {
		j.HitRate = num(s.PrefixHits / s.PrefixQueries)
	}
	if s.Preemptions >= 0 {
		j.Preemptions = num(s.Preemptions)
	}
	return j
}

// decisionJSON is a decision in GET /admin/v1/decisions.
type decisionJSON struct {
	Ago        num             `json:"seconds_ago"`
	Request    string          `json:"request"`
	Pool       string          `json:"pool"`
	Verdict    string          `json:"verdict"`
	Replica    string          `json:"replica"`
	Reason     string          `json:"reason"`
	Class      string          `json:"class"`
	Attempt    int             `json:"attempt"`
	Prompt     int             `json:"prompt_tokens"`
	TTFT       num             `json:"ttft_predicted_seconds"`
	ITL        num             `json:"itl_predicted_seconds"`
	Own        num             `json:"own_seconds"`
	Harm       num             `json:"harm_seconds"`
	Hit        num             `json:"hit_tokens"`
	HeldFor    num             `json:"held_seconds"`
	Observed   num             `json:"ttft_observed_seconds"` // null = none yet
	Candidates []candidateJSON `json:"candidates"`
}

type candidateJSON struct {
	Replica  string `json:"replica"`
	State    string `json:"state"`
	Requests int    `json:"requests"`
	Prefill  num    `json:"prefill_tokens"`
	KV       num    `json:"kv_tokens"`
	TTFT     num    `json:"ttft_seconds"`
	Own      num    `json:"own_seconds"`
	Harm     num    `json:"harm_seconds"`
	Cost     num    `json:"cost_seconds"`
	Hit      num    `json:"hit_tokens"`
}

// maxDecisions bounds ?n=.
const maxDecisions = 1000

func (h *handler) decisions(w http.ResponseWriter, r *http.Request) {
	n := 50
	if v := r.URL.Query().Get("n"); v != "" {
		var err error
		if n, err = strconv.Atoi(v); err != nil || n < 1 || n > maxDecisions {
			fail(w, http.StatusBadRequest, "invalid_request", "n is a number from 1 to "+strconv.Itoa(maxDecisions))
			return
		}
	}
	q := r.URL.Query()
	switch q.Get("verdict") {
	case "", "placed", "held", "shed":
	default: // an empty list would read as: there were none
		fail(w, http.StatusBadRequest, "invalid_request", "verdict is placed, held or shed")
		return
	}
	now := h.Router.Now()
	all := h.Router.Decisions()
	sort.SliceStable(all, func(i, j int) bool { return all[i].At > all[j].At })
	out := []decisionJSON{}
	for i := range all {
		d := &all[i]
		if v := q.Get("request"); v != "" && v != d.Request {
			continue
		}
		if v := q.Get("verdict"); v != "" && v != d.Verdict {
			continue
		}
		if len(out) == n {
			break
		}
		j := decisionJSON{num(now - d.At), d.Request, d.Pool, d.Verdict, d.Replica, d.Reason, d.Class, d.Attempt, d.Prompt,
			num(d.TTFT), num(d.ITL), num(d.Own), num(d.Harm), num(d.Hit), num(d.HeldFor), num(d.Observed), []candidateJSON{}}
		nan := num(math.NaN())
		if d.Verdict != "placed" { // no replica, so nothing was predicted
			j.TTFT, j.ITL, j.Own, j.Harm, j.Hit = nan, nan, nan, nan, nan
		}
		if d.Observed <= 0 {
			j.Observed = nan
		}
		for _, c := range d.Candidates {
			j.Candidates = append(j.Candidates, candidateJSON{c.Replica, c.State, c.Requests, num(c.Prefill), num(c.KV),
				num(c.TTFT), num(c.Own), num(c.Harm), num(c.Cost), num(c.Hit)})
		}
		out = append(out, j)
	}
	reply(w, map[string]any{"decisions": out})
}

// requestJSON is a request in GET /admin/v1/requests.
type requestJSON struct {
	ID      string `json:"id"`
	Path    string `json:"path"`
	Model   string `json:"model"`
	Tenant  string `json:"tenant"`
	Class   string `json:"class"`
	Phase   string `json:"phase"`
	Pool    string `json:"pool"`
	Replica string `json:"replica"`
	Attempt int    `json:"attempt"`
	Prompt  int    `json:"prompt_tokens"`
	Output  int    `json:"output_tokens"`
	Age     num    `json:"age_seconds"`
	HeldFor num    `json:"held_seconds"`
}

// maxRequests bounds GET /admin/v1/requests; the oldest are shown.
const maxRequests = 1000

func (h *handler) requests(w http.ResponseWriter, _ *http.Request) {
	all := h.Router.Requests()
	sort.SliceStable(all, func(i, j int) bool { return all[i].Age > all[j].Age })
	out := []requestJSON{}
	for i := range all {
		if i == maxRequests {
			break
		}
		q := &all[i]
		out = append(out, requestJSON{q.ID, q.Path, q.Model, q.Tenant, q.Class, q.Phase, q.Pool, q.Replica, q.Attempt, q.Prompt, q.Output,
			num(q.Age), num(q.HeldFor)})
	}
	reply(w, map[string]any{"total": len(all), "requests": out})
}

// list makes an empty list of nil, which JSON would show as null.
func list(s []string) []string {
	if s == nil {
		return []string{}
	}
	return s
}

func reply(w http.ResponseWriter, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		fail(w, http.StatusInternalServerError, "internal_error", "cannot show this: "+err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(append(b, '\n'))
}

// fail answers in the API's error shape.
func fail(w http.ResponseWriter, status int, code, message string) {
	kind := "invalid_request_error"
	switch status {
	case http.StatusNotFound:
		kind = "not_found_error"
	case http.StatusForbidden:
		kind = "permission_error"
	case http.StatusInternalServerError:
		kind = "api_error"
	}
	type detail struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    string  `json:"code"`
	}
	b, err := json.Marshal(map[string]detail{"error": {message, kind, nil, code}})
	if err != nil {
		panic("BUG: error body: " + err.Error())
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(b)
}
