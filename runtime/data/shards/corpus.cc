// See corpus.h.
#include "runtime/data/shards/corpus.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <unordered_set>
#include <utility>

#include "common/checksum.h"
#include "common/error.h"
#include "common/files.h"
#include "common/text.h"
#include "runtime/data/shards/find_files.h"
#include "runtime/data/shards/refuse.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;

// Texts longer than kFingerprintAll, and all token files, are fingerprinted by kFingerprintBlocks evenly spaced blocks.
constexpr int64_t kFingerprintAll = int64_t{1} << 30;
constexpr int64_t kFingerprintBlocks = 1024;
constexpr int64_t kTextBlock = int64_t{1} << 20;
constexpr int64_t kTokenBlock = 1024;

// Where block i of `blocks` begins; the first and the last lie at the ends.
int64_t spread(int64_t i, int64_t blocks, int64_t last) {
  return blocks < 2 ? 0 : static_cast<int64_t>(static_cast<__int128>(last) * i / (blocks - 1));
}

}  // namespace

Corpus::Corpus(const SourceConfig& source, int64_t max_tokens) {
  const int64_t limit = max_tokens > 0 ? max_tokens : INT64_MAX;
  std::unordered_set<std::string> seen;
  Tokenizations tokenizations;
  std::string first_of_tokenizer;
  bool all_say_vocab = true;
  for (const std::string& entry : source.files) {
    for (const std::string& path : find_files(entry)) {
      if (tokens_ >= limit) break;
      std::unique_ptr<TokenFile> file = TokenFile::open(path, source, &tokenizations);
      std::error_code error;
      const fs::path real = fs::canonical(file->path(), error);
      if (!seen.insert(error ? file->path() : real.string()).second) continue;
      if (file->tokens() > INT64_MAX / 4 - tokens_)
        refuse_data(path + " and the files before it have more than 2^61 tokens");
      const bool is_text = file->format() == TokenFormat::kText;
      if (!files_.empty() && is_text != is_text_) {
        const std::string other = files_[0]->path();
        refuse_data((is_text ? path : other) + " is text, whose tokens are its bytes, and " + (is_text ? other : path) +
                    " holds the tokens of a tokenizer: name files of one kind only for a source");
      }
      if (!files_.empty() && file->has_trees() != has_trees()) {
        const std::string other = files_[0]->path();
        refuse_data((has_trees() ? other : path) + " holds prefix trees, and " + (has_trees() ? path : other) +
                    " documents: name them as two sources");
      }
      is_text_ = is_text;
      all_say_vocab = all_say_vocab && file->vocab();
      vocab_ = std::max(vocab_, file->vocab());
      if (!file->tokenizer().empty()) {
        if (tokenizer_.empty()) first_of_tokenizer = path;
        if (!tokenizer_.empty() && tokenizer_ != file->tokenizer()) {
          refuse_data(path + " was made with another tokenizer (" + file->tokenizer() + ") than " + first_of_tokenizer +
                      " (" + tokenizer_ + "): a source has one; tokenize again, or leave one of them out");
        }
        tokenizer_ = file->tokenizer();
      }
      if (const auto& weights = file->weights()) {
        marks_targets_ = true;
        weighs_targets_ = weighs_targets_ || (weights->counted != 0 && (weights->least != 1 || weights->most != 1));
      }
      tokens_ += std::min(file->tokens(), limit - tokens_);
      files_.push_back(std::move(file));
      ends_.push_back(tokens_);
    }
  }
  if (tokens_ == 0) {
    refuse_data((files_.size() == 1
                     ? files_[0]->path() + " is"
                     : "the " + with_commas(files(), "file") + " of " + join(source.files, ", ") + " are") +
                " empty: name files with text or tokens");
  }
  if (!all_say_vocab) vocab_.reset();
  fingerprint_ = is_text_ ? text_fingerprint() : token_fingerprint();
}

Corpus::~Corpus() = default;

size_t Corpus::file_of(int64_t token) const {
  return static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), token) - ends_.begin());
}

void Corpus::read(int64_t first, int64_t count, int64_t* to, int64_t stride) const {
  if (first < 0 || count < 0 || (count > 0 && first + (count - 1) * stride >= tokens_)) {
    throw Error(ErrorKind::kInternal, "data", "tokens beyond the source were asked for");
  }
  tokens_read_ += count;
  for (size_t i = file_of(first); count > 0; ++i) {
    if (ends_[i] <= first) continue;  // it is empty, or the stride passes over it
    const int64_t n = std::min(count, (ends_[i] - 1 - first) / stride + 1);
    files_[i]->read(first - begin_of(i), n, to, stride);
    first += n * stride;
    to += n;
    count -= n;
  }
}

void Corpus::visit_weights(int64_t first, int64_t count, const WeightVisitor& visit) const {
  for (size_t i = file_of(first); count > 0; ++i) {
    const int64_t begin = begin_of(i), n = std::min(count, ends_[i] - first);
    files_[i]->visit_weights(first - begin, n,
                             [&](int64_t at, int64_t of, float weight) { visit(begin + at, of, weight); });
    first += n;
    count -= n;
  }
}

int64_t Corpus::counted(int64_t first, int64_t count) const {
  int64_t counted = 0;
  visit_weights(first, count, [&](int64_t, int64_t of, float weight) { counted += weight > 0 ? of : 0; });
  return counted;
}

Branch Corpus::branch_at(int64_t token) const {
  const size_t i = file_of(token);
  const int64_t begin = begin_of(i);
  Branch branch = files_[i]->branch_at(token - begin);
  branch.begin += begin;
  if (branch.after >= 0) branch.after += begin;
  return branch;
}

void Corpus::visit_documents(bool hashed, const DocumentVisitor& visit) const {
  for (size_t i = 0; i < files_.size(); ++i) {
    const int64_t begin = begin_of(i), tokens = ends_[i] - begin;
    files_[i]->visit_documents(
        hashed, [&](int64_t first, int64_t length, uint64_t hash) { visit(begin + first, length, hash); },
        tokens == files_[i]->tokens() ? -1 : tokens);
  }
}

std::string Corpus::where(int64_t token) const {
  const size_t i = std::min(file_of(token), files_.size() - 1);
  const int64_t inside = token - begin_of(i);
  return files_[i]->paths()[0] + ", token " + with_commas(inside) + " (byte " +
         with_commas(files_[i]->byte_of(inside)) + ")";
}

std::string Corpus::text() const {
  return with_commas(files(), "file") + ", " + with_commas(tokens_, is_text_ ? "byte" : "token");
}

std::string Corpus::folder() const { return folder_of(files_[0]->path()); }

void Corpus::verify() const {
  for (const auto& file : files_) file->verify();
}

// This must not change, because checkpoints hold it.
std::string Corpus::text_fingerprint() const {
  Checksum sum;
  sum.update(ends_.data(), ends_.size() * sizeof(int64_t));
  const bool all = tokens_ <= kFingerprintAll;
  const int64_t blocks = all ? (tokens_ + kTextBlock - 1) / kTextBlock : kFingerprintBlocks;
  std::vector<int64_t> ids(static_cast<size_t>(std::min(tokens_, kTextBlock)));
  std::string bytes;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t begin = all ? i * kTextBlock : spread(i, blocks, tokens_ - kTextBlock);
    const int64_t n = std::min(kTextBlock, tokens_ - begin);
    read(begin, n, ids.data());
    bytes.assign(ids.begin(), ids.begin() + n);
    sum.update(bytes.data(), bytes.size());
  }
  return sum.hex();
}

std::string Corpus::token_fingerprint() const {
  Checksum sum;
  sum.update(ends_.data(), ends_.size() * sizeof(int64_t));
  for (const auto& file : files_) file->add_fingerprint(sum);
  const int64_t block = std::min(tokens_, kTokenBlock);
  const int64_t blocks = std::min(kFingerprintBlocks, (tokens_ + block - 1) / block);
  std::vector<int64_t> ids(static_cast<size_t>(block));
  for (int64_t i = 0; i < blocks; ++i) {
    read(spread(i, blocks, tokens_ - block), block, ids.data());
    sum.update(ids.data(), ids.size() * sizeof(int64_t));
  }
  return sum.hex();
}

}  // namespace annulus
