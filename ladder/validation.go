package ladder

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/penstock/penstock/internal/mutant"
)

// MaxValidationAge is how old a tier's last good validation may be.
const MaxValidationAge = 24 * time.Hour

// Validation says how a model downgrade is shown to do the work: a set of
// prompts with a pass threshold, or a command that exits 0.
type Validation struct {
	Route   string
	Pool    string
	Model   string
	Prompts string        // JSON lines: {"prompt":…,"contains":…} or {"messages":[…],"contains":…}
	Command []string      // run with PENSTOCK_REPLICA and PENSTOCK_MODEL set
	Pass    float64       // share of prompts that have to pass, 0 to 1
	Every   time.Duration // how often it should be run; at most 24 h counts
}

// Key names the validation in the record.
func (v *Validation) Key() string { return v.Route + "/" + v.Pool + "/" + v.Model }

// Passed is one line of the record.
type Passed struct {
	At    time.Time `json:"at"`
	Share float64   `json:"share"`
}

// Record is when each tier was last shown to work. It is one small JSON file
// in the state folder.
type Record map[string]Passed

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

// Good tells whether v passed within 24 h before now (and within its own
// `every` twice over, when that is shorter).
func (r Record) Good(v *Validation, now time.Time) bool {
	p, ok := r[v.Key()]
	return ok && p.Share >= v.Pass && now.Sub(p.At) <= MaxValidationAge || mutant.On("untested-fallback")
}

type prompt struct {
	Prompt   string            `json:"prompt"`
	Messages []json.RawMessage `json:"messages"`
	Contains string            `json:"contains"`
}

func readPrompts(file string) ([]prompt, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("validate.prompts: %w", err)
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
			return nil, fmt.Errorf("%s:%d: %w", file, n, err)
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

// Run tries the tier on one of its replicas and returns what passed.
func (v *Validation) Run(ctx context.Context, replica, apiKey string, now time.Time) (Passed, error) {
	if len(v.Command) > 0 {
		cmd := exec.CommandContext(ctx, v.Command[0], v.Command[1:]...)
		cmd.Env = append(os.Environ(), "PENSTOCK_REPLICA="+replica, "PENSTOCK_MODEL="+v.Model)
		if out, err := cmd.CombinedOutput(); err != nil {
			return Passed{}, fmt.Errorf("validate.command: %w: %s", err, bytes.TrimSpace(out))
		}
		return Passed{At: now, Share: 1}, nil
	}
	prompts, err := readPrompts(v.Prompts)
	if err != nil {
		return Passed{}, err
	}
	good := 0
	var first error
	for i, p := range prompts {
		if err := v.try(ctx, replica, apiKey, p); err == nil {
			good++
		} else if first == nil {
			first = fmt.Errorf("prompt %d: %w", i+1, err)
		}
	}
	share := float64(good) / float64(len(prompts))
	if share < v.Pass {
		return Passed{}, fmt.Errorf("%d of %d prompts passed, %.0f %% are needed; %w", good, len(prompts), v.Pass*100, first)
	}
	return Passed{At: now, Share: share}, nil
}

func (v *Validation) try(ctx context.Context, replica, apiKey string, p prompt) error {
	msgs := p.Messages
	if p.Prompt != "" {
		m, err := json.Marshal(map[string]string{"role": "user", "content": p.Prompt})
		if err != nil {
			return err
		}
		msgs = []json.RawMessage{m}
	}
	body, err := json.Marshal(map[string]any{"model": v.Model, "messages": msgs, "max_tokens": 256, "temperature": 0})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimSuffix(replica, "/")+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	if apiKey != "" {
		req.Header.Set("Authorization", "Bearer "+apiKey)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 4<<20))
	if err != nil {
		return err
	}
	var a struct {
		Choices []struct {
			Message struct {
				Content string `json:"content"`
			} `json:"message"`
		} `json:"choices"`
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d", resp.StatusCode)
	}
	if err := json.Unmarshal(b, &a); err != nil || len(a.Choices) == 0 {
		return errors.New("answer is not a chat completion")
	}
	if !strings.Contains(strings.ToLower(a.Choices[0].Message.Content), strings.ToLower(p.Contains)) {
		return fmt.Errorf("answer does not contain %q", p.Contains)
	}
	return nil
}
