// See attention.h.
#include "attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <cstdlib>
#include <limits>
#include <string_view>
#include <utility>

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool planted(std::string_view bug) {
  const char* const name = std::getenv("RING_BUG");
  return name != nullptr && bug == name;
}

}  // namespace

at::Tensor ring_attention(annulus::Communicator& comm, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          double scale, const annulus::Count& count) {
  const int64_t batch = q.size(0), n = q.size(1), heads = q.size(2), m = k.size(1), group = heads / k.size(2);
  const at::Tensor queries = q.transpose(1, 2);
  at::Tensor block = at::stack({k, v});
  at::Tensor most = at::full({batch, heads, n, 1}, -kInfinity, at::kDouble);
  at::Tensor sum = at::zeros({batch, heads, n, 1}, at::kDouble);
  at::Tensor out = at::zeros({batch, heads, n, q.size(3)}, at::kDouble);
  for (int step = 0; step < comm.size(); ++step) {
    const int owner = (comm.rank() - step + comm.size()) % comm.size();
    at::Tensor counts = at::empty({batch, heads, n, m}, at::kDouble);
    double* next = counts.mutable_data_ptr<double>();
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < n * m; ++i) {
          *next++ = static_cast<double>(count(b, h, comm.rank() * n + i / m, owner * m + i % m));
        }
      }
    }
    const at::Tensor keys = block[0].repeat_interleave(group, 2).transpose(1, 2);
    const at::Tensor values = block[1].repeat_interleave(group, 2).transpose(1, 2);
    const at::Tensor scores = at::matmul(queries, keys.transpose(2, 3)) * scale + counts.log();
    const at::Tensor top = at::maximum(most, scores.amax(-1, true));
    const at::Tensor finite = planted("no key") ? top : top.clamp_min(std::numeric_limits<double>::lowest());
    const at::Tensor kept = (most - finite).exp(), weights = (scores - finite).exp();
    out = out * kept + at::matmul(weights, values);
    sum = sum * kept + weights.sum(-1, true);
    most = top;
    if (step + 1 < comm.size()) {
      at::Tensor received = at::empty_like(block);
      comm.exchange({{block, (comm.rank() + 1) % comm.size()}},
                    {{received, (comm.rank() + comm.size() - 1) % comm.size()}}, {"ring", step, "step"})
          ->wait();
      block = std::move(received);
    }
  }
  return (out / sum.clamp_min(std::numeric_limits<double>::min())).transpose(1, 2);
}
