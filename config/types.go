package config

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Size is a number of bytes, written with its unit: 512KiB, 32MiB, 1GiB
// (powers of 1,024) or KB, MB, GB (powers of 1,000).
type Size int64

// Ratio is a share from 0 to 1, written 20% or 0.2.
type Ratio float64

// Seconds is a time with more precision than a Duration (cost coefficients
// are fractions of a nanosecond), written with its unit: 16.8us, 0.92ns.
type Seconds float64

// Headroom is the share of a pool's token-work kept free for the top class.
type Headroom struct {
	Share   Ratio
	NMinus1 bool // what the loss of the largest replica would need
}

// Rate is per second, written 20/s, 100/m or 2M/h.
type Rate float64

// Secret is a text that is never printed.
type Secret string

// String hides the secret.
func (Secret) String() string { return "[secret]" }

// GoString hides the secret.
func (Secret) GoString() string { return "[secret]" }

// Value is the secret itself.
func (s Secret) Value() string { return string(s) }

func (h Headroom) String() string {
	if h.NMinus1 {
		return "n-1"
	}
	return h.Share.String()
}

func (r Ratio) String() string { return strconv.FormatFloat(float64(r)*100, 'g', 6, 64) + "%" }

// split cuts "12.5MiB" into its number and its unit.
func split(s string) (num, unit string) {
	s = strings.TrimSpace(s)
	i := len(s)
	for i > 0 && (s[i-1] < '0' || s[i-1] > '9') && s[i-1] != '.' {
		i--
	}
	return s[:i], strings.TrimSpace(s[i:])
}

// ParseSize reads a size with its unit.
func ParseSize(s string) (Size, error) {
	num, unit := split(s)
	mult := map[string]float64{"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
	f, err := strconv.ParseFloat(num, 64)
	switch {
	case err != nil || math.IsNaN(f):
		return 0, fmt.Errorf("%q is not a size: write it as 512KiB or 32MiB", s)
	case unit == "" && f == 0:
		return 0, nil
	case unit == "":
		return 0, fmt.Errorf("%q has no unit: write it as 512KiB or 32MiB", s)
	case mult == 0:
		return 0, fmt.Errorf("%q is not a unit of size (B, KiB, MiB, GiB, KB, MB, GB)", unit)
	case f < 0:
		return 0, fmt.Errorf("%q is negative", s)
	case f*mult > 1<<50:
		return 0, fmt.Errorf("%q is too large", s)
	}
	return Size(f * mult), nil
}

// ParseDuration reads a duration with its unit; negative ones are refused.
func ParseDuration(s string) (time.Duration, error) {
	d, err := time.ParseDuration(strings.TrimSpace(s))
	if err != nil {
		if _, ferr := strconv.ParseFloat(s, 64); ferr == nil {
			return 0, fmt.Errorf("%q has no unit: write it as 250ms, 5s, 10m or 24h", s)
		}
		return 0, fmt.Errorf("%q is not a duration: write it as 250ms, 5s, 10m or 24h", s)
	}
	if d < 0 {
		return 0, fmt.Errorf("%q is negative", s)
	}
	return d, nil
}

// ParseSeconds reads a small time with its unit, precise below a nanosecond.
func ParseSeconds(s string) (Seconds, error) {
	num, unit := split(s)
	mult := map[string]float64{"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1}[unit]
	f, err := strconv.ParseFloat(num, 64)
	switch {
	case err != nil || math.IsNaN(f):
		return 0, fmt.Errorf("%q is not a time: write it as 6.4ms, 16.8us or 0.92ns", s)
	case f == 0:
		return 0, nil
	case unit == "":
		return 0, fmt.Errorf("%q has no unit: write it as 6.4ms, 16.8us or 0.92ns", s)
	case mult == 0:
		return 0, fmt.Errorf("%q is not a unit of time (ns, us, ms, s)", unit)
	case f < 0:
		return 0, fmt.Errorf("%q is negative", s)
	}
	return Seconds(f * mult), nil
}

// ParseRatio reads 20% or 0.2; the result is from 0 to 1.
func ParseRatio(s string) (Ratio, error) {
	num, unit := split(s)
	f, err := strconv.ParseFloat(num, 64)
	if err != nil || math.IsNaN(f) || (unit != "" && unit != "%") {
		return 0, fmt.Errorf("%q is not a share: write it as 20%%", s)
	}
	switch {
	case unit == "%":
		f /= 100
	case f > 1:
		return 0, fmt.Errorf("%q is over 1: did you mean %s%%?", s, num)
	}
	if f < 0 || f > 1 {
		return 0, fmt.Errorf("%q is outside 0%% to 100%%", s)
	}
	return Ratio(f), nil
}

// ParseHeadroom reads n-1 or a share under 100 %.
func ParseHeadroom(s string) (Headroom, error) {
	if strings.EqualFold(strings.TrimSpace(s), "n-1") {
		return Headroom{NMinus1: true}, nil
	}
	r, err := ParseRatio(s)
	if err != nil {
		return Headroom{}, fmt.Errorf("%q is not a headroom: write n-1 or a share as 20%%", s)
	}
	if r > 0.9 {
		return Headroom{}, errors.New("a headroom over 90% would keep nearly the whole pool idle")
	}
	return Headroom{Share: r}, nil
}

// ParseRate reads 20/s, 100/m or 2M/h.
func ParseRate(s string) (Rate, error) {
	num, per, ok := strings.Cut(strings.TrimSpace(s), "/")
	num, unit := split(num)
	f, err := strconv.ParseFloat(num, 64)
	mult := map[string]float64{"": 1, "k": 1e3, "K": 1e3, "M": 1e6}[unit]
	div := map[string]float64{"s": 1, "m": 60, "h": 3600}[strings.TrimSpace(per)]
	if !ok || err != nil || !(f >= 0 && f < 1e15) || mult == 0 || div == 0 {
		return 0, fmt.Errorf("%q is not a rate: write it as 20/s, 100/m or 2M/h", s)
	}
	return Rate(f * mult / div), nil
}

func (r *Rate) parse(s string) (err error)     { *r, err = ParseRate(s); return }
func (h *Headroom) parse(s string) (err error) { *h, err = ParseHeadroom(s); return }
func (s *Size) parse(t string) (err error)     { *s, err = ParseSize(t); return }
func (r *Ratio) parse(s string) (err error)    { *r, err = ParseRatio(s); return }
func (s *Seconds) parse(t string) (err error)  { *s, err = ParseSeconds(t); return }
func (s *Secret) parse(t string) error         { *s = Secret(t); return nil }
