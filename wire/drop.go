package wire

// toolMembers are the root members of a chat request that are about tools.
var toolMembers = map[string]bool{"tools": true, "tool_choice": true, "parallel_tool_calls": true, "functions": true, "function_call": true}

// DropTools appends a chat request's body without its tools and what is said of
// them; every other byte stays as it was. ok is false when there are none, or
// when the request cannot do without: it asks for a call, or its messages hold
// one. body must have passed Body.Scan.
func DropTools(dst, body []byte) (out []byte, ok bool) {
	s := scanner{b: body}
	i := s.space(0)
	if i >= len(body) || body[i] != '{' {
		return dst, false
	}
	out = append(dst, body[:i+1]...)       //nolint:gocritic // dst made longer is what is returned
	from, found, kept := i+1, false, false // body[from:] is not copied yet
	i = s.space(i + 1)
	for i < len(body) && body[i] == '"' {
		began := i
		start, end, v := s.key(i)
		if v < 0 {
			return dst, false
		}
		if i = s.value(v, 1); i < 0 {
			return dst, false
		}
		key, val := string(appendDecoded(nil, body[start:end])), body[v:i]
		if toolMembers[key] {
			if needed(key, val) {
				return dst, false
			}
			found = found || key == "tools" || key == "functions"
			if kept { // with the comma before it
				out = append(out, body[from:before(body, began)]...)
			}
			from = i
			if !kept { // the first of all: with the comma behind it
				if j := s.space(i); j < len(body) && body[j] == ',' {
					from = j + 1
				}
			}
		} else {
			if key == "messages" && called(val) {
				return dst, false
			}
			kept = true
			out = append(out, body[from:i]...)
			from = i
		}
		if i = s.space(i); i >= len(body) || body[i] != ',' {
			break
		}
		i = s.space(i + 1)
	}
	return append(out, body[from:]...), found
}

// before is where what stands before a member ends: at its comma.
func before(body []byte, member int) int {
	for member > 0 && body[member-1] != ',' {
		member--
	}
	return member - 1
}

// needed tells whether a member asks for a call.
func needed(key string, val []byte) bool {
	if key != "tool_choice" && key != "function_call" {
		return false
	}
	switch string(val) {
	case `"auto"`, `"none"`, "null":
		return false
	}
	return true
}

// called tells whether a message is a tool's, or holds a call of one.
func called(messages []byte) bool {
	s := scanner{b: messages}
	if len(messages) == 0 || messages[0] != '[' {
		return false
	}
	for i := s.space(1); i < len(messages) && messages[i] == '{'; {
		for j := s.space(i + 1); j < len(messages) && messages[j] == '"'; {
			start, end, v := s.key(j)
			next := s.value(v, 2)
			if v < 0 || next < 0 {
				return true
			}
			val := string(messages[v:next])
			switch string(appendDecoded(nil, messages[start:end])) {
			case "tool_calls", "function_call", "tool_call_id":
				if val != "null" && val != "[]" {
					return true
				}
			case "role":
				if val == `"tool"` || val == `"function"` {
					return true
				}
			}
			if j = s.space(next); j < len(messages) && messages[j] == ',' {
				j = s.space(j + 1)
			}
		}
		if i = s.value(i, 1); i < 0 {
			return true
		}
		if i = s.space(i); i < len(messages) && messages[i] == ',' {
			i = s.space(i + 1)
		}
	}
	return false
}
