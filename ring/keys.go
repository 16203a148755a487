package ring

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/memberlist"
)

// ParseKeys reads a key file: one base64 key of 16, 24 or 32 bytes (AES-128,
// -192 or -256) on each line; empty lines and lines that begin with # do not
// count. The first key encrypts, all of them decrypt. To rotate: add the new
// key as the second line everywhere, then make it the first everywhere, then
// remove the old one everywhere.
func ParseKeys(data []byte) ([][]byte, error) {
	var keys [][]byte
	for i, line := range strings.Split(string(data), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		key, err := base64.StdEncoding.DecodeString(line)
		if err != nil {
			return nil, fmt.Errorf("line %d: not base64", i+1) // never show the key
		}
		if err := memberlist.ValidateKey(key); err != nil {
			return nil, fmt.Errorf("line %d: %w, not %d", i+1, err, len(key))
		}
		keys = append(keys, key)
	}
	if len(keys) == 0 {
		return nil, fmt.Errorf("no key in it")
	}
	return keys, nil
}

func readKeys(file string) ([][]byte, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	keys, err := ParseKeys(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return keys, nil
}

// NewKey returns a random AES-256 key as a line of a key file.
func NewKey() string {
	key := make([]byte, 32)
	_, _ = rand.Read(key) // never fails
	return base64.StdEncoding.EncodeToString(key)
}

// keyring holds the keys twice: in memberlist's form, which encrypts and
// decrypts, and ready to verify, with which the guard drops a forged datagram
// before memberlist sees it.
type keyring struct {
	mu   sync.Mutex
	last [][]byte
	list *memberlist.Keyring
	open atomic.Pointer[[]cipher.AEAD]
}

func newKeyring(keys [][]byte) (*keyring, error) {
	if len(keys) == 0 {
		return nil, fmt.Errorf("peers.key_file: needed, since peers only talk encrypted")
	}
	list, err := memberlist.NewKeyring(keys, keys[0])
	if err != nil {
		return nil, fmt.Errorf("peers.key_file: %w", err)
	}
	k := &keyring{list: list}
	return k, k.set(keys)
}

// set makes keys the only ones, the first of them the one that encrypts.
func (k *keyring) set(keys [][]byte) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.open.Load() != nil && slices.EqualFunc(keys, k.last, bytes.Equal) {
		return nil
	}
	open := make([]cipher.AEAD, 0, len(keys))
	want := map[string]bool{}
	for _, key := range keys {
		block, err := aes.NewCipher(key)
		if err != nil {
			return fmt.Errorf("peers.key_file: %w", err)
		}
		gcm, err := cipher.NewGCM(block)
		if err != nil {
			return fmt.Errorf("peers.key_file: %w", err)
		}
		open, want[string(key)] = append(open, gcm), true
	}
	for _, key := range keys {
		if err := k.list.AddKey(key); err != nil {
			return fmt.Errorf("peers.key_file: %w", err)
		}
	}
	// UseKey installs a new slice; RemoveKey shifts the installed one in place
	// under readers, who have it without a lock only while they decrypt.
	for _, old := range append([][]byte(nil), k.list.GetKeys()...) {
		if err := k.list.UseKey(keys[0]); err != nil {
			return fmt.Errorf("peers.key_file: %w", err)
		}
		if !want[string(old)] {
			if err := k.list.RemoveKey(old); err != nil {
				return fmt.Errorf("peers.key_file: %w", err)
			}
		}
	}
	k.open.Store(&open)
	k.last = keys
	return nil
}

// Layout of an encrypted memberlist packet: version, nonce, ciphertext, tag.
const (
	cryptVersion = 1
	cryptNonce   = 12
	cryptTag     = 16
)

// verify tells whether p was made with one of the keys. scratch is memory to
// decrypt into; it is returned, grown.
func (k *keyring) verify(p, scratch []byte) (bool, []byte) {
	if len(p) < 1+cryptNonce+cryptTag || p[0] != cryptVersion {
		return false, scratch
	}
	for _, gcm := range *k.open.Load() {
		out, err := gcm.Open(scratch[:0], p[1:1+cryptNonce], p[1+cryptNonce:], nil)
		if err == nil {
			return true, out
		}
	}
	return false, scratch
}

// replays remembers the nonces of the datagrams heard, at least the last
// replayWindow and at most twice as many: 2 to 4 minutes of 16 routers. Older
// replays pass it, and fail on the sequence numbers of what they carry.
type replays struct {
	now, before map[uint64]struct{}
}

const replayWindow = 1 << 15

// seen notes a nonce and tells whether it was known.
func (r *replays) seen(nonce []byte) bool {
	key := binary.LittleEndian.Uint64(nonce) ^ uint64(binary.LittleEndian.Uint32(nonce[8:]))<<17
	if _, ok := r.now[key]; ok {
		return true
	}
	if _, ok := r.before[key]; ok {
		return true
	}
	if r.now == nil || len(r.now) >= replayWindow {
		r.before, r.now = r.now, make(map[uint64]struct{}, 1024)
	}
	r.now[key] = struct{}{}
	return false
}
