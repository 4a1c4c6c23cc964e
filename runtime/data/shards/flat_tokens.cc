// See flat_tokens.h.
#include "runtime/data/shards/flat_tokens.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>

#include "common/error.h"
#include "common/files.h"
#include "common/text.h"
#include "runtime/data/shards/find_files.h"
#include "runtime/data/shards/refuse.h"

namespace annulus {
namespace {

constexpr int64_t kLlmcHeader = 256 * 4;

// Sets the ids by which documents are found if the source gives them. Otherwise those of tokenization.json or of the
// format remain.
void choose_ids(const SourceConfig& source, std::optional<int64_t>& begin, std::optional<int64_t>& end) {
  if (source.begin < 0 && source.end < 0) return;
  begin = source.begin < 0 ? std::nullopt : std::optional(source.begin);
  end = source.end < 0 ? std::nullopt : std::optional(source.end);
}

class Llmc : public FlatTokens {
 public:
  Llmc(const std::string& path, const SourceConfig& source, std::shared_ptr<const Tokenization> made)
      : FlatTokens(TokenFormat::kLlmc, path, path) {
    if (data_.size() < kLlmcHeader) {
      refuse_data(path + " has " + with_commas(data_.size()) +
                  " bytes, less than the 1,024 of llm.c's header: it was cut off");
    }
    const auto magic = data_.at<int32_t>(0), version = data_.at<int32_t>(4), count = data_.at<int32_t>(8);
    const bool wide = magic == 20240801;
    const int32_t expected = wide ? 7 : 1;
    if (version != expected) {
      refuse_data(path + " has llm.c's magic " + std::to_string(magic) + ", but version " + std::to_string(version) +
                  ": version " + std::to_string(expected) + " is expected");
    }
    bits_ = wide ? 32 : 16;
    if (count < 0) {
      refuse_data(path + " has a negative number of tokens in its header of llm.c, " + std::to_string(count) +
                  ": it is damaged, or was written with more tokens than such a header counts, " +
                  with_commas(INT32_MAX) + ": make it again, in shards of at most so many");
    }
    if (data_.size() != kLlmcHeader + int64_t{count} * (bits_ / 8)) {
      refuse_data(path + " says that it holds " + with_commas(count) + " tokens, which is " +
                  with_commas(kLlmcHeader + int64_t{count} * (bits_ / 8)) + " bytes with llm.c's header, but it has " +
                  with_commas(data_.size()) + ": it was cut off or damaged, fetch or make it again");
    }
    tokens_ = count;
    offset_ = kLlmcHeader;
    begin_ = wide ? 128000 : 50256;  // as llm.c's scripts in dev/data write them
    use(std::move(made), std::filesystem::path(path).filename().string());
    choose_ids(source, begin_, end_);
    use_targets();
  }
};

class Nanogpt : public FlatTokens {
 public:
  Nanogpt(const std::string& path, const SourceConfig& source, std::shared_ptr<const Tokenization> made)
      : FlatTokens(TokenFormat::kNanogpt, path, path) {
    bits_ = source.width != 0 ? static_cast<int>(source.width) : made && made->width ? made->width : 16;
    if (bits_ != 16 && bits_ != 32) throw Error(ErrorKind::kInternal, "data", "the width was not checked");
    if (data_.size() % (bits_ / 8) != 0) {
      refuse_data(path + " has " + with_commas(data_.size()) + " bytes, which is not a whole number of tokens of " +
                  std::to_string(bits_) + " bits: " +
                  (data_.size() % 2 == 0 ? "set width = 16 if they have 16, or fetch or make it again"
                                         : "it was cut off, or holds no tokens"));
    }
    tokens_ = data_.size() / (bits_ / 8);
    use(std::move(made), std::filesystem::path(path).filename().string());
    choose_ids(source, begin_, end_);
    use_targets();
  }
};

}  // namespace

void add_ends(Checksum& sum, const MappedFile& file) {
  constexpr int64_t kEnd = 4096;
  char end[kEnd];
  const int64_t size = file.size();
  sum.update(&size, sizeof size);
  const int64_t n = std::min(size, kEnd);
  for (const int64_t at : {int64_t{0}, size - n}) {
    file.copy(at, n, end);
    sum.update(end, static_cast<size_t>(n));
  }
}

void add_content(Checksum& sum, const MappedFile& file, int64_t from) {
  std::string piece;
  for (int64_t at = from; at < file.size(); at += static_cast<int64_t>(piece.size())) {
    piece.resize(static_cast<size_t>(std::min<int64_t>(int64_t{1} << 20, file.size() - at)));
    file.copy(at, static_cast<int64_t>(piece.size()), piece.data());
    sum.update(piece.data(), piece.size());
  }
}

void FlatTokens::visit_raw(int64_t first, int64_t count, const RawVisitor& take) const {
  alignas(8) char piece[kPiece * 4];
  const int64_t width = bits_ / 8;
  const int64_t end = first + count;
  // The system reads the next part while this one is used.
  constexpr int64_t kAhead = 256 * kPiece;
  for (int64_t asked = first; first < end;) {
    if (asked < end && asked - first <= kAhead / 2) {
      const int64_t n = std::min(end - asked, kAhead);
      data_.will_need(offset_ + asked * width, n * width);
      asked += n;
    }
    const int64_t n = std::min(end - first, kPiece);
    data_.copy(offset_ + first * width, n * width, piece);
    take(piece, n);
    first += n;
  }
}

void FlatTokens::use_targets() {
  const std::string path = data_.path() + std::string(kTargetsEnding);
  if (!is_file(path)) {
    if (!made_as_ || made_as_->targets.empty()) return;
    refuse_data(data_.path() + " was written with " + path +
                ", which says which of its tokens count as targets and is missing: copy both files");
  }
  targets_.emplace("data", path);
  if (targets_->size() != tokens_) {
    refuse_data(path + " has " + with_commas(targets_->size(), "byte") + ", but a byte for each of the " +
                with_commas(tokens_, "token") + " of " + data_.path() + " is expected: make both together");
  }
  weights_ = {.counted = {}, .least = 1, .most = 1};
}

void FlatTokens::visit_weights(int64_t first, int64_t count, const WeightVisitor& visit) const {
  if (!targets_) return TokenFile::visit_weights(first, count, visit);
  char piece[kPiece];
  int64_t since = first;  // where the open run begins
  char open = 0;
  const int64_t end = first + count;
  for (int64_t at = first; at < end;) {
    const int64_t n = std::min(end - at, kPiece);
    targets_->copy(at, n, piece);
    for (int64_t i = 0; i < n; ++i) {
      if (piece[i] != 0 && piece[i] != 1) {
        refuse_data(targets_->path() + ": byte " + with_commas(at + i) + " is " +
                    std::to_string(static_cast<unsigned char>(piece[i])) +
                    ", but 1 is expected for a token that counts as a target, and 0 for another");
      }
      if (piece[i] == open && at + i > first) continue;
      if (at + i > since) visit(since, at + i - since, static_cast<float>(open));
      since = at + i, open = piece[i];
    }
    at += n;
  }
  if (end > since) visit(since, end - since, static_cast<float>(open));
  require_unchanged();
}

void FlatTokens::require_unchanged() const {
  data_.require_unchanged();
  if (targets_) targets_->require_unchanged();
}

void FlatTokens::verify_stored() const {
  visit_weights(0, tokens_, [](int64_t, int64_t, float) {});
  if (targets_ && made_as_ && !made_as_->targets.empty()) require_made({targets_->path()}, made_as_->targets);
}

void FlatTokens::add_stored_fingerprint(Checksum& sum) const {
  add_ends(sum, data_);
  if (targets_) add_ends(sum, *targets_);
}

// A document begins at a `begin` that follows an `end`; an id that is not known does not matter.
void FlatTokens::visit_documents(bool hashed, const DocumentVisitor& visit, int64_t limit) const {
  const int64_t tokens = limit < 0 ? tokens_ : std::min(limit, tokens_);
  if (tokens == 0) return;
  if (!begin_ && !end_) {
    visit(0, tokens, hashed ? hash(0, tokens) : 0);
    return;
  }
  Hash64 sum;
  int64_t document = 0, at = 0, before = 0;
  visit_raw(0, tokens, [&](const void* raw, int64_t n) {
    const auto scan = [&](auto* ids) {
      int64_t hashed_to = 0;
      for (int64_t i = 0; i < n; ++i) {
        const int64_t id = ids[i];
        if ((!begin_ || id == *begin_) && (!end_ || before == *end_) && at + i > 0) {
          if (hashed) add_to_hash(sum, ids + hashed_to, i - hashed_to);
          visit(document, at + i - document, hashed ? sum.take() : 0);
          document = at + i;
          hashed_to = i;
        }
        before = id;
      }
      if (hashed) add_to_hash(sum, ids + hashed_to, n - hashed_to);
    };
    if (bits_ == 16) scan(static_cast<const uint16_t*>(raw));
    if (bits_ == 32) scan(static_cast<const uint32_t*>(raw));
    at += n;
  });
  require_unchanged();
  visit(document, tokens - document, hashed ? sum.take() : 0);
}

std::unique_ptr<TokenFile> open_llmc(const std::string& path, const SourceConfig& source,
                                     std::shared_ptr<const Tokenization> made) {
  return std::make_unique<Llmc>(path, source, std::move(made));
}

std::unique_ptr<TokenFile> open_nanogpt(const std::string& path, const SourceConfig& source,
                                        std::shared_ptr<const Tokenization> made) {
  return std::make_unique<Nanogpt>(path, source, std::move(made));
}

}  // namespace annulus
