package wire

import (
	"fmt"
	"math"
	"strconv"
)

// Codes of contract.md. Clients, drills and dashboards match on these words.
const (
	CodeInvalidRequest         = "invalid_request"
	CodeContextLength          = "context_length_exceeded"
	CodeInvalidAPIKey          = "invalid_api_key"
	CodeInvalidToken           = "invalid_token"
	CodeNotFound               = "not_found"
	CodeModelNotFound          = "model_not_found"
	CodeRequestTooLarge        = "request_too_large"
	CodeRateLimited            = "rate_limited"
	CodeBudgetExceeded         = "budget_exceeded"
	CodeRetryStorm             = "ERR_RETRY_STORM_DETECTED"
	CodeInternal               = "internal_error"
	CodeUpstreamError          = "upstream_error"
	CodeUpstreamStreamFailed   = "upstream_stream_failed"
	CodeStreamIntegrity        = "stream_integrity"
	CodeCapacityExhausted      = "capacity_exhausted"
	CodeConcurrencyLimit       = "concurrency_limit"
	CodeNoPermittedReplica     = "no_permitted_replica"
	CodeNotReady               = "not_ready"
	CodeJWKSUnavailable        = "jwks_unavailable"
	CodeBudgetStoreUnavailable = "budget_store_unavailable"
	CodeServiceUnavailable     = "NAME_unavailable" // see ServiceUnavailable
	CodeDeadlineExceeded       = "deadline_exceeded"
)

// ErrorEntry is one row of the error table.
type ErrorEntry struct {
	Code          string
	Status        int    // HTTP status; 502 for the two that are only ever an SSE event
	Type          string // error.type of the OpenAI shape
	AnthropicType string // error.type on /v1/messages
	EventOnly     bool   // sent inside a stream that already began, never as a status
	// RetryAfter is the default pause in seconds; > 0 means that the answer
	// carries Retry-After and retry-after-ms (every 429 and 503, no other).
	RetryAfter float64
	Retry      bool // what x-should-retry says unless the caller decides otherwise
	When       string
}

// The one table. A repeat is recommended only where it can succeed: a full
// queue or a missing dependency passes, a policy or a spent budget does not.
var errorTable = []ErrorEntry{
	{CodeInvalidRequest, 400, "invalid_request_error", "invalid_request_error", false, 0, false, "malformed JSON, missing model, wrong type; with status 431 a head over limits.max_header, with 408 a request that did not come in time"},
	{CodeContextLength, 400, "invalid_request_error", "invalid_request_error", false, 0, false, "no replica of the model could ever hold prompt + minimum output"},
	{CodeInvalidAPIKey, 401, "authentication_error", "authentication_error", false, 0, false, "the API key was refused"},
	{CodeInvalidToken, 401, "authentication_error", "authentication_error", false, 0, false, "the JWT was refused; a bad alg is refused without any network call"},
	{CodeNotFound, 404, "not_found_error", "not_found_error", false, 0, false, "the path or method is not part of the API"},
	{CodeModelNotFound, 404, "not_found_error", "not_found_error", false, 0, false, "no pool serves the model, or the tenant may not use it"},
	{CodeRequestTooLarge, 413, "invalid_request_error", "request_too_large", false, 0, false, "the body is over max_body"},
	{CodeRateLimited, 429, "rate_limit_error", "rate_limit_error", false, 1, true, "the tenant's burst or rate; Retry-After says when the next is allowed"},
	{CodeBudgetExceeded, 429, "rate_limit_error", "rate_limit_error", false, 60, false, "the tenant's token budget for the window is spent"},
	{CodeRetryStorm, 429, "rate_limit_error", "rate_limit_error", false, 10, false, "more than 2 repeats of the same request within 10 s of a degraded or shed answer"},
	{CodeInternal, 500, "server_error", "api_error", false, 0, false, "a defect in the router itself; the request was not answered"},
	{CodeUpstreamError, 502, "server_error", "api_error", false, 0, false, "every permitted attempt failed, or no good replica was left for another; then, while the request has an attempt left, `x-should-retry: true` and a Retry-After that spreads what failed together"},
	{CodeUpstreamStreamFailed, 502, "server_error", "api_error", true, 0, false, "SSE event: the replica failed after the first byte"},
	{CodeStreamIntegrity, 502, "server_error", "api_error", true, 0, false, "SSE event: the replica sent a stream that breaks its protocol"},
	{CodeCapacityExhausted, 503, "server_error", "overloaded_error", false, 1, true, "the token-work budget is full for this class and it cannot be reached in the allowed wait"},
	{CodeConcurrencyLimit, 503, "server_error", "overloaded_error", false, 1, true, "the router's own in-flight limit"},
	{CodeNoPermittedReplica, 503, "server_error", "api_error", false, 30, false, "policy (region, tenant, tools, model) excludes all that live: fails closed"},
	{CodeNotReady, 503, "server_error", "api_error", false, 1, true, "/readyz: a configured pool has no reachable replica, or the router drains"},
	{CodeJWKSUnavailable, 503, "server_error", "api_error", false, 5, true, "no signing key was ever fetched"},
	{CodeBudgetStoreUnavailable, 503, "server_error", "api_error", false, 5, true, "the shared budget store is unreachable: refused, not un-metered"},
	{CodeServiceUnavailable, 503, "server_error", "api_error", false, 5, true, "the auxiliary service NAME is down; `x-should-retry: false` when it may have got a POST or PATCH that names no Idempotency-Key"},
	{CodeDeadlineExceeded, 504, "server_error", "api_error", false, 0, false, "the deadline passed; as an event when the answer had begun"},
}

// ErrorTable returns a copy of the error table, in the order of docs/errors.md.
func ErrorTable() []ErrorEntry { return append([]ErrorEntry(nil), errorTable...) }

// Error is an answer of the router itself.
type Error struct {
	Code    string
	Status  int
	Type    string // OpenAI shape
	Message string
	Param   string // the body key at fault, "" = null

	// RetryAfter is seconds until a repeat makes sense. It is always rendered
	// for statuses 429 and 503, where 0 means 1 s, and for others when it is set
	// and a repeat is recommended.
	RetryAfter float64
	Retry      bool // x-should-retry

	anthropicType string
}

// NewError makes an Error from the table's row for code. An unknown code is a
// programming fault and panics.
func NewError(code, format string, args ...any) *Error {
	for i := range errorTable {
		if t := &errorTable[i]; t.Code == code {
			msg := format
			if len(args) > 0 {
				msg = fmt.Sprintf(format, args...)
			}
			return &Error{Code: code, Status: t.Status, Type: t.Type, Message: msg,
				RetryAfter: t.RetryAfter, Retry: t.Retry, anthropicType: t.AnthropicType}
		}
	}
	panic("BUG: no error code " + code)
}

// ServiceUnavailable is the 503 NAME_unavailable of an auxiliary service.
func ServiceUnavailable(name, format string, args ...any) *Error {
	e := NewError(CodeServiceUnavailable, format, args...)
	e.Code = name + "_unavailable"
	return e
}

// Error makes it usable where a Go error is wanted.
func (e *Error) Error() string { return e.Code + ": " + e.Message }

// RetryHeaders are the values for the headers Retry-After, retry-after-ms and
// x-should-retry. The first two are empty when the error owes none.
func (e *Error) RetryHeaders() (after, afterMs, should string) {
	should = strconv.FormatBool(e.Retry)
	if e.Status != 429 && e.Status != 503 && !(e.Retry && e.RetryAfter > 0) {
		return "", "", should
	}
	s := e.RetryAfter
	if !(s > 0) { // NaN too
		s = 1
	}
	s = min(s, 30*86400)
	// Whole seconds are rounded up: a client that waits less than the exact
	// time is refused once more.
	return strconv.Itoa(max(1, int(math.Ceil(s)))), strconv.Itoa(max(1, int(math.Ceil(s*1000-1e-6)))), should
}

// EachHeader calls set for every header that the error owes beside
// Content-Type (application/json).
func (e *Error) EachHeader(set func(name, value string)) {
	after, ms, should := e.RetryHeaders()
	if after != "" {
		set("Retry-After", after)
		set("retry-after-ms", ms)
	}
	set("x-should-retry", should)
}

// AppendBody appends the JSON body: the Anthropic shape on KindMessages (with
// the code beside its type), the OpenAI shape elsewhere.
func (e *Error) AppendBody(dst []byte, k Kind) []byte {
	if k == KindMessages {
		t := e.anthropicType
		if t == "" {
			t = e.Type
		}
		dst = append(dst, `{"type":"error","error":{"type":`...)
		dst = appendQuoted(dst, t)
		dst = append(dst, `,"message":`...)
		dst = appendQuoted(dst, e.Message)
		dst = append(dst, `,"code":`...)
		dst = appendQuoted(dst, e.Code)
		return append(dst, "}}"...)
	}
	dst = append(dst, `{"error":`...)
	dst = e.appendObject(dst)
	return append(dst, '}')
}

// AppendEvent appends the terminal server-sent event for a stream that already
// began. The form is the one that each API's official SDK raises an error for.
func (e *Error) AppendEvent(dst []byte, k Kind) []byte {
	switch k {
	case KindMessages:
		dst = append(dst, "event: error\ndata: "...)
		dst = e.AppendBody(dst, k)
	case KindResponses:
		// The Responses API documents a flat error event; the Python SDK raises
		// only for an "error" member. Both are given.
		dst = append(dst, "event: error\ndata: {\"type\":\"error\",\"code\":"...)
		dst = appendQuoted(dst, e.Code)
		dst = append(dst, `,"message":`...)
		dst = appendQuoted(dst, e.Message)
		dst = append(dst, `,"param":`...)
		dst = e.appendParam(dst)
		dst = append(dst, `,"error":`...)
		dst = e.appendObject(dst)
		dst = append(dst, '}')
	default:
		dst = append(dst, "data: "...)
		dst = e.AppendBody(dst, k)
	}
	return append(dst, "\n\n"...)
}

func (e *Error) appendObject(dst []byte) []byte {
	dst = append(dst, `{"message":`...)
	dst = appendQuoted(dst, e.Message)
	dst = append(dst, `,"type":`...)
	dst = appendQuoted(dst, e.Type)
	dst = append(dst, `,"param":`...)
	dst = e.appendParam(dst)
	dst = append(dst, `,"code":`...)
	dst = appendQuoted(dst, e.Code)
	return append(dst, '}')
}

func (e *Error) appendParam(dst []byte) []byte {
	if e.Param == "" {
		return append(dst, "null"...)
	}
	return appendQuoted(dst, e.Param)
}

const hexDigits = "0123456789abcdef"

// appendQuoted appends s as a JSON string. Bytes that are not UTF-8 become
// U+FFFD, so that an error body is valid whatever a replica or client put in.
func appendQuoted(dst []byte, s string) []byte {
	dst = append(dst, '"')
	for _, r := range s { // an invalid byte ranges as U+FFFD
		switch {
		case r == '"' || r == '\\':
			dst = append(dst, '\\', byte(r))
		case r == '\n':
			dst = append(dst, '\\', 'n')
		case r < 0x20 || r == 0x7f:
			dst = append(dst, '\\', 'u', '0', '0', hexDigits[r>>4], hexDigits[r&15])
		case r < 0x80:
			dst = append(dst, byte(r))
		default:
			dst = append(dst, string(r)...)
		}
	}
	return append(dst, '"')
}
