// Flash attention on CPU for a block of query rows of one head, or of several heads that share their keys: the keys may
// be gathered from any number of pieces of storage, strided, each cut by a band. Pointers only; the caller cuts the
// work and gives it to threads. Used by kernels/cpu_kernel.cc.
//
// FlashAttention 2 (arXiv 2307.08691, algorithms 1 and 2), with the running out and lse as its state, so that nothing
// is merged afterwards. Keys are packed once for all rows of a call, a chunk at a time, and the scores of a few rows
// with a chunk stay in the first cache (tile_math.h has the products).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/cpu_flash/tile_math.h"
#include "attention/pattern/span.h"

namespace annulus {

// Rows of a matrix of `dim` columns, `step` >= dim elements apart.
template <typename T>
struct Rows {
  T* data = nullptr;
  int64_t step = 0;

  T* at(int64_t i) const { return data + i * step; }
};

// Rows of one query head. q and dout: float, bf16 or fp16 where T is float, double where it is double.
template <typename T>
struct QueryRows {
  StoredRows q;
  T* lse = nullptr;  // `count` values, lse_step apart
  int64_t lse_step = 1;
  Rows<T> out;  // forward: state; together with lse
  // Backward.
  StoredRows dout;
  uint64_t philox_key = 0;   // with dropout (dropout.h)
  const T* delta = nullptr;  // rowsum(dout * out), delta_step apart
  int64_t delta_step = 1;
  Rows<T> dq;  // added to
};

template <typename T>
struct QueryBlock {
  int64_t count = 0;  // rows of each head, at most kMostRows
  Span positions;     // of these rows
  std::vector<QueryRows<T>> heads;
  // Dropout of pairs (attention/tiles/draws.h): what the others are multiplied by, and where it ends; 0: none.
  T kept = 1;
  uint64_t drop_threshold = 0;
};

template <typename T>
struct KeyPiece {
  Span positions;
  Band band;
  StoredRows k, v;
  Rows<T> dk, dv;  // backward: added to
  // A flag for each row of dk and dv, holds_step apart: whether the row holds something. A row that does not is set,
  // and its flag too. Null: all rows hold something.
  uint8_t* holds = nullptr;
  int64_t holds_step = 1;
};

// What one thread needs besides. It grows to what is needed and stays.
template <typename T>
struct FlashScratch {
  std::vector<T> q, dout, out, per_row, scores, gradients, factors, k, v, k_columns, v_columns, dk, dv;
};
constexpr int64_t kMostRows = 1024;
constexpr int64_t kMostKeys = 256;
// Query rows whose scores are held at once in the backward: few enough for the second cache, many enough for dk and dv
// to be read and written seldom.
constexpr int64_t kRowsHeld = 48;

// About how many elements that is, where all heads together have at most `rows` rows at a time.
constexpr int64_t flash_scratch_elements(int64_t rows, int64_t dim, bool backward) {
  return backward ? (3 * rows + 5 * kMostKeys) * dim + 2 * kRowsHeld * kMostKeys : 2 * (rows + kMostKeys) * dim;
}

// Updates out and lse of all rows by all keys of `pieces`. Keys and values behind a band must be finite: they are
// multiplied by a probability of 0.
template <typename T>
void flash_forward(const QueryBlock<T>& block, std::span<const KeyPiece<T>> pieces, int64_t dim, T scale,
                   FlashScratch<T>& scratch);

// Adds to dq, dk and dv, and sets rows that hold nothing. lse is the merged one, +inf for rows without a key. Besides
// keys and values behind a band, q and dout of all rows must be finite: dk and dv of keys that a row does not see add
// its q and dout times 0.
template <typename T>
void flash_backward(const QueryBlock<T>& block, std::span<const KeyPiece<T>> pieces, int64_t dim, T scale,
                    FlashScratch<T>& scratch);

}  // namespace annulus
