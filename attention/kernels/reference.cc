// The reference kernel: every tile densely in fp64, whatever its band. Slow, exact, on any device. Not the tests'
// oracle (which never sees a tile), but its cousin for checking other kernels through the same plan.
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "attention/kernels/dense.h"
#include "attention/kernels/kernels.h"
#include "attention/kernels/merge.h"
#include "attention/kernels/tile_views.h"

namespace annulus {
namespace {

class ReferenceKernel : public Kernel {
 public:
  void begin_forward(const at::Tensor& q, double scale) override {
    type_ = accumulator_type(q.scalar_type());
    q_ = q.to(at::kDouble);
    scale_ = scale;
    out_ = at::zeros(q.sizes(), q_.options());
    lse_ = at::full({q.size(0), q.size(2), q.size(1)}, -std::numeric_limits<double>::infinity(), q_.options());
  }

  void forward(const at::Tensor& k, const at::Tensor& v, std::span<const Tile> tiles, const Poll& poll) override {
    for_each_block(k, tiles, poll,
                   [&](const Tile& tile, const Span& rows, const HeadGroup& group, const at::Tensor& mask) {
                     const DenseForward part = dense_forward(rows_view(q_, tile.batch, group.query, rows),
                                                             keys(k, tile, group), keys(v, tile, group), mask, scale_);
                     merge_partial(rows_view(out_, tile.batch, group.query, rows),
                                   lse_view(lse_, tile.batch, group.query, rows), part.out, part.lse);
                   });
  }

  void finish_forward(at::Tensor& out, at::Tensor& lse) override {
    out = out_.to(type_);
    lse = lse_.to(type_);
  }

  void begin_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& out, const at::Tensor& lse,
                      double scale) override {
    type_ = accumulator_type(q.scalar_type());
    q_ = q.to(at::kDouble);
    dout_ = dout.to(at::kDouble);
    out_ = out.to(at::kDouble);
    lse_ = lse.to(at::kDouble);
    scale_ = scale;
    dq_ = at::zeros(q.sizes(), q_.options());
  }

  void backward(const at::Tensor& k, const at::Tensor& v, std::span<const Tile> tiles, at::Tensor& dk, at::Tensor& dv,
                const Poll& poll) override {
    for_each_block(k, tiles, poll,
                   [&](const Tile& tile, const Span& rows, const HeadGroup& group, const at::Tensor& mask) {
                     const DenseBackward part = dense_backward(
                         rows_view(dout_, tile.batch, group.query, rows), rows_view(q_, tile.batch, group.query, rows),
                         keys(k, tile, group), keys(v, tile, group), rows_view(out_, tile.batch, group.query, rows),
                         lse_view(lse_, tile.batch, group.query, rows), mask, scale_);
                     rows_view(dq_, tile.batch, group.query, rows).add_(part.dq);
                     rows_view(dk, tile.batch, group.kv, tile.key_rows).add_(part.dk);
                     rows_view(dv, tile.batch, group.kv, tile.key_rows).add_(part.dv);
                     peak_result_elements_ = std::max(peak_result_elements_, part.dk.numel() + part.dv.numel());
                   });
  }

  at::Tensor finish_backward() override { return dq_.to(type_); }

 private:
  // Query rows in blocks, so that the dense scores stay small.
  template <typename Visit>
  void for_each_block(const at::Tensor& k, std::span<const Tile> tiles, const Poll& poll, Visit visit) const {
    for (const Tile& tile : tiles) for_each_block_of(k, tile, poll, visit);
  }
  template <typename Visit>
  void for_each_block_of(const at::Tensor& k, const Tile& tile, const Poll& poll, Visit visit) const {
    constexpr int64_t kRows = 256;
    const bool banded = !(tile.band.unbounded_below() && tile.band.unbounded_above());
    for (const HeadGroup& group : head_groups(tile.heads, q_.size(2) / k.size(2))) {
      for (int64_t i = 0; i < tile.query_rows.count; i += kRows) {
        const Span block = Span::range(i, std::min(tile.query_rows.count, i + kRows));
        at::Tensor mask;
        if (banded) mask = band_mask(tile, block, Span::range(0, tile.key_rows.count), q_);
        visit(tile, members(tile.query_rows, block), group, mask);
        if (poll) poll();
      }
    }
  }
  at::Tensor keys(const at::Tensor& tensor, const Tile& tile, const HeadGroup& group) const {
    return rows_view(tensor, tile.batch, group.kv, tile.key_rows).to(at::kDouble);
  }

  at::ScalarType type_ = at::kFloat;
  double scale_ = 0;
  at::Tensor q_, out_, lse_, dout_, dq_;
};

}  // namespace

std::unique_ptr<Kernel> make_reference_kernel() { return std::make_unique<ReferenceKernel>(); }

}  // namespace annulus
