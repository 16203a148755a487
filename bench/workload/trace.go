package workload

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"sort"
	"strconv"
	"strings"
	"time"
)

// TraceOptions say how a recorded trace is replayed.
type TraceOptions struct {
	Speed    float64 // time runs so many times as fast; default 1
	Skip     float64 // seconds of the trace left out at its start
	Duration float64 // seconds of the trace, 0 = all
	Max      int     // most requests, 0 = all
	Jitter   float64 // seconds; arrivals are spread evenly over this much after their stamp (Mooncake's are quantised to 3 s)
	Seed     uint64
}

// mooncakeBlock is the number of tokens that one hash id of a Mooncake trace
// stands for.
const mooncakeBlock = 512

// ReadTrace reads a trace file: Mooncake JSON lines (timestamp in ms, lengths,
// hash_ids) or an Azure CSV (TIMESTAMP, ContextTokens, GeneratedTokens).
func ReadTrace(path string, o TraceOptions) ([]Request, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	defer func() { _ = f.Close() }()
	var out []Request
	if strings.HasSuffix(path, ".csv") {
		out, err = azure(f)
	} else {
		out, err = mooncake(f)
	}
	if err != nil {
		return nil, fmt.Errorf("trace %s: %w", path, err)
	}
	return Cut(out, o), nil
}

func mooncake(f io.Reader) ([]Request, error) {
	sc := bufio.NewScanner(f)
	sc.Buffer(nil, 16<<20)
	var out []Request
	for line := 1; sc.Scan(); line++ {
		if len(strings.TrimSpace(sc.Text())) == 0 {
			continue
		}
		var r struct {
			Timestamp float64  `json:"timestamp"`
			In        int      `json:"input_length"`
			Out       int      `json:"output_length"`
			Hash      []uint64 `json:"hash_ids"`
		}
		if err := json.Unmarshal(sc.Bytes(), &r); err != nil {
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
		q := Request{At: r.Timestamp / 1e3, Prompt: max(1, r.In), Out: max(1, r.Out), Session: line}
		hash, left := uint64(1), q.Prompt
		for _, id := range r.Hash {
			n := min(mooncakeBlock, left)
			if n <= 0 {
				break
			}
			hash = Chain(hash, id)
			q.Segs = append(q.Segs, Seg{id, hash, n})
			left -= n
		}
		if left > 0 {
			id := mix(uint64(line) ^ 0x7a11)
			q.Segs = append(q.Segs, Seg{id, Chain(hash, id), left})
		}
		out = append(out, q)
	}
	return out, sc.Err()
}

func azure(f io.Reader) ([]Request, error) {
	sc := bufio.NewScanner(f)
	var out []Request
	var first time.Time
	for line := 1; sc.Scan(); line++ {
		parts := strings.Split(strings.TrimSpace(sc.Text()), ",")
		if line == 1 || len(parts) < 3 {
			continue
		}
		at, err := time.Parse("2006-01-02 15:04:05.9999999", parts[0])
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
		in, err1 := strconv.Atoi(parts[1])
		gen, err2 := strconv.Atoi(parts[2])
		if err1 != nil || err2 != nil {
			return nil, fmt.Errorf("line %d: lengths %q, %q are no numbers", line, parts[1], parts[2])
		}
		if first.IsZero() {
			first = at
		}
		id := mix(uint64(line) ^ 0xa2)
		in = max(1, in)
		out = append(out, Request{At: at.Sub(first).Seconds(), Prompt: in, Out: max(1, gen), Session: line,
			Segs: []Seg{{id, Chain(2, id), in}}})
	}
	return out, sc.Err()
}

// Cut takes from a whole trace what the options say.
func Cut(in []Request, o TraceOptions) []Request {
	if o.Speed <= 0 {
		o.Speed = 1
	}
	rng := rand.New(rand.NewPCG(o.Seed, 0x7ace))
	var out []Request
	for _, r := range in {
		r.At -= o.Skip
		if r.At < 0 || o.Duration > 0 && r.At >= o.Duration {
			continue
		}
		r.At = (r.At + o.Jitter*rng.Float64()) / o.Speed
		out = append(out, r)
	}
	sort.SliceStable(out, func(i, j int) bool { return out[i].At < out[j].At })
	if o.Max > 0 && len(out) > o.Max {
		out = out[:o.Max]
	}
	return out
}

// words are short, and one token each for the usual tokenizers.
var words = strings.Fields("the and for are but not you all any can had her was one our out day get has him his how man new now old see two way who boy did its let put say she too use war act add age ago air arm art ask bad bag bar bed bit box bus buy car cut dog dry due eat egg end eye far few fit fly fun gas god guy hit hot ice job key kid lay leg lie lot low map may mix net oil own pay per red run sea set sit six sky son sun tax tea ten tie top try win yes yet")

// Text is the text of a run: as many short words as it has tokens, the same
// for the same ID. With its spaces it has four bytes per token.
func Text(id uint64, tokens int) string {
	var b strings.Builder
	b.Grow(4 * tokens)
	x := id
	for i := 0; i < tokens; i++ {
		if i%8 == 0 {
			x = mix(x)
		}
		b.WriteString(words[(x>>(8*uint(i%8)))&0xff%uint64(len(words))])
		b.WriteByte(' ')
	}
	return b.String()
}
