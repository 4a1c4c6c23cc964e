// Corpus: the files of one source as one sequence of tokens. Used by row_index.cc (which cuts it into rows), the
// dataset and `annulus pack`.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/config/config.h"
#include "runtime/data/shards/token_file.h"

namespace annulus {

// Thread-safe after construction.
class Corpus {
 public:
  // Visits documents in order: tokens [begin, begin + length) of the sequence; hash as in TokenFile.
  using DocumentVisitor = TokenFile::DocumentVisitor;
  using WeightVisitor = TokenFile::WeightVisitor;  // tokens of the sequence

  // Finds and opens the files: entries in order, each file once, however it is named. Takes at most max_tokens tokens
  // (0: all); the file in which they end is cut, later ones are left out. Raises Error(kInput) as find_files and
  // TokenFile::open do, for a source without a token, for files of different tokenizers, and for a mixture of text and
  // token files, or of files with prefix trees and without.
  explicit Corpus(const SourceConfig& source, int64_t max_tokens = 0);
  ~Corpus();

  int64_t tokens() const { return tokens_; }
  int64_t files() const { return static_cast<int64_t>(files_.size()); }
  const TokenFile& file(int64_t i) const { return *files_[static_cast<size_t>(i)]; }
  // Whether all files are texts, whose tokens are bytes.
  bool is_text() const { return is_text_; }

  // Reads `count` tokens: first, first + stride, ... Raises Error(kInput) if a file has changed since it was opened.
  void read(int64_t first, int64_t count, int64_t* to, int64_t stride = 1) const;
  // The number of tokens that read() has returned so far.
  int64_t tokens_read() const { return tokens_read_; }

  // Whether a file says which tokens count as targets, and whether a weight is then something other than 0 and 1.
  bool marks_targets() const { return marks_targets_; }
  bool weighs_targets() const { return weighs_targets_; }
  // Visits the weights of tokens [first, first + count) as TokenFile does; 1 in files that say nothing.
  void visit_weights(int64_t first, int64_t count, const WeightVisitor& visit) const;
  // Returns how many of these tokens count as targets.
  int64_t counted(int64_t first, int64_t count) const;

  // Whether its documents are prefix trees, and the branch that holds a token of them, as in TokenFile.
  bool has_trees() const { return files_[0]->has_trees(); }
  Branch branch_at(int64_t token) const;

  // Visits every document, empty ones included. hashed: see TokenFile::visit_documents.
  void visit_documents(bool hashed, const DocumentVisitor& visit) const;

  // A number that every id is below: the largest that a file says; none unless all files say one.
  std::optional<int64_t> vocab() const { return vocab_; }
  // The tokenizer's digest if a file says it, otherwise empty.
  const std::string& tokenizer() const { return tokenizer_; }

  // "FILE, token 1,234 (byte 5,678)", for messages.
  std::string where(int64_t token) const;
  // A checksum of sizes and a bounded part of the content (all of it for texts up to 1 GiB), without the files' names.
  // Ranks compare it, an index is found by it, and a resumed run compares it with its checkpoint.
  const std::string& fingerprint() const { return fingerprint_; }
  // "2,141 files, 41,335,867 bytes", or tokens if they are not bytes.
  std::string text() const;
  // The folder of the first file, in which indexes lie unless data.index names another.
  std::string folder() const;

  // Reads and checks everything: TokenFile::verify of each file.
  void verify() const;

 private:
  size_t file_of(int64_t token) const;
  int64_t begin_of(size_t file) const { return file == 0 ? 0 : ends_[file - 1]; }
  std::string text_fingerprint() const;
  std::string token_fingerprint() const;

  std::vector<std::unique_ptr<TokenFile>> files_;
  std::vector<int64_t> ends_;  // ends_[i]: where file i ends in the sequence
  int64_t tokens_ = 0;
  bool is_text_ = true;
  bool marks_targets_ = false, weighs_targets_ = false;
  std::optional<int64_t> vocab_;
  std::string tokenizer_;
  std::string fingerprint_;
  mutable std::atomic<int64_t> tokens_read_ = 0;
};

}  // namespace annulus
