// Shards of `annulus tokenize` (docs/reference/formats.md): tokens, where their documents begin, and hashes of the
// documents.
#include <algorithm>

#include "common/error.h"
#include "common/text.h"
#include "runtime/data/shards/flat_tokens.h"

namespace annulus {
namespace {

constexpr int64_t kHeader = 4096;

struct Header {
  char magic[8];
  uint32_t version, token_bytes;
  uint64_t tokens, documents, vocab, offsets, hashes;
  unsigned char tokenizer[16], checksum[16];
  uint64_t text_bytes;
};
static_assert(sizeof(Header) == 96);

class AnnulusShard : public FlatTokens {
 public:
  explicit AnnulusShard(const std::string& path) : FlatTokens(TokenFormat::kAnnulus, path, path) {
    const uint64_t size = static_cast<uint64_t>(data_.size());
    if (size < kHeader) refuse("it has " + with_commas(data_.size(), "byte") + ", less than its header");
    const auto header = data_.at<Header>(0);
    if (header.version != 1) {
      throw Error(ErrorKind::kInput, "data",
                  path + " is of version " + std::to_string(header.version) +
                      " of annulus's shards, but only version 1 is read");
    }
    const uint64_t width = header.token_bytes;
    if (width != 2 && width != 4) refuse("it says that a token has " + counted(width, "byte"));
    // No sum below overflows, because counts are below the file's size.
    const bool fits =
        header.tokens <= size / width && header.documents <= size / 16 && header.vocab <= uint64_t{1} << 32;
    const uint64_t offsets = (kHeader + header.tokens * width + 7) / 8 * 8;
    const uint64_t hashes = offsets + (header.documents + 1) * 8;
    if (!fits || header.offsets != offsets || header.hashes != hashes || size != hashes + header.documents * 8) {
      refuse("its header says that it has " + std::to_string(header.tokens) + " tokens in " +
             std::to_string(header.documents) + " documents, which does not fit its " +
             with_commas(data_.size(), "byte"));
    }
    bits_ = static_cast<int>(width * 8);
    tokens_ = static_cast<int64_t>(header.tokens);
    documents_ = static_cast<int64_t>(header.documents);
    vocab_ = static_cast<int64_t>(header.vocab);
    tokenizer_ = hex_text(header.tokenizer);
    checksum_ = hex_text(header.checksum);
    offset_ = kHeader;
    offsets_ = static_cast<int64_t>(offsets);
    hashes_ = static_cast<int64_t>(hashes);
    if (data_.at<uint64_t>(offsets_) != 0 || data_.at<uint64_t>(hashes_ - 8) != header.tokens) {
      refuse("its documents do not cover its " + with_commas(tokens_, "token"));
    }
  }

  void visit_documents(bool hashed, const DocumentVisitor& visit, int64_t limit) const override {
    const int64_t tokens = limit < 0 ? tokens_ : std::min(limit, tokens_);
    MappedArray<uint64_t> ends(data_, offsets_ + 8, *documents_);
    MappedArray<uint64_t> hashes(data_, hashes_, *documents_);
    int64_t begin = 0;
    for (int64_t i = 0; i < *documents_ && (begin < tokens || tokens == tokens_); ++i) {
      const uint64_t stored = ends.at(i);
      if (stored < static_cast<uint64_t>(begin) || stored > static_cast<uint64_t>(tokens_)) {
        refuse("document " + with_commas(i) + " ends at token " + std::to_string(stored) + ", but begins at " +
               with_commas(begin) + " of " + with_commas(tokens_));
      }
      const auto end = static_cast<int64_t>(stored);
      const int64_t cut = std::min(end, tokens);
      const uint64_t its = !hashed ? 0 : cut == end ? hashes.at(i) : hash(begin, cut - begin);
      visit(begin, cut - begin, its);
      begin = end;
    }
    require_unchanged();
  }

 protected:
  void verify_stored() const override {
    Checksum sum;
    std::string piece;
    for (int64_t at = kHeader; at < data_.size(); at += static_cast<int64_t>(piece.size())) {
      piece.resize(static_cast<size_t>(std::min<int64_t>(int64_t{1} << 20, data_.size() - at)));
      data_.copy(at, static_cast<int64_t>(piece.size()), piece.data());
      sum.update(piece.data(), piece.size());
    }
    if (sum.hex() != checksum_) refuse("its checksum is " + sum.hex() + ", but its header says " + checksum_);
    int64_t i = 0;
    visit_documents(
        true,
        [&](int64_t begin, int64_t length, uint64_t stored) {
          if (hash(begin, length) != stored) refuse("document " + with_commas(i) + " is not the one that was hashed");
          ++i;
        },
        -1);
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ErrorKind::kInput, "data",
                path_ + " was cut off or damaged: " + what + "; copy it again, or run `annulus tokenize` again");
  }

  std::string checksum_;
  int64_t offsets_ = 0, hashes_ = 0;  // in bytes
};

}  // namespace

std::unique_ptr<TokenFile> open_annulus(const std::string& path) { return std::make_unique<AnnulusShard>(path); }

}  // namespace annulus
