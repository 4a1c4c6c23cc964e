// Shards of `annulus tokenize` (docs/reference/formats.md): tokens, where their documents begin, hashes of the
// documents, and in version 2 the weights with which tokens count as targets, in runs of equal weights.
#include <algorithm>
#include <cmath>

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

// Behind the header in version 2.
struct WeightsHeader {
  uint64_t ends, runs;  // where the runs' ends begin, in bytes, and how many runs there are
  uint64_t counted;     // tokens whose weight is above 0
  float least, most;    // the weights of these
};
static_assert(sizeof(WeightsHeader) == 32);

bool is_weight(float weight) { return std::isfinite(weight) && weight >= 0; }

class AnnulusShard : public FlatTokens {
 public:
  explicit AnnulusShard(const std::string& path) : FlatTokens(TokenFormat::kAnnulus, path, path) {
    const uint64_t size = static_cast<uint64_t>(data_.size());
    if (size < kHeader) refuse("it has " + with_commas(data_.size(), "byte") + ", less than its header");
    const auto header = data_.at<Header>(0);
    if (header.version != 1 && header.version != 2) {
      throw Error(ErrorKind::kInput, "data",
                  path + " is of version " + std::to_string(header.version) +
                      " of annulus's shards, but only versions 1 and 2 are read");
    }
    const bool weighs = header.version == 2;
    const auto of_weights = weighs ? data_.at<WeightsHeader>(sizeof(Header)) : WeightsHeader{};
    const uint64_t width = header.token_bytes;
    if (width != 2 && width != 4) refuse("it says that a token has " + counted(width, "byte"));
    // No sum below overflows, because counts are below the file's size.
    const bool fits =
        header.tokens <= size / width && header.documents <= size / 16 && header.vocab <= uint64_t{1} << 32;
    const uint64_t offsets = (kHeader + header.tokens * width + 7) / 8 * 8;
    const uint64_t hashes = offsets + (header.documents + 1) * 8;
    const uint64_t ends = hashes + header.documents * 8;  // of the runs
    const bool runs_fit = !weighs || (of_weights.runs <= size / 12 && of_weights.ends == ends);
    const uint64_t expected = weighs && runs_fit ? ends + (of_weights.runs * 12 + 7) / 8 * 8 : ends;
    if (!fits || !runs_fit || header.offsets != offsets || header.hashes != hashes || size != expected) {
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
    if (!weighs) return;
    run_ends_ = static_cast<int64_t>(ends);
    runs_ = static_cast<int64_t>(of_weights.runs);
    weights_ = Weights{static_cast<int64_t>(of_weights.counted), of_weights.least, of_weights.most};
    const bool covered = runs_ == 0 ? tokens_ == 0 : run_end(runs_ - 1) == header.tokens;
    const bool sensible = is_weight(of_weights.least) && is_weight(of_weights.most) &&
                          of_weights.least <= of_weights.most && of_weights.counted <= header.tokens;
    if (!covered || !sensible) refuse("its weights do not fit its " + with_commas(tokens_, "token"));
  }

  // A binary search finds the first run.
  void visit_weights(int64_t first, int64_t count, const WeightVisitor& visit) const override {
    if (!weights_) return TokenFile::visit_weights(first, count, visit);
    int64_t run = 0;
    for (int64_t behind = runs_; run < behind;) {
      const int64_t middle = run + (behind - run) / 2;
      if (run_end(middle) <= static_cast<uint64_t>(first)) {
        run = middle + 1;
      } else {
        behind = middle;
      }
    }
    const int64_t end = first + count;
    for (; first < end; ++run) {
      const uint64_t stored = run < runs_ ? run_end(run) : 0;
      const int64_t until = stored <= static_cast<uint64_t>(tokens_) ? static_cast<int64_t>(stored) : 0;
      if (until <= first) refuse("run " + with_commas(run) + " of its weights ends where it may not");
      const auto weight = data_.at<float>(run_ends_ + runs_ * 8 + run * 4);
      if (!is_weight(weight)) refuse("the weight of run " + with_commas(run) + " is not a number from 0 on");
      const int64_t n = std::min(until, end) - first;
      visit(first, n, weight);
      first += n;
    }
    require_unchanged();
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
    if (weights_) verify_weights();
  }

 private:
  void verify_weights() const {
    Weights found{.counted = 0, .least = 0, .most = 0};
    float before = -1;
    visit_weights(0, tokens_, [&](int64_t begin, int64_t count, float weight) {
      if (weight == before) refuse("the weight at token " + with_commas(begin) + " is the one before it, in two runs");
      before = weight;
      if (weight == 0) return;
      found.least = found.counted == 0 ? weight : std::min(found.least, weight);
      found.most = std::max(found.most, weight);
      *found.counted += count;
    });
    if (found.counted == weights_->counted && found.least == weights_->least && found.most == weights_->most) return;
    refuse(with_commas(*found.counted, "token") + " of it count as targets, but its header says " +
           with_commas(*weights_->counted) + ", or other weights");
  }

  uint64_t run_end(int64_t run) const { return data_.at<uint64_t>(run_ends_ + run * 8); }

  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ErrorKind::kInput, "data",
                path_ + " was cut off or damaged: " + what + "; copy it again, or run `annulus tokenize` again");
  }

  std::string checksum_;
  int64_t offsets_ = 0, hashes_ = 0;  // in bytes
  int64_t run_ends_ = 0, runs_ = 0;   // in bytes; how many
};

}  // namespace

std::unique_ptr<TokenFile> open_annulus(const std::string& path) { return std::make_unique<AnnulusShard>(path); }

}  // namespace annulus
