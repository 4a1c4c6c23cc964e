// The reference kernel computes every tile densely in fp64, whatever its band. It is slow, exact to fp64 rounding, and
// runs on any device. Tests compare other kernels with it over the same plan. It is not the oracle of attention/oracle,
// which never sees a tile.
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "attention/kernels/reference_kernel.h"
#include "attention/tiles/dense_tiles.h"
#include "attention/tiles/tile_views.h"

namespace annulus {
namespace {

class ReferenceKernel : public Kernel {
 public:
  void begin_forward(const at::Tensor& q, const KernelCall& call) override {
    type_ = accumulator_type(q.scalar_type());
    call_ = call;
    q_ = q.to(at::kDouble);
    out_ = at::zeros(q.sizes(), q_.options());
    lse_ = at::full({q.size(0), q.size(2), q.size(1)}, -std::numeric_limits<double>::infinity(), q_.options());
  }

  void forward(const KeyBlock& keys, std::span<const Tile> tiles, const Poll& poll) override {
    for (const Tile& tile : tiles) dense_tile_forward(q_, keys, tile, call_, out_, lse_, poll);
  }

  void finish_forward(at::Tensor& out, at::Tensor& lse) override {
    out = out_.to(type_);
    lse = lse_.to(type_);
  }

  void begin_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& out, const at::Tensor& lse,
                      const KernelCall& call) override {
    type_ = accumulator_type(q.scalar_type());
    call_ = call;
    queries_ = {dout.to(at::kDouble), q.to(at::kDouble), out.to(at::kDouble), lse};
    dq_ = at::zeros(q.sizes(), queries_.q.options());
  }

  void backward(const KeyBlock& keys, const KeyBlock& grads, std::span<const Tile> tiles, const Poll& poll) override {
    zero_if_fresh(grads);
    for (const Tile& tile : tiles) {
      const int64_t most = dense_tile_backward(queries_, keys, grads, tile, call_, dq_, poll);
      peak_result_elements_ = std::max(peak_result_elements_, most);
    }
  }

  at::Tensor finish_backward() override { return dq_.to(type_); }

  std::vector<Charge> charges(const CallSize& size) const override {
    const int64_t wide = sizeof(double), queries = size.query_elements() * wide, lse = size.lse_elements() * wide;
    std::vector<Charge> charges = {{"q and out in fp64", 2 * queries + lse, When::kForward},
                                   {"q, out, dout and dq in fp64", 4 * queries, When::kBackward},
                                   {"dq in the accumulator's dtype", size.query_elements() * 4, When::kBackward}};
    CallSize dense = size;
    dense.dropout = true;  // this kernel computes every tile densely
    add_dense_charges(dense, wide, charges);
    return charges;
  }

 private:
  at::ScalarType type_ = at::kFloat;
  KernelCall call_;
  at::Tensor q_, out_, lse_, dq_;
  DenseQueries queries_;
};

}  // namespace

std::unique_ptr<Kernel> make_reference_kernel() { return std::make_unique<ReferenceKernel>(); }

}  // namespace annulus
