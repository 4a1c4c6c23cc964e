// Flash attention on CPU for one block of query rows of one head: its keys may be gathered from any number of pieces of
// storage, strided, each cut by a band. Pointers only; the caller cuts the work and gives it to threads. Used by
// kernels/aten_kernel.cc.
//
// FlashAttention 2 (arXiv 2307.08691, algorithms 1 and 2), with the running out and lse as its state, so that nothing
// is merged afterwards.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/pattern/span.h"

namespace annulus {

// Rows of a matrix of `dim` columns, `step` >= dim elements apart.
template <typename T>
struct Rows {
  T* data = nullptr;
  int64_t step = 0;

  T* at(int64_t i) const { return data + i * step; }
};

template <typename T>
struct QueryBlock {
  int64_t count = 0;
  Span positions;
  Rows<const T> q;
  T* lse = nullptr;  // `count` values, lse_step apart
  int64_t lse_step = 1;
  Rows<T> out;  // forward: state; together with lse
  // Backward.
  Rows<const T> dout;
  const T* delta = nullptr;  // rowsum(dout * out), delta_step apart
  int64_t delta_step = 1;
  Rows<T> dq;  // added to
};

template <typename T>
struct KeyPiece {
  Span positions;
  Band band;
  Rows<const T> k, v;
  Rows<T> dk, dv;  // backward: added to
};

// What one thread needs besides: at most kMostRows x kMostKeys scores and as many of their gradients, and kMostKeys
// rows of keys, values and gradients. Grows to what is needed and stays.
template <typename T>
struct FlashScratch {
  std::vector<T> scores, gradients, out, keys, values, dk, dv, maximum, sum;
};
constexpr int64_t kMostRows = 256;
constexpr int64_t kMostKeys = 512;

// Updates block.out and block.lse by all keys of `pieces`. block.count <= kMostRows. Keys and values behind a band must
// be finite.
template <typename T>
void flash_forward(const QueryBlock<T>& block, std::span<const KeyPiece<T>> pieces, int64_t dim, T scale,
                   FlashScratch<T>& scratch);

// Adds to dq, dk and dv. lse is the merged one, +inf for rows without a key.
template <typename T>
void flash_backward(const QueryBlock<T>& block, std::span<const KeyPiece<T>> pieces, int64_t dim, T scale,
                    FlashScratch<T>& scratch);

}  // namespace annulus
