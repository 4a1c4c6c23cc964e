// Implements attention_calls.h.
#include "benchmarks/attention_calls.h"

#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/randn.h>

#include <utility>

#include "attention/pattern/pattern.h"
#include "comm/threads/threads.h"

namespace annulus {

AttentionInputs random_inputs(const AttentionShape& s, int64_t head_dim, const at::TensorOptions& options) {
  const auto made = [&](int64_t rows, int64_t heads) { return at::randn({s.batch, rows, heads, head_dim}, options); };
  AttentionInputs in;
  in.q = made(s.q_len, s.heads);
  in.k = made(s.k_len, s.kv_heads);
  in.v = made(s.k_len, s.kv_heads);
  in.dout = made(s.q_len, s.heads);
  return in;
}

ExecutorCall::ExecutorCall(AttentionInputs inputs, AttentionCall call)
    : in_(std::move(inputs)), self_(call.comm == nullptr ? make_self_communicator() : nullptr), call_(std::move(call)) {
  if (self_) call_.comm = self_.get();
  if (call_.sinks) sinks_ = at::randn({in_.q.size(2)}, in_.q.options().dtype(at::kFloat));
}

double ExecutorCall::pairs() const {
  return static_cast<double>(count_pairs(*cached_pattern(output_.program().request)));
}

OperatorCall::OperatorCall(const AttentionInputs& in, bool causal)
    : q_(in.q.transpose(1, 2)),
      k_(in.k.transpose(1, 2)),
      v_(in.v.transpose(1, 2)),
      dout_(in.dout.transpose(1, 2)),
      causal_(causal) {}

void OperatorCall::forward() {
  if (q_.is_cuda()) {
    auto r = at::_scaled_dot_product_cudnn_attention(q_, k_, v_, {}, /*compute_log_sumexp=*/true, /*dropout_p=*/0,
                                                     causal_, /*return_debug_mask=*/false);
    std::tie(out_, lse_, cum_q_, cum_k_) =
        std::make_tuple(std::get<0>(r), std::get<1>(r), std::get<2>(r), std::get<3>(r));
    max_q_ = std::get<4>(r).expect_int();
    max_k_ = std::get<5>(r).expect_int();
    seed_ = std::get<6>(r);
    offset_ = std::get<7>(r);
  } else {
    std::tie(out_, lse_) = at::_scaled_dot_product_flash_attention_for_cpu(q_, k_, v_, /*dropout_p=*/0, causal_);
  }
}

void OperatorCall::backward() {
  gradients_ = q_.is_cuda() ? at::_scaled_dot_product_cudnn_attention_backward(
                                  dout_, q_, k_, v_, out_, lse_, seed_, offset_, /*attn_bias=*/{}, cum_q_, cum_k_,
                                  max_q_, max_k_, /*dropout_p=*/0, causal_)
                            : at::_scaled_dot_product_flash_attention_for_cpu_backward(dout_, q_, k_, v_, out_, lse_,
                                                                                       /*dropout_p=*/0, causal_);
}

AttentionGradients OperatorCall::gradients() const {
  const auto& [dq, dk, dv] = gradients_;
  return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)};
}

}  // namespace annulus
