// TokenMask: which (query, key) pairs a mask of tokens shows, for each batch row and query head or for all. The planner
// sees its blocks of 128 x 128 pairs: none, all or some of a block's pairs are shown, and only blocks of the last kind
// have bits, one a pair. Kernels, the proof and the oracle read the bits. A rank holds those of the query rows that it
// owns or computes (needed_bits in attention/plan/plan.h). Made from a tensor or a file; pattern.cc makes slices from
// it. It is plain data on the host.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/pattern/block_map.h"
#include "attention/pattern/span.h"

namespace annulus {

// The bits of one query: bit i of words[j] tells whether key first_key + 64 j + i is shown. Words without bits (null)
// belong to another rank.
struct MaskBits {
  const uint64_t* words = nullptr;
  int64_t first_key = 0;

  bool shows(int64_t key) const {
    const int64_t i = key - first_key;
    return (words[i / 64] >> (i % 64) & 1) != 0;
  }
};

// Of which query rows a mask holds the bits.
struct HeldBits {
  // Queries of some batch rows and query heads.
  struct Part {
    Span batch, heads;
    std::vector<Span> queries;  // apart from each other

    friend bool operator==(const Part&, const Part&) = default;
  };
  bool all = false;         // those of all
  std::vector<Part> parts;  // or those of these, which may overlap; none: the bits have not been read

  static HeldBits everything() { return {true, {}}; }
  // Those of these queries in all batch rows and heads.
  static HeldBits of(std::vector<Span> queries);

  std::string text() const;
  friend bool operator==(const HeldBits&, const HeldBits&) = default;
};

struct TokenMask {
  static constexpr int64_t kBlock = 128;  // positions on each side of a block

  int64_t batch = 1;  // 1: all batch rows share the mask
  int64_t heads = 1;  // 1: all query heads share the mask
  int64_t queries = 0, keys = 0;
  // The number of the plane [queries, keys] of batch row b and head h is plane_of[b * heads + h]. Equal planes have one
  // number.
  std::vector<int64_t> plane_of;
  // The blocks that are shown whole, and those of which a part is. The planes are the heads of these maps.
  BlockMap whole, partial;
  // The bits of a query are the words from word_of[plane * queries + query] on, two for each of the partial blocks of
  // its row, in order; -1: they are not held here. Empty: none are.
  struct Stored {
    std::vector<int64_t> word_of;
    std::vector<uint64_t> words;
  };
  std::shared_ptr<const Stored> stored = std::make_shared<const Stored>();  // also that of masks of some batch rows
  HeldBits held;
  // The least and the greatest key - query of a shown pair.
  int64_t nearest = 0, farthest = 0;
  std::string digest;  // of the sizes and all pairs, whoever holds their bits

  int64_t planes() const { return whole.heads; }
  // Returns a query of these whose bits of some of these batch rows and heads are not held together; none: all are.
  std::optional<int64_t> query_without_bits(const HeldBits::Part& rows) const;
  // Returns the bits of the run of partial blocks of this query that contains the key, which one must contain.
  MaskBits bits(int64_t plane, int64_t query, int64_t key) const;
  int64_t bytes() const;                              // of memory, with the bits
  int64_t bytes_holding(const HeldBits& rows) const;  // of memory, if it held these bits, and no others
  int64_t bytes_of_bits(const HeldBits& rows) const;  // of memory that these bits would take
  // Returns the mask of the batch rows first, ..., first + count - 1, with the bits of them that are held, which it
  // shares. Its digest follows from that of the whole mask.
  TokenMask of_batch_rows(int64_t first, int64_t count) const;
};

// Raises Error(kResource) if these bits would take more than mask_limit(). `where` names the mask.
void require_mask_limit(const TokenMask& mask, const HeldBits& rows, const std::string& where);

// A plane of a mask, to which slices and tiles refer by its index in a list.
struct MaskPlane {
  std::shared_ptr<const TokenMask> mask;
  int64_t plane = 0;

  MaskBits bits(int64_t query, int64_t key) const { return mask->bits(plane, query, key); }
  friend bool operator==(const MaskPlane& a, const MaskPlane& b) {
    return a.plane == b.plane && a.mask->digest == b.mask->digest && a.mask->held == b.mask->held;
  }
};
using MaskPlanes = std::vector<MaskPlane>;

// Calls visit(first, count) for the runs of shown keys, as indices into `keys`, of a query. One run of partial blocks
// must contain all of `keys`.
template <typename Visit>
void for_each_shown(const MaskBits& bits, const Span& keys, Visit visit) {
  int64_t since = -1;  // the first index of the open run
  for (int64_t i = 0; i < keys.count;) {
    const int64_t at = keys.at(i) - bits.first_key, left = keys.stride == 1 ? 64 - at % 64 : 1;
    const uint64_t word = bits.words[at / 64] >> (at % 64);
    const int alike = since < 0 ? std::countr_zero(word) : std::countr_one(word);
    if (alike > 0) {
      i += std::min<int64_t>(alike, left);
    } else {
      if (since >= 0) visit(since, i - since);
      since = since < 0 ? i : -1;
    }
  }
  if (since >= 0) visit(since, keys.count - since);
}

// Where a mask comes from: returns `count` rows of `keys` bytes, nonzero where a pair is shown, of the queries `first`,
// ... of plane `number` = b * heads + h. The memory is valid until the next call. Called in order, and more than once.
using MaskRows = std::function<const uint8_t*(int64_t number, int64_t first, int64_t count)>;

// Makes a mask with the bits in `held`. Raises Error(kPlan) if no pair of the whole mask is shown, and Error(kResource)
// if the bits would take more than mask_limit(), before it takes memory for them. `where` names the mask in messages
// ("the mask in FILE").
TokenMask make_token_mask(int64_t batch, int64_t heads, int64_t queries, int64_t keys, const MaskRows& rows,
                          const HeldBits& held, const std::string& where);

// Makes a mask that holds all of its bits, from uint8 [batch, heads, queries, keys], row-major.
TokenMask token_mask_from_dense(const uint8_t* shown, int64_t batch, int64_t heads, int64_t queries, int64_t keys);

// Returns the most bytes that the bits of one mask may take on a rank: ANNULUS_MASKS_MIB or 1 GiB until
// set_mask_limit() is called, with the key memory.masks of a configuration. Raises Error(kUsage) if the variable is not
// a whole number from 0 to 1,048,576. Thread safe.
int64_t mask_limit();
void set_mask_limit(int64_t bytes);

}  // namespace annulus
