// The decoder's operations between matrix products as autograd nodes that keep no more than their gradients need. In
// fp32 on a CPU, and in fp32, bf16 and fp16 on a GPU, they are single passes over memory (loop_ops.h, gpu_ops.h);
// otherwise the same mathematics is composed of LibTorch's operators (composed_ops.h). Called by model.cc. Thread
// safety: free functions without state.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

#include "attention/modules/rotary.h"
#include "memory/charge.h"
#include "runtime/model/decoder_ops.h"

namespace annulus {

// The dtype and device that these operations work on, known before there are tensors, for the memory that they declare
// (memory/charge.h). Every part declares what it saves for its backward, what it makes and does not save, and for the
// backward the gradient that it receives (kGivenGradient) and the gradients that it makes.
struct Computes {
  at::ScalarType dtype = at::kFloat;
  bool gpu = false;

  int64_t element() const { return static_cast<int64_t>(c10::elementSize(dtype)); }
  int64_t wide() const;  // bytes of an element of statistics and losses
  // Whether the loops of fused_loops.h run, which take no memory but their results.
  bool loops() const { return !gpu && dtype == at::kFloat; }
  // Whether operations are single passes, loops or kernels, and not composed.
  bool single_passes() const { return gpu || loops(); }
  // Whether cross entropy is composed. Its logits are fp32 for tensors of bf16 and fp16, too.
  bool composes_loss() const { return dtype == at::kDouble; }
};
inline constexpr std::string_view kNormPart = "norm";
inline constexpr std::string_view kGivenGradient = "gradient of the result";

struct Normed {
  at::Tensor sum;  // x + delta
  at::Tensor y;    // RMSNorm of sum
};
// x [rows, dim]; delta like x, or undefined if nothing is added; weight [dim]. Differentiable in all three.
Normed add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight, double eps);

// For tensors [rows, dim]. kGivenGradient is that of `sum`, charged if something else reads `sum`, too (`with_sum`).
Part norm_charges(int64_t rows, int64_t dim, bool with_sum, const Computes& on);

// RMSNorm of each query and key over the head dimension (Qwen 3, before the rotation): qkv [rows, (heads + 2 kv_heads)
// head_dim] -> the same shape with queries and keys normed; q_weight and k_weight [head_dim]. Differentiable in all
// three.
at::Tensor head_norm(const at::Tensor& qkv, const at::Tensor& q_weight, const at::Tensor& k_weight, int64_t heads,
                     int64_t kv_heads, double eps);

Part head_norm_charges(int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim, const Computes& on);

// qkv [batch * n, (heads + 2 kv_heads) head_dim] -> contiguous q, k, v; q and k are rotated. n is the table's length.
Heads rotary_split(const at::Tensor& qkv, const RotaryTable& table, int64_t heads, int64_t kv_heads);

Part rotary_charges(int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim, const Computes& on);

// gate_up [rows, 2 ffn] -> silu(gate) * up [rows, ffn].
at::Tensor swiglu(const at::Tensor& gate_up);

Part swiglu_charges(int64_t rows, int64_t ffn, const Computes& on);

// Bytes of logits that are held at once, in the accumulator's dtype. Their gradient takes as much again.
inline constexpr int64_t kLossChunkBytes = int64_t{256} << 20;
// The number of rows whose logits take that many bytes; at least one.
int64_t loss_chunk_rows(int64_t vocab, at::ScalarType dtype);

// scale * sum over rows of -log softmax(hidden head^T)[target], a scalar of the accumulator's dtype (fp32 for bf16).
// hidden [rows, dim], head [vocab, dim], targets int64 [rows]; a row whose target is -1 has no loss and no gradient.
// Both gradients are computed together with the loss, chunk by chunk of rows, so that the logits of all rows never
// exist at once; chunk_rows = 0 means loss_chunk_rows(). Raises Error(kInput) if targets are on a CPU and one is vocab
// or more; targets on another device have been checked by the caller before they were copied there.
at::Tensor linear_cross_entropy_sum(const at::Tensor& hidden, const at::Tensor& head, const at::Tensor& targets,
                                    double scale, int64_t chunk_rows = 0);

Part loss_charges(int64_t rows, int64_t dim, int64_t vocab, const Computes& on);

}  // namespace annulus
