package console

import (
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// protect sets the headers of every answer and refuses what another site's
// page makes a browser send: there is no login that would stop it. Two ways
// lead here: a request across origins, and a name of the other site's that
// resolves to this address (DNS rebinding), for which all is one origin.
func protect(next http.Handler, hosts func() []string) http.Handler {
	cross := http.NewCrossOriginProtection()
	cross.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fail(w, http.StatusForbidden, "cross_origin", "a page of another site may not change anything here")
	}))
	inner := cross.Handler(next)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		hd := w.Header()
		hd.Set("X-Content-Type-Options", "nosniff")
		hd.Set("Content-Security-Policy", "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'")
		hd.Set("Referrer-Policy", "no-referrer")
		hd.Set("Cache-Control", "no-store")
		if r.URL.Path != "/healthz" && r.URL.Path != "/readyz" && !knownHost(r.Host, hosts) {
			fail(w, http.StatusMisdirectedRequest, "misdirected_request", "the admin listener is not asked by this host name; name it in admin_hosts if it is one of yours")
			return
		}
		inner.ServeHTTP(w, r)
	})
}

// knownHost tells whether a Host header names this listener. An IP address
// does: a page that was loaded from it was served here. No Host at all is no
// browser.
func knownHost(host string, also func() []string) bool {
	if host == "" {
		return true
	}
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.TrimSuffix(strings.Trim(host, "[]"), ".")
	if _, err := netip.ParseAddr(host); err == nil {
		return true
	}
	if strings.EqualFold(host, "localhost") || len(host) > 10 && strings.EqualFold(host[len(host)-10:], ".localhost") {
		return true
	}
	for _, h := range also() {
		if strings.EqualFold(host, h) {
			return true
		}
	}
	return false
}
