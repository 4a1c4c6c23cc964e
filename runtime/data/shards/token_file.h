// TokenFile: one shard of tokens in any of the formats that annulus reads (docs/reference/formats.md), or a text whose
// bytes are its tokens. Used by corpus.cc, and by `tokenize --inspect` and `--verify`.
//
//   text      a file; a token is a byte
//   annulus   .tokens of `annulus tokenize`: 16 or 32 bits, documents, hashes, checksum; which tokens count as targets;
//             prefix trees
//   megatron  .idx and .bin of Megatron-LM's indexed datasets: uint16 or int32
//   llmc      .bin of llm.c, magic 20240520 (uint16) and 20240801 (uint32)
//   nanogpt   .bin of nanoGPT: raw uint16 (or 32 bits if the source says so)
//
// Beside the tokens of the last three may lie a file with their targets (kTargetsEnding of find_files.h): a byte for
// each token, 1 if it counts as a target and 0 if not. It must, if `annulus tokenize` wrote one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/checksum.h"
#include "runtime/config/config.h"
#include "runtime/data/shards/tokenization.h"

namespace annulus {

enum class TokenFormat { kText, kAnnulus, kMegatron, kLlmc, kNanogpt };
std::string_view format_name(TokenFormat format);

// A branch of a prefix tree: tokens [begin, begin + length) of a file or source, each of which predicts the next, so
// all but the last are inputs. They go on behind the input `after` of an earlier branch; -1: they begin a tree. A
// branch begins with the token that its forerunner predicts at `after`, so every input has one target.
struct Branch {
  int64_t begin = 0, length = 0, after = -1;
};

// Thread-safe after construction.
class TokenFile {
 public:
  // Visits documents in order, empty ones included: tokens [begin, begin + length) of the file. `hash` is the XXH3-64
  // of the document's tokens as little-endian uint32, or 0 if it was not asked for.
  using DocumentVisitor = std::function<void(int64_t begin, int64_t length, uint64_t hash)>;
  // Visits runs of tokens in order, [begin, begin + count) of the file, that count as targets with the same weight; 0:
  // they do not count.
  using WeightVisitor = std::function<void(int64_t begin, int64_t count, float weight)>;
  // What a file says of the weights of its tokens.
  struct Weights {
    std::optional<int64_t> counted;  // how many tokens count, if that is stored
    float least = 0, most = 0;       // the weights of these; 0 if there are none
  };

  // Opens a file. The first bytes decide the format if it has a mark there, otherwise source.format does, or the
  // tokenization.json beside the file; a file without either is text, unless its name ends in .bin, which is refused.
  // Either file of a Megatron pair may be named. Reads headers and a bounded part of what must agree with them, however
  // long the file is; a text is not read. `tokenizations` is for many files: it reads each folder's tokenization.json
  // once. Raises Error(kInput), in one line that names the file and says what to do, for a file that is missing, is of
  // another format than the source says, has a wrong version, size or width, or has parts that disagree.
  static std::unique_ptr<TokenFile> open(const std::string& path, const SourceConfig& source,
                                         Tokenizations* tokenizations = nullptr);
  virtual ~TokenFile() = default;
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;

  TokenFormat format() const { return format_; }
  const std::string& path() const { return path_; }  // of a Megatron pair: the .idx
  // All files that it consists of, the one with the tokens first, but for one with targets beside them.
  virtual std::vector<std::string> paths() const { return {path_}; }
  int64_t tokens() const { return tokens_; }
  int bits() const { return bits_; }  // of a token in the file: 8, 16 or 32
  // A number that every id is below, if it is known.
  std::optional<int64_t> vocab() const { return vocab_; }
  // The digest of the tokenizer that made it, 32 hexadecimal digits; empty if it is not known.
  const std::string& tokenizer() const { return tokenizer_; }
  // The number of documents, if it is stored.
  std::optional<int64_t> documents() const { return documents_; }
  // Nothing if the file says nothing about weights: each token then counts with the weight 1.
  const std::optional<Weights>& weights() const { return weights_; }
  // Whether its documents are prefix trees. Branches then cover all tokens, in depth-first order, and each document
  // that is not empty begins with one that begins a tree.
  virtual bool has_trees() const { return false; }
  // Returns the branch that holds a token of a file that has trees. Raises as read(), and for stored branches that
  // cannot be such.
  virtual Branch branch_at(int64_t token) const;
  // The ids by which documents are found in formats without boundaries. With neither, the whole file is one document.
  std::optional<int64_t> begin_id() const { return begin_; }
  std::optional<int64_t> end_id() const { return end_; }

  // Reads `count` tokens as int64: first, first + stride, ... Raises Error(kInput) if the file has changed since it was
  // opened or cannot be read.
  void read(int64_t first, int64_t count, int64_t* to, int64_t stride = 1) const;

  // Visits the weights of tokens [first, first + count), which must lie in the file. Raises as read(), and for stored
  // weights that are not weights.
  virtual void visit_weights(int64_t first, int64_t count, const WeightVisitor& visit) const;

  // Visits the documents within the first `limit` tokens (-1: all); the last one is cut there. Reads no tokens if
  // boundaries are stored and hashes are stored or not asked for. Raises as read(), and if stored boundaries go
  // backwards, beyond the tokens, or leave some out.
  virtual void visit_documents(bool hashed, const DocumentVisitor& visit, int64_t limit = -1) const = 0;

  // Reads everything and compares it with every stored size, hash and checksum, with tokenization.json if that lists
  // the file, and the ids with the vocabulary's size if that is known. Raises Error(kInput).
  void verify() const;

  // Adds sizes, what determines the documents, and a bounded part of the content to a checksum.
  void add_fingerprint(Checksum& sum) const;

  // The byte at which a token begins in its file, for messages.
  virtual int64_t byte_of(int64_t token) const = 0;

 protected:
  TokenFile(TokenFormat format, std::string path) : format_(format), path_(std::move(path)) {}

  // Passes tokens as they lie in the file, little-endian, of `bits()` each, in pieces of at most kPiece.
  using RawVisitor = std::function<void(const void* tokens, int64_t count)>;
  static constexpr int64_t kPiece = 4096;
  virtual void visit_raw(int64_t first, int64_t count, const RawVisitor& take) const = 0;
  virtual void require_unchanged() const = 0;
  virtual void verify_stored() const {}
  virtual void add_stored_fingerprint(Checksum&) const {}

  // The hash of tokens [first, first + count), for DocumentVisitor.
  uint64_t hash(int64_t first, int64_t count) const;
  void add_to_hash(Hash64& sum, const void* raw, int64_t count) const;  // count: at most kPiece
  // Raises Error(kInput) unless the content of these files has the checksum that tokenization.json says.
  void require_made(const std::vector<std::string>& files, const std::string& made) const;
  // Takes over what tokenization.json says of this file, under the name `name`, and compares the counts.
  void use(std::shared_ptr<const Tokenization> made_by, const std::string& name);

  TokenFormat format_;
  std::string path_;
  int64_t tokens_ = 0;
  int bits_ = 16;
  std::optional<int64_t> vocab_, documents_, begin_, end_;
  std::optional<Weights> weights_;
  std::string tokenizer_;
  std::shared_ptr<const Tokenization> made_by_;
  const Tokenization::Shard* made_as_ = nullptr;
};

}  // namespace annulus
