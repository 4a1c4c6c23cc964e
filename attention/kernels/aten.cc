// The aten kernel: LibTorch's CPU flash attention with its logsumexp, called on the rectangles of band_cut.h.
//
// Its operator computes in the tensors' dtype, and its backward wants one dtype throughout: bf16 and fp16 are computed
// in fp32. It knows causal from the top left and float masks only, and dies for zero rows, which no rectangle has.
#include <ATen/Parallel.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "attention/kernels/band_cut.h"
#include "attention/kernels/dense.h"
#include "attention/kernels/kernels.h"
#include "attention/kernels/merge.h"
#include "attention/kernels/tile_views.h"

namespace annulus {
namespace {

using Mask = Rectangle::Mask;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Part of a step's work that one mask describes.
struct Area {
  Mask mask;
  const Tile* tile;     // for the mask of a banded area
  Rectangle rectangle;  // likewise: where the area lies in its tile
  Span batch, heads;    // query heads
  Span queries, keys;   // storage rows
  Span grads;           // rows of the keys' gradients; none in the forward
};

// One operator call.
struct Piece {
  const Area* area;
  Span batch;
  HeadGroup heads;
};

// b continues where a ends.
bool adjacent(const Span& a, const Span& b) { return a.stride == 1 && b.stride == 1 && a.begin + a.count == b.begin; }

// Full areas that touch become one: chunks that lie apart in the sequence lie side by side in storage, and LibTorch's
// operator takes larger blocks for longer tensors.
void join_full_areas(std::vector<Area>& areas) {
  for (size_t i = 0; i < areas.size();) {
    bool joined = false;
    for (size_t j = i + 1; j < areas.size() && !joined; ++j) {
      Area &a = areas[i], &b = areas[j];
      if (a.mask != Mask::kFull || b.mask != Mask::kFull || !(a.batch == b.batch) || !(a.heads == b.heads)) continue;
      if (a.keys == b.keys && a.grads == b.grads && adjacent(a.queries, b.queries)) {
        a.queries.count += b.queries.count;
        joined = true;
      } else if (a.queries == b.queries && adjacent(a.keys, b.keys) &&
                 (a.grads.empty() || adjacent(a.grads, b.grads))) {
        a.keys.count += b.keys.count;
        a.grads.count += b.grads.count;
        joined = true;
      }
      if (joined) areas.erase(areas.begin() + static_cast<std::ptrdiff_t>(j));
    }
    if (!joined) ++i;
  }
}

class AtenKernel : public Kernel {
 public:
  void begin_forward(const at::Tensor& q, const KernelCall& call) override {
    type_ = accumulator_type(q.scalar_type());
    call_ = call;
    q_ = q.to(type_);
    out_ = at::zeros(q.sizes(), q_.options());
    lse_ = at::full({q.size(0), q.size(2), q.size(1)}, -kInfinity, q_.options());
  }

  void forward(const KeyBlock& keys, std::span<const Tile> tiles, const Poll& poll) override {
    load(keys);
    for_each_piece(tiles, poll, [&](const Piece& piece) {
      const DenseForward part = call_forward(piece);
      merge_partial(queries_of(out_, piece), lse_of(piece), part.out, part.lse);
    });
  }

  void finish_forward(at::Tensor& out, at::Tensor& lse) override {
    out = out_;
    lse = lse_;
  }

  void begin_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& out, const at::Tensor& lse,
                      const KernelCall& call) override {
    type_ = accumulator_type(q.scalar_type());
    call_ = call;
    q_ = q.to(type_);
    dout_ = dout.to(type_);
    out_ = out.to(type_);
    // exp(score - lse) must be 0 in rows without keys.
    lse_ = lse.masked_fill(lse.eq(-kInfinity), kInfinity);
    dq_ = at::zeros(q.sizes(), q_.options());
  }

  void backward(const KeyBlock& keys, const KeyBlock& grads, std::span<const Tile> tiles, const Poll& poll) override {
    load(keys);
    for_each_piece(tiles, poll, [&](const Piece& piece) {
      const DenseBackward part = call_backward(piece);
      queries_of(dq_, piece).add_(part.dq);
      const Span& rows = piece.area->grads;
      block_view(grads.k, grads, piece.batch, piece.heads.kv, rows).add_(part.dk);
      block_view(grads.v, grads, piece.batch, piece.heads.kv, rows).add_(part.dv);
      peak_result_elements_ = std::max(peak_result_elements_, part.dk.numel() + part.dv.numel());
    });
  }

  at::Tensor finish_backward() override { return dq_; }

 private:
  void load(const KeyBlock& keys) {
    keys_ = {keys.k.to(type_), keys.v.to(type_), keys.batch, keys.heads};
    finite_ = Finite::kUnknown;
  }

  // Whether a mask may be trusted to hide a key: an infinite or NaN value would leak through 0 x inf.
  bool loaded_is_finite() {
    if (finite_ == Finite::kUnknown) finite_ = all_finite(keys_.k) && all_finite(keys_.v) ? Finite::kYes : Finite::kNo;
    return finite_ == Finite::kYes;
  }

  template <typename Visit>
  void for_each_piece(std::span<const Tile> tiles, const Poll& poll, Visit visit) {
    const double budget = poll ? kFlopsPerCall * at::get_num_threads() : std::numeric_limits<double>::infinity();
    const std::vector<Area> areas = areas_of(tiles, budget);
    for (const Area& area : areas) {
      for (const Piece& piece : pieces_of(area, budget)) {
        visit(piece);
        if (poll) poll();
      }
    }
  }

  // Where transfers wait for progress, no call does much more than this for one thread: about 4 ms.
  static constexpr double kFlopsPerCall = 3e8;
  // The operator takes its largest blocks from this many query rows on: splitting further costs more than waiting.
  static constexpr int64_t kFewestRows = 768;

  double flops_per_row(int64_t keys) const {
    return 4.0 * static_cast<double>(std::max<int64_t>(1, keys) * q_.size(3));
  }

  // Calls are shortened by taking fewer batch rows and heads (pieces_of), which costs nothing; if one head alone is too
  // long, by taking fewer query rows.
  std::vector<Area> areas_of(std::span<const Tile> tiles, double budget) const {
    std::vector<Area> areas;
    for (const Tile& tile : tiles) {
      const double rows = std::min(budget / flops_per_row(tile.key_rows.count), 1e15);
      for (const Rectangle& r : cut_band(tile, std::max(kFewestRows, static_cast<int64_t>(rows)))) {
        areas.push_back({r.mask, &tile, r, tile.batch, tile.heads, members(tile.query_rows, r.queries),
                         members(tile.key_rows, r.keys),
                         tile.grad_rows.empty() ? Span{} : members(tile.grad_rows, r.keys)});
      }
    }
    join_full_areas(areas);
    return areas;
  }

  std::vector<Piece> pieces_of(const Area& area, double budget) const {
    const double one_head = flops_per_row(area.keys.count) * static_cast<double>(area.queries.count);
    const int64_t at_once = static_cast<int64_t>(std::clamp(budget / one_head, 1.0, 1e6));  // query heads x batch rows
    std::vector<Piece> list;
    for (const HeadGroup& group : head_groups(area.heads, call_.group)) {
      const int64_t share = group.query.count / group.kv.count;  // query heads of one kv head
      // Whole kv heads where they fit, else some of one kv head's query heads.
      const int64_t heads = at_once >= share ? std::min(at_once / share, group.kv.count) * share : at_once;
      const int64_t rows = std::clamp<int64_t>(at_once / std::max<int64_t>(heads, 1), 1, area.batch.count);
      for (int64_t b = 0; b < area.batch.count; b += rows) {
        const Span batch = area.batch.sub(b, std::min(rows, area.batch.count - b));
        for (int64_t h = 0; h < group.query.count;) {
          const int64_t left_of_kv_head = share - h % share;
          const int64_t n = heads >= share ? std::min(heads, group.query.count - h) : std::min(heads, left_of_kv_head);
          list.push_back(
              {&area, batch, {group.query.sub(h, n), group.kv.sub(h / share, std::max<int64_t>(1, n / share))}});
          h += n;
        }
      }
    }
    return list;
  }

  at::Tensor queries_of(const at::Tensor& tensor, const Piece& piece) const {
    return rows_view(tensor, piece.batch, piece.heads.query, piece.area->queries);
  }
  at::Tensor keys_of(const at::Tensor& tensor, const Piece& piece) const {
    return block_view(tensor, keys_, piece.batch, piece.heads.kv, piece.area->keys);
  }
  at::Tensor lse_of(const Piece& piece) const {
    return lse_view(lse_, piece.batch, piece.heads.query, piece.area->queries);
  }
  at::Tensor mask_of(const Piece& piece) const {
    return band_mask(*piece.area->tile, piece.area->rectangle.queries, piece.area->rectangle.keys, q_);
  }
  static at::Tensor flip(const at::Tensor& tensor, Mask mask) { return mask == Mask::kUpper ? tensor.flip(2) : tensor; }
  static at::Tensor additive(const at::Tensor& mask, const at::Tensor& like) {
    return at::zeros(mask.sizes(), like.options()).masked_fill_(mask.logical_not(), -kInfinity);
  }

  DenseForward call_forward(const Piece& piece) {
    const Mask mask = piece.area->mask;
    const at::Tensor q = queries_of(q_, piece), k = keys_of(keys_.k, piece), v = keys_of(keys_.v, piece);
    if (mask != Mask::kFull && !loaded_is_finite()) return dense_forward(q, k, v, mask_of(piece), call_.scale);
    if (mask == Mask::kBanded) {
      const at::Tensor shown = mask_of(piece);
      auto [out, lse] =
          at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, false, additive(shown, q), call_.scale);
      return {out, lse.masked_fill(shown.any(1).logical_not(), -kInfinity)};  // the operator says 0 for empty rows
    }
    auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(flip(q, mask), flip(k, mask), flip(v, mask), 0.0,
                                                                      mask != Mask::kFull, {}, call_.scale);
    return {flip(out, mask), flip(lse, mask)};
  }

  DenseBackward call_backward(const Piece& piece) {
    const Mask mask = piece.area->mask;
    const at::Tensor q = queries_of(q_, piece), dout = queries_of(dout_, piece), out = queries_of(out_, piece);
    const at::Tensor lse = lse_of(piece).contiguous();
    const at::Tensor k = keys_of(keys_.k, piece), v = keys_of(keys_.v, piece);
    if (mask != Mask::kFull && !loaded_is_finite()) {
      return dense_backward(dout, q, k, v, out, lse, mask_of(piece), call_.scale);
    }
    if (mask == Mask::kBanded) {
      auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          dout, q, k, v, out, lse, 0.0, false, additive(mask_of(piece), q), call_.scale);
      return {dq, dk, dv};
    }
    auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        flip(dout, mask), flip(q, mask), flip(k, mask), flip(v, mask), flip(out, mask), flip(lse, mask).contiguous(),
        0.0, mask != Mask::kFull, {}, call_.scale);
    return {flip(dq, mask), flip(dk, mask), flip(dv, mask)};
  }

  at::ScalarType type_ = at::kFloat;
  KernelCall call_;
  at::Tensor q_, out_, lse_, dout_, dq_;
  KeyBlock keys_;  // in type_
  enum class Finite { kUnknown, kYes, kNo } finite_ = Finite::kUnknown;
};

}  // namespace

std::unique_ptr<Kernel> make_aten_kernel() { return std::make_unique<AtenKernel>(); }

}  // namespace annulus
