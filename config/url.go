package config

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
)

// ReplicaURL normalises the root URL of a replica to scheme://host:port/base,
// the form in which two are compared. host:port alone means http.
func ReplicaURL(s string) (string, error) {
	s = strings.TrimSpace(s)
	if s == "" {
		return "", errors.New("the replica URL is empty")
	}
	raw := s
	if !strings.Contains(s, "://") {
		if strings.HasPrefix(s, "/") {
			return "", fmt.Errorf("%q has no host: write it as http://host:8000", raw)
		}
		s = "http://" + s
	}
	u, err := url.Parse(s)
	if err != nil {
		if strings.Count(s, ":") > 3 && !strings.Contains(s, "[") {
			return "", fmt.Errorf("%q: write an IPv6 address in brackets, as http://[::1]:8000", raw)
		}
		return "", fmt.Errorf("%q is not a URL: write it as http://host:8000", raw)
	}
	host, port := u.Hostname(), u.Port()
	switch {
	case u.Scheme != "http" && u.Scheme != "https":
		return "", fmt.Errorf("%q: scheme %q is not http or https", raw, u.Scheme)
	case u.User != nil:
		return "", errors.New("a replica URL must not carry a user or password: use api_key_file")
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		return "", fmt.Errorf("%q: a replica URL has no query and no fragment", raw)
	case host == "":
		return "", fmt.Errorf("%q has no host: write it as http://host:8000", raw)
	case strings.Contains(host, ":") && !strings.Contains(u.Host, "["):
		return "", fmt.Errorf("%q: write an IPv6 address in brackets, as http://[::1]:8000", raw)
	case strings.Trim(u.Path, "/") == "v1":
		return "", fmt.Errorf("%q: leave /v1 out, the API's paths are added: %s://%s", raw, u.Scheme, u.Host)
	case strings.Contains(u.EscapedPath(), "//") || strings.Contains(u.EscapedPath(), "%") || strings.HasSuffix(u.Path, "/v1"):
		return "", fmt.Errorf("%q: %q is not a base path", raw, u.EscapedPath())
	}
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return "", fmt.Errorf("%q: port %q is not from 1 to 65535", raw, port)
	}
	return u.Scheme + "://" + net.JoinHostPort(strings.ToLower(host), port) + strings.TrimSuffix(u.Path, "/"), nil
}

// listenAddr checks host:port of an own listener.
func listenAddr(s string) error {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return fmt.Errorf("%q is not an address to listen on: write it as :8080 or 127.0.0.1:9090", s)
	}
	if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
		return fmt.Errorf("%q: port %q is not from 0 to 65535", s, port)
	}
	if strings.ContainsAny(host, " /") {
		return fmt.Errorf("%q: %q is not a host", s, host)
	}
	return nil
}
