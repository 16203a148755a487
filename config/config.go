// Package config is the configuration of the daemon: one strict YAML file, the
// environment and flags, their defaults, validation and reload.
//
// The settings are the fields of Config; what each means, its default and the
// reason for it stand in one table (options.go), from which both the defaults
// and docs/configuration.md come. Everything wrong is told at once, each with
// file:line:key.
package config

import (
	"time"

	"github.com/penstock/penstock/fleet"
)

// Config is a whole, valid configuration. It is not changed after Load.
type Config struct {
	Listen     string    `yaml:"listen"`
	Admin      string    `yaml:"admin"`
	AdminHosts []string  `yaml:"admin_hosts"`
	StateDir   string    `yaml:"state_dir"`
	Pools      []Pool    `yaml:"pools"`
	Classes    []Class   `yaml:"classes"`
	Routes     []Route   `yaml:"routes"`
	Attempts   Attempts  `yaml:"attempts"`
	Limits     Limits    `yaml:"limits"`
	Timeouts   Timeouts  `yaml:"timeouts"`
	Scrape     Scrape    `yaml:"scrape"`
	Health     Health    `yaml:"health"`
	Tenants    Tenants   `yaml:"tenants"`
	Integrity  string    `yaml:"integrity"`
	Services   []Service `yaml:"services"`
	Tracing    Tracing   `yaml:"tracing"`
	Peers      *Peers    `yaml:"peers"` // nil = alone
	Forward    Forward   `yaml:"forward"`
	TLS        TLS       `yaml:"tls"`
	Log        Log       `yaml:"log"`

	// File is the path the configuration came from; empty without a file.
	File string `yaml:"-"`
	// Warnings are things that are legal and probably not meant.
	Warnings []string `yaml:"-"`

	lines map[string]int // path -> line in File
}

// Pool is a set of replicas that are interchangeable.
type Pool struct {
	Name        string            `yaml:"name"`
	Models      []string          `yaml:"models"`
	Aliases     Aliases           `yaml:"aliases"`
	Replicas    Replicas          `yaml:"replicas"`
	Labels      map[string]string `yaml:"labels"`
	Profile     *Profile          `yaml:"profile"`
	Headroom    Headroom          `yaml:"headroom"`
	Objective   Objective         `yaml:"objective"`
	APIKey      Secret            `yaml:"api_key"`
	Policy      string            `yaml:"policy"`
	Shadow      string            `yaml:"shadow"`
	Concurrency int               `yaml:"concurrency"` // 0 = no cap
	Abilities   []string          `yaml:"abilities"`   // nil = all, see Abilities
	SideEffects bool              `yaml:"side_effects"`
}

// Alias is one more name by which clients may ask for a model.
type Alias struct {
	Name  string
	Model string // empty = the pool's first model
}

// Aliases is a list of names, or a mapping from name to model.
type Aliases []Alias

// Replicas tells where a pool's replicas come from; any mix.
type Replicas struct {
	Static []string `yaml:"static"` // normalised: scheme://host:port
	File   string   `yaml:"file"`
	HTTP   string   `yaml:"http"`
	DNS    *DNS     `yaml:"dns"`
}

// Empty tells whether no source is given.
func (r *Replicas) Empty() bool {
	return len(r.Static) == 0 && r.File == "" && r.HTTP == "" && r.DNS == nil
}

// DNS finds replicas behind a name.
type DNS struct {
	Name string `yaml:"name"`
	Type string `yaml:"type"` // A, AAAA or SRV
	Port int    `yaml:"port"` // unused for SRV
}

// Profile is the cost model of a pool's replicas: a name from the profile
// table, coefficients, or a name with some coefficients replaced (zero = as in
// the table). Coefficients are in seconds here, and written with their unit in
// the file.
type Profile struct {
	Base        string  `yaml:"base"`
	PerStep     Seconds `yaml:"per_step"`
	PerPrefill  Seconds `yaml:"per_prefill"`
	PerSeq      Seconds `yaml:"per_seq"`
	PerKV       Seconds `yaml:"per_kv"`
	PerAttn     Seconds `yaml:"per_attn"`
	KVTokens    int     `yaml:"kv_tokens"`
	MaxSeqs     int     `yaml:"max_seqs"`
	MaxBatched  int     `yaml:"max_batched"`
	BlockTokens int     `yaml:"block_tokens"`
	MaxModelLen int     `yaml:"max_model_len"`
}

// Over returns base with what is given in p put in its place.
func (p *Profile) Over(base fleet.Profile) fleet.Profile {
	put := func(dst *float64, v Seconds) {
		if v != 0 {
			*dst = float64(v)
		}
	}
	count := func(dst *int, v int) {
		if v != 0 {
			*dst = v
		}
	}
	put(&base.Base, p.PerStep)
	put(&base.PerPrefill, p.PerPrefill)
	put(&base.PerSeq, p.PerSeq)
	put(&base.PerKV, p.PerKV)
	put(&base.PerAttn, p.PerAttn)
	count(&base.KVTokens, p.KVTokens)
	count(&base.MaxSeqs, p.MaxSeqs)
	count(&base.MaxBatched, p.MaxBatched)
	count(&base.BlockTokens, p.BlockTokens)
	count(&base.MaxModelLen, p.MaxModelLen)
	return base
}

// Objective is what a request should get; 0 = not limited.
type Objective struct {
	TTFT      time.Duration `yaml:"ttft"`
	TTFTPer1K time.Duration `yaml:"ttft_per_1k"` // added for each 1,000 prompt tokens
	ITL       time.Duration `yaml:"itl"`
}

// Class is a priority band; the first of the list is the most important.
type Class struct {
	Name      string        `yaml:"name"`
	Wait      time.Duration `yaml:"wait"`
	Deadline  time.Duration `yaml:"deadline"`
	MinShare  Ratio         `yaml:"min_share"`
	Objective *Objective    `yaml:"objective"` // nil = the pool's
	Exact     bool          `yaml:"exact"`     // no tier may change its prompts
	Defer     bool          `yaml:"defer"`
}

// Route is the ladder of one model: tiers tried in order.
type Route struct {
	Model   string        `yaml:"model"`
	Budget  time.Duration `yaml:"budget"`
	Regions []string      `yaml:"regions"`
	Degrade Degrade       `yaml:"degrade"`
	Tiers   []Tier        `yaml:"tiers"`
}

// Degrade is when a route leaves its first tier and returns to it.
type Degrade struct {
	FirstByteP95 time.Duration `yaml:"first_byte_p95"`
	FailShare    Ratio         `yaml:"fail_share"`
	Window       time.Duration `yaml:"window"`
	HealthyFor   time.Duration `yaml:"healthy_for"`
	AgainFor     time.Duration `yaml:"again_for"`
	TrialShare   Ratio         `yaml:"trial_share"`
	MinAttempts  int           `yaml:"min_attempts"`
	TrialRate    float64       `yaml:"trial_rate"`
	Trials       int           `yaml:"trials"`
	TrialSuccess Ratio         `yaml:"trial_success"`
	RampFrom     Ratio         `yaml:"ramp_from"`
	Ramp         time.Duration `yaml:"ramp"`
	StalledAfter time.Duration `yaml:"stalled_after"`
}

// Tier is one step of a ladder; exactly one of Pool, Reduce, Cached, Static
// and Defer is set.
type Tier struct {
	Pool     string        `yaml:"pool"`
	Model    string        `yaml:"model"`    // with Pool: the model asked of it; empty = as the request says
	Limit    time.Duration `yaml:"limit"`    // with Pool: until an answer begins; 0 = what the budget leaves
	Validate *Validation   `yaml:"validate"` // with Pool
	Reduce   *Reduce       `yaml:"reduce"`
	Cached   *Cached       `yaml:"cached"`
	Static   *Static       `yaml:"static"`
	Defer    bool          `yaml:"defer"`
}

// Validation is the proof that a fallback pool answers well enough.
type Validation struct {
	Prompts string        `yaml:"prompts"`
	Pass    Ratio         `yaml:"pass"`
	Every   time.Duration `yaml:"every"`
}

// Reduce asks less of the pool before it.
type Reduce struct {
	MaxTokens int  `yaml:"max_tokens"` // 0 = as the request says
	DropTools bool `yaml:"drop_tools"`
}

// Cached answers from an earlier answer to the very same request.
type Cached struct {
	Scope     string        `yaml:"scope"` // tenant or shared
	Staleness time.Duration `yaml:"staleness"`
}

// Static answers with a fixed body.
type Static struct {
	File string `yaml:"file"`
}

// Attempts bounds how often a request is sent to replicas.
type Attempts struct {
	PerRequest   int     `yaml:"per_request"`
	Budget       Ratio   `yaml:"budget"`
	MinPerSecond float64 `yaml:"min_per_second"`
}

// Limits bounds what the router takes in.
type Limits struct {
	MaxBody        Size `yaml:"max_body"`
	MaxHeader      Size `yaml:"max_header"`
	ReceiveBytes   Size `yaml:"receive_bytes"`
	MaxInFlight    int  `yaml:"max_in_flight"`
	MaxConnections int  `yaml:"max_connections"`
	BufferAnswer   Size `yaml:"buffer_answer"`
	HeldRequests   int  `yaml:"held_requests"`
	HeldBytes      Size `yaml:"held_bytes"`
}

// Timeouts of connections, attempts and shutting down.
type Timeouts struct {
	Header       time.Duration `yaml:"header"`
	Body         time.Duration `yaml:"body"`
	Idle         time.Duration `yaml:"idle"`
	Write        time.Duration `yaml:"write"`
	Connect      time.Duration `yaml:"connect"`
	FirstToken   time.Duration `yaml:"first_token"`
	Answer       time.Duration `yaml:"answer"`
	Stall        time.Duration `yaml:"stall"`
	UpstreamIdle time.Duration `yaml:"upstream_idle"`
	DrainDelay   time.Duration `yaml:"drain_delay"`
	DrainTimeout time.Duration `yaml:"drain_timeout"`
}

// Scrape is how replicas' metrics pages are read.
type Scrape struct {
	Interval time.Duration `yaml:"interval"`
	Timeout  time.Duration `yaml:"timeout"`
	MaxPage  Size          `yaml:"max_page"`
}

// Health is how replicas are judged.
type Health struct {
	ProbeInterval time.Duration `yaml:"probe_interval"`
	ProbeTimeout  time.Duration `yaml:"probe_timeout"`
	HangAfter     time.Duration `yaml:"hang_after"`
}

// Tenants tells who a request belongs to.
type Tenants struct {
	Header string       `yaml:"header"`
	Limits TenantLimits `yaml:"limits"`
}

// TenantLimits are each tenant's; 0 = no limit.
type TenantLimits struct {
	Rate     Rate `yaml:"rate"`
	Burst    int  `yaml:"burst"`
	Parallel int  `yaml:"parallel"`
}

// Service is a path prefix passed to one plain HTTP service.
type Service struct {
	Name        string        `yaml:"name"`
	Prefix      string        `yaml:"prefix"`
	URL         string        `yaml:"url"`
	Connections int           `yaml:"connections"`
	Timeout     time.Duration `yaml:"timeout"`
}

// Tracing is where spans go.
type Tracing struct {
	OTLP string `yaml:"otlp"`
}

// Peers are the other routers of the same fleet.
type Peers struct {
	Name      string        `yaml:"name"`
	Bind      string        `yaml:"bind"`
	Advertise string        `yaml:"advertise"`
	Join      []string      `yaml:"join"`
	KeyFile   string        `yaml:"key_file"`
	Allow     []string      `yaml:"allow"`
	Interval  time.Duration `yaml:"interval"`
	Bandwidth int           `yaml:"bandwidth"`
	HoldShare time.Duration `yaml:"hold_share"`
}

// Forward is what goes along with a request and its answer.
type Forward struct {
	ClientAuth  bool `yaml:"client_auth"`
	TrustClient bool `yaml:"trust_forwarded_for"`
	ShowReplica bool `yaml:"show_replica"`
}

// TLS of the public listener; plain HTTP when empty.
type TLS struct {
	CertFile string `yaml:"cert_file"`
	KeyFile  string `yaml:"key_file"`
}

// Log is how the daemon logs.
type Log struct {
	Level  string `yaml:"level"`
	Format string `yaml:"format"`
}
