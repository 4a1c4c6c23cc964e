// The two sides that benchmarks of attention compare: a call through the executor, and LibTorch's own operator. Used by
// ring.cc, patterns.cc, attention.cc, gpu/attention.cc and seeds/.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <tuple>

#include "attention/execution/planned_call.h"

namespace annulus {

// q and dout [B, queries, H, D], k and v [B, keys, Hk, D].
struct AttentionInputs {
  at::Tensor q, k, v, dout;
};
AttentionInputs random_inputs(const AttentionShape& shape, int64_t head_dim, const at::TensorOptions& options);

// A call of attention with these inputs, forward and backward. Collective over call.comm; without one it runs on one
// rank. Not thread safe.
class ExecutorCall {
 public:
  // If call.sinks, it draws them.
  ExecutorCall(AttentionInputs inputs, AttentionCall call);
  void forward() { output_ = attention_forward(in_.q, in_.k, in_.v, call_, sinks_, &forward_stats_); }
  // Of the last forward.
  void backward() { gradients_ = attention_backward(in_.dout, in_.q, in_.k, in_.v, output_, &backward_stats_); }
  void run() {
    forward();
    backward();
  }

  // Of the last forward or backward.
  const AttentionOutput& output() const { return output_; }
  const AttentionGradients& gradients() const { return gradients_; }
  const AttentionStats& forward_stats() const { return forward_stats_; }
  const AttentionStats& backward_stats() const { return backward_stats_; }
  // The (query, key) pairs that count, of all heads, with the block maps that the last forward selected.
  double pairs() const;

 private:
  const AttentionInputs in_;
  const std::shared_ptr<Communicator> self_;
  AttentionCall call_;
  at::Tensor sinks_;
  AttentionOutput output_;
  AttentionGradients gradients_;
  AttentionStats forward_stats_, backward_stats_;
};

// LibTorch's operator over the whole sequence: cuDNN's on a GPU, flash attention on a CPU. Not thread safe.
class OperatorCall {
 public:
  OperatorCall(const AttentionInputs& inputs, bool causal);
  void forward();
  void backward();  // of the last forward
  void run() {
    forward();
    backward();
  }

  at::Tensor out() const { return out_.transpose(1, 2); }
  AttentionGradients gradients() const;

 private:
  const at::Tensor q_, k_, v_, dout_;  // [B, H, n, D], as the operators want them
  const bool causal_;
  at::Tensor out_, lse_, cum_q_, cum_k_, seed_, offset_;
  int64_t max_q_ = 0, max_k_ = 0;
  std::tuple<at::Tensor, at::Tensor, at::Tensor> gradients_;
};

}  // namespace annulus
