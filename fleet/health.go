package fleet

// Evidence is one thing seen that tells of a replica's health. The set is
// closed; String gives the word used in logs and as a metric's reason.
type Evidence uint8

const (
	EvidenceOK           Evidence = iota // an answer (or first content event) came
	EvidenceRefused                      // connection refused, reset or unreachable before a request was written
	EvidenceReset                        // connection lost after the request was written
	EvidenceFirstTimeout                 // no first content event within the first-token deadline
	EvidenceStatus5xx                    // 500, 502, 504 or another server error
	EvidenceBusy                         // 429 or 503: full, not dead
	EvidenceDraining                     // "cannot schedule new futures after shutdown"
	EvidenceAbort                        // finish_reason "abort" or a stream with only [DONE]
	EvidenceEngineDead                   // an in-stream error event, EngineDead
	EvidenceProtocol                     // an answer that breaks HTTP, SSE or JSON
	EvidenceStalled                      // work outstanding, no byte and no counter moved for hang_after
	EvidenceProbeOK                      // /health answered 200
	EvidenceProbeFailed                  // /health answered otherwise
	EvidenceProbeRefused                 // /health: connection refused
	EvidenceScrapeOK
	EvidenceScrapeFailed
	EvidenceSlow // first tokens far later than the rest of the fleet's
	evidenceCount
)

// EvidenceCount is the number of kinds of evidence.
const EvidenceCount = int(evidenceCount)

var evidenceWords = [...]string{"ok", "refused", "reset", "first_token_timeout", "status_5xx", "busy", "draining",
	"abort", "engine_dead", "protocol", "stalled", "probe_ok", "probe_failed", "probe_refused", "scrape_ok", "scrape_failed", "slow"}

func (e Evidence) String() string {
	if int(e) < len(evidenceWords) {
		return evidenceWords[e]
	}
	return "unknown"
}

// State is where a replica stands.
type State uint8

const (
	StateUp       State = iota // takes its full share
	StateRamping               // joining or recovered: its share grows
	StateBusy                  // said 429/503: back-off until a time, not dead
	StateTrial                 // ejected, its time is over: one trial request at a time
	StateEjected               // takes nothing until a time
	StateDraining              // takes nothing; what runs there may finish
)

var stateWords = [...]string{"up", "ramping", "busy", "trial", "ejected", "draining"}

func (s State) String() string {
	if int(s) < len(stateWords) {
		return stateWords[s]
	}
	return "unknown"
}

// Health is a replica's health: the state, why, and until when. Its rules are
// methods that take evidence and the time (see health_rules.go).
type Health struct {
	State  State
	Reason Evidence // the evidence that led to State
	Since  float64  // when State began
	Until  float64  // when an ejection or back-off ends
	Share  float64  // 0..1 of its capacity that may be used now (ramp)
	Fails  int      // consecutive failures
	FailAt float64  // when the last failure was; 0 = it has answered a later request
	Flaps  int      // ejections without a long good time between them

	flaps [flapKinds]int // the same by kind of reason: each kind has its own back-off

	ProbeFails int     // consecutive failed probes
	Busies     int     // consecutive 429/503 windows
	ProbeSeen  float64 // when a probe last answered anything but OK
	ProbeGood  float64 // when one last found an ejected process there; 0 = none since
}
