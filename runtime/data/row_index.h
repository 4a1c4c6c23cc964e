// RowIndex: which tokens of a source make which row, for training and for validation. It depends only on the corpus and
// the settings, never on ranks. Used by SourceOrder, the dataset and `annulus pack`. That of a corpus with prefix trees
// looks up their branches, so the corpus must outlive it.
//
// On disk (docs/reference/formats.md) it is memory-mapped: opening one reads its tables and at most 16 blocks of its
// pieces.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/files.h"
#include "runtime/data/packing.h"
#include "runtime/data/shards/corpus.h"

namespace annulus {

enum class Split { kTrain, kValidation };

// The counts of a part. targets + first_tokens + lone_tokens = tokens.
struct PartCounts {
  int64_t documents = 0;  // empty ones included; pieces, for what remains of an epoch
  int64_t tokens = 0;
  int64_t rows = 0;
  int64_t targets = 0;  // positions; a token is a target in one row at most
  // Tokens that are not targets: the first ones of documents (or stretches, or branches), which no token predicts, ...
  int64_t first_tokens = 0;
  // ... and documents (or stretches, or branches) of a single token, which are in no row at all.
  int64_t lone_tokens = 0;

  int64_t left_out() const { return first_tokens + lone_tokens; }
};

// Rows of an epoch that were not drawn: at(i) of KeyedPermutation(rows, key) for every i from `drawn` on.
struct RowsLeft {
  uint64_t key = 0;
  int64_t drawn = 0;
};

// What an index records besides its pieces.
struct RowIndexFacts {
  PackSettings settings;
  std::string digest;
  bool tail_held_out = false;
  std::array<PartCounts, 2> counts;
  std::array<int64_t, 2> pieces{};  // of each part
  std::vector<uint64_t> windows;    // of training: the number of pieces up to the end of each window of the packing
};

// Thread-safe after construction.
class RowIndex {
 public:
  // Documents are held out for validation as a whole: those with hash / 2^64 < validation_fraction. The hash is that of
  // a document's tokens, so a corpus that grows keeps them. If these have no targets, or more than half of the tokens,
  // the source's tail is held out instead: a share of validation_fraction of its tokens, rounded up. Trees are held out
  // and packed whole; a larger one than a row is divided among rows as TreePacker does.

  // Makes an index in memory, for texts. Raises Error(kInput) for a document that is too long if that is refused, as
  // TreePacker does, and as the corpus does.
  static std::shared_ptr<const RowIndex> make(const Corpus& corpus, const PackSettings& settings);

  // The index in this folder if it is there, undamaged, and of this corpus and these settings; otherwise null.
  static std::shared_ptr<const RowIndex> find(const Corpus& corpus, const PackSettings& settings,
                                              const std::string& folder);
  // The same, but made if it is not there or not usable. Raises what make() and writing raise, and Error(kResource) on
  // a request to stop (common/interrupt.h); no half-written file is left. Tests replace `files`.
  static std::shared_ptr<const RowIndex> find_or_make(const Corpus& corpus, const PackSettings& settings,
                                                      const std::string& folder,
                                                      FileSystem& files = FileSystem::real());

  // The training rows of `before` that were not drawn, packed again with other settings (another context): pieces in
  // the order of their tokens, neighbours in a document joined. There is no validation part. In memory if `folder` is
  // empty, otherwise found there or made as above. Raises Error(kInput) if only one of the settings keeps documents
  // apart.
  static std::shared_ptr<const RowIndex> remaining(const RowIndex& before, const RowsLeft& left,
                                                   const PackSettings& settings, const std::string& folder = "",
                                                   FileSystem& files = FileSystem::real());

  virtual ~RowIndex() = default;
  RowIndex(const RowIndex&) = delete;
  RowIndex& operator=(const RowIndex&) = delete;

  const PackSettings& settings() const { return facts_.settings; }
  const PartCounts& counts(Split split) const { return facts_.counts[static_cast<size_t>(split)]; }
  int64_t rows(Split split) const { return counts(split).rows; }
  int64_t targets(Split split) const { return counts(split).targets; }
  // Whether the source's tail is held out instead of documents chosen by their hashes.
  bool tail_held_out() const { return facts_.tail_held_out; }
  // Identifies corpus, settings and what it was made from: 32 hexadecimal digits, equal if the rows are.
  const std::string& digest() const { return facts_.digest; }
  // The file's path; empty if it is in memory.
  virtual std::string path() const { return ""; }

  // The pieces of a row in order, each of one document (or branch of a tree); the rest of `context` is padding. Takes a
  // binary search. Raises Error(kInput) if the file has changed or cannot be read.
  std::vector<Piece> row(Split split, int64_t r) const;

  // The pieces of the training rows that were not drawn, in the order of their tokens, neighbours in a document joined.
  void visit_left(const RowsLeft& left, const std::function<void(const Piece&)>& visit) const;

  // Reads and checks everything: hashes, order, counts. Raises Error(kInput).
  void verify() const;

  // The name of an index's file: "rows-DIGEST.index".
  static std::string file_name(std::string_view digest);

 protected:
  // trees: the corpus if it has trees, otherwise null.
  explicit RowIndex(const Corpus* trees) : trees_(trees) {}

  // Reads pieces [first, first + count) of both parts, training first.
  virtual void read_pieces(int64_t first, int64_t count, PlacedPiece* to) const = 0;
  virtual void require_unchanged() const {}
  virtual void verify_stored() const {}

  RowIndexFacts facts_;

 private:
  [[noreturn]] void damaged(const std::string& what) const;
  Piece piece_of(const PlacedPiece& placed, uint64_t begin, uint64_t end) const;
  void verify_part(Split split) const;

  const Corpus* trees_;
};

}  // namespace annulus
