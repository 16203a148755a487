package proxy

import (
	"bytes"

	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/internal/mutant"
	"github.com/penstock/penstock/wire"
)

// watchModel makes the observer ready; the served name has to answer.
func (f *flight) watchModel() { f.obs.Reset(f.req.kind, f.wanted()...) }

// wanted lists the names that the answer may give as its model: the one asked
// of the replica, and what the replica says that this one is.
func (f *flight) wanted() []string {
	n := 1
	f.want[0] = f.body.Model
	if f.target.served != "" {
		f.want[0] = f.target.served
	}
	if f.target.root != "" {
		f.want[1], n = f.target.root, 2
	}
	return f.want[:n]
}

// watch shows payload to the observer, and tells whether all of it may be
// forwarded. When it says no, keep of the stream's bytes are good.
func (f *flight) watch(data []byte) bool {
	s := &f.str
	o := &f.obs
	base := o.Fed
	o.Feed(data)
	if (o.Done || o.ErrorEvent || o.Violation != wire.ViolationNone) && !f.inspect() {
		s.stop = true
		if n := o.BadOffset - base; n > 0 && n <= int64(len(data)) {
			s.good = data[:n]
			f.forwarding(s.good)
		}
		return false
	}
	f.forwarding(data)
	return true
}

// forwarding notes what goes to the client.
func (f *flight) forwarding(data []byte) {
	s := &f.str
	for _, b := range data[max(0, len(data)-4):] {
		s.tail = s.tail<<8 | uint32(b)
	}
	f.sent += int64(len(data))
}

// inspect is called when the observer has seen something out of the ordinary
// in the payload just fed. It tells whether that payload may go on.
func (f *flight) inspect() bool {
	s := &f.str
	o := &f.obs
	if o.Failed() {
		ev, ok := f.healthyEnd()
		s.evidence = ev
		f.countViolation()
		return ok
	}
	return f.tolerate()
}

// ends tells which violations end an answer: those after which a client would
// act on what the model never said; when strict, also those that engines of
// other makes may show while all is well. Broken tool arguments never do:
// models write such. What is passed on is marked, see appendMark.
func (f *flight) ends(v wire.Violation) bool {
	switch v {
	case wire.ToolIndexCollision, wire.IDChanged, wire.BrokenJSON, wire.BrokenUTF8:
		return !f.p.opt.TolerateViolations
	case wire.ModelChanged, wire.ModelSubstitution, wire.MissingFinish:
		return f.p.opt.StrictIntegrity && !f.p.opt.TolerateViolations
	}
	return false
}

// appendMark discloses a violation that was seen before the head left and is
// passed on; what is seen later stands in the log and the metrics only.
func (f *flight) appendMark(dst []byte) []byte {
	if f.mark == wire.ViolationNone {
		return dst
	}
	return append(append(append(dst, "X-Stream-Integrity: "...), f.mark.String()...), "\r\n"...)
}

// tolerate decides on the violation that the observer has noted, if any.
func (f *flight) tolerate() bool {
	v := f.obs.Violation
	if mutant.On("no-integrity") || mutant.On("tool-index-collision") && v == wire.ToolIndexCollision {
		return true
	}
	f.countViolation()
	if v == wire.ViolationNone || !f.ends(v) {
		return true
	}
	f.str.evidence = fleet.EvidenceProtocol
	f.str.endErr = wire.NewError(wire.CodeStreamIntegrity, "the replica sent a stream that breaks its protocol: %s", v)
	return false
}

func (f *flight) countViolation() {
	if mutant.On("no-integrity") || mutant.On("tool-index-collision") && f.obs.Violation == wire.ToolIndexCollision {
		return
	}
	if v := f.obs.Violation; v != wire.ViolationNone && !f.str.counted {
		f.str.counted, f.mark = true, v
		f.p.metrics.integrity[v].Inc()
	}
}

// healthyEnd tells whether the events seen make a whole answer.
func (f *flight) healthyEnd() (fleet.Evidence, bool) {
	o := &f.obs
	if o.Usage.Seen {
		f.usage = o.Usage
	}
	switch o.Ended() {
	case wire.EndOK:
		return fleet.EvidenceOK, true
	case wire.EndAbort, wire.EndEmpty:
		return fleet.EvidenceAbort, mutant.On("abort-as-success")
	case wire.EndError:
		// The client's own fault goes back as the replica said it.
		return evidenceOfClass(o.ErrorClass), o.ErrorClass == wire.ErrorClient
	}
	return fleet.EvidenceReset, false
}

// evidenceOfClass is what an error from a replica tells of it.
func evidenceOfClass(c wire.ErrorClass) fleet.Evidence {
	switch c {
	case wire.ErrorBusy:
		return fleet.EvidenceBusy
	case wire.ErrorDraining:
		return fleet.EvidenceDraining
	case wire.ErrorEngineDead:
		return fleet.EvidenceEngineDead
	case wire.ErrorNone, wire.ErrorClient:
		return fleet.EvidenceOK
	}
	return fleet.EvidenceStatus5xx
}

// healthyAnswer tells whether the body of a 200 in one piece is an answer.
func (f *flight) healthyAnswer(b []byte) (fleet.Evidence, bool) {
	if t := bytes.TrimLeft(b, " \t\r\n"); len(t) == 0 || t[0] != '{' {
		return fleet.EvidenceProtocol, false // null, a list, a page: whatever it is, no answer
	}
	a := wire.ParseAnswer(f.req.kind, b, f.wanted()...)
	if a.Usage.Seen {
		f.usage = a.Usage
	}
	if a.Violation != wire.ViolationNone && !mutant.On("no-integrity") {
		f.p.metrics.integrity[a.Violation].Inc()
		f.mark = a.Violation
		if f.ends(a.Violation) {
			return fleet.EvidenceProtocol, false
		}
	}
	switch {
	case !a.Failed() || a.Err == wire.ErrorClient:
		return fleet.EvidenceOK, true
	case a.Aborted:
		return fleet.EvidenceAbort, mutant.On("abort-as-success")
	case a.Err != wire.ErrorNone:
		return evidenceOfClass(a.Err), false
	}
	return fleet.EvidenceProtocol, false
}
