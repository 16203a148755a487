//go:build race

package wire

// raceOn: the race detector makes sync.Pool forget things, to find more.
const raceOn = true
