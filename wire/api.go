// Package wire knows the bytes: request bodies of the OpenAI and Anthropic
// shapes (scanned once, never re-serialised), server-sent event streams, and
// the error answers of contract.md. It does no I/O.
package wire

// Kind is which inference API a path is.
type Kind uint8

const (
	KindNone Kind = iota
	KindChat
	KindCompletions
	KindResponses
	KindMessages
	KindEmbeddings
	KindRerank
	KindScore
	KindAudio // transcriptions and translations: multipart
	KindTokenize
	KindDetokenize
	KindModels
)

/* To be provided by this package (wire room):

// Observer watches one answer stream, any chunking, without allocation on the usual event.
type Observer struct {...}
func (o *Observer) Reset(k Kind, model string)
func (o *Observer) Feed(p []byte)            // p is body bytes (transfer framing already removed)
func (o *Observer) Close()                   // the body ended cleanly
// Results, valid at any time:
//   Committed bool       an event with content (or tool call, finish, output item ...) was seen
//   Events, Content int  events, events with content (a good estimate of tokens)
//   Finish string, Usage{Prompt,Cached,Completion,Seen}, ErrorEvent bool + ErrorText, Done bool
//   Violation Violation  closed set of integrity kinds; ViolationNone when healthy
//   Ended() Ending       EndOK, EndAbort, EndEmpty (only [DONE]), EndError, EndTruncated
// and CommitOffset: how many bytes fed before the first content event

*/
