// RowIndex: which tokens of a source make which row, for training and for validation. It depends on the corpus and the
// settings alone, never on ranks. Used by order.h, the dataset and `annulus pack`.
//
// On disk (docs/formats.md) it is memory-mapped: opening one of any size reads a bounded part of it.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/files.h"
#include "data/packing.h"
#include "data/shards/corpus.h"

namespace annulus {

enum class Split { kTrain, kValidation };

// What a part is made of. targets + first_tokens + lone_tokens = tokens.
struct PartCounts {
  int64_t documents = 0;  // empty ones included; of what remains of an epoch, units
  int64_t tokens = 0;
  int64_t rows = 0;
  int64_t targets = 0;  // positions: every token that is one is so in one row
  // Tokens that are no target: the first ones of documents (or stretches), which nothing before them predicts, ...
  int64_t first_tokens = 0;
  // ... and documents (or stretches) of a single token, which are in no row at all.
  int64_t lone_tokens = 0;

  int64_t left_out() const { return first_tokens + lone_tokens; }
};

// Rows of an epoch that were not drawn: rows at(i) of KeyedPermutation(rows, key), i from `drawn` on.
struct RowsLeft {
  uint64_t key = 0;
  int64_t drawn = 0;
};

// What an index says of its pieces.
struct RowIndexFacts {
  PackSettings settings;
  std::string digest;
  bool tail_held_out = false;
  std::array<PartCounts, 2> counts;
  std::array<int64_t, 2> pieces{};  // of each part
  std::vector<uint64_t> windows;    // of training: the piece behind the last of each window of the packing
};

// Thread-safe after construction.
class RowIndex {
 public:
  // Which documents are held out for validation: those with hash / 2^64 < validation_fraction, whole. A document's hash
  // is of its tokens, so that a corpus that grows keeps them. Where these are none, or more than half of the tokens,
  // the source's tail is held out instead: a share of validation_fraction of its tokens, rounded up.

  // In memory: for texts. Raises Error(kInput) for a document that is too long where that is refused, and as the
  // corpus does.
  static std::shared_ptr<const RowIndex> make(const Corpus& corpus, const PackSettings& settings);

  // The index in this folder, if it is there, whole, and of this corpus and these settings; else null.
  static std::shared_ptr<const RowIndex> find(const Corpus& corpus, const PackSettings& settings,
                                              const std::string& folder);
  // The same, made where it is not there (or not usable). Raises what make() and writing raise, and Error(kResource) on
  // a request to stop (common/interrupt.h); nothing is left half written. `files` is replaced in tests.
  static std::shared_ptr<const RowIndex> find_or_make(const Corpus& corpus, const PackSettings& settings,
                                                      const std::string& folder,
                                                      FileSystem& files = FileSystem::real());

  // The training rows of `before` that were not drawn, packed anew with other settings (another context): pieces in the
  // order of their tokens, neighbours joined. There is no validation part. In memory where `folder` is empty; else
  // found there or made as above.
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
  // Whether the tail is held out, not documents by their hashes.
  bool tail_held_out() const { return facts_.tail_held_out; }
  // Names corpus, settings and what it was made from: 32 hexadecimal digits, equal where the rows are.
  const std::string& digest() const { return facts_.digest; }
  // Of the file; empty where it is in memory.
  virtual std::string path() const { return ""; }

  // The pieces of a row, one behind the other; what they leave of `context` is padding. A binary search. Raises
  // Error(kInput) where the file has changed or cannot be read.
  std::vector<Piece> row(Split split, int64_t r) const;

  // The pieces of the training rows that were not drawn, in the order of their tokens, neighbours joined.
  void visit_left(const RowsLeft& left, const std::function<void(const Piece&)>& visit) const;

  // Reads all and checks it: hashes, order, counts. Raises Error(kInput).
  void verify() const;

  // The name of an index's file: "rows-DIGEST.index".
  static std::string file_name(std::string_view digest);

 protected:
  RowIndex() = default;

  // Pieces of both parts, training first, [first, first + count).
  virtual void read_pieces(int64_t first, int64_t count, PlacedPiece* to) const = 0;
  virtual void require_unchanged() const {}
  virtual void verify_stored() const {}

  RowIndexFacts facts_;

 private:
  [[noreturn]] void damaged(const std::string& what) const;
  void verify_part(Split split) const;
};

}  // namespace annulus
