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
  void begin_forward(const at::Tensor& q, const KernelCall& call) override {
    type_ = accumulator_type(q.scalar_type());
    q_ = q.to(at::kDouble);
    call_ = call;
    out_ = at::zeros(q.sizes(), q_.options());
    lse_ = at::full({q.size(0), q.size(2), q.size(1)}, -std::numeric_limits<double>::infinity(), q_.options());
  }

  void forward(const KeyBlock& block, std::span<const Tile> tiles, const Poll& poll) override {
    for_each_block(tiles, poll,
                   [&](const Tile& tile, const Span& rows, const HeadGroup& group, const at::Tensor& mask) {
                     const DenseForward part =
                         dense_forward(rows_view(q_, tile.batch, group.query, rows), keys(block, block.k, tile, group),
                                       keys(block, block.v, tile, group), mask, call_.scale);
                     merge_partial(rows_view(out_, tile.batch, group.query, rows),
                                   lse_view(lse_, tile.batch, group.query, rows), part.out, part.lse);
                   });
  }

  void finish_forward(at::Tensor& out, at::Tensor& lse) override {
    out = out_.to(type_);
    lse = lse_.to(type_);
  }

  void begin_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& out, const at::Tensor& lse,
                      const KernelCall& call) override {
    type_ = accumulator_type(q.scalar_type());
    q_ = q.to(at::kDouble);
    dout_ = dout.to(at::kDouble);
    out_ = out.to(at::kDouble);
    lse_ = lse.to(at::kDouble);
    call_ = call;
    dq_ = at::zeros(q.sizes(), q_.options());
  }

  void backward(const KeyBlock& block, const KeyBlock& grads, std::span<const Tile> tiles, const Poll& poll) override {
    for_each_block(
        tiles, poll, [&](const Tile& tile, const Span& rows, const HeadGroup& group, const at::Tensor& mask) {
          const DenseBackward part =
              dense_backward(rows_view(dout_, tile.batch, group.query, rows),
                             rows_view(q_, tile.batch, group.query, rows), keys(block, block.k, tile, group),
                             keys(block, block.v, tile, group), rows_view(out_, tile.batch, group.query, rows),
                             lse_view(lse_, tile.batch, group.query, rows), mask, call_.scale);
          rows_view(dq_, tile.batch, group.query, rows).add_(part.dq);
          block_view(grads.k, grads, tile.batch, group.kv, tile.grad_rows).add_(part.dk);
          block_view(grads.v, grads, tile.batch, group.kv, tile.grad_rows).add_(part.dv);
          peak_result_elements_ = std::max(peak_result_elements_, part.dk.numel() + part.dv.numel());
        });
  }

  at::Tensor finish_backward() override { return dq_.to(type_); }

 private:
  // Query rows in blocks, so that the dense scores stay small.
  template <typename Visit>
  void for_each_block(std::span<const Tile> tiles, const Poll& poll, Visit visit) const {
    for (const Tile& tile : tiles) for_each_block_of(tile, poll, visit);
  }
  template <typename Visit>
  void for_each_block_of(const Tile& tile, const Poll& poll, Visit visit) const {
    constexpr int64_t kRows = 256;
    const bool banded = !(tile.band.unbounded_below() && tile.band.unbounded_above());
    for (const HeadGroup& group : head_groups(tile.heads, call_.group)) {
      for (int64_t i = 0; i < tile.query_rows.count; i += kRows) {
        const Span block = Span::range(i, std::min(tile.query_rows.count, i + kRows));
        at::Tensor mask;
        if (banded) mask = band_mask(tile, block, Span::range(0, tile.key_rows.count), q_);
        visit(tile, members(tile.query_rows, block), group, mask);
        if (poll) poll();
      }
    }
  }
  static at::Tensor keys(const KeyBlock& block, const at::Tensor& tensor, const Tile& tile, const HeadGroup& group) {
    return block_view(tensor, block, tile.batch, group.kv, tile.key_rows).to(at::kDouble);
  }

  at::ScalarType type_ = at::kFloat;
  KernelCall call_;
  at::Tensor q_, out_, lse_, dout_, dq_;
};

}  // namespace

std::unique_ptr<Kernel> make_reference_kernel() { return std::make_unique<ReferenceKernel>(); }

}  // namespace annulus
