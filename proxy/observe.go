package proxy

import (
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/wire"
)

// wantModel is the model that has to answer: the served name asked for.
func (f *flight) wantModel() string {
	if f.target != nil && f.target.served != "" {
		return f.target.served
	}
	return f.body.Model
}

// inspect is called when the observer has seen something out of the ordinary
// in the payload just fed. It tells whether that payload may go on.
func (f *flight) inspect() bool {
	s := &f.str
	o := &f.obs
	switch {
	case o.ErrorEvent:
		// Before the answer began: another attempt. After it: the replica's
		// words are replaced by the router's one error event.
		s.evidence = fleet.EvidenceEngineDead
		return false
	case o.Done:
		if ev, ok := f.healthyEnd(); !ok {
			s.evidence = ev
			return false
		}
	}
	return f.tolerate()
}

// fatal tells which violations end a stream at once: those after which a
// client would act on what the model never said.
func fatal(v wire.Violation) bool {
	switch v {
	case wire.ToolIndexCollision, wire.IDChanged, wire.BrokenJSON, wire.BrokenUTF8:
		return true
	}
	return false
}

// tolerate decides on the violation that the observer has noted, if any.
func (f *flight) tolerate() bool {
	s := &f.str
	v := f.obs.Violation
	if v == wire.ViolationNone {
		return true
	}
	if !s.counted {
		s.counted = true
		f.p.metrics.integrity[v].Inc()
	}
	if !fatal(v) || f.p.opt.TolerateViolations {
		return true
	}
	s.evidence = fleet.EvidenceProtocol
	s.endErr = wire.NewError(wire.CodeStreamIntegrity, "the replica sent a stream that breaks its protocol: "+v.String())
	return false
}

// healthyEnd tells whether the events seen make a whole answer.
func (f *flight) healthyEnd() (fleet.Evidence, bool) {
	o := &f.obs
	f.noteUsage()
	switch o.Ended() {
	case wire.EndOK:
		return fleet.EvidenceOK, true
	case wire.EndAbort, wire.EndEmpty:
		return fleet.EvidenceAbort, false
	case wire.EndError:
		return fleet.EvidenceEngineDead, false
	}
	return fleet.EvidenceReset, false
}

func (f *flight) noteUsage() {
	if f.obs.Usage.Seen {
		f.usage = f.obs.Usage
	}
}
