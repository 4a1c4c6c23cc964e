// TokenTable: the bytes of every id of a tokenizer, from the tokens.table that `annulus tokenize` writes beside its
// shards (python/tokenizer/table.py). It turns tokens into text without the tokenizer's library. Used by the sampler
// and `tokenize --inspect`.
//
// The file, little-endian, at byte
//   0        "ANNTABLE"
//   8, 12    u32: version, 1; the rule for spaces, below
//   16, 24   u64: number of ids; bytes of all texts
//   32, 48   16 bytes each: the tokenizer's digest; XXH3-128 of this file from byte 64 on (big-endian)
//   64       u64 [ids + 1]: where the text of each id begins, counted from the first text
//   behind   u8 [ids]: kinds. 0: ordinary; 1: special, which decoding leaves out (its text is its name);
//            2: no token has this id; 3: ordinary, and the rule does not apply to it
//   behind   the texts. The file ends there
//
// Tokens are decoded by concatenating their texts. Spaces that are removed first: by rule 0 none; 1, one at the
// beginning of the first token; 2, all of the first token's; 3, one at the beginning of each token until the output
// holds something.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// Thread-safe after construction.
class TokenTable {
 public:
  // Reads a file and checks all of it. Raises Error(kInput), in one line that names the file, if it is missing, cut
  // off, damaged or of another version; Error(kResource) if it may not be read.
  static TokenTable load(const std::string& path);

  // Every id is below it.
  int64_t size() const { return static_cast<int64_t>(kinds_.size()); }
  // The digest of the tokenizer from which it was made, 32 hexadecimal digits.
  const std::string& tokenizer() const { return tokenizer_; }
  // The bytes of a token; for a special one, its name. Raises Error(kInput) for an id that the table does not have.
  std::string_view bytes(int64_t id) const;
  // Whether the tokenizer's own decoder leaves this token out: a special token, or an id without a token.
  bool hidden(int64_t id) const;

 private:
  friend class TokenText;
  // What happens to spaces at the beginning of a text.
  enum class Rule : uint32_t { kKeep, kStripOne, kStripFirstToken, kStripUntilText };
  enum class Kind : uint8_t { kOrdinary, kSpecial, kUnused, kUnstripped };

  std::string path_, tokenizer_, text_;
  Rule rule_ = Rule::kKeep;
  std::vector<Kind> kinds_;
  std::vector<uint64_t> offsets_;  // in text_, one more than ids
};

// One text, token by token: all that is appended is what the tokenizer's own decoder gives for the ids. A character may
// span several tokens, so each piece may end within one. Not thread-safe; `table` must outlive it.
class TokenText {
 public:
  explicit TokenText(const TokenTable& table) : table_(table) {}
  // Appends the token's bytes; nothing for one that is hidden. Raises as TokenTable::bytes().
  void append(int64_t id, std::string& out);

 private:
  const TokenTable& table_;
  bool first_ = true;  // no token has counted as the first one yet
  bool empty_ = true;  // nothing has been written yet
};

}  // namespace annulus
