// Which calls of a library's attention operators compute some tiles: rectangles that fill a device as views of the
// storage (strides and all), smaller ones gathered into batches of one shape, the rest densely. No tensors here: made
// on the host, once for tiles that come again. Used by kernels/composed_kernel.cc.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention/composition/rectangles.h"
#include "attention/plan/plan.h"
#include "attention/tiles/tile_views.h"

namespace annulus {

// One call on views: these batch rows and heads of the rectangle's rows.
struct DirectCall {
  Span batch;
  HeadGroup heads;
  Rectangle rectangle;  // not reversed
};

// One call on `count` gathered problems of `queries` x `keys`, each for `heads` query heads that read `kv_heads` kv
// heads. Numbers name rows of width `heads` (or `kv_heads`) in the storage [B, rows, H] taken apart into such rows:
// those of problem p are p * queries, ... No query row is named twice.
struct GatherCall {
  int64_t count = 0, queries = 0, keys = 0;
  int64_t heads = 1, kv_heads = 1;
  Band band;  // whole, or any that the operator takes
  std::vector<int64_t> query_rows, key_rows;
  std::vector<int64_t> grad_rows;  // of the gradients' block; empty in a forward
};

struct Composition {
  std::vector<DirectCall> direct;
  std::vector<GatherCall> gathered;
  std::vector<Tile> dense;  // bands over positions whose strides do not fit

  int64_t bytes() const;  // of memory, its lists included
};

// A block as the kernel sees it.
struct BlockShape {
  Span batch, heads;  // global
  int64_t rows = 0;
};

struct CompositionInput {
  int64_t rows = 0, heads = 0;  // of q [B, rows, heads, D]
  int64_t group = 1;            // query heads that read one kv head
  BlockShape keys, grads;       // grads.rows = 0 in a forward
  bool any_band = false;        // the operator takes any band over indices, not only whole and causal
  // Rows x query heads of the longer side that one gathered call holds at most.
  int64_t most_gathered = int64_t{1} << 20;
  // Blocks of 128 query rows, over heads and batch rows, that keep a device busy: a call on views. Fewer are gathered
  // with others of their shape, if there are any.
  int64_t fill = 256;
};

// Every counted pair of the tiles is in exactly one call.
Composition compose(std::span<const Tile> tiles, const CompositionInput& input);

// Equal for equal arguments of compose: what a cache finds them by.
std::string fingerprint(std::span<const Tile> tiles, const CompositionInput& input);

}  // namespace annulus
