// Finds the calls of a library's attention operators that compute some tiles. Rectangles that fill a device become
// calls on strided views of the storage, smaller ones are gathered into batches of one shape, and the rest is computed
// densely. docs/attention.md, "Composed of operators", has examples. This code works on the host without tensors, and
// its result is cached for programs that run again. Used by attention/kernels/composed_kernel.cc. The functions are
// thread safe.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention/kernels/rectangles.h"
#include "attention/plan/plan.h"
#include "attention/tiles/tile_views.h"

namespace annulus {

// One call on views of the rectangle's rows, for these batch rows and heads.
struct DirectCall {
  Span batch;
  HeadGroup heads;
  Rectangle rectangle;  // not reversed
};

// One call on `count` gathered problems of `queries` x `keys` rows, each for `heads` query heads that read `kv_heads`
// kv heads. The storage [B, rows, H] consists of rows of `heads` (or `kv_heads`) heads, and the lists contain the
// numbers of such rows: query_rows[p * queries] is the first one of problem p. No query row is named twice.
struct GatherCall {
  int64_t count = 0, queries = 0, keys = 0;
  int64_t heads = 1, kv_heads = 1;
  Band band;  // over row indices: unbounded, causal, or any if the operator takes any band
  std::vector<int64_t> query_rows, key_rows;
  std::vector<int64_t> grad_rows;  // rows of the gradients' block; empty in a forward
};

struct Composition {
  std::vector<DirectCall> direct;
  std::vector<GatherCall> gathered;
  std::vector<Tile> dense;  // tiles whose strides would give too many rectangles (rectangles_of)

  int64_t bytes() const;  // the memory that it occupies, including its lists
};

// The batch rows, kv heads and number of rows of a block of keys or gradients.
struct BlockShape {
  Span batch, heads;  // global
  int64_t rows = 0;
};

struct CompositionInput {
  int64_t rows = 0, heads = 0;  // the sizes of q [B, rows, heads, D]
  int64_t group = 1;            // the number of query heads that read one kv head
  BlockShape keys, grads;       // grads.rows = 0 in a forward
  bool any_band = false;        // the operator takes any band over row indices, not only unbounded and causal ones
  // The most rows x query heads of the longer side that one gathered call has.
  int64_t most_gathered = int64_t{1} << 20;
  // The number of blocks of 128 query rows, over heads and batch rows, that keep a device busy. A rectangle with as
  // many becomes a call on views; smaller ones are gathered with others of their shape, if there are any.
  int64_t fill = 256;
};

// Composes the tiles. Each tile's counted pairs are in exactly one call each.
Composition compose(std::span<const Tile> tiles, const CompositionInput& input);

// The key under which the result of compose() is cached: the tiles by their program's number and their place in it, and
// the input. The tiles are not read, because there may be a hundred thousand of them in each call.
std::string composition_key(uint64_t program, std::span<const Tile> tiles, const CompositionInput& input);

}  // namespace annulus
