// Makes views of tensors for tiles; see tile_views.h.
#include "attention/tiles/tile_views.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "common/error.h"

namespace annulus {
namespace {

at::Tensor take(const at::Tensor& tensor, int64_t dim, const Span& s) {
  if (s.begin == 0 && s.stride == 1 && s.count == tensor.size(dim)) return tensor;
  if (s.empty()) return tensor.slice(dim, 0, 0);
  return tensor.slice(dim, s.begin, s.last() + 1, s.stride);
}

// A bool tensor [queries, keys], true where the mask shows a pair of these positions.
at::Tensor shown_by(const MaskPlane& mask, const Span& queries, const Span& keys) {
  const at::Tensor shown = at::zeros({queries.count, keys.count}, at::kBool);
  bool* row = shown.mutable_data_ptr<bool>();
  for (int64_t i = 0; i < queries.count; ++i, row += keys.count) {
    for_each_shown(mask.bits(queries.at(i), keys.begin), keys,
                   [row](int64_t first, int64_t count) { std::fill_n(row + first, count, true); });
  }
  return shown;
}

at::Tensor positions(const Span& s, const at::Tensor& like) {
  return at::arange(s.count, like.options().dtype(at::kLong)) * s.stride + s.begin;
}

}  // namespace

KeyBlock key_block(const at::Tensor& k, const at::Tensor& v, const RowSet& rows, int number) {
  int64_t first = 0;
  for (int i = 0; i < number; ++i) first += rows.blocks[static_cast<size_t>(i)].rows();
  const RowBlock& block = rows.blocks[static_cast<size_t>(number)];
  const auto view = [&](const at::Tensor& flat) {
    return flat.narrow(0, first, block.rows())
        .view({block.batch.count, block.positions_count(), block.heads.count, flat.size(1)});
  };
  return {view(k), view(v), block.batch, block.heads};
}

std::vector<HeadGroup> head_groups(const Span& heads, int64_t group) {
  if (group == 1) return {{heads, heads}};
  if (heads.stride == 1 && heads.begin % group == 0 && heads.count % group == 0) {
    return {{heads, Span::range(heads.begin / group, (heads.begin + heads.count) / group)}};
  }
  std::vector<HeadGroup> groups;  // neighbouring heads that read the same kv head stay together
  for (int64_t i = 0; i < heads.count;) {
    const int64_t kv = heads.at(i) / group;
    int64_t n = 1;
    while (i + n < heads.count && heads.at(i + n) / group == kv) ++n;
    groups.push_back({heads.sub(i, n), Span::range(kv, kv + 1)});
    i += n;
  }
  return groups;
}

at::Tensor rows_view(const at::Tensor& tensor, const Span& batch, const Span& heads, const Span& rows) {
  return take(take(take(tensor, 0, batch), 1, rows), 2, heads).transpose(1, 2);
}

Span indices_of(const Span& part, const Span& whole, const char* what) {
  const bool held = part.empty() || (whole.contains(part.begin) && whole.contains(part.last()) &&
                                     (part.count == 1 || part.stride % whole.stride == 0));
  if (!held) {
    throw Error(
        ErrorKind::kInternal, "kernel",
        std::string("a tile's ") + what + " " + to_string(part) + " are not all in its block's " + to_string(whole));
  }
  if (part.empty()) return {};
  return {whole.index_of(part.begin), part.count > 1 ? part.stride / whole.stride : 1, part.count};
}

at::Tensor block_view(const at::Tensor& tensor, const KeyBlock& block, const Span& batch, const Span& heads,
                      const Span& rows) {
  return rows_view(tensor, indices_of(batch, block.batch, "batch rows"), indices_of(heads, block.heads, "kv heads"),
                   rows);
}

at::Tensor lse_view(const at::Tensor& lse, const Span& batch, const Span& heads, const Span& rows) {
  return take(take(take(lse, 0, batch), 1, heads), 2, rows);
}

at::Tensor pair_mask(const Tile& tile, const MaskPlane* mask, const Span& queries, const Span& keys,
                     const at::Tensor& like) {
  const Span of_queries = members(tile.query_positions, queries), of_keys = members(tile.key_positions, keys);
  const at::Tensor difference = positions(of_keys, like).unsqueeze(0) - positions(of_queries, like).unsqueeze(1);
  at::Tensor shown = difference.ge(tile.band.lo).logical_and(difference.le(tile.band.hi));
  if (mask != nullptr) shown = shown.logical_and(shown_by(*mask, of_queries, of_keys).to(like.device()));
  return shown;
}

void zero_if_fresh(const KeyBlock& grads) {
  if (!grads.fresh) return;
  grads.k.zero_();
  grads.v.zero_();
}

at::ScalarType accumulator_type(at::ScalarType input) { return input == at::kDouble ? at::kDouble : at::kFloat; }

}  // namespace annulus
