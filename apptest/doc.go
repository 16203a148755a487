// Package apptest holds black-box tests: they build the penstock binary, start
// it as a process with flags or a configuration file on loopback ports, put
// byte-exact replicas behind it and judge only what a client, a replica or an
// operator can see.
//
// The replicas (mock_test.go) are a Go port of cases/rawmock.py: raw TCP, with
// a log of every request and of every close by the peer. Real vLLM answers
// come from testdata/vllm. Each router is stopped with SIGTERM at the end of
// its test and has to leave with status 0 and every account back at zero.
package apptest
