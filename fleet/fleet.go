// Package fleet is the vocabulary that every other room shares: what is known
// of a replica, what a request is worth in work, and the evidence of health.
//
// It is pure: no I/O, no goroutine, no clock (now is always an argument, in
// seconds since an epoch that the owner chooses), no random source.
package fleet

// ID names a replica for the life of the process. IDs are never reused; 0 is
// "no replica".
type ID uint32

// Profile holds the coefficients of one replica's step-time model
// (decision-core.md): step = Base + PerPrefill*p + PerSeq*n + PerKV*K + PerAttn*a.
// All coefficients are in seconds; capacities in tokens.
type Profile struct {
	Name        string
	Base        float64 // seconds per step, whatever is in it
	PerPrefill  float64 // seconds per prompt token computed
	PerSeq      float64 // seconds per decoding sequence
	PerKV       float64 // seconds per KV token read
	PerAttn     float64 // seconds per (chunk token x context token)
	KVTokens    int     // KV cache capacity, tokens
	MaxSeqs     int     // most sequences running at once (--max-num-seqs)
	MaxBatched  int     // most tokens in one step (--max-num-batched-tokens)
	BlockTokens int     // tokens in one KV block
	MaxModelLen int     // longest prompt + output the replica takes, 0 = not known
	FrontPerTok float64 // seconds per prompt token before the engine sees it (tokeniser, HTTP); 0 = FrontPerToken
}

// FrontPerToken is what vLLM's front end takes per prompt token, seconds
// (design/bench.md).
const FrontPerToken = 13e-6

// Front is how long a prompt takes to reach the engine, seconds, beside what
// is learned as Replica.Offset.
func (p *Profile) Front(prompt int) float64 {
	f := p.FrontPerTok
	if f == 0 {
		f = FrontPerToken
	}
	return f * float64(prompt)
}

// Load is one router's account of one replica, or the sum of several: what
// was sent there and has not ended.
type Load struct {
	Requests      int     // placed and not ended
	Prefilling    int     // of those, without a first token
	PrefillTokens float64 // uncached prompt tokens of those without a first token
	KVTokens      float64 // KV tokens held: prompt + generated so far
	OutTokens     float64 // expected output tokens still to come
	Unique        float64 // of KVTokens, those that no prefix cache shares; 0 with requests there = not known
	LastFirst     float64 // when the last first token came (seconds; 0 = never)
}

// Add returns the sum of two accounts; LastFirst is the later one.
func (l Load) Add(m Load) Load {
	l.Requests += m.Requests
	l.Prefilling += m.Prefilling
	l.PrefillTokens += m.PrefillTokens
	l.KVTokens += m.KVTokens
	l.OutTokens += m.OutTokens
	l.Unique += m.Unique
	l.LastFirst = max(l.LastFirst, m.LastFirst)
	return l
}

// Sample is one reading of a replica's own metrics, engines already summed.
// Counters are cumulative since the replica started; a consumer takes deltas.
// A field that the page did not have is NaN (gauges) or -1 (counters).
type Sample struct {
	At            float64 // when the page was read (owner's seconds)
	Engines       int     // data-parallel engines summed in it
	Waiting       float64
	Running       float64
	KVUsage       float64 // 0..1, weighed over engines
	KVTokens      float64 // KV capacity in tokens (blocks x block size), summed
	BlockTokens   float64
	PrefixQueries float64 // tokens asked of the prefix cache
	PrefixHits    float64
	Preemptions   float64
	PromptTokens  float64
	OutputTokens  float64
	TTFTSum       float64 // seconds
	TTFTCount     float64
	ITLSum        float64 // seconds
	ITLCount      float64
	QueueSum      float64 // seconds
	QueueCount    float64
	PrefillSum    float64 // seconds
	PrefillCount  float64
	Steps         float64 // engine iterations counted; moves whenever the engine works
	Broken        bool    // the newest page was unusable; the rest is the last good sample
}

// Abilities that a request may need and a replica may have, beside text.
const (
	AbilityTools uint64 = 1 << iota
	AbilityImages
	AbilityAudio
	AbilityVideo

	AbilityText uint64 = 1 << 63 // every replica has it: a set is never empty
	AbilityAll         = ^uint64(0)
)

// Work is what the core needs to know of one request.
type Work struct {
	Model    uint32   // interned model or adapter name
	Tenant   uint32   // interned tenant
	Class    uint8    // index into the pool's classes, 0 = most important
	Needs    uint64   // abilities required (bits); a replica must have them all
	Regions  uint64   // permitted regions (bits); 0 = any
	Prompt   int      // prompt tokens (estimate)
	MaxOut   int      // max_tokens asked, 0 = not given
	Seqs     int      // sequences asked (n), at least 1
	Out      float64  // expected output tokens per sequence; filled by admission
	Blocks   []uint64 // chained prefix fingerprints, one per block of BlockTokens prompt tokens
	Tokens   float64  // prompt tokens per entry of Blocks (estimate)
	Arrived  float64  // when the request came
	Deadline float64  // when its answer is worth nothing any more; 0 = none
	Bytes    int      // bytes held at the router while it waits
	Exclude  [4]ID    // replicas already tried
	Excluded int      // how many of Exclude are set
	Trial    bool     // may be used as trial traffic for a recovering replica
	Whole    bool     // the answer comes in one piece: no first content event before its end
	ASCII    int      // prompt bytes that are ASCII, 0 = not known (EstimatePrompt learns from them)
	Other    int      // prompt bytes that are not
	Media    int      // images, sounds and films in the prompt
	OfMedia  int      // of Prompt: what those are supposed to be
	Print    uint64   // by which a client that was told to return is known again, 0 = it is not
	Further  bool     // if no replica of the pool takes it, another pool or a lower tier would
	Prefer   [2]ID    // the consistent hash's first and second choice for a new prefix, 0 = none (ring)
}

// Excludes tells whether replica id was already tried.
func (w *Work) Excludes(id ID) bool {
	for i := 0; i < w.Excluded; i++ {
		if w.Exclude[i] == id {
			return true
		}
	}
	return false
}

// Replica is all that is known of one replica at one moment.
type Replica struct {
	ID      ID
	Name    string // host:port, for people
	Models  []uint32
	Caps    uint64 // abilities it has (bits)
	Region  uint64 // its region (one bit; 0 = none given)
	Domain  uint32 // interned failure domain, 0 = none given
	Profile *Profile
	Own     Load // this router's account
	Peers   Load // the other routers' accounts, corrected for their age (ring)
	Other   Load // load that came by another road: what the samples show above the accounts
	Sample  Sample
	// Learned factors over the profile's coefficients, 1 = as the profile says.
	ScalePrefill float64
	ScaleDecode  float64
	// Pace is the factor on gaps between tokens, in what is let in only, by which
	// the fleet decodes faster than ScaleDecode says; 1 = no faster.
	Pace float64
	// Offset is the learned time, seconds, that a first token takes beside the
	// engine's work: network, HTTP front end, tokenisation.
	Offset float64
	// Shared is the KV memory in use beyond Load.Unique: prefixes that several
	// requests share, as the samples show it; tokens.
	Shared float64
	// PrefillShare is the share of its time that the replica has spent on
	// prefills lately (a mean that forgets over Window), 0..1: it makes the
	// others' gaps longer.
	PrefillShare float64
	// Window is how long an answer takes from its first token to its last, seconds,
	// as learned: what comes in that time makes its gaps. 0 = PrefillWindow.
	Window float64
	// Crowd is how many requests were there lately for each one that this router
	// sent, >= 1: what it sends next will not come alone.
	Crowd float64
	// Trust says how far the model may be believed: 0 nothing learned yet and
	// no profile given, 1 calibrated.
	Trust  float64
	Health Health
}

// PrefillWindow is Replica.Window where nothing is learned, seconds.
const PrefillWindow = 5.0

// Load is the account that decisions use: own + peers' + what came by another
// road.
func (r *Replica) Load() Load { return r.Own.Add(r.Peers).Add(r.Other) }

// Memory is the KV memory in use, tokens, a shared prefix counted once.
func (r *Replica) Memory() float64 {
	return r.Own.Unique + unique(&r.Peers) + unique(&r.Other) + r.Shared
}

func unique(l *Load) float64 {
	if l.Unique > 0 {
		return l.Unique
	}
	return l.KVTokens
}

// Serves tells whether the replica serves a model. A replica without a list
// serves whatever its pool is asked for; model 0 stands for a name that came
// before any list was known, so that such a request can still go on to
// another replica once the lists are there.
func (r *Replica) Serves(model uint32) bool {
	if len(r.Models) == 0 || model == 0 {
		return true
	}
	for _, m := range r.Models {
		if m == model {
			return true
		}
	}
	return false
}

// Generic is the profile of hardware that nobody described: about an 8B model
// on an L40S (design/bench.md), a middle between a CPU and an H100. Learned
// factors and a low trust stand between it and decisions.
func Generic() Profile {
	return Profile{Name: "generic", Base: 0.012, PerPrefill: 4e-5, PerSeq: 3e-5, PerKV: 1e-7, PerAttn: 4e-9,
		KVTokens: 200_000, MaxSeqs: 1024, MaxBatched: 2048, BlockTokens: 16}
}

// View is what a decision is made from. It is not changed while one is made.
type View struct {
	Now      float64
	Replicas []Replica
}
