// See sinks.h.
#include "attention/execution/sinks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/sigmoid.h>

#include <limits>

namespace annulus {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The sinks as [H, 1], to broadcast to [B, H, n].
at::Tensor for_rows(const at::Tensor& sinks, const at::Tensor& lse) {
  return sinks.detach().to(lse.scalar_type()).unsqueeze(1);
}

// The share of each softmax that is its sink's, [B, H, n].
at::Tensor shares(const at::Tensor& sinks, const at::Tensor& lse) {
  const at::Tensor s = for_rows(sinks, lse);
  return (s - lse).exp_().masked_fill_(s.eq(-kInfinity), 0);  // where lse is -inf, too, it is NaN
}

template <typename T>
void add_up(const at::Tensor& terms, const at::Tensor& sums) {
  const int64_t batch = terms.size(0), heads = terms.size(1), rows = terms.size(2);
  const T* const from = terms.const_data_ptr<T>();
  for (int64_t h = 0; h < heads; ++h) {
    double sum = 0;
    for (int64_t b = 0; b < batch; ++b) {
      const T* const row = from + (b * heads + h) * rows;
      for (int64_t i = 0; i < rows; ++i) sum += static_cast<double>(row[i]);
    }
    sums.mutable_data_ptr<T>()[h] = static_cast<T>(sum);
  }
}

// The sums of each head, [H]. A CPU operator of LibTorch would add in an order that depends on its threads.
at::Tensor sums_of_heads(const at::Tensor& terms) {
  if (!terms.is_cpu()) return terms.sum(at::IntArrayRef{0, 2});
  const at::Tensor all = terms.contiguous(), sums = at::empty({all.size(1)}, all.options());
  if (all.scalar_type() == at::kDouble) {
    add_up<double>(all, sums);
  } else {
    add_up<float>(all, sums);
  }
  return sums;
}

}  // namespace

void add_sinks(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& sinks) {
  const at::Tensor s = for_rows(sinks, lse);
  // exp(lse - lse') without the rounding of lse'. A row without keys keeps its zeros, whatever its sink.
  const at::Tensor kept = at::sigmoid(lse - s).masked_fill_(lse.eq(-kInfinity), 0);
  out.mul_(kept.transpose(1, 2).unsqueeze(3));
  lse.copy_(at::logaddexp(lse, s));
}

at::Tensor sink_gradients(const at::Tensor& dout, const at::Tensor& out, const at::Tensor& lse,
                          const at::Tensor& sinks) {
  const at::Tensor terms = shares(sinks, lse).neg_();
  // Head by head, because the products of all heads would take twice the memory of out in fp32.
  for (int64_t h = 0; h < out.size(2); ++h) {
    const auto wide = [&](const at::Tensor& t) { return t.select(2, h).to(lse.scalar_type()); };
    terms.select(1, h).mul_((wide(dout) * wide(out)).sum(-1));
  }
  return sums_of_heads(terms);
}

at::Tensor sink_gradients_of_lse(const at::Tensor& dlse, const at::Tensor& lse, const at::Tensor& sinks) {
  return sums_of_heads(shares(sinks, lse).mul_(dlse));
}

int64_t sink_bytes(int64_t rows, int64_t heads, int64_t head_dim, int64_t element, int64_t wide, bool backward) {
  // add_sinks holds two tensors like lse and a mask; sink_gradients holds one, and for one head dout and out if they
  // are narrower than their products, the products, and their sums.
  if (!backward) return rows * heads * (2 * wide + 1);
  const int64_t copies = element == wide ? 1 : 3;
  return rows * wide * (heads + copies * head_dim + 1);
}

}  // namespace annulus
