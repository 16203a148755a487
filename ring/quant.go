package ring

import "math/bits"

// q16 is a non-negative number in 16 bits, 5 of exponent and 11 of fraction:
// whole numbers under 4096 are exact, larger ones right to 1 part in 4096.
type q16 uint16

// q8 is an age in 8 bits, 4 of exponent and 4 of fraction, in milliseconds:
// right to 1 part in 32, up to 507 s. q8Never says that there is none.
type q8 uint8

const (
	q8Never q8 = 255
	q8Top   q8 = 254
)

// mini rounds v to a float with m bits of fraction and a hidden one, without
// sign, as its ordered code.
func mini(v uint64, m int) uint64 {
	if v < 1<<m {
		return v
	}
	e := bits.Len64(v) - 1 - m // how far to shift so that m+1 bits are left
	if e > 0 {
		v += 1 << (e - 1) // to nearest
		if bits.Len64(v)-1-m > e {
			e++
		}
	}
	return uint64(e+1)<<m | (v>>e)&(1<<m-1)
}

func unmini(c uint64, m int) uint64 {
	e := c >> m
	if e == 0 {
		return c
	}
	return (c&(1<<m-1) | 1<<m) << (e - 1)
}

// quant16 returns the code of v; negative and NaN are 0, too large is the top.
func quant16(v float64) q16 {
	if !(v > 0) {
		return 0
	}
	if v >= 1<<40 {
		return 1<<16 - 1
	}
	return q16(min(mini(uint64(v+0.5), 11), 1<<16-1))
}

func (q q16) float() float64 { return float64(unmini(uint64(q), 11)) }

// quantAge returns the code of an age in seconds; negative is 0, too large the top.
func quantAge(s float64) q8 {
	if !(s > 0) {
		return 0
	}
	if s >= 508 {
		return q8Top
	}
	return q8(min(mini(uint64(s*1000+0.5), 4), uint64(q8Top)))
}

// seconds is the age; what it is for q8Never the caller has to know.
func (q q8) seconds() float64 { return float64(unmini(uint64(q), 4)) / 1000 }
