//go:build !race

package apptest

const raceOn = false
