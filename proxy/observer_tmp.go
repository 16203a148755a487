package proxy

import (
	"bytes"
	"encoding/json"

	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/wire"
)

// Stand-ins until wire.Observer lands.
type usage struct {
	Prompt, Cached, Completion int
	Seen                       bool
}

type observer struct {
	Committed, ErrorEvent, Done bool
	Events, Content             int
	Finish                      string
	Usage                       usage
	Violation                   wire.Violation
	buf                         []byte
}

func (o *observer) Reset(k wire.Kind, model string) { *o = observer{buf: o.buf[:0]} }
func (o *observer) Close()                          {}
func (o *observer) Ended() wire.Ending {
	switch {
	case o.ErrorEvent:
		return wire.EndError
	case o.Finish == "abort":
		return wire.EndAbort
	case o.Finish == "" && o.Done:
		return wire.EndEmpty
	case o.Finish == "":
		return wire.EndTruncated
	}
	return wire.EndOK
}
func (o *observer) Feed(p []byte) {
	o.buf = append(o.buf, p...)
	for {
		i := bytes.Index(o.buf, []byte("\n\n"))
		n := 2
		if j := bytes.Index(o.buf, []byte("\r\n\r\n")); j >= 0 && (i < 0 || j < i) {
			i, n = j, 4
		}
		if i < 0 {
			return
		}
		o.event(o.buf[:i])
		o.buf = o.buf[:copy(o.buf, o.buf[i+n:])]
	}
}
func (o *observer) event(p []byte) {
	var data []byte
	for _, l := range bytes.Split(p, []byte("\n")) {
		l = bytes.TrimSuffix(l, []byte("\r"))
		if bytes.HasPrefix(l, []byte("data:")) {
			data = append(data, bytes.TrimPrefix(l[5:], []byte(" "))...)
		}
	}
	if len(data) == 0 {
		return
	}
	o.Events++
	if string(data) == "[DONE]" {
		o.Done = true
		return
	}
	var v struct {
		Type    string
		Error   json.RawMessage
		Choices []struct {
			Text  string
			Delta struct {
				Content string
			}
			FinishReason *string `json:"finish_reason"`
		}
		Usage *struct {
			P int `json:"prompt_tokens"`
			C int `json:"completion_tokens"`
		}
	}
	if json.Unmarshal(data, &v) != nil {
		o.Violation = wire.BrokenJSON
		return
	}
	if v.Error != nil {
		o.ErrorEvent = true
	}
	if v.Type == "response.completed" {
		o.Finish, o.Committed = "stop", true
	}
	if v.Usage != nil {
		o.Usage = usage{Prompt: v.Usage.P, Completion: v.Usage.C, Seen: true}
	}
	for _, c := range v.Choices {
		if c.Delta.Content != "" || c.Text != "" {
			o.Content++
			o.Committed = true
		}
		if c.FinishReason != nil {
			o.Finish = *c.FinishReason
			o.Committed = o.Committed || o.Finish != "abort"
		}
	}
}

// healthyAnswer tells whether an answer in one piece is one.
func (f *flight) healthyAnswer(b []byte) (fleet.Evidence, bool) {
	var v struct {
		Choices []struct {
			FinishReason *string `json:"finish_reason"`
		}
		Usage *struct {
			P int `json:"prompt_tokens"`
			C int `json:"completion_tokens"`
		}
	}
	if json.Unmarshal(b, &v) != nil {
		return fleet.EvidenceProtocol, false
	}
	for _, c := range v.Choices {
		if c.FinishReason != nil && *c.FinishReason == "abort" {
			return fleet.EvidenceAbort, false
		}
	}
	if v.Usage != nil {
		f.usage = usage{Prompt: v.Usage.P, Completion: v.Usage.C, Seen: true}
	}
	return fleet.EvidenceOK, true
}
