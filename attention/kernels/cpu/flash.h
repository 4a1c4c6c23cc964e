// Flash attention on CPUs for blocks of query rows of one head, or of several heads with the same kv head. Keys may lie
// in any number of pieces of storage, strided or not, each masked by a band and, if wanted, by a mask of tokens. The
// functions take pointers and run in the calling thread; the caller divides the work among threads. Used by
// attention/kernels/cpu/cpu_kernel.cc.
//
// This is FlashAttention 2 (arXiv 2307.08691, algorithms 1 and 2) with the running out and lse as its state, so nothing
// is merged afterwards. Keys are packed once for all rows of a call, chunk by chunk; values are read in place if
// possible, and dk and dv are summed over all rows of a call before they are added to the results (key_chunks.h). Query
// rows are packed when a chunk first needs them, and their results are written after the last chunk that they see
// (row_tiles.h). The scores of a few rows with a chunk stay in the L1 cache (tile_math.h has the products). bf16 is
// multiplied as bf16 where the processor supports it (tile_math_of_pairs): the products of q k^T and dout v^T are
// exact, and p and ds are rounded to bf16 first, as in the kernels for GPUs. Sums, softmax and the state are fp32.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "attention/kernels/cpu/tile_math.h"
#include "attention/pattern/span.h"
#include "attention/pattern/token_mask.h"
#include "memory/pool/pool_vector.h"

namespace annulus {

// Rows of a matrix of `dim` columns, `step` >= dim elements apart.
template <typename T>
struct Rows {
  T* data = nullptr;
  int64_t step = 0;

  T* at(int64_t i) const { return data + i * step; }
};

// Rows of results, `step` elements apart, in T or in bf16.
struct ResultRows {
  void* data = nullptr;
  int64_t step = 0;
  ElementType storage = ElementType::kFloat;

  void* at(int64_t i) const { return static_cast<char*>(data) + i * step * width_of(storage); }
  operator StoredRows() const { return {data, step, storage}; }
  // Returns how to write a row, given whether it has been written. A bf16 row can be written only once.
  Put put(bool written) const {
    return storage == ElementType::kBFloat16 ? Put::kRound : written ? Put::kAdd : Put::kSet;
  }
};

// Flags, `step` apart, of the rows that have been written. Other rows are set instead of added to. Null: all have been
// written.
struct WrittenRows {
  uint8_t* flags = nullptr;
  int64_t step = 1;

  // Returns whether row i has been written, and marks it as written.
  bool test_and_set(int64_t i) const { return flags == nullptr || std::exchange(flags[i * step], uint8_t{1}) != 0; }
};

// The rows of one query head. q and dout are fp32, bf16 or fp16 if T is float, and fp64 if T is double.
template <typename T>
struct QueryRows {
  StoredRows q;
  T* lse = nullptr;  // `count` values, lse_step apart
  int64_t lse_step = 1;
  // Forward: the state, with lse, which the call updates. A bf16 `out` must be fresh: lse is -inf.
  ResultRows out;
  // For the backward, except philox_key, which both directions use.
  StoredRows dout;
  uint64_t philox_key = 0;  // with dropout (attention/dropout/dropout.h)
  StoredRows result;        // the merged out of the forward, in the dtype of dout
  ResultRows dq;            // accumulated or set; in bf16 only one call may write it
  WrittenRows written;      // of dq
};

template <typename T>
struct QueryBlock {
  int64_t count = 0;  // rows of each head
  Span positions;     // of these rows
  std::vector<QueryRows<T>> heads;
  // Dropout (attention/dropout/draws.h): the factor of kept pairs, and the threshold below which a draw drops its pair;
  // a threshold of 0 means no dropout.
  T kept = 1;
  uint64_t drop_threshold = 0;
};

template <typename T>
struct KeyPiece {
  std::span<const int> blocks;  // the distinct ascending indices of the query blocks that see some of it
  Span positions;
  Band band;
  const MaskPlane* mask = nullptr;  // hides further pairs; null: none
  StoredRows k, v;
  Rows<T> dk, dv;       // backward: accumulated or set
  WrittenRows written;  // of dk and dv
};

// Aligned to cache lines, so that vectors and rows of tiles do not straddle lines, and uninitialized.
template <typename T>
using ScratchBuffer = PoolVector<T, PoolPurpose::kScratch>;

// The scratch memory of one thread. Its vectors grow as needed and keep their size.
template <typename T>
struct FlashScratch {
  ScratchBuffer<T> q, dout, out, per_row, scores, gradients, narrowed, factors, k, v, k_columns, v_columns, dk, dv;
};
// The recommended maximum of rows, all heads together: of a query block, so that they stay in the L2 cache, and of all
// blocks of a call, if only some blocks see a key.
constexpr int64_t kMostRows = 1024, kMostSetRows = 4096;
constexpr int64_t kMostKeys = 256;

// How a score follows from q.k: scale * q.k, or with a soft cap softcap * tanh(scale / softcap * q.k).
template <typename T>
struct Scoring {
  T scale, softcap;  // without a cap it is 0

  Scoring(double s, double cap) : scale(static_cast<T>(s)), softcap(static_cast<T>(cap)) {}
};

// Estimates the number of elements of a FlashScratch if all blocks and heads of a call together have at most `rows`
// rows.
constexpr int64_t flash_scratch_elements(int64_t rows, int64_t dim, bool backward) {
  return backward ? (3 * rows + 5 * kMostKeys) * dim + 2 * kMostRowsHeld * kMostKeys : 2 * (rows + kMostKeys) * dim;
}

// Called in the calling thread between pieces of work, with the number of pairs since the last call. May be empty.
using FlashDone = std::function<void(double pairs)>;

// Updates out and lse of all rows of the blocks with all keys of `pieces`. All blocks have the same heads and settings
// of dropout, and are disjoint. Keys are packed once for all blocks, in the order of `pieces`. `dim` is the head size.
// Masked keys and values must be finite, because they are multiplied by a probability of 0. Thread safe for calls that
// share neither scratch nor outputs. If `done` throws, outputs are invalid.
template <typename T>
void flash_forward(std::span<const QueryBlock<T>> blocks, std::span<const KeyPiece<T>> pieces, int64_t dim,
                   const Scoring<T>& scoring, FlashScratch<T>& scratch, const FlashDone& done);

// Adds the gradients to dq, dk and dv, or sets rows that have not been written. lse is merged, +inf for rows without a
// key. Masked keys and values must be finite, as must q, dout and result of all rows, because masked pairs contribute
// rows times 0 to dk and dv. Otherwise like flash_forward.
template <typename T>
void flash_backward(std::span<const QueryBlock<T>> blocks, std::span<const KeyPiece<T>> pieces, int64_t dim,
                    const Scoring<T>& scoring, FlashScratch<T>& scratch, const FlashDone& done);

}  // namespace annulus
