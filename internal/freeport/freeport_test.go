package freeport

import (
	"net"
	"runtime"
	"testing"
)

func TestAPortIsGivenOnce(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("ports are kept on Linux only")
	}
	seen := map[string]bool{}
	for range 300 {
		a := Addr(t)
		if seen[a] {
			t.Fatalf("%s twice", a)
		}
		seen[a] = true
	}
	for range 1000 {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		a := ln.Addr().String()
		ln.Close()
		if seen[a] {
			t.Fatalf("%s is kept, and was given to one who asked for any", a)
		}
	}
}

func TestAPortIsDeadUntilItsOwnerListens(t *testing.T) {
	a := Addr(t)
	for range 3 { // one that is killed comes back at the same address
		if c, err := net.Dial("tcp", a); err == nil {
			c.Close()
			t.Fatal("somebody listens")
		}
		ln, err := net.Listen("tcp", a)
		if err != nil {
			t.Fatal(err)
		}
		c, err := net.Dial("tcp", a)
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
		ln.Close()
	}
}
