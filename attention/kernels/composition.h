// Composes the computation of tiles from calls of a library's attention operators. Rectangles that fill a device become
// calls on strided views of the storage, smaller ones are gathered into batches of one shape, and the rest is computed
// densely. docs/internals/kernels.md, "Composed of operators", has examples. This code works on the host without
// tensors, and its result is cached for programs that run again. Used by attention/kernels/composed_kernel.cc. The
// functions are thread safe.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention/kernels/rectangles.h"
#include "attention/plan/plan.h"
#include "attention/tiles/tile_views.h"

namespace annulus {

// An operator call on views of the rectangle's rows, for these batch rows and heads.
struct DirectCall {
  Span batch;
  HeadGroup heads;
  Rectangle rectangle;  // not reversed
};

// An operator call on a gathered batch of `count` problems of `queries` x `keys` rows, each for `heads` query heads
// that read `kv_heads` kv heads. Row numbers count rows of `heads` (or `kv_heads`) heads in storage [B, rows, H]; those
// of problem p begin at query_rows[p * queries]. No query row occurs twice.
struct GatherCall {
  int64_t count = 0, queries = 0, keys = 0;
  int64_t heads = 1, kv_heads = 1;
  Band band;  // over row indices: unbounded, causal, or any if the operator supports any band
  std::vector<int64_t> query_rows, key_rows;
  std::vector<int64_t> grad_rows;  // rows of the gradients' block; empty in a forward
};

struct Composition {
  std::vector<DirectCall> direct;
  std::vector<GatherCall> gathered;
  std::vector<Tile> dense;  // tiles with too many rectangles (rectangles_of), or with a mask of tokens

  int64_t bytes() const;  // of memory, lists included
};

// The shape of a block of keys or gradients.
struct BlockShape {
  Span batch, heads;  // global
  int64_t rows = 0;
};

struct CompositionInput {
  int64_t rows = 0, heads = 0;  // the sizes of q [B, rows, heads, D]
  int64_t group = 1;            // query heads per kv head
  BlockShape keys, grads;       // grads.rows = 0 in a forward
  bool any_band = false;        // the operator supports any band, not only unbounded and causal ones
  // The limit of rows x query heads, on the longer side, of a gathered call.
  int64_t most_gathered = int64_t{1} << 20;
  // The number of blocks of 128 query rows, over heads and batch rows, that fill a device. A rectangle with as many
  // becomes a call on views; smaller ones are gathered with others of the same shape, if there are any.
  int64_t fill = 256;
};

// Composes the tiles. Each counted pair of each tile is in exactly one call.
Composition compose(std::span<const Tile> tiles, const CompositionInput& input);

// Returns the cache key of compose()'s result: the program's number, the tiles' place in the program, and the input.
// Does not read the tiles, of which a call may have a hundred thousand.
std::string composition_key(uint64_t program, std::span<const Tile> tiles, const CompositionInput& input);

}  // namespace annulus
