package scraper

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// maxTargets bounds a target file or HTTP answer, bytes.
const maxTargets = 10 << 20

// group is Prometheus' target group, in file_sd and http_sd.
type group struct {
	Targets []string          `json:"targets" yaml:"targets"`
	Labels  map[string]string `json:"labels" yaml:"labels"`
}

// File watches a file in Prometheus' file_sd format, JSON or (.yml, .yaml)
// YAML. Its whole content is compared at each look: files of targets are
// small, and mtimes lie after a restore, a bind mount or a fast second write.
func File(path string, o SourceOptions) Source {
	o = o.withDefaults(2 * time.Second)
	var last []byte
	var list []Target
	return &poller{o: o, what: "target file " + path, names: newNames(o), look: func(context.Context) ([]Target, error) {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		b, err := readBounded(f)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		if last != nil && string(b) == string(last) {
			return list, nil
		}
		ext := strings.ToLower(filepath.Ext(path))
		now, err := readGroups(b, ext == ".yml" || ext == ".yaml")
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		last, list = b, now
		return list, nil
	}}
}

// HTTP asks an endpoint in Prometheus' http_sd format.
func HTTP(endpoint string, o SourceOptions) Source {
	shown := endpoint
	if u, err := url.Parse(endpoint); err == nil {
		shown = u.Redacted()
	}
	o = o.withDefaults(30 * time.Second)
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{Proxy: http.ProxyFromEnvironment, DisableKeepAlives: true}}
	return &poller{o: o, what: "target endpoint", names: newNames(o), look: func(ctx context.Context) ([]Target, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, endpoint, nil)
		if err != nil {
			return nil, err
		}
		req.Header.Set("Accept", "application/json")
		req.Header.Set("User-Agent", "penstock")
		resp, err := client.Do(req)
		if err != nil {
			return nil, err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return nil, fmt.Errorf("%s answered %d", shown, resp.StatusCode)
		}
		b, err := readBounded(resp.Body)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", shown, err)
		}
		list, err := readGroups(b, false)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", shown, err)
		}
		return list, nil
	}}
}

func readBounded(r io.Reader) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxTargets+1))
	if err == nil && len(b) > maxTargets {
		err = fmt.Errorf("more than %d bytes of targets", maxTargets)
	}
	return b, err
}

// readGroups reads a list of target groups. One bad target refuses the whole
// list, as a typo must not take the others' place silently.
func readGroups(b []byte, isYAML bool) ([]Target, error) {
	var groups []group
	var err error
	if isYAML {
		err = yaml.Unmarshal(b, &groups)
	} else {
		err = json.Unmarshal(b, &groups)
	}
	if err != nil {
		return nil, fmt.Errorf("not a list of target groups: %w", err)
	}
	if groups == nil { // an empty file is one that is being written
		return nil, errors.New("not a list of target groups: it is empty (write [] for no targets)")
	}
	out := []Target{}
	for _, g := range groups {
		scheme := g.Labels["__scheme__"]
		if scheme == "" {
			scheme = "http"
		}
		labels := map[string]string{}
		for k, v := range g.Labels {
			if !strings.HasPrefix(k, "__") {
				labels[k] = v
			}
		}
		for _, s := range g.Targets {
			t, err := parseTarget(s, scheme)
			if err != nil {
				return nil, err
			}
			t.Labels = labels
			out = append(out, t)
		}
	}
	return out, nil
}
