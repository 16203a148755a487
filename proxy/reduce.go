package proxy

import (
	"strconv"

	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/ladder"
	"github.com/penstock/penstock/wire"
)

// reduceBody asks for less: optional tools are left out, the bytes of the bound
// on output tokens are replaced or put in. It is false when there is nothing to
// reduce.
func (f *flight) reduceBody(t *ladder.Tier) bool {
	if f.req.kind != wire.KindChat && f.req.kind != wire.KindCompletions {
		return false
	}
	whole := f.req.body
	if t.DropTools && f.req.kind == wire.KindChat && !f.p.opt.Classes[f.req.classIndex].Exact {
		if less, ok := wire.DropTools(nil, f.req.body); ok {
			f.req.body = less
			f.rescan()
		}
	}
	if b := &f.body; t.MaxTokens > 0 && (b.MaxOut == 0 || b.MaxOut > t.MaxTokens) {
		n := strconv.Itoa(t.MaxTokens)
		if b.MaxOut > 0 {
			f.req.body = wire.SpliceRaw(nil, f.req.body, b.MaxOutStart, b.MaxOutEnd, n)
		} else {
			f.req.body = b.SpliceInsert(nil, f.req.body, "max_tokens", n)
		}
		f.rescan()
	}
	if len(f.req.body) == len(whole) && &f.req.body[0] == &whole[0] {
		return false
	}
	f.climb.whole = whole
	return true
}

func (f *flight) restoreBody() {
	if w := f.climb.whole; w != nil {
		f.req.body, f.climb.whole = w, nil
		f.rescan()
	}
}

// rescan reads a body that the router itself rewrote; what the core is told
// follows.
func (f *flight) rescan() {
	if e := f.body.Scan(f.req.kind, string(f.req.ctype), f.req.body); e != nil {
		panic("BUG: a rewritten body is not valid: " + e.Message)
	}
	w, b := &f.ticket.Work, &f.body
	w.MaxOut, w.Needs, w.Blocks, w.Bytes, w.ASCII, w.Other, w.Media = b.MaxOut, needs(b), b.Blocks, len(f.req.body), b.ASCII, b.Other, b.MediaParts
}

// needs are the abilities that a request asks of a replica.
func needs(b *wire.Body) (n uint64) {
	for _, a := range [...]struct {
		has bool
		bit uint64
	}{{b.HasTools, fleet.AbilityTools}, {b.HasImages, fleet.AbilityImages}, {b.HasAudio, fleet.AbilityAudio}, {b.HasVideo, fleet.AbilityVideo}} {
		if a.has {
			n |= a.bit
		}
	}
	return n
}
