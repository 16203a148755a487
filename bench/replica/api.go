package replica

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// kind is which inference API a request came by.
type kind uint8

const (
	kindChat kind = iota + 1
	kindCompletion
	kindResponses
	kindMessages
	kindEmbeddings
	kindRerank
	kindScore
)

// inferencePaths is what a text-generating vLLM serves by POST.
var inferencePaths = map[string]kind{
	"/v1/chat/completions": kindChat, "/v1/completions": kindCompletion,
	"/v1/responses": kindResponses, "/v1/messages": kindMessages,
}

// poolingPaths are served with Options.Pooling only.
var poolingPaths = map[string]kind{
	"/v1/embeddings": kindEmbeddings, "/v1/rerank": kindRerank, "/rerank": kindRerank, "/v2/rerank": kindRerank,
	"/v1/score": kindScore, "/score": kindScore,
}

// reqInfo is what answers need of the HTTP request.
type reqInfo struct {
	method, path string
	id           string // x-request-id: the client's or made
	own          string // the client's, "" when it gave none
	host         string
	fault        string // X-Fault
}

// prompt is one prompt of a request: n sequences come of it.
type prompt struct {
	canon  []byte // canonical bytes, what the prefix cache sees
	tokens int
	echo   string // words to answer with
	ids    bool   // came as token ids
}

// toolCall is the call that a request's tool_choice forces.
type toolCall struct {
	name   string
	schema json.RawMessage
	named  bool
}

// request is a parsed inference request.
type request struct {
	info       *reqInfo
	kind       kind
	model      string
	stream     bool
	usage      bool // stream_options.include_usage
	continuous bool
	n          int
	maxOut     int // 0 = not given
	prompts    []prompt
	texts      bool // a prompt is text, which needs the front end's tokenizer
	tool       *toolCall
	salt       string
	fault      string
	documents  int // rerank and score: pairs
}

func invalid(param, format string, args ...any) *apiError {
	return &apiError{status: 400, kind: "BadRequestError", param: param, message: fmt.Sprintf(format, args...)}
}

// validation is the shape of FastAPI's own validation errors in vLLM.
func validation(param, format string, args ...any) *apiError {
	return &apiError{status: 400, kind: "Bad Request", param: param, message: "1 validation error:\n  " + fmt.Sprintf(format, args...)}
}

func missing(field string, members int) *apiError {
	return validation("body."+field, "{'type': 'missing', 'loc': 'body.%s', 'msg': 'Field required', 'input': '<dict of %d items>'}", field, members)
}

// fields reads typed members of a JSON object; the first wrong one stays in err.
type fields struct {
	m   map[string]json.RawMessage
	err *apiError
}

func (f *fields) has(name string) bool {
	v, ok := f.m[name]
	return ok && string(v) != "null"
}

func (f *fields) fail(name, typ, msg string) {
	if f.err == nil {
		in := string(f.m[name])
		if s := ""; json.Unmarshal(f.m[name], &s) == nil {
			in = s
		}
		f.err = validation("body."+name, "{'type': '%s', 'loc': 'body.%s', 'msg': '%s', 'input': '%s'}", typ, name, msg, in)
	}
}

func (f *fields) str(name string) string {
	var s string
	if f.has(name) && json.Unmarshal(f.m[name], &s) != nil {
		f.fail(name, "string_type", "Input should be a valid string")
	}
	return s
}

func (f *fields) boolean(name string) bool {
	var b bool
	if f.has(name) && json.Unmarshal(f.m[name], &b) != nil {
		f.fail(name, "bool_parsing", "Input should be a valid boolean, unable to interpret input")
	}
	return b
}

func (f *fields) integer(name string, def int) int {
	if !f.has(name) {
		return def
	}
	var x float64
	if json.Unmarshal(f.m[name], &x) != nil || x != float64(int(x)) {
		f.fail(name, "int_parsing", "Input should be a valid integer, unable to parse string as an integer")
		return def
	}
	return int(x)
}

func (f *fields) number(name string) (x float64) {
	if f.has(name) && json.Unmarshal(f.m[name], &x) != nil {
		f.fail(name, "float_parsing", "Input should be a valid number, unable to parse string as a number")
	}
	return x
}

// parse reads and checks an inference request's body as vLLM does.
func (s *Server) parse(info *reqInfo, k kind, h http.Header, body []byte) (*request, *apiError) {
	if ct := h.Get("Content-Type"); ct != "" && !strings.HasPrefix(ct, jsonType) {
		return nil, validation("", "Unsupported Media Type: Only 'application/json' is allowed")
	}
	if len(bytes.TrimSpace(body)) == 0 {
		return nil, validation("body", "{'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': 'None'}")
	}
	f := fields{}
	if err := json.Unmarshal(body, &f.m); err != nil {
		at := len(body)
		var se *json.SyntaxError
		if errors.As(err, &se) {
			at = int(se.Offset)
		}
		loc := "body." + strconv.Itoa(at)
		return nil, validation(loc, "{'type': 'json_invalid', 'loc': '%s', 'msg': 'JSON decode error', 'input': '<dict of 0 items>', 'ctx': {'error': 'Expecting value'}}", loc)
	}
	r := &request{info: info, kind: k, n: 1, fault: info.fault}
	if f.has("x_fault") {
		r.fault = f.str("x_fault")
	}
	if err := s.generic(r, &f); err != nil {
		return nil, err
	}
	if err := s.promptOf(r, &f); err != nil {
		return nil, err
	}
	if f.err != nil {
		return nil, f.err
	}
	if r.model == "" {
		r.model = s.opt.Model
	} else if !s.serves(r.model) {
		return nil, s.notFound(r.model)
	}
	if err := s.fits(r); err != nil {
		return nil, err
	}
	for _, p := range r.prompts {
		r.texts = r.texts || !p.ids
	}
	return r, nil
}

func (s *Server) serves(name string) bool {
	if name == s.opt.Model {
		return true
	}
	for _, a := range s.opt.Aliases {
		if a == name {
			return true
		}
	}
	return false
}

func (s *Server) notFound(name string) *apiError {
	valid := strings.Join(append([]string{s.opt.Model}, s.opt.Aliases...), ", ")
	return &apiError{status: 404, kind: "NotFoundError", param: "model",
		message: fmt.Sprintf("The model `%s` does not exist. Valid aliases: %s.", name, valid)}
}

// generic reads the members that all generating APIs share.
func (s *Server) generic(r *request, f *fields) *apiError {
	r.model = f.str("model")
	r.stream = f.boolean("stream")
	if t := f.number("temperature"); t < 0 {
		return invalid("temperature", "temperature must be non-negative, got %.1f. (parameter=temperature, value=%.1f)", t, t)
	}
	if r.n = f.integer("n", 1); r.n < 1 && f.err == nil {
		return invalid("", "n must be at least 1, got %d.", r.n)
	}
	limit := "max_tokens"
	switch {
	case r.kind == kindResponses:
		limit = "max_output_tokens"
	case f.has("max_completion_tokens"):
		limit = "max_completion_tokens"
	}
	r.maxOut = f.integer(limit, 0)
	if f.has(limit) && r.maxOut < 1 && f.err == nil {
		return invalid(limit, "%s must be at least 1, got %d. (parameter=%s, value=%d)", limit, r.maxOut, limit, r.maxOut)
	}
	if r.maxOut > s.opt.MaxModelLen {
		return invalid(limit, "%s=%d cannot be greater than max_model_len=%d. Please request fewer output tokens. (parameter=%s, value=%d)",
			limit, r.maxOut, s.opt.MaxModelLen, limit, r.maxOut)
	}
	if f.has("cache_salt") {
		if r.salt = f.str("cache_salt"); r.salt == "" {
			return invalid("cache_salt", "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)")
		}
	}
	if f.has("stream_options") && (r.kind == kindChat || r.kind == kindCompletion) {
		if !r.stream {
			return invalid("stream_options", "Stream options can only be defined when `stream=True`. (parameter=stream_options)")
		}
		o := fields{}
		if json.Unmarshal(f.m["stream_options"], &o.m) != nil {
			f.fail("stream_options", "model_attributes_type", "Input should be a valid dictionary or object to extract fields from")
		}
		r.usage, r.continuous = o.boolean("include_usage"), o.boolean("continuous_usage_stats")
	}
	return nil
}

// contentText flattens a message's content: a string, or parts with text,
// image_url and the like; the parts that are no text count as their raw bytes.
func contentText(raw json.RawMessage) string {
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return s
	}
	var parts []map[string]json.RawMessage
	if json.Unmarshal(raw, &parts) != nil {
		return ""
	}
	var b strings.Builder
	for i, p := range parts {
		if i > 0 {
			b.WriteByte('\n')
		}
		t := ""
		if v, ok := p["text"]; ok && json.Unmarshal(v, &t) == nil {
			b.WriteString(t)
			continue
		}
		for _, k := range []string{"image_url", "input_audio", "source", "content"} {
			b.Write(p[k])
		}
	}
	return b.String()
}

type message struct {
	Role      string          `json:"role"`
	Content   json.RawMessage `json:"content"`
	ToolCalls json.RawMessage `json:"tool_calls"`
}

// chatPrompt makes the canonical prompt of messages.
func chatPrompt(head []byte, msgs []message) prompt {
	p := prompt{canon: head}
	for _, m := range msgs {
		text := contentText(m.Content)
		p.canon = append(p.canon, "<|"...)
		p.canon = append(p.canon, m.Role...)
		p.canon = append(p.canon, "|>\n"...)
		p.canon = append(p.canon, text...)
		p.canon = append(p.canon, m.ToolCalls...)
		p.canon = append(p.canon, '\n')
		if m.Role == "user" {
			p.echo = text
		}
	}
	p.canon = append(p.canon, "<|assistant|>\n"...)
	p.tokens = tokensOf(len(p.canon))
	return p
}

func textPrompt(text string) prompt {
	return prompt{canon: []byte(text), tokens: tokensOf(len(text)), echo: text}
}

func idsPrompt(ids []int) prompt {
	b := make([]byte, 0, 4*len(ids))
	for _, id := range ids {
		b = binary.LittleEndian.AppendUint32(b, uint32(id))
	}
	return prompt{canon: b, tokens: max(1, len(ids)), ids: true}
}

// promptOf reads the prompt of each API.
func (s *Server) promptOf(r *request, f *fields) *apiError {
	switch r.kind {
	case kindChat, kindMessages:
		if !f.has("messages") {
			return missing("messages", len(f.m))
		}
		var msgs []message
		if json.Unmarshal(f.m["messages"], &msgs) != nil {
			f.fail("messages", "list_type", "Input should be a valid list")
			return f.err
		}
		if len(msgs) == 0 {
			return invalid("messages", "messages must not be empty. (parameter=messages)")
		}
		head := append([]byte(nil), f.m["tools"]...)
		if r.kind == kindMessages {
			head = append(head, contentText(f.m["system"])...)
		}
		r.prompts = []prompt{chatPrompt(head, msgs)}
		return s.tools(r, f)
	case kindResponses:
		if !f.has("input") {
			return missing("input", len(f.m))
		}
		var msgs []message
		if t := ""; json.Unmarshal(f.m["input"], &t) == nil {
			msgs = []message{{Role: "user", Content: f.m["input"]}}
		} else if json.Unmarshal(f.m["input"], &msgs) != nil {
			f.fail("input", "list_type", "Input should be a valid list")
			return f.err
		}
		r.prompts = []prompt{chatPrompt([]byte(f.str("instructions")), msgs)}
	case kindCompletion:
		if !f.has("prompt") {
			return missing("prompt", len(f.m))
		}
		return r.readPrompts("prompt", f)
	case kindEmbeddings:
		if !f.has("input") {
			return missing("input", len(f.m))
		}
		return r.readPrompts("input", f)
	case kindRerank, kindScore:
		return r.readPairs(f)
	}
	return nil
}

// readPrompts takes a string, strings, token ids or lists of them.
func (r *request) readPrompts(name string, f *fields) *apiError {
	raw := f.m[name]
	var (
		s   string
		ss  []string
		ids []int
		idl [][]int
	)
	switch {
	case json.Unmarshal(raw, &s) == nil:
		r.prompts = []prompt{textPrompt(s)}
	case json.Unmarshal(raw, &ss) == nil && len(ss) > 0:
		for _, t := range ss {
			r.prompts = append(r.prompts, textPrompt(t))
		}
	case json.Unmarshal(raw, &ids) == nil && len(ids) > 0:
		r.prompts = []prompt{idsPrompt(ids)}
	case json.Unmarshal(raw, &idl) == nil && len(idl) > 0:
		for _, l := range idl {
			r.prompts = append(r.prompts, idsPrompt(l))
		}
	default:
		f.fail(name, "string_type", "Input should be a valid string")
		return f.err
	}
	return nil
}

// readPairs takes rerank's query and documents, and score's text_1 and text_2.
func (r *request) readPairs(f *fields) *apiError {
	a, b := "query", "documents"
	if r.kind == kindScore {
		a, b = "text_1", "text_2"
	}
	for _, n := range []string{a, b} {
		if !f.has(n) {
			return missing(n, len(f.m))
		}
	}
	var docs []string
	if s := ""; json.Unmarshal(f.m[b], &s) == nil {
		docs = []string{s}
	} else if json.Unmarshal(f.m[b], &docs) != nil {
		f.fail(b, "list_type", "Input should be a valid list")
		return f.err
	}
	q := contentText(f.m[a])
	for _, d := range docs {
		r.prompts = append(r.prompts, textPrompt(q+"\n"+d))
	}
	r.documents = len(docs)
	return nil
}

// tools finds the call that the request forces.
func (s *Server) tools(r *request, f *fields) *apiError {
	if !f.has("tools") || !f.has("tool_choice") {
		return nil
	}
	var tools []struct {
		Name        string          `json:"name"`
		InputSchema json.RawMessage `json:"input_schema"`
		Function    struct {
			Name       string          `json:"name"`
			Parameters json.RawMessage `json:"parameters"`
		} `json:"function"`
	}
	if json.Unmarshal(f.m["tools"], &tools) != nil || len(tools) == 0 {
		f.fail("tools", "list_type", "Input should be a valid list")
		return f.err
	}
	var word string
	var named struct {
		Type     string `json:"type"`
		Name     string `json:"name"`
		Function struct {
			Name string `json:"name"`
		} `json:"function"`
	}
	if json.Unmarshal(f.m["tool_choice"], &word) != nil {
		_ = json.Unmarshal(f.m["tool_choice"], &named)
	}
	want := named.Function.Name + named.Name
	if word != "required" && named.Type != "any" && want == "" {
		return nil
	}
	for _, t := range tools {
		name, schema := t.Function.Name, t.Function.Parameters
		if name == "" {
			name, schema = t.Name, t.InputSchema
		}
		if want == "" || want == name {
			r.tool = &toolCall{name: name, schema: schema, named: want != ""}
			return nil
		}
	}
	return invalid("tool_choice", "The tool specified in `tool_choice` does not match any of the specified `tools` (parameter=tool_choice)")
}

// fits refuses what the context can never hold.
func (s *Server) fits(r *request) *apiError {
	for _, p := range r.prompts {
		limit, n := s.opt.MaxModelLen, p.tokens
		if n+1 > limit {
			return invalid("input_tokens", "This model's maximum context length is %d tokens. However, your prompt contains at least %d input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value=%d)", limit, n, n)
		}
		if n+r.maxOut > limit {
			return invalid("input_tokens", "This model's maximum context length is %d tokens. However, you requested %d output tokens and your prompt contains at least %d input tokens, for a total of at least %d tokens. Please reduce the length of the input prompt or the number of requested output tokens. (parameter=input_tokens, value=%d)", limit, r.maxOut, n, n+r.maxOut, n)
		}
	}
	return nil
}
