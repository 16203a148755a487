package wire

import "bytes"

// responses reads an event of the Responses API; name is its type behind
// "response.".
func (o *Observer) responses(b, name []byte, r *root, f *facts) {
	var id, model, status, usage, reason, errv val
	members(b, r.response, func(key []byte, v val) {
		switch string(key) {
		case "id":
			id = v
		case "model":
			model = v
		case "status":
			status = v
		case "usage":
			usage = v
		case "error":
			errv = v
		case "incomplete_details":
			members(b, v, func(key []byte, v val) {
				if string(key) == "reason" {
					reason = v
				}
			})
		}
	})
	o.same(b, id, model)
	o.usage(b, usage, f)
	index, _ := r.outputIndex.number(b)
	switch string(name) {
	case "completed", "incomplete":
		o.responseEnd(b, name, status, reason, errv, r)
	case "failed":
		r.err = errv
		o.fail(b, r)
		o.done()
	case "cancelled":
		o.finish(0, name)
		o.done()
	case "output_item.added":
		o.outputItem(b, index, r.item, f)
	case "function_call_arguments.delta", "mcp_call_arguments.delta", "custom_tool_call_input.delta":
		if t := r.delta.text(b); len(t) > 0 {
			o.Content++
			o.commit()
			if name[0] == 'f' {
				o.tool(b, 0, index, nil, nil, r.delta, f)
			}
		}
	default:
		if t := r.delta.text(b); len(t) > 0 && bytes.HasSuffix(name, []byte(".delta")) {
			o.Content++
			o.commit()
			f.text(r.delta, -1)
		}
	}
}

func (o *Observer) responseEnd(b, name []byte, status, reason, errv val, r *root) {
	word := status.text(b)
	if word == nil {
		word = name
	}
	switch {
	case string(word) == "failed" || errv.given(b):
		r.err = errv
		o.fail(b, r)
	case string(word) == "cancelled":
		o.finish(0, word)
	case string(reason.text(b)) == "max_output_tokens":
		o.finish(0, []byte("length"))
	default:
		o.finish(0, word)
	}
	o.done()
}

// outputItem takes a new output item: a tool call commits, an empty message or
// reasoning item does not.
func (o *Observer) outputItem(b []byte, index int, item val, f *facts) {
	f.unfit = true
	var typ, id, callID, name val
	members(b, item, func(key []byte, v val) {
		switch string(key) {
		case "type":
			typ = v
		case "id":
			id = v
		case "call_id":
			callID = v
		case "name":
			name = v
		}
	})
	switch string(typ.text(b)) {
	case "", "message", "reasoning":
		return
	case "function_call":
		if callID.end == 0 {
			callID = id
		}
		o.tool(b, 0, index, callID.text(b), name.text(b), val{}, f)
	}
	o.commit()
}

// messages reads an event of the Anthropic API.
func (o *Observer) messages(b, typ []byte, r *root, f *facts) {
	o.usage(b, r.usage, f)
	index, _ := r.index.number(b)
	switch string(typ) {
	case "message_start":
		var id, model, usage val
		members(b, r.message, func(key []byte, v val) {
			switch string(key) {
			case "id":
				id = v
			case "model":
				model = v
			case "usage":
				usage = v
			}
		})
		o.same(b, id, model)
		o.usage(b, usage, f)
		o.seen |= 1
	case "content_block_start":
		o.block(b, index, r.block, f)
	case "content_block_delta":
		o.blockDelta(b, index, r.delta, f)
	case "message_delta":
		f.unfit = true
		members(b, r.delta, func(key []byte, v val) {
			if t := v.text(b); len(t) > 0 && string(key) == "stop_reason" {
				o.finish(0, t)
			}
		})
	case "message_stop":
		o.done()
	}
}

func (o *Observer) block(b []byte, index int, v val, f *facts) {
	f.unfit = true
	var typ, id, name, text val
	members(b, v, func(key []byte, v val) {
		switch string(key) {
		case "type":
			typ = v
		case "id":
			id = v
		case "name":
			name = v
		case "text":
			text = v
		}
	})
	switch string(typ.text(b)) {
	case "tool_use", "server_tool_use":
		o.tool(b, 0, index, id.text(b), name.text(b), val{}, f)
		o.commit()
	case "text":
		if len(text.text(b)) > 0 {
			o.Content++
			o.commit()
		}
	}
}

func (o *Observer) blockDelta(b []byte, index int, v val, f *facts) {
	members(b, v, func(key []byte, v val) {
		t := v.text(b)
		if len(t) == 0 {
			return
		}
		switch string(key) {
		case "text", "thinking":
			f.text(v, -1)
		case "partial_json":
			o.tool(b, 0, index, nil, nil, v, f)
		default:
			return
		}
		o.Content++
		o.commit()
	})
}
