package replica

import (
	"fmt"
	"strconv"

	"github.com/penstock/penstock/bench/model"
)

const fingerprint = `"system_fingerprint":"vllm-0.32.0-0e430db9"`

func itoa(n int) string { return strconv.Itoa(n) }

func idPrefix(k kind) string {
	switch k {
	case kindCompletion:
		return "cmpl-"
	case kindResponses:
		return "resp_"
	case kindEmbeddings:
		return "embd-"
	case kindRerank:
		return "rerank-"
	case kindScore:
		return "score-"
	}
	return "chatcmpl-"
}

func statusError(status int) *apiError {
	switch status {
	case 503:
		return &apiError{status: 503, kind: "Service Unavailable", message: "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."}
	case 429:
		return &apiError{status: 429, kind: "TooManyRequestsError", message: "Too many requests."}
	case 404:
		return &apiError{status: 404, kind: "NotFoundError", message: "Not found."}
	}
	if status < 500 {
		return &apiError{status: status, kind: "BadRequestError", message: "Injected client error."}
	}
	return &apiError{status: status, kind: "InternalServerError", message: "Injected server error."}
}

// chunkHead starts a chat or completion chunk up to "choices":[.
func (j *job) chunkHead(b []byte) []byte {
	b = append(b, `data: {"id":`...)
	b = appendQuoted(b, j.id)
	if j.req.kind == kindChat {
		b = append(b, `,"object":"chat.completion.chunk","created":`...)
	} else {
		b = append(b, `,"object":"text_completion","created":`...)
	}
	b = strconv.AppendInt(b, j.created, 10)
	b = append(b, `,"model":`...)
	b = appendQuoted(b, j.req.model)
	return append(b, `,"choices":[`...)
}

func (c *choice) continuousUsage(b []byte) []byte {
	if !c.job.req.continuous {
		return b
	}
	return fmt.Appendf(b, `,"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"completion_tokens_details":null}`,
		c.prompt.tokens, c.prompt.tokens+c.sent, c.sent)
}

// chatChunk sends one chat event; delta is JSON, finish "" = null.
func (s *Server) chatChunk(c *choice, delta, finish string, roleChunk bool) {
	j := c.job
	b := j.chunkHead(make([]byte, 0, 320))
	b = append(b, `{"index":`...)
	b = strconv.AppendInt(b, int64(c.index), 10)
	b = append(b, `,"delta":`...)
	b = append(b, delta...)
	b = append(b, `,"logprobs":null,"finish_reason":`...)
	if finish == "" {
		b = append(b, "null"...)
	} else {
		b = appendQuoted(b, finish)
		b = append(b, `,"stop_reason":null`...)
	}
	if !roleChunk {
		b = append(b, `,"token_ids":null`...)
	}
	b = append(b, "}]"...)
	b = c.continuousUsage(b)
	if roleChunk {
		b = append(b, `,"prompt_token_ids":null,"prompt_text":null`...)
	}
	if finish != "" && !j.req.usage {
		b = append(b, ',')
		b = append(b, fingerprint...)
	}
	j.conn.writeChunk(append(b, "}\n\n"...))
}

func (s *Server) completionChunk(c *choice, piece, finish string) {
	j := c.job
	b := j.chunkHead(make([]byte, 0, 320))
	b = append(b, `{"index":`...)
	b = strconv.AppendInt(b, int64(c.index), 10)
	b = append(b, `,"text":`...)
	b = appendQuoted(b, piece)
	b = append(b, `,"logprobs":null,"finish_reason":`...)
	if finish == "" {
		b = append(b, "null"...)
	} else {
		b = appendQuoted(b, finish)
	}
	b = append(b, `,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]`...)
	b = c.continuousUsage(b)
	if finish != "" && !j.req.usage {
		b = append(b, ',')
		b = append(b, fingerprint...)
	}
	j.conn.writeChunk(append(b, "}\n\n"...))
}

// sse sends an event of the APIs that name their events.
func (j *job) sse(name, data string) {
	j.conn.writeChunk([]byte("event: " + name + "\ndata: " + data + "\n\n"))
}

// preamble is what a stream says before any work is done.
func (s *Server) preamble(j *job) {
	if j.req.kind != kindResponses || j.fault != nil && j.fault.Mode == OnlyDone {
		return
	}
	j.itemID = "msg_" + randomHex(16)
	for _, name := range []string{"response.created", "response.in_progress"} {
		j.sse(name, fmt.Sprintf(`{"response":%s,"sequence_number":%d,"type":"%s"}`, s.responseObject(j, "in_progress"), j.seqNo, name))
		j.seqNo++
	}
}

// streamToken sends the event of one output token.
func (s *Server) streamToken(c *choice, piece string, last bool) {
	j := c.job
	if f := j.fault; f != nil && f.Mode == IDChange && j.content == 3 {
		j.id += "-changed"
	}
	finish := ""
	if last && (j.fault == nil || j.fault.Mode != MissingFinish) {
		finish = c.reason
	}
	switch j.req.kind {
	case kindChat:
		s.chatToken(c, piece, finish, last)
	case kindCompletion:
		s.completionChunk(c, piece, finish)
	case kindResponses:
		if !c.role {
			c.role = true
			j.sse("response.output_item.added", fmt.Sprintf(`{"item":{"id":"%s","content":[],"role":"assistant","status":"in_progress","type":"message","phase":null},"output_index":0,"sequence_number":%d,"type":"response.output_item.added"}`, j.itemID, j.seqNo))
			j.sse("response.content_part.added", fmt.Sprintf(`{"content_index":0,"item_id":"%s","output_index":0,"part":{"annotations":[],"text":"","type":"output_text","logprobs":[]},"sequence_number":%d,"type":"response.content_part.added"}`, j.itemID, j.seqNo+1))
			j.seqNo += 2
		}
		j.sse("response.output_text.delta", fmt.Sprintf(`{"content_index":0,"delta":%s,"item_id":"%s","logprobs":[],"output_index":0,"sequence_number":%d,"type":"response.output_text.delta"}`, quote(piece), j.itemID, j.seqNo))
		j.seqNo++
	case kindMessages:
		s.messageToken(c, piece)
	}
}

func (s *Server) chatToken(c *choice, piece, finish string, last bool) {
	j := c.job
	if !c.role {
		c.role = true
		sent := c.sent
		c.sent = 0
		s.chatChunk(c, `{"role":"assistant","content":""}`, "", true)
		c.sent = sent
	}
	if f := j.fault; f != nil && f.Mode == ToolCollision && c.sent <= 2 {
		name := []string{"", "alpha", "beta"}[c.sent]
		s.chatChunk(c, fmt.Sprintf(`{"content":null,"tool_calls":[{"id":"chatcmpl-tool-%s","type":"function","index":0,"function":{"name":"%s","arguments":"{}"}}]}`, randomHex(16), name), "", false)
		return
	}
	if j.req.tool == nil {
		s.chatChunk(c, `{"content":`+quote(piece)+`}`, finish, false)
		return
	}
	switch i := c.sent - 2; {
	case last:
		s.chatChunk(c, `{}`, finish, false)
	case i < 0:
		s.chatChunk(c, fmt.Sprintf(`{"content":null,"tool_calls":[{"id":"%s","type":"function","index":0,"function":{"name":%s}}]}`, c.callID, quote(j.req.tool.name)), "", false)
	default:
		s.chatChunk(c, `{"content":null,"tool_calls":[{"index":0,"function":{"arguments":`+quote(c.pieces[i])+`}}]}`, "", false)
	}
}

func (s *Server) messageToken(c *choice, piece string) {
	j := c.job
	if !c.role {
		c.role = true
		j.sse("message_start", fmt.Sprintf(`{"type":"message_start","message":{"id":%s,"type":"message","role":"assistant","content":[],"model":%s,"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":%d,"output_tokens":0}}}`, quote(j.id), quote(j.req.model), c.prompt.tokens))
		block := `{"type":"text","text":""}`
		if t := j.req.tool; t != nil {
			block = fmt.Sprintf(`{"type":"tool_use","id":"%s","name":%s,"input":{}}`, c.callID, quote(t.name))
		}
		j.sse("content_block_start", `{"type":"content_block_start","content_block":`+block+`,"index":0}`)
	}
	delta := `{"type":"text_delta","text":` + quote(piece) + `}`
	if j.req.tool != nil {
		part := ""
		if i := c.sent - 2; i >= 0 && i < len(c.pieces) {
			part = c.pieces[i]
		}
		delta = `{"type":"input_json_delta","partial_json":` + quote(part) + `}`
	}
	j.sse("content_block_delta", `{"type":"content_block_delta","delta":`+delta+`,"index":0}`)
}

// totals sums the tokens of all choices; the prompt counts once per prompt.
func (j *job) totals() (prompt, cached, out int) {
	for _, c := range j.choices {
		out += c.sent
		if c.index%j.req.n == 0 {
			prompt += c.prompt.tokens
			cached += c.seq.Cached
		}
	}
	if len(j.choices) == 0 {
		for _, p := range j.req.prompts {
			prompt += p.tokens
		}
	}
	return prompt, cached, out
}

// complete sends the end of an answer whose sequences all ended.
func (s *Server) complete(j *job) {
	s.n.Finished++
	switch {
	case j.req.stream:
		s.completeStream(j)
	default:
		j.conn.reply(j.req.info, 200, jsonType, s.answer(j), "")
	}
	s.flushEnd(j)
}

func (s *Server) completeStream(j *job) {
	prompt, cached, out := j.totals()
	noDone := j.fault != nil && j.fault.Mode == NoDone
	switch j.req.kind {
	case kindChat, kindCompletion:
		if j.req.usage {
			b := j.chunkHead(nil)
			created := ""
			if j.req.kind == kindChat {
				created = `,"created_cache_tokens":0`
			}
			b = fmt.Appendf(b, `],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d%s}},%s}`+"\n\n",
				prompt, prompt+out, out, cached, created, fingerprint)
			j.conn.writeChunk(b)
		}
		if !noDone {
			j.conn.writeChunk([]byte("data: [DONE]\n\n"))
		}
	case kindResponses:
		s.completeResponse(j)
	case kindMessages:
		c := j.choices[0]
		j.sse("content_block_stop", `{"type":"content_block_stop","index":0}`)
		if j.fault == nil || j.fault.Mode != MissingFinish {
			j.sse("message_delta", fmt.Sprintf(`{"type":"message_delta","delta":{"stop_reason":"%s","stop_sequence":null},"usage":{"input_tokens":%d,"output_tokens":%d,"cache_creation_input_tokens":0,"cache_read_input_tokens":%d}}`, stopReason(c.reason), prompt, out, cached))
		}
		if !noDone {
			j.sse("message_stop", `{"type":"message_stop"}`)
		}
	}
}

// stopReason is the Anthropic word for a finish_reason.
func stopReason(r string) string {
	switch r {
	case "length":
		return "max_tokens"
	case "tool_calls":
		return "tool_use"
	case "stop":
		return "end_turn"
	}
	return r
}

func (s *Server) completeResponse(j *job) {
	c := j.choices[0]
	text := quote(string(c.text))
	part := `{"annotations":[],"text":` + text + `,"type":"output_text","logprobs":null}`
	j.sse("response.output_text.done", fmt.Sprintf(`{"content_index":0,"item_id":"%s","logprobs":[],"output_index":0,"sequence_number":%d,"text":%s,"type":"response.output_text.done"}`, j.itemID, j.seqNo, text))
	j.sse("response.content_part.done", fmt.Sprintf(`{"content_index":0,"item_id":"%s","output_index":0,"part":%s,"sequence_number":%d,"type":"response.content_part.done"}`, j.itemID, part, j.seqNo+1))
	j.sse("response.output_item.done", fmt.Sprintf(`{"item":%s,"output_index":0,"sequence_number":%d,"type":"response.output_item.done"}`, s.responseItem(j), j.seqNo+2))
	if j.fault == nil || j.fault.Mode != NoDone && j.fault.Mode != MissingFinish {
		j.sse("response.completed", fmt.Sprintf(`{"response":%s,"sequence_number":%d,"type":"response.completed"}`, s.responseObject(j, ""), j.seqNo+3))
	}
	j.seqNo += 4
}

func (s *Server) responseItem(j *job) string {
	if j.itemID == "" {
		j.itemID = "msg_" + randomHex(16)
	}
	return fmt.Sprintf(`{"id":"%s","content":[{"annotations":[],"text":%s,"type":"output_text","logprobs":null}],"role":"assistant","status":"completed","type":"message","phase":null}`, j.itemID, quote(string(j.choices[0].text)))
}

// responseObject is the response of /v1/responses; status "" = ended.
func (s *Server) responseObject(j *job, status string) string {
	incomplete, output, usage, limit := "null", "", "null", itoa(j.req.maxOut)
	if j.req.maxOut == 0 {
		limit = itoa(s.opt.MaxModelLen - j.req.prompts[0].tokens)
	}
	if status == "" {
		status = "completed"
		if j.choices[0].reason == "length" {
			status, incomplete = "incomplete", `{"reason":"max_output_tokens"}`
		}
		output = s.responseItem(j)
		p, cached, out := j.totals()
		usage = fmt.Sprintf(`{"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d,"cache_write_tokens":0,"input_tokens_per_turn":[],"cached_tokens_per_turn":[]},"output_tokens":%d,"output_tokens_details":{"reasoning_tokens":0,"tool_output_tokens":0,"output_tokens_per_turn":[],"tool_output_tokens_per_turn":[]},"total_tokens":%d}`, p, cached, out, p+out)
	}
	return fmt.Sprintf(`{"id":%s,"created_at":%d,"incomplete_details":%s,"instructions":null,"metadata":null,"model":%s,"object":"response","output":[%s],"parallel_tool_calls":true,"temperature":1.0,"tool_choice":"none","tools":[],"top_p":1.0,"background":false,"max_output_tokens":%s,"max_tool_calls":null,"previous_response_id":null,"prompt":null,"reasoning":null,"service_tier":"auto","status":"%s","text":null,"top_logprobs":null,"truncation":"disabled","usage":%s,"user":null,"presence_penalty":0.0,"frequency_penalty":0.0,"kv_transfer_params":null,"ec_transfer_params":null,"input_messages":null,"output_messages":null}`,
		quote(j.id), j.created, incomplete, quote(j.req.model), output, limit, status, usage)
}

// answer is the body of a whole (not streamed) answer.
func (s *Server) answer(j *job) []byte {
	p, cached, out := j.totals()
	switch j.req.kind {
	case kindResponses:
		return []byte(s.responseObject(j, ""))
	case kindMessages:
		c := j.choices[0]
		content := `{"type":"text","text":` + quote(string(c.text)) + `}`
		if t := j.req.tool; t != nil {
			content = fmt.Sprintf(`{"type":"tool_use","id":"%s","name":%s,"input":%s}`, c.callID, quote(t.name), c.arguments())
		}
		return fmt.Appendf(nil, `{"id":%s,"type":"message","role":"assistant","content":[%s],"model":%s,"stop_reason":"%s","usage":{"input_tokens":%d,"output_tokens":%d,"cache_creation_input_tokens":0,"cache_read_input_tokens":%d}}`,
			quote(j.id), content, quote(j.req.model), stopReason(c.reason), p, out, cached)
	case kindEmbeddings, kindRerank, kindScore:
		return s.poolingAnswer(j, p)
	}
	object, created, tail := "chat.completion", "0", `"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,`
	if j.req.kind == kindCompletion {
		object, created, tail = "text_completion", "null", ""
	}
	b := fmt.Appendf(nil, `{"id":%s,"object":"%s","created":%d,"model":%s,"choices":[`, quote(j.id), object, j.created, quote(j.req.model))
	for i, c := range j.choices {
		if i > 0 {
			b = append(b, ',')
		}
		b = c.appendWhole(b)
	}
	return fmt.Appendf(b, `],"service_tier":null,%s,"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d,"created_cache_tokens":%s,"multimodal_tokens":null},"completion_tokens_details":null},%s"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}`,
		fingerprint, p, p+out, out, cached, created, tail)
}

func (c *choice) arguments() (s string) {
	for _, p := range c.pieces {
		s += p
	}
	return s
}

// appendWhole appends one choice of a chat or completion answer.
func (c *choice) appendWhole(b []byte) []byte {
	r := c.job.req
	finish := quote(c.reason)
	if f := c.job.fault; c.reason == "" || f != nil && f.Mode == MissingFinish {
		finish = "null"
	}
	if r.kind == kindCompletion {
		return fmt.Appendf(b, `{"index":%d,"text":%s,"logprobs":null,"finish_reason":%s,"stop_reason":null,"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}`,
			c.index, quote(string(c.text)), finish)
	}
	calls := ""
	if r.tool != nil {
		calls = fmt.Sprintf(`"tool_calls":[{"id":"%s","type":"function","function":{"name":%s,"arguments":%s}}],`, c.callID, quote(r.tool.name), quote(c.arguments()))
	}
	return fmt.Appendf(b, `{"index":%d,"message":{"role":"assistant","content":%s,"refusal":null,"annotations":null,"audio":null,"function_call":null,%s"reasoning":null},"logprobs":null,"finish_reason":%s,"stop_reason":null,"token_ids":null,"routed_experts":null}`,
		c.index, quote(string(c.text)), calls, finish)
}

// poolingAnswer is the answer of embeddings, rerank and score: numbers made of
// the prompt's hash.
func (s *Server) poolingAnswer(j *job, prompt int) []byte {
	b := []byte(nil)
	usage := fmt.Sprintf(`"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":0,"prompt_tokens_details":null}`, prompt, prompt)
	number := func(c *choice, i int) float64 {
		return float64(hashString(uint64(i), string(c.prompt.canon))%2000)/1000 - 1
	}
	switch j.req.kind {
	case kindEmbeddings:
		b = fmt.Appendf(b, `{"id":%s,"object":"list","created":%d,"model":%s,"data":[`, quote(j.id), j.created, quote(j.req.model))
		for i, c := range j.choices {
			if i > 0 {
				b = append(b, ',')
			}
			b = fmt.Appendf(b, `{"index":%d,"object":"embedding","embedding":[`, i)
			for d := 0; d < 8; d++ {
				if d > 0 {
					b = append(b, ',')
				}
				b = strconv.AppendFloat(b, number(c, d), 'g', -1, 64)
			}
			b = append(b, "]}"...)
		}
		return append(b, "],"+usage+"}"...)
	case kindRerank:
		b = fmt.Appendf(b, `{"id":%s,"model":%s,"usage":{"prompt_tokens":%d,"total_tokens":%d},"results":[`, quote(j.id), quote(j.req.model), prompt, prompt)
		for i, c := range j.choices {
			if i > 0 {
				b = append(b, ',')
			}
			b = fmt.Appendf(b, `{"index":%d,"document":{"text":%s,"multi_modal":null},"relevance_score":%g}`, i, quote(c.prompt.echo), (number(c, 0)+1)/2)
		}
		return append(b, "]}"...)
	}
	b = fmt.Appendf(b, `{"id":%s,"object":"list","created":%d,"model":%s,"data":[`, quote(j.id), j.created, quote(j.req.model))
	for i, c := range j.choices {
		if i > 0 {
			b = append(b, ',')
		}
		b = fmt.Appendf(b, `{"index":%d,"object":"score","score":%g}`, i, (number(c, 0)+1)/2)
	}
	return append(b, "],"+usage+"}"...)
}

// abortAnswer ends j as a vLLM that was told to stop does: 200, finish_reason
// "abort" with what was made so far, or only [DONE] when nothing was.
func (s *Server) abortAnswer(j *job) {
	for _, c := range j.choices {
		c.reason = "abort"
	}
	if !j.req.stream {
		if len(j.choices) == 0 {
			for i := range j.req.prompts {
				j.choices = append(j.choices, &choice{job: j, index: i, prompt: &j.req.prompts[i], reason: "abort", seq: model.Seq{Ended: model.Aborted}})
			}
		}
		j.conn.reply(j.req.info, 200, jsonType, s.answer(j), "")
		s.flushEnd(j)
		return
	}
	for _, c := range j.choices {
		if c.sent == 0 {
			continue
		}
		switch j.req.kind {
		case kindChat:
			s.chatChunk(c, `{"content":""}`, "abort", false)
		case kindCompletion:
			s.completionChunk(c, "", "abort")
		}
	}
	if j.req.kind == kindChat || j.req.kind == kindCompletion {
		j.conn.writeChunk([]byte("data: [DONE]\n\n"))
	}
	s.flushEnd(j)
}

// errorAnswer ends j as a vLLM whose engine died does.
func (s *Server) errorAnswer(j *job) {
	const text = "EngineCore encountered an issue. See stack trace (above) for the root cause."
	if !j.req.stream {
		j.conn.replyError(j.req.info, &apiError{status: 500, kind: "InternalServerError", message: text})
		s.flushEnd(j)
		return
	}
	j.conn.writeChunk([]byte(`data: {"error": {"message": "` + text + `", "type": "InternalServerError", "param": null, "code": 500}}` + "\n\n"))
	j.conn.writeChunk([]byte("data: [DONE]\n\n"))
	s.flushEnd(j)
}
