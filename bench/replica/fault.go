package replica

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Mode is a kind of fault; a closed set.
type Mode string

// Faults of the whole replica, until their time or count is over or Heal.
const (
	Refuse        Mode = "refuse"         // the port is closed: connection refused; idle connections are closed too
	Freeze        Mode = "freeze"         // SIGSTOP of the engine: headers of streams go out, then nothing; gauges frozen, /health 200
	Slow          Mode = "slow"           // every step takes Factor times as long
	Drain         Mode = "drain"          // SIGTERM with --shutdown-timeout: new text requests get 500, running ones finish, gauges 0/0
	Abort         Mode = "abort"          // SIGTERM without: all end as 200 with "abort", the port closes 2 s later
	Kill          Mode = "kill"           // kill -9: every connection breaks without a last chunk, the port refuses
	EngineDead    Mode = "engine_dead"    // the engine process died: in-stream error events, 500, /health 503, then refused
	FreezeMetrics Mode = "freeze_metrics" // the page says for ever what it says now
	NaNMetrics    Mode = "nan_metrics"    // gauges NaN and negative
	HangMetrics   Mode = "hang_metrics"   // /metrics never answers
	BrokenMetrics Mode = "broken_metrics" // /metrics answers 500
	HangHealth    Mode = "hang_health"    // /health never answers
)

// Faults of single inference requests.
const (
	Hang          Mode = "hang"           // read and never answered
	Status        Mode = "status"         // answered with Status (and RetryAfter)
	Delay         Mode = "delay"          // Delay before anything happens
	Reset         Mode = "reset"          // RST after the request was read
	Cut           Mode = "cut"            // the connection closes after After content events, without a last chunk
	CutReset      Mode = "cut_reset"      // the same with RST
	Stall         Mode = "stall"          // nothing more after After content events, connection open
	Garble        Mode = "garble"         // after After content events, bytes that are neither SSE nor JSON
	WrongModel    Mode = "wrong_model"    // the answer names another model
	ToolCollision Mode = "tool_collision" // two tool calls with one index in a stream
	IDChange      Mode = "id_change"      // the id changes in the middle of a stream
	NoDone        Mode = "no_done"        // the stream ends without [DONE]
	MissingFinish Mode = "missing_finish" // no finish_reason ever comes
	OnlyDone      Mode = "only_done"      // the stream is headers and [DONE]
	AbortOne      Mode = "abort_one"      // finish_reason "abort" after After content events
	ErrorEvent    Mode = "error_event"    // an in-stream error event after After content events, then [DONE]
)

var globalModes = map[Mode]bool{Refuse: true, Freeze: true, Slow: true, Drain: true, Abort: true, Kill: true, EngineDead: true,
	FreezeMetrics: true, NaNMetrics: true, HangMetrics: true, BrokenMetrics: true, HangHealth: true}

var requestModes = map[Mode]bool{Hang: true, Status: true, Delay: true, Reset: true, Cut: true, CutReset: true, Stall: true, Garble: true,
	WrongModel: true, ToolCollision: true, IDChange: true, NoDone: true, MissingFinish: true, OnlyDone: true, AbortOne: true, ErrorEvent: true}

// Fault is one fault to inject.
type Fault struct {
	Mode       Mode
	Factor     float64       // Slow; default 10
	Status     int           // Status; default 503
	RetryAfter int           // Status: seconds for Retry-After, 0 = no header (as vLLM)
	After      int           // content events before a Cut, Stall, Garble, AbortOne or ErrorEvent
	Delay      time.Duration // Delay
	Count      int           // single requests: how many it hits; 0 = all
	For        time.Duration // how long it lasts; 0 = until Heal
}

func (f *Fault) check() error {
	if !globalModes[f.Mode] && !requestModes[f.Mode] {
		return fmt.Errorf("fault: unknown mode %q", f.Mode)
	}
	if f.Mode == Slow && f.Factor <= 0 {
		f.Factor = 10
	}
	if f.Mode == Status && f.Status == 0 {
		f.Status = 503
	}
	return nil
}

// ParseFault reads the short form of the X-Fault header and the x_fault body
// member: MODE, or MODE=VALUE, then further settings, separated by ";":
//
//	hang · status=503;retry_after=3 · cut=3 · slow=10 · delay_ms=500 · garble=2;count=5;for=10s
func ParseFault(s string) (Fault, error) {
	m := map[string]any{}
	for i, part := range strings.Split(s, ";") {
		name, val, has := strings.Cut(strings.TrimSpace(part), "=")
		switch {
		case i == 0 && !has:
			m["mode"] = name
		case !has:
			return Fault{}, fmt.Errorf("fault %q: %q has no value", s, name)
		default:
			if x, err := strconv.ParseFloat(val, 64); err == nil {
				m[name] = x
			} else {
				m[name] = val
			}
		}
	}
	return faultOf(m)
}

// UnmarshalJSON reads the form of POST /fault: {"mode":"hang"}, {"slow":10},
// {"status":503,"retry_after":3}, {"cut":{"after":3}}, {"delay_ms":500}, each
// with "count" and "for" ("10s").
func (f *Fault) UnmarshalJSON(b []byte) (err error) {
	m := map[string]any{}
	if err := json.Unmarshal(b, &m); err != nil {
		return err
	}
	*f, err = faultOf(m)
	return err
}

func faultOf(m map[string]any) (Fault, error) {
	var f Fault
	for name, v := range m {
		num, isNum := v.(float64)
		str, isStr := v.(string)
		obj, isObj := v.(map[string]any)
		switch mode := Mode(name); {
		case name == "mode" && isStr:
			f.Mode = Mode(str)
		case name == "status" && isNum:
			f.Mode, f.Status = Status, int(num)
		case name == "slow" && isNum:
			f.Mode, f.Factor = Slow, num
		case name == "factor" && isNum:
			f.Factor = num
		case name == "delay_ms" && isNum:
			f.Delay = time.Duration(num * float64(time.Millisecond))
			if m["mode"] == nil {
				f.Mode = Delay
			}
		case name == "retry_after" && isNum:
			f.RetryAfter = int(num)
		case name == "after" && isNum:
			f.After = int(num)
		case name == "count" && isNum:
			f.Count = int(num)
		case name == "for" && isStr:
			d, err := time.ParseDuration(str)
			if err != nil {
				return f, fmt.Errorf("fault: for: %w", err)
			}
			f.For = d
		case (requestModes[mode] || globalModes[mode]) && isObj:
			f.Mode = mode
			if a, ok := obj["after"].(float64); ok {
				f.After = int(a)
			}
		case (requestModes[mode] || globalModes[mode]) && isNum:
			f.Mode, f.After = mode, int(num)
		default:
			return f, fmt.Errorf("fault: %q: unknown setting or wrong type", name)
		}
	}
	return f, f.check()
}

// activeFault is a Fault with its time and what is left of its count.
type activeFault struct {
	Fault
	until time.Time // zero = none
	left  int       // -1 = no limit
}
