// TextSource: the bytes of text files as training and validation rows. Used by trainer.cc.
//
// The files of the entries of [data] train (find_files.h) follow each other, each file once. A token is a byte.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "config/config.h"

namespace annulus {

// Thread-safe after construction.
class TextSource {
 public:
  // Finds the files and reads them once (texts of up to 256 MiB stay in memory, of longer ones rows are read from the
  // files when they are needed). Raises Error(kInput): no such file, a glob that matches nothing, a file that cannot be
  // read, fewer bytes than a row needs in the training or in the validation part.
  TextSource(const DataConfig& data, int64_t seed);
  ~TextSource();

  // The row of this step: int64 [context + 1], CPU; inputs are its first, targets its last `context` tokens. Depends on
  // the text, the seed, step and row alone, never on ranks.
  at::Tensor sample(int64_t step, int64_t row) const;

  // Row i of `rows` evenly spaced over the validation part (the tail of the text): int64 [context + 1], CPU.
  at::Tensor validation_row(int64_t i, int64_t rows) const;

  // The lengths of the documents (files; of the first and the last their part) that the first `context` tokens of these
  // rows are made of; they add up to context.
  std::vector<int64_t> sample_documents(int64_t step, int64_t row) const;
  std::vector<int64_t> validation_documents(int64_t i, int64_t rows) const;

  bool has_validation() const { return bytes_ > train_bytes_; }
  int64_t bytes() const { return bytes_; }
  int64_t files() const;
  // Of sizes and content (of texts longer than 1 GiB: of evenly spaced parts). Ranks compare it at bootstrap, a resumed
  // run with its checkpoint.
  const std::string& fingerprint() const { return fingerprint_; }
  // "2,141 files, 41,335,867 bytes (2,066,794 for validation)"
  std::string text() const;

 private:
  struct Files;
  int64_t sample_offset(int64_t step, int64_t row) const;
  int64_t validation_offset(int64_t i, int64_t rows) const;
  at::Tensor row_at(int64_t offset) const;
  std::vector<int64_t> documents_at(int64_t offset) const;

  std::unique_ptr<Files> files_;
  int64_t seed_;
  int64_t context_;
  int64_t bytes_ = 0;
  int64_t train_bytes_ = 0;
  std::string fingerprint_;
};

}  // namespace annulus
