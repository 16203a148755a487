package ring

import (
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
)

// logWriter takes memberlist's log lines: those of warnings and errors go to
// the log, a few a minute; the rest only at the debug level.
type logWriter struct {
	log    *zap.Logger
	forged func() // called for a stream that no key opens

	mu         sync.Mutex
	since      time.Time
	written    int
	suppressed int
}

const (
	logPeriod   = time.Minute
	logMostInIt = 6
)

func (w *logWriter) Write(p []byte) (int, error) {
	line := strings.TrimSpace(string(p))
	level, text, ok := strings.Cut(line, " memberlist: ")
	if !ok {
		level, text = "", line
	}
	// memberlist says only here that a stream was not encrypted with a known key.
	if strings.HasPrefix(text, "failed to receive: ") && (strings.Contains(text, "decrypt") || strings.Contains(text, "encrypt")) {
		w.forged()
	}
	if level != "[WARN]" && level != "[ERR]" {
		w.log.Debug("memberlist: " + text)
		return len(p), nil
	}
	w.mu.Lock()
	now := time.Now()
	if now.Sub(w.since) >= logPeriod {
		w.since, w.written = now, 0
	}
	w.written++
	pass, left := w.written <= logMostInIt, w.suppressed
	if pass {
		w.suppressed = 0
	} else {
		w.suppressed++
	}
	w.mu.Unlock()
	if pass {
		w.log.Info("memberlist: "+text, zap.Int("suppressed_before", left))
	}
	return len(p), nil
}
