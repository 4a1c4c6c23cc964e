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

// One operator call: a rectangle for some batch rows and heads.
struct Piece {
  Rectangle rectangle;
  Span batch;
  HeadGroup heads;
};

class AtenKernel : public Kernel {
 public:
  void begin_forward(const at::Tensor& q, double scale) override {
    type_ = accumulator_type(q.scalar_type());
    scale_ = scale;
    q_ = q.to(type_);
    out_ = at::zeros(q.sizes(), q_.options());
    lse_ = at::full({q.size(0), q.size(2), q.size(1)}, -kInfinity, q_.options());
  }

  void forward(const at::Tensor& k, const at::Tensor& v, std::span<const Tile> tiles, const Poll& poll) override {
    load(k, v);
    for_each_piece(tiles, poll, [&](const Tile& tile, const Piece& piece) {
      const Span queries = members(tile.query_rows, piece.rectangle.queries);
      DenseForward part = call_forward(piece, tile, queries);
      merge_partial(rows_view(out_, piece.batch, piece.heads.query, queries),
                    lse_view(lse_, piece.batch, piece.heads.query, queries), part.out, part.lse);
    });
  }

  void finish_forward(at::Tensor& out, at::Tensor& lse) override {
    out = out_;
    lse = lse_;
  }

  void begin_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& out, const at::Tensor& lse,
                      double scale) override {
    type_ = accumulator_type(q.scalar_type());
    scale_ = scale;
    q_ = q.to(type_);
    dout_ = dout.to(type_);
    out_ = out.to(type_);
    // exp(score - lse) must be 0 in rows without keys.
    lse_ = lse.masked_fill(lse.eq(-kInfinity), kInfinity);
    dq_ = at::zeros(q.sizes(), q_.options());
  }

  void backward(const at::Tensor& k, const at::Tensor& v, std::span<const Tile> tiles, at::Tensor& dk, at::Tensor& dv,
                const Poll& poll) override {
    load(k, v);
    for_each_piece(tiles, poll, [&](const Tile& tile, const Piece& piece) {
      const Span queries = members(tile.query_rows, piece.rectangle.queries);
      const Span keys = members(tile.key_rows, piece.rectangle.keys);
      const DenseBackward part = call_backward(piece, tile, queries);
      rows_view(dq_, piece.batch, piece.heads.query, queries).add_(part.dq);
      rows_view(dk, piece.batch, piece.heads.kv, keys).add_(part.dk);
      rows_view(dv, piece.batch, piece.heads.kv, keys).add_(part.dv);
      peak_result_elements_ = std::max(peak_result_elements_, part.dk.numel() + part.dv.numel());
    });
  }

  at::Tensor finish_backward() override { return dq_; }

 private:
  void load(const at::Tensor& k, const at::Tensor& v) {
    k_ = k.to(type_);
    v_ = v.to(type_);
    finite_ = Finite::kUnknown;
  }

  // Whether a mask may be trusted to hide a key: an infinite or NaN value would leak through 0 x inf.
  bool loaded_is_finite() {
    if (finite_ == Finite::kUnknown) finite_ = all_finite(k_) && all_finite(v_) ? Finite::kYes : Finite::kNo;
    return finite_ == Finite::kYes;
  }

  template <typename Visit>
  void for_each_piece(std::span<const Tile> tiles, const Poll& poll, Visit visit) {
    for (const Tile& tile : tiles) {
      for (const Piece& piece : pieces(tile, poll != nullptr)) {
        visit(tile, piece);
        if (poll) poll();
      }
    }
  }

  // The calls that make up a tile. When transfers wait (`short_calls`), none takes more than a few milliseconds: first
  // fewer batch rows and heads a call, which cost nothing, then fewer query rows.
  std::vector<Piece> pieces(const Tile& tile, bool short_calls) const {
    constexpr double kFlopsPerCall = 3e8;  // of one thread: about 4 ms
    const int64_t group = q_.size(2) / k_.size(2);
    const double budget = short_calls ? kFlopsPerCall * at::get_num_threads() : 1e30;
    const double flops_per_row = 4.0 * static_cast<double>(tile.key_rows.count * q_.size(3));
    const double flops_per_head = flops_per_row * static_cast<double>(tile.query_rows.count);
    const int64_t max_rows =
        budget >= flops_per_head * static_cast<double>(group)
            ? std::max<int64_t>(1, tile.query_rows.count)
            : std::max<int64_t>(256, static_cast<int64_t>(budget / (flops_per_row * static_cast<double>(group))));
    const std::vector<Rectangle> rectangles = cut_band(tile, max_rows);
    std::vector<Piece> list;
    for (const HeadGroup& heads : head_groups(tile.heads, group)) {
      for (const Rectangle& rectangle : rectangles) {
        const double one_kv_head = 4.0 * static_cast<double>(rectangle.queries.count * rectangle.keys.count *
                                                             q_.size(3) * (heads.query.count / heads.kv.count));
        const int64_t at_once = std::max<int64_t>(1, static_cast<int64_t>(std::min(budget / one_kv_head, 1e6)));
        const int64_t kv_heads = std::min(heads.kv.count, at_once);
        const int64_t rows = std::clamp<int64_t>(at_once / kv_heads, 1, tile.batch.count);
        const int64_t share = heads.query.count / heads.kv.count;
        for (int64_t b = 0; b < tile.batch.count; b += rows) {
          const Span batch = tile.batch.sub(b, std::min(rows, tile.batch.count - b));
          for (int64_t h = 0; h < heads.kv.count; h += kv_heads) {
            const int64_t n = std::min(kv_heads, heads.kv.count - h);
            list.push_back({rectangle, batch, {heads.query.sub(h * share, n * share), heads.kv.sub(h, n)}});
          }
        }
      }
    }
    return list;
  }

  at::Tensor keys_of(const at::Tensor& tensor, const Piece& piece, const Tile& tile) const {
    return rows_view(tensor, piece.batch, piece.heads.kv, members(tile.key_rows, piece.rectangle.keys));
  }
  at::Tensor mask_of(const Piece& piece, const Tile& tile) const {
    return band_mask(tile, piece.rectangle.queries, piece.rectangle.keys, q_);
  }
  static at::Tensor flip(const at::Tensor& tensor, Mask mask) { return mask == Mask::kUpper ? tensor.flip(2) : tensor; }
  static at::Tensor additive(const at::Tensor& mask, const at::Tensor& like) {
    return at::zeros(mask.sizes(), like.options()).masked_fill_(mask.logical_not(), -kInfinity);
  }

  DenseForward call_forward(const Piece& piece, const Tile& tile, const Span& queries) {
    const Mask mask = piece.rectangle.mask;
    const at::Tensor q = rows_view(q_, piece.batch, piece.heads.query, queries);
    const at::Tensor k = keys_of(k_, piece, tile), v = keys_of(v_, piece, tile);
    if (mask != Mask::kFull && !loaded_is_finite()) return dense_forward(q, k, v, mask_of(piece, tile), scale_);
    if (mask == Mask::kBanded) {
      const at::Tensor shown = mask_of(piece, tile);
      auto [out, lse] =
          at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, false, additive(shown, q), scale_);
      return {out, lse.masked_fill(shown.any(1).logical_not(), -kInfinity)};  // the operator says 0 for empty rows
    }
    auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(flip(q, mask), flip(k, mask), flip(v, mask), 0.0,
                                                                      mask != Mask::kFull, {}, scale_);
    return {flip(out, mask), flip(lse, mask)};
  }

  DenseBackward call_backward(const Piece& piece, const Tile& tile, const Span& queries) {
    const Mask mask = piece.rectangle.mask;
    const at::Tensor q = rows_view(q_, piece.batch, piece.heads.query, queries);
    const at::Tensor dout = rows_view(dout_, piece.batch, piece.heads.query, queries);
    const at::Tensor out = rows_view(out_, piece.batch, piece.heads.query, queries);
    const at::Tensor lse = lse_view(lse_, piece.batch, piece.heads.query, queries).contiguous();
    const at::Tensor k = keys_of(k_, piece, tile), v = keys_of(v_, piece, tile);
    if (mask != Mask::kFull && !loaded_is_finite()) {
      return dense_backward(dout, q, k, v, out, lse, mask_of(piece, tile), scale_);
    }
    if (mask == Mask::kBanded) {
      auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          dout, q, k, v, out, lse, 0.0, false, additive(mask_of(piece, tile), q), scale_);
      return {dq, dk, dv};
    }
    auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        flip(dout, mask), flip(q, mask), flip(k, mask), flip(v, mask), flip(out, mask), flip(lse, mask).contiguous(),
        0.0, mask != Mask::kFull, {}, scale_);
    return {flip(dq, mask), flip(dk, mask), flip(dv, mask)};
  }

  at::ScalarType type_ = at::kFloat;
  double scale_ = 0;
  at::Tensor q_, out_, lse_, dout_, dq_;
  at::Tensor k_, v_;
  enum class Finite { kUnknown, kYes, kNo } finite_ = Finite::kUnknown;
};

}  // namespace

std::unique_ptr<Kernel> make_aten_kernel() { return std::make_unique<AtenKernel>(); }

}  // namespace annulus
