// The decoder's operations between matrix products as autograd nodes that save only what their gradients need. In fp32
// on a CPU, and in fp32, bf16 and fp16 on a GPU, they are fused, single passes over memory (loop_ops.cc, gpu_ops.cc);
// otherwise they are composed of LibTorch's operators (composed_ops.cc). Used by model.cc. Thread safety: free
// functions without state.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

#include "attention/modules/rotary.h"
#include "memory/charge.h"
#include "runtime/model/decoder_ops.h"

namespace annulus {

// The dtype and device of these operations, from which they declare their memory (memory/charge.h) before there are
// tensors. Every part declares what it saves for its backward, its results that are not saved, and for the backward the
// gradient that it receives (kGivenGradient) and those that it makes.
struct Computes {
  at::ScalarType dtype = at::kFloat;
  bool gpu = false;

  int64_t element() const { return static_cast<int64_t>(c10::elementSize(dtype)); }
  int64_t wide() const;  // bytes per element of statistics and losses
  // Whether the loops of fused_loops.h run, which allocate only their results.
  bool loops() const { return !gpu && dtype == at::kFloat; }
  // Whether operations are fused (loops or kernels), not composed.
  bool single_passes() const { return gpu || loops(); }
  // Whether cross entropy is composed; for bf16 and fp16 its logits are fp32.
  bool composes_loss() const { return dtype == at::kDouble; }
};
inline constexpr std::string_view kNormPart = "norm";
inline constexpr std::string_view kGivenGradient = "gradient of the result";
// Operands and results, of which a caller knows how long they live.
inline constexpr std::string_view kNormOperands = "what is added, and the result";
inline constexpr std::string_view kNormGradients = "gradients of the normed and of the sum";
inline constexpr std::string_view kRotaryOperands = "projection, and queries, keys and values";
inline constexpr std::string_view kProjectionGradient = "gradient of the projection";

struct Normed {
  at::Tensor sum;  // x + delta
  at::Tensor y;    // RMSNorm of sum
};
// Residual addition and RMSNorm: x [rows, dim]; delta like x, or undefined; weight [dim]. Differentiable in all three.
Normed add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const NormWeight& weight, double eps);

// For tensors [rows, dim]. kGivenGradient is that of `sum`, charged if `sum` has another consumer (`with_sum`).
Part norm_charges(int64_t rows, int64_t dim, bool with_sum, const Computes& on);

// Of DecoderOps::head_norm, rotary_split and glu (decoder_ops.h) and their gradients.
Part head_norm_charges(int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim, const Computes& on);
Part rotary_charges(int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim, const Computes& on);
Part glu_charges(int64_t rows, int64_t ffn, const Computes& on);

// Bytes of logits held at once, in the accumulator's dtype. Their gradient takes the same again.
inline constexpr int64_t kLossChunkBytes = int64_t{256} << 20;
// Returns the number of rows whose logits fit in that many bytes; at least one.
int64_t loss_chunk_rows(int64_t vocab, at::ScalarType dtype);

// Returns scale * sum over rows of weight * -log softmax(hidden head^T)[target], a scalar of the accumulator's dtype
// (fp32 for bf16). hidden [rows, dim], head [vocab, dim], targets int64 [rows]; -1 is ignored (no loss, no gradient);
// weights fp32 [rows], on the same device; undefined: all are 1. Both
// gradients are computed together with the loss, in chunks of rows, so that the logits of all rows never exist at once;
// chunk_rows = 0 means loss_chunk_rows(). Raises Error(kInput) if targets are on a CPU and one is vocab or more; the
// caller must have checked targets on another device before the copy.
at::Tensor linear_cross_entropy_sum(const at::Tensor& hidden, const at::Tensor& head, const at::Tensor& targets,
                                    double scale, int64_t chunk_rows = 0, const at::Tensor& weights = {});

Part loss_charges(int64_t rows, int64_t dim, int64_t vocab, const Computes& on);

}  // namespace annulus
