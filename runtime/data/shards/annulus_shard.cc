// Shards of `annulus tokenize` (docs/reference/formats.md): tokens, where their documents begin, hashes of the
// documents, in version 2 the weights with which tokens count as targets, in runs of equal weights, and in version 3
// the branches of its documents, which are prefix trees.
#include <algorithm>
#include <cmath>
#include <vector>

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

// Behind it in version 3.
struct BranchesHeader {
  uint64_t begins, branches;  // where the branches' beginnings begin, in bytes, and how many branches there are
};
static_assert(sizeof(BranchesHeader) == 16);

constexpr uint64_t kNoBranch = UINT64_MAX;  // what is stored of a branch that begins a tree

bool is_weight(float weight) { return std::isfinite(weight) && weight >= 0; }

class AnnulusShard : public FlatTokens {
 public:
  explicit AnnulusShard(const std::string& path) : FlatTokens(TokenFormat::kAnnulus, path, path) {
    const uint64_t size = static_cast<uint64_t>(data_.size());
    if (size < kHeader) refuse("it has " + with_commas(data_.size(), "byte") + ", less than its header");
    const auto header = data_.at<Header>(0);
    if (header.version < 1 || header.version > 3) {
      throw Error(ErrorKind::kInput, "data",
                  path + " is of version " + std::to_string(header.version) +
                      " of annulus's shards, but only versions 1 to 3 are read");
    }
    const bool weighs = header.version >= 2, branches = header.version == 3;
    const auto of_weights = weighs ? data_.at<WeightsHeader>(sizeof(Header)) : WeightsHeader{};
    const auto of_branches =
        branches ? data_.at<BranchesHeader>(sizeof(Header) + sizeof(WeightsHeader)) : BranchesHeader{};
    const uint64_t width = header.token_bytes;
    if (width != 2 && width != 4) refuse("it says that a token has " + counted(width, "byte"));
    // No sum below overflows, because counts are below the file's size.
    const bool fits =
        header.tokens <= size / width && header.documents <= size / 16 && header.vocab <= uint64_t{1} << 32;
    const uint64_t offsets = (kHeader + header.tokens * width + 7) / 8 * 8;
    const uint64_t hashes = offsets + (header.documents + 1) * 8;
    const uint64_t ends = hashes + header.documents * 8;  // of the runs
    const bool runs_fit = !weighs || (of_weights.runs <= size / 12 && of_weights.ends == ends);
    const uint64_t begins = weighs && runs_fit ? ends + (of_weights.runs * 12 + 7) / 8 * 8 : ends;  // of the branches
    const bool branches_fit = of_branches.branches <= size / 16 && (!branches || of_branches.begins == begins);
    const uint64_t expected = branches_fit ? begins + of_branches.branches * 16 : begins;
    if (!fits || !runs_fit || !branches_fit || header.offsets != offsets || header.hashes != hashes ||
        size != expected) {
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
    if (!branches) return;
    has_trees_ = true;
    branches_ = static_cast<int64_t>(of_branches.branches);
    branch_begins_ = static_cast<int64_t>(begins);
    if (branches_ == 0 ? tokens_ != 0 : branch_begin(0) != 0) {
      refuse("its branches do not cover its " + with_commas(tokens_, "token"));
    }
  }

  bool has_trees() const override { return has_trees_; }

  // A binary search finds the branch.
  Branch branch_at(int64_t token) const override {
    int64_t i = 0;
    for (int64_t behind = branches_; i + 1 < behind;) {
      const int64_t middle = i + (behind - i) / 2;
      (branch_begin(middle) <= static_cast<uint64_t>(token) ? i : behind) = middle;
    }
    const uint64_t begin = branch_begin(i), after = data_.at<uint64_t>(branch_begins_ + (branches_ + i) * 8);
    const uint64_t end = i + 1 < branches_ ? branch_begin(i + 1) : static_cast<uint64_t>(tokens_);
    const auto place = static_cast<uint64_t>(token);
    const bool sound = begin <= place && place < end && end <= static_cast<uint64_t>(tokens_);
    if (!sound || (after != kNoBranch && after >= begin)) refuse("branch " + with_commas(i) + " is where none may be");
    require_unchanged();
    return {static_cast<int64_t>(begin), static_cast<int64_t>(end - begin), static_cast<int64_t>(after)};
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
    add_content(sum, data_, kHeader);
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
    if (has_trees_) verify_trees();
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

  // Branches are in depth-first order: each goes on behind an input of the branch before it or of one from which that
  // goes on, directly or not.
  void verify_trees() const {
    int64_t i = 0;
    visit_documents(
        false,
        [&](int64_t begin, int64_t length, uint64_t) {
          std::vector<Branch> open;  // the branch before and those from which it goes on, up to where each is left
          for (int64_t at = begin; at < begin + length; ++i) {
            const Branch branch = branch_at(at);
            while (!open.empty() && branch.after < open.back().begin) open.pop_back();
            const bool follows = open.empty() || branch.after < open.back().begin + open.back().length - 1;
            if (branch.begin != at || open.empty() != (branch.after < 0) || !follows ||
                branch.length > begin + length - at) {
              refuse("branch " + with_commas(i) + ", at token " + with_commas(at) + ", goes on behind token " +
                     with_commas(branch.after) + ", which does not fit its tree");
            }
            // What comes may leave it no later than this branch does.
            if (!open.empty()) open.back().length = branch.after - open.back().begin + 2;
            open.push_back(branch);
            at += branch.length;
          }
        },
        -1);
  }

  uint64_t branch_begin(int64_t i) const { return data_.at<uint64_t>(branch_begins_ + i * 8); }

  uint64_t run_end(int64_t run) const { return data_.at<uint64_t>(run_ends_ + run * 8); }

  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ErrorKind::kInput, "data",
                path_ + " was cut off or damaged: " + what + "; copy it again, or run `annulus tokenize` again");
  }

  std::string checksum_;
  int64_t offsets_ = 0, hashes_ = 0;  // in bytes
  int64_t run_ends_ = 0, runs_ = 0;   // in bytes; how many
  bool has_trees_ = false;
  int64_t branch_begins_ = 0, branches_ = 0;  // in bytes; how many
};

}  // namespace

std::unique_ptr<TokenFile> open_annulus(const std::string& path) { return std::make_unique<AnnulusShard>(path); }

}  // namespace annulus
