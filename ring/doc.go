// Package ring lets several routers act as one: membership and transport
// (memberlist), each router's own account per replica and health evidence as
// absolute values, and the consistent hash that places new prefixes.
//
// Most of it is pure (no I/O, no clock, no goroutine, no random source):
// hash.go (where a prefix goes), state.go (what a router says, and how two such
// states merge), peers.go (which routers count) and codec.go with encode.go
// (the bytes of a datagram). node.go and its neighbours do the I/O around them.
//
// A replica's identity between routers is its name (host:port and base path),
// hashed to 40 bits: fleet.IDs are each router's own.
package ring
