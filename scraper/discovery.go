package scraper

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"sort"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"go.uber.org/zap"

	"github.com/penstock/penstock/fleet"
)

// Model is one entry of GET /v1/models.
type Model struct {
	ID          string
	Created     int64 // Unix seconds
	OwnedBy     string
	MaxModelLen int    // longest prompt + output, tokens; 0 = not said (an adapter has its parent's)
	Parent      string // of a LoRA adapter: the model it belongs to
}

// Info is what discovery learned of a replica.
type Info struct {
	Models      []Model
	MaxModelLen int // the largest of Models, 0 = not said
	// From the metrics page; 0 = not said.
	BlockTokens int // tokens in one KV block
	KVTokens    int // KV capacity in tokens, all data-parallel engines together
	// Adapters that the newest lora_requests_info names as running or waiting,
	// sorted: a hint of what is loaded on the device.
	Adapters []string
}

// Info returns what is known of a replica; ok is false before discovery.
func (s *Scraper) Info(id fleet.ID) (i Info, ok bool) {
	s.mu.Lock()
	p := s.replicas[id]
	s.mu.Unlock()
	if p == nil {
		return i, false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.info, p.known
}

// Models is the union of what the live replicas serve, by name; of one name
// the entry that was created last. Live is a replica whose last health probe
// was answered.
func (s *Scraper) Models() []Model {
	s.mu.Lock()
	live := make([]*replica, 0, len(s.replicas))
	for _, p := range s.replicas {
		if p.alive.Load() {
			live = append(live, p)
		}
	}
	s.mu.Unlock()
	byName := map[string]Model{}
	for _, p := range live {
		p.mu.Lock()
		for _, m := range p.info.Models {
			if old, ok := byName[m.ID]; !ok || newer(m, old) {
				byName[m.ID] = m
			}
		}
		p.mu.Unlock()
	}
	out := make([]Model, 0, len(byName))
	for _, m := range byName {
		out = append(out, m)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].ID < out[j].ID })
	return out
}

// newer orders entries of one name so that the choice does not hang on the
// order of a map.
func newer(a, b Model) bool {
	if a.Created != b.Created {
		return a.Created > b.Created
	}
	if a.MaxModelLen != b.MaxModelLen {
		return a.MaxModelLen > b.MaxModelLen
	}
	return a.OwnedBy+"\x00"+a.Parent > b.OwnedBy+"\x00"+b.Parent
}

// modelsLoop reads /v1/models at once, then at intervals, and when the health
// probe says that the replica came back. A replica that is not up yet is asked
// until it is.
func (p *replica) modelsLoop() {
	o := &p.s.o
	c := newClient(o, p.Replica, "/v1/models", o.MaxPage, false)
	page := newClient(o, p.Replica, "/metrics", o.MaxPage, false)
	q := quiet{log: p.log, what: "reading /v1/models"}
	t := time.NewTimer(p.offset("models", min(50*time.Millisecond, o.ModelsRetry)))
	defer t.Stop()
	limits := false // block size and capacity were read since the replica came (back) up
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-p.kick:
			limits = false
		case <-t.C:
		}
		info, err := p.models(c)
		if p.ctx.Err() != nil {
			return
		}
		wait := o.ModelsInterval
		if err != nil {
			q.failed(err)
			limits, wait = false, o.ModelsRetry
		} else {
			q.worked()
			info, limits = p.limits(page, info, limits)
			p.publish(info)
		}
		p.note(func(st *Status) *string { return &st.Models }, modelsWord(err), err)
		t.Reset(wait)
	}
}

func modelsWord(err error) string {
	var se *statusError
	if errors.As(err, &se) {
		return scrapeWords[scrapeStatus]
	}
	if err != nil {
		return scrapeWords[resultOf(err)]
	}
	return scrapeWords[scrapeOK]
}

func (p *replica) models(c *client) (Info, error) {
	status, body, err := c.get(p.ctx, p.s.o.ModelsTimeout)
	if err != nil {
		return Info{}, err
	}
	if status != http.StatusOK {
		return Info{}, &statusError{status}
	}
	return readModels(body)
}

// limits adds what only the metrics page tells. It is read until it could be
// once; afterwards the earlier reading stands.
func (p *replica) limits(c *client, i Info, have bool) (Info, bool) {
	p.mu.Lock()
	i.BlockTokens, i.KVTokens, i.Adapters = p.info.BlockTokens, p.info.KVTokens, p.info.Adapters
	p.mu.Unlock()
	if have {
		return i, true
	}
	status, body, err := c.get(p.ctx, p.s.o.Timeout)
	if err != nil || status != http.StatusOK {
		return i, false // the scrape loop logs it
	}
	if err := readLimits(body, &i); err != nil {
		p.log.Debug("metrics page could not be read for block size and KV capacity", zap.Error(err))
		return i, false
	}
	return i, true
}

// publish keeps i and tells of a change.
func (p *replica) publish(i Info) {
	p.mu.Lock()
	// vLLM says of a model that it was created when it is asked; that is no change.
	for k := range i.Models {
		for _, old := range p.info.Models {
			if old.ID == i.Models[k].ID && old.Created > 0 {
				i.Models[k].Created = old.Created
			}
		}
	}
	changed := !p.known || !reflect.DeepEqual(p.info, i)
	p.info, p.known = i, true
	p.mu.Unlock()
	if !changed {
		return
	}
	names := make([]string, len(i.Models))
	for k, m := range i.Models {
		names[k] = m.ID
	}
	p.log.Info("replica serves", zap.Strings("models", names), zap.Int("max_model_len", i.MaxModelLen),
		zap.Int("block_tokens", i.BlockTokens), zap.Int("kv_tokens", i.KVTokens))
	if p.s.o.Info != nil {
		p.s.o.Info(p.ID, i)
	}
}

// readModels reads the body of GET /v1/models.
func readModels(body []byte) (Info, error) {
	var list struct {
		Data []struct {
			ID          string  `json:"id"`
			Created     float64 `json:"created"`
			OwnedBy     string  `json:"owned_by"`
			MaxModelLen *int    `json:"max_model_len"`
			Parent      *string `json:"parent"`
		} `json:"data"`
	}
	if err := json.Unmarshal(body, &list); err != nil {
		return Info{}, fmt.Errorf("body of /v1/models: %w", err)
	}
	var i Info
	lens := map[string]int{}
	for _, d := range list.Data {
		if d.ID == "" {
			continue
		}
		m := Model{ID: d.ID, Created: int64(d.Created), OwnedBy: d.OwnedBy}
		if d.MaxModelLen != nil && *d.MaxModelLen > 0 {
			m.MaxModelLen = *d.MaxModelLen
			lens[m.ID] = m.MaxModelLen
		}
		if d.Parent != nil {
			m.Parent = *d.Parent
		}
		i.Models = append(i.Models, m)
		i.MaxModelLen = max(i.MaxModelLen, m.MaxModelLen)
	}
	if len(i.Models) == 0 {
		return Info{}, errors.New("body of /v1/models names no model")
	}
	for k := range i.Models {
		if m := &i.Models[k]; m.MaxModelLen == 0 {
			m.MaxModelLen = lens[m.Parent]
		}
	}
	return i, nil
}

// readLimits reads a metrics page with the reference parser, which also checks
// it: block size, KV capacity and adapters.
func readLimits(body []byte, i *Info) error {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	fams, err := parser.TextToMetricFamilies(bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("metrics page: %w", err)
	}
	var s fleet.Sample
	if _, err := Parse(body, &s); err != nil {
		return err
	}
	// The scan knows which figures are sums already (see page.capacity).
	if s.BlockTokens > 0 {
		i.BlockTokens = int(s.BlockTokens)
	}
	if s.KVTokens > 0 {
		i.KVTokens = int(min(s.KVTokens, 1<<53))
	}
	i.Adapters = adapters(fams["vllm:lora_requests_info"])
	return nil
}

// adapters reads lora_requests_info, which is no gauge of load: each
// combination ever seen stays as a series whose value is when it was seen.
// Only the newest tells something.
func adapters(f *dto.MetricFamily) []string {
	var newest *dto.Metric
	at := -1.0
	for _, m := range f.GetMetric() {
		v := m.GetGauge().GetValue()
		if m.Untyped != nil {
			v = m.Untyped.GetValue()
		}
		if v > at {
			newest, at = m, v
		}
	}
	var out []string
	for _, l := range newest.GetLabel() {
		if l.GetName() != "running_lora_adapters" && l.GetName() != "waiting_lora_adapters" {
			continue
		}
		for _, a := range strings.Split(l.GetValue(), ",") {
			if a = strings.TrimSpace(a); a != "" && !slices.Contains(out, a) {
				out = append(out, a)
			}
		}
	}
	sort.Strings(out)
	return out
}
