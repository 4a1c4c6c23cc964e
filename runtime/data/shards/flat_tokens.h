// Token files that are one memory-mapped array. In llm.c's and nanoGPT's, documents are found by the ids that they
// begin or end with; the formats with stored boundaries derive from FlatTokens. Used by token_file.cc and the files of
// the formats.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/mapped_file.h"
#include "runtime/data/shards/token_file.h"

namespace annulus {

class FlatTokens : public TokenFile {
 public:
  void visit_documents(bool hashed, const DocumentVisitor& visit, int64_t limit) const override;
  void visit_weights(int64_t first, int64_t count, const WeightVisitor& visit) const override;
  int64_t byte_of(int64_t token) const override { return offset_ + token * (bits_ / 8); }

 protected:
  // path: the name that messages show; data: the file that holds the tokens.
  FlatTokens(TokenFormat format, std::string path, const std::string& data)
      : TokenFile(format, std::move(path)), data_("data", data) {}

  void visit_raw(int64_t first, int64_t count, const RawVisitor& take) const override;
  void require_unchanged() const override;
  void verify_stored() const override;
  void add_stored_fingerprint(Checksum& sum) const override;

  // Opens the file of targets beside the tokens, if there is one. Called once tokens_ is known.
  void use_targets();

  MappedFile data_;
  int64_t offset_ = 0;  // of the first token, in bytes
  std::optional<MappedFile> targets_;
};

std::unique_ptr<TokenFile> open_llmc(const std::string& path, const SourceConfig& source,
                                     std::shared_ptr<const Tokenization> made);
std::unique_ptr<TokenFile> open_nanogpt(const std::string& path, const SourceConfig& source,
                                        std::shared_ptr<const Tokenization> made);
// Defined in annulus_shard.cc, megatron.cc and text_tokens.cc.
std::unique_ptr<TokenFile> open_annulus(const std::string& path);
std::unique_ptr<TokenFile> open_megatron(const std::string& index, const std::string& data,
                                         std::shared_ptr<const Tokenization> made);
std::unique_ptr<TokenFile> open_text(const std::string& path, const FileState& state);

// Adds a file's size and its first and last 4 KiB to a checksum.
void add_ends(Checksum& sum, const MappedFile& file);
// Adds a file's content from a byte offset on.
void add_content(Checksum& sum, const MappedFile& file, int64_t from = 0);

// An array in a mapped file that is read from beginning to end in pieces.
template <typename T>
class MappedArray {
 public:
  MappedArray(const MappedFile& file, int64_t offset, int64_t count) : file_(file), offset_(offset), count_(count) {}

  T at(int64_t i) {
    if (i < begin_ || i >= begin_ + static_cast<int64_t>(piece_.size())) {
      begin_ = i;
      piece_.resize(static_cast<size_t>(std::min<int64_t>(kPiece, count_ - i)));
      // The system reads the next piece while this one is used.
      file_.will_need(offset_ + i * static_cast<int64_t>(sizeof(T)),
                      std::min<int64_t>(2 * kPiece, count_ - i) * static_cast<int64_t>(sizeof(T)));
      file_.copy(offset_ + i * static_cast<int64_t>(sizeof(T)), static_cast<int64_t>(piece_.size() * sizeof(T)),
                 piece_.data());
    }
    return piece_[static_cast<size_t>(i - begin_)];
  }

 private:
  static constexpr int64_t kPiece = 65536;
  const MappedFile& file_;
  int64_t offset_, count_;
  int64_t begin_ = 0;
  std::vector<T> piece_;
};

}  // namespace annulus
