package ladder

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/penstock/penstock/internal/mutant"
)

// MaxValidationAge is how old a tier's last good validation may be.
const MaxValidationAge = 24 * time.Hour

// Validation says how a model downgrade is shown to do the work: a set of
// prompts with a pass threshold.
type Validation struct {
	Route   string
	Pool    string
	Model   string
	Prompts string        // JSON lines: {"prompt":…,"contains":…} or {"messages":[…],"contains":…}
	Pass    float64       // share of prompts that have to pass, 0 to 1
	Every   time.Duration // how often it is to be run; at most 24 h counts
}

// Key names the validation in the record.
func (v *Validation) Key() string { return v.Route + "/" + v.Pool + "/" + v.Model }

// Result is one line of the record: what the last validation that could be
// run has shown.
type Result struct {
	At     time.Time `json:"at"`
	Share  float64   `json:"share"`            // of the prompts that passed
	Failed string    `json:"failed,omitempty"` // why that is not enough
}

// Record is what the last validation of each tier has shown. It is one small
// JSON file in the state folder.
type Record map[string]Result

// RecordFile is the record's place in the state folder.
func RecordFile(stateDir string) string { return filepath.Join(stateDir, "validations.json") }

// LoadRecord reads the record; no file is an empty record.
func LoadRecord(file string) (Record, error) {
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return Record{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("validation record: %w", err)
	}
	r := Record{}
	if err := json.Unmarshal(b, &r); err != nil {
		return nil, fmt.Errorf("validation record %s: %w", file, err)
	}
	return r, nil
}

// Save replaces the record in one step.
func (r Record) Save(file string) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	tmp := file + ".new"
	if err := os.WriteFile(tmp, append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("validation record: %w", err)
	}
	return os.Rename(tmp, file)
}

// Good tells whether v may be used: its last validation was passed, within
// 24 h before now. One that failed takes the tier out of use at once, also when
// it passed shortly before.
func (r Record) Good(v *Validation, now time.Time) bool {
	return r.Why(v, now) == "" || mutant.On("untested-fallback")
}

// Why tells for what reason v may not be used; "" = it may.
func (r Record) Why(v *Validation, now time.Time) string {
	p, ok := r[v.Key()]
	switch {
	case !ok:
		return "did not pass a validation within 24h"
	case p.Failed != "":
		return fmt.Sprintf("failed its validation of %s: %s", p.At.UTC().Format(time.RFC3339), p.Failed)
	case p.Share < v.Pass:
		return fmt.Sprintf("passed %.0f %% of its validation of %s, and needs %.0f %%", p.Share*100, p.At.UTC().Format(time.RFC3339), v.Pass*100)
	case now.Sub(p.At) > MaxValidationAge:
		return fmt.Sprintf("did not pass a validation within 24h (the last one at %s)", p.At.UTC().Format(time.RFC3339))
	}
	return ""
}

// Due tells whether v is to be run again: it is out of use, or its last pass is
// older than v.Every.
func (r Record) Due(v *Validation, now time.Time) bool {
	return r.Why(v, now) != "" || now.Sub(r[v.Key()].At) >= v.Every
}

type prompt struct {
	Prompt   string            `json:"prompt"`
	Messages []json.RawMessage `json:"messages"`
	Contains string            `json:"contains"`
}

// CheckPrompts tells whether file can be used as a validation's prompts.
func CheckPrompts(file string) error {
	_, err := readPrompts(file)
	return err
}

func readPrompts(file string) ([]prompt, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var out []prompt
	sc := bufio.NewScanner(f)
	sc.Buffer(nil, 8<<20)
	for n := 1; sc.Scan(); n++ {
		if len(bytes.TrimSpace(sc.Bytes())) == 0 {
			continue
		}
		var p prompt
		// Strictly: with a slip in "contains" any answer would pass.
		dec := json.NewDecoder(bytes.NewReader(sc.Bytes()))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&p); err != nil {
			return nil, fmt.Errorf(`%s:%d: not a line of JSON like {"prompt": "...", "contains": "..."}: %w`, file, n, err)
		}
		if dec.More() {
			return nil, fmt.Errorf("%s:%d: more than one value in the line", file, n)
		}
		if (p.Prompt == "") == (len(p.Messages) == 0) {
			return nil, fmt.Errorf(`%s:%d: needs "prompt" or "messages"`, file, n)
		}
		out = append(out, p)
	}
	if len(out) == 0 && sc.Err() == nil {
		return nil, fmt.Errorf("%s: holds no prompt", file)
	}
	return out, sc.Err()
}
