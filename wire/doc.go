// Package wire knows the bytes: request bodies of the OpenAI and Anthropic
// shapes (scanned once, never re-serialised), server-sent event streams, and
// the error answers of contract.md. It does no I/O.
//
//   - KindOf: which API a path is.
//   - Body.Scan: what routing needs from a request, and its prompt's fingerprints;
//     Body.Rewrite: the same body with only the asked values changed.
//   - Observer: what became of a streamed answer; ParseAnswer: of a whole one.
//   - Error: the router's own answers, from one table.
package wire
