// Computes tiles block by block; see dense_tiles.h.
#include "attention/tiles/dense_tiles.h"

#include <algorithm>

#include "attention/tiles/dense.h"
#include "attention/tiles/merge.h"
#include "attention/tiles/tile_views.h"

namespace annulus {
namespace {

// A block of a tile for one batch row.
struct Block {
  Span batch;
  HeadGroup heads;
  Span rows, keys;     // indices into the tile's rows and keys
  at::Tensor mask;     // undefined: nothing is hidden
  at::Tensor factors;  // undefined: no dropout
};

bool hides_all(const Tile& tile, const Span& queries, const Span& keys) {
  return keys.last() - queries.begin < tile.band.lo || keys.begin - queries.last() > tile.band.hi;
}
bool hides_none(const Tile& tile, const Span& queries, const Span& keys) {
  return keys.begin - queries.last() >= tile.band.lo && keys.last() - queries.begin <= tile.band.hi;
}

template <typename Visit>
void for_each_block(const Tile& tile, const KernelCall& call, const at::Tensor& like, const Poll& poll, Visit visit) {
  const std::vector<HeadGroup> groups = head_groups(tile.heads, call.group);
  for (int64_t i = 0; i < tile.query_rows.count; i += kDenseRows) {
    const Span rows = Span::range(i, std::min(tile.query_rows.count, i + kDenseRows));
    const Span queries = members(tile.query_positions, rows);
    for (int64_t j = 0; j < tile.key_rows.count; j += kDenseKeys) {
      const Span columns = Span::range(j, std::min(tile.key_rows.count, j + kDenseKeys));
      const Span keys = members(tile.key_positions, columns);
      if (hides_all(tile, queries, keys)) continue;
      const MaskPlane* const of_tokens = call.mask_of(tile);
      const bool shows_all = of_tokens == nullptr && hides_none(tile, queries, keys);
      const at::Tensor mask = shows_all ? at::Tensor() : pair_mask(tile, of_tokens, rows, columns, like);
      for (int64_t b = 0; b < tile.batch.count; ++b) {
        for (const HeadGroup& heads : groups) {
          Block block{tile.batch.sub(b, 1), heads, rows, columns, mask, {}};
          if (call.dropout.rate > 0) {
            block.factors = dropout_factors(call.dropout, block.batch, heads.query, queries, keys, like);
          }
          visit(block);
          if (poll) poll();
        }
      }
    }
  }
}

}  // namespace

void dense_tile_forward(const at::Tensor& q, const KeyBlock& keys, const Tile& tile, const KernelCall& call,
                        at::Tensor& out, at::Tensor& lse, const Poll& poll) {
  for_each_block(tile, call, q, poll, [&](const Block& block) {
    const Span rows = members(tile.query_rows, block.rows), key_rows = members(tile.key_rows, block.keys);
    const auto of_keys = [&](const at::Tensor& tensor) {
      return block_view(tensor, keys, block.batch, block.heads.kv, key_rows).to(q.scalar_type());
    };
    const DenseForward part = dense_forward(rows_view(q, block.batch, block.heads.query, rows), of_keys(keys.k),
                                            of_keys(keys.v), block.mask, block.factors, call.scale, call.softcap);
    merge_partial(rows_view(out, block.batch, block.heads.query, rows),
                  lse_view(lse, block.batch, block.heads.query, rows), part.out, part.lse);
  });
}

int64_t dense_tile_backward(const DenseQueries& queries, const KeyBlock& keys, const KeyBlock& grads, const Tile& tile,
                            const KernelCall& call, at::Tensor& dq, const Poll& poll) {
  int64_t most = 0;
  for_each_block(tile, call, queries.q, poll, [&](const Block& block) {
    const Span rows = members(tile.query_rows, block.rows), key_rows = members(tile.key_rows, block.keys);
    const Span grad_rows = members(tile.grad_rows, block.keys);
    const auto of_queries = [&](const at::Tensor& tensor) {
      return rows_view(tensor, block.batch, block.heads.query, rows);
    };
    const auto of_keys = [&](const at::Tensor& tensor) {
      return block_view(tensor, keys, block.batch, block.heads.kv, key_rows).to(queries.q.scalar_type());
    };
    const DenseBackward part =
        dense_backward(of_queries(queries.dout), of_queries(queries.q), of_keys(keys.k), of_keys(keys.v),
                       of_queries(queries.out), lse_view(queries.lse, block.batch, block.heads.query, rows), block.mask,
                       block.factors, call.scale, call.softcap);
    of_queries(dq).add_(part.dq);
    block_view(grads.k, grads, block.batch, block.heads.kv, grad_rows).add_(part.dk);
    block_view(grads.v, grads, block.batch, block.heads.kv, grad_rows).add_(part.dv);
    most = std::max(most, part.dk.numel() + part.dv.numel());
  });
  return most;
}

DenseBytes dense_bytes(int64_t queries, int64_t keys, int64_t heads, int64_t wide) {
  const int64_t scores = std::min(queries, kDenseRows) * std::min(keys, kDenseKeys) * heads;
  // dense.cc holds tensors of [heads, rows, keys]: scores, factors, probabilities, these times the factors, and a bool
  // tensor of shown pairs; in the backward also dp, ds and an intermediate result of ds, or
  // of the derivative of a soft cap.
  return {(4 * wide + 1) * scores, (7 * wide + 1) * scores};
}

}  // namespace annulus
