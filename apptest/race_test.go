//go:build race

package apptest

const raceOn = true
