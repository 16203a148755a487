package main

import (
	"time"

	"go.uber.org/zap"

	"github.com/penstock/penstock/scraper"
)

// change lets replicas leave and join. An unchanged one keeps its account,
// its learned scales and its health, also when only its labels are others.
func (a *app) change(pool string, added, removed []scraper.Target) {
	a.fleetMu.Lock()
	defer a.fleetMu.Unlock()
	p := a.pool(pool)
	for _, t := range removed {
		if m := a.members[pool+" "+t.Key()]; m != nil {
			m.leaving = time.Now()
		}
	}
	for _, t := range added {
		key := pool + " " + t.Key()
		if m := a.members[key]; m != nil {
			// It was to leave, or has other labels: it stays.
			same := m.target.Host == t.Host
			m.leaving, m.target = time.Time{}, t
			if m.joined {
				a.join(m)
			}
			if !same {
				a.scraper.Remove(m.id)
				a.scraper.Add(scraped(p, m))
			}
			continue
		}
		a.lastID++
		m := &member{id: a.lastID, pool: pool, target: t}
		a.members[key] = m
		a.byID[m.id] = m
		if len(p.Models) > 0 {
			a.join(m)
		}
		a.scraper.Add(scraped(p, m))
		a.log.Info("replica found", zap.String("pool", pool), zap.String("replica", t.Name), zap.String("addr", t.Addr))
	}
	a.leave(pool, false)
}

// leaveGrace is how long the last replicas of a pool stay when all of them are
// replaced at once, until one of the new ones has said what it serves: before
// that there would be nobody to take a request.
const leaveGrace = 5 * time.Second

// leave takes the members of a pool out that no source names any more, if
// another one has joined, or none is to come, or (late) after leaveGrace.
func (a *app) leave(pool string, late bool) {
	var out []*member
	stays, comes := false, false
	for _, m := range a.members {
		switch {
		case m.pool != pool:
		case !m.leaving.IsZero():
			if !late || time.Since(m.leaving) >= leaveGrace {
				out = append(out, m)
			}
		case len(m.serves) > 0: // has joined, and it is known for what
			stays = true
		default:
			comes = true
		}
	}
	if len(out) == 0 {
		return
	}
	if comes && !stays && !late {
		time.AfterFunc(leaveGrace, func() {
			a.fleetMu.Lock()
			defer a.fleetMu.Unlock()
			a.leave(pool, true)
		})
		return
	}
	for _, m := range out {
		delete(a.members, pool+" "+m.target.Key())
		delete(a.byID, m.id)
		a.hints.Delete(m.id)
		a.scraper.Remove(m.id)
		a.proxy.RemoveReplica(m.id)
		a.log.Info("replica leaves", zap.String("pool", pool), zap.String("replica", m.target.Name))
	}
}
