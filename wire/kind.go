package wire

import "strings"

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

// KindOf tells which API a request path is: the exact paths of contract.md
// only, no trailing slash, no other spelling of the same path (routing,
// authorisation and forwarding must all see one string). A query is ignored.
// ok is false for everything else, which is answered 404.
func KindOf(path string) (k Kind, ok bool) {
	if i := strings.IndexByte(path, '?'); i >= 0 {
		path = path[:i]
	}
	switch path {
	case "/v1/chat/completions":
		k = KindChat
	case "/v1/completions":
		k = KindCompletions
	case "/v1/responses":
		k = KindResponses
	case "/v1/messages":
		k = KindMessages
	case "/v1/embeddings":
		k = KindEmbeddings
	case "/v1/rerank", "/rerank", "/v2/rerank":
		k = KindRerank
	case "/v1/score", "/score":
		k = KindScore
	case "/v1/audio/transcriptions", "/v1/audio/translations":
		k = KindAudio
	case "/tokenize":
		k = KindTokenize
	case "/detokenize":
		k = KindDetokenize
	case "/v1/models":
		k = KindModels
	default:
		return KindNone, false
	}
	return k, true
}

var kindWords = [...]string{"none", "chat", "completions", "responses", "messages", "embeddings", "rerank", "score",
	"audio", "tokenize", "detokenize", "models"}

// KindCount is the number of kinds, KindNone included.
const KindCount = len(kindWords)

// String is the kind's metric label.
func (k Kind) String() string {
	if int(k) < len(kindWords) {
		return kindWords[k]
	}
	return "unknown"
}

// Generates tells whether answers of this kind are made token by token, and so
// may be streamed and cost decode steps.
func (k Kind) Generates() bool {
	return k == KindChat || k == KindCompletions || k == KindResponses || k == KindMessages
}

// Method is the one HTTP method that the kind's paths take.
func (k Kind) Method() string {
	if k == KindModels {
		return "GET"
	}
	return "POST"
}
