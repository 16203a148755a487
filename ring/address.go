package ring

import (
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
)

// DefaultPort is the port of peers, of memberlist by custom.
const DefaultPort = 7946

// hostPort splits host, :port, host:port or [v6]:port.
func hostPort(s string, port int) (string, int, error) {
	host, p, err := net.SplitHostPort(s)
	if err != nil {
		if ip := net.ParseIP(s); ip != nil || !strings.Contains(s, ":") {
			return s, port, nil
		}
		return "", 0, err
	}
	if p == "" {
		return host, port, nil
	}
	n, err := strconv.ParseUint(p, 10, 16)
	if err != nil {
		return "", 0, fmt.Errorf("%q: no such port", s)
	}
	return host, int(n), nil
}

// parseBind reads where to listen. A nil IP is all of them.
func parseBind(s string) (net.IP, int, error) {
	host, port, err := hostPort(s, DefaultPort)
	if err != nil || host == "" {
		if err != nil {
			err = fmt.Errorf("%q is not IP:port, :port or IP", s)
		}
		return nil, port, err
	}
	ip := net.ParseIP(host)
	if ip == nil {
		return nil, 0, fmt.Errorf("%q is not an IP address: write it as 10.0.0.1:%d, or :%d for all of the host's", host, DefaultPort, DefaultPort)
	}
	return ip, port, nil
}

// parseAdvertise reads what peers are told; port is for one that says none.
func parseAdvertise(s string, port int) (netip.AddrPort, error) {
	host, n, err := hostPort(s, port)
	if err != nil || n == 0 {
		return netip.AddrPort{}, fmt.Errorf("%q is not IP or IP:port", s)
	}
	ip, err := netip.ParseAddr(host)
	switch {
	case err != nil:
		return netip.AddrPort{}, fmt.Errorf("%q is not an IP address: write it as 10.0.0.1 or 10.0.0.1:%d", host, DefaultPort)
	case ip.IsUnspecified():
		return netip.AddrPort{}, fmt.Errorf("%s is no address that peers could send to: write this host's own", ip)
	}
	return netip.AddrPortFrom(ip.Unmap(), uint16(n)), nil
}

var hostName = regexp.MustCompile(`^[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?$`)

// checkJoin tells what is wrong with an entry of the join list.
func checkJoin(s string) error {
	host, port, err := hostPort(s, DefaultPort)
	if err != nil || port == 0 || net.ParseIP(host) == nil && !hostName.MatchString(host) {
		return fmt.Errorf("%q is not host or host:port: write it as router-2.internal, 10.0.0.2 or 10.0.0.2:%d", s, DefaultPort)
	}
	return nil
}
