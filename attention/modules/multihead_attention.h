// MultiheadAttention: projections around attention(), as a torch module for C++ programs, over the ranks of a
// communicator. Every rank has the same weights and its own positions of the sequence. Made directly or by name
// (factory.h).
//
//   x [B, n, dim] -> q, k, v projections -> rotary embedding by global position -> attention over all ranks
//                 -> normalisation, if any -> output projection -> [B, n, dim]
//
// Thread safety: forward is const and keeps nothing in the module, so several threads may use one module at the same
// time, each with a communicator of its own, as long as nothing changes the parameters meanwhile.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "attention/execution/attention.h"
#include "attention/modules/sequence.h"
#include "attention/plan/plan.h"
#include "comm/communicator.h"

namespace annulus {

struct MultiheadAttentionOptions {
  int64_t dim = 0;         // of x and of the result
  int64_t heads = 0;       // query heads
  int64_t kv_heads = 0;    // heads is a multiple of it; 0: as many as heads
  int64_t head_dim = 0;    // 0: dim / heads
  int64_t memory_dim = 0;  // width of the memory in cross-attention; 0: dim
  bool bias = true;        // of the four projections
  bool norm = false;       // LayerNorm of the attention's result, over all heads, before the output projection
  double norm_eps = 1e-5;
  double rotary_base = 0;    // base of the rotary embedding's wavelengths, usually 10000; 0: no rotary embedding
  double scale = 0;          // of the scores; 0: 1 / sqrt(head_dim)
  PatternSpec pattern = {};  // full by default; map = "file" only as read_block_maps returns it (runtime/tensor_files/)
  // Which positions this rank's rows of x and memory are. The module cannot check that the rows lie so.
  LayoutKind layout = LayoutKind::kContiguous;
  // How the result is computed. None of these changes it beyond rounding.
  ScheduleKind schedule = ScheduleKind::kAuto;
  KernelKind kernel = KernelKind::kAuto;
  // Keep x, out and lse for the backward, and not q, k and v. It computes the projections again, but not attention.
  bool recompute = false;
  // Dropout of attention probabilities, only while training (module.train()).
  double dropout = 0;
  uint64_t seed = 0;
  int64_t layer = 0;  // also named in errors

  // One line that resembles TOML and says what is computed. A saved module must share it with the one that loads it.
  std::string text() const;
};

// What one call needs besides tensors. All ranks pass the same values except `comm`.
struct AttentionScope {
  Communicator& comm;        // for this call; a share of it is kept until the backward has run
  int64_t step = 0;          // the training step, and
  int64_t first_row = 0;     // the global number of batch row 0, both for dropout
  int64_t query_offset = 0;  // query i has the position i + query_offset
  // Packed sequences, as in PatternSpec. If `documents` is empty, the pattern's own documents apply.
  std::vector<std::vector<int64_t>> documents = {};
  std::vector<std::vector<int64_t>> key_documents = {};
};

class MultiheadAttentionImpl final : public torch::nn::Cloneable<MultiheadAttentionImpl> {
 public:
  // Raises Error(kPlan) if sizes do not fit, before it takes memory. Initial weights are Xavier-uniform, biases 0.
  explicit MultiheadAttentionImpl(const MultiheadAttentionOptions& options);

  // Self-attention. x [B, n, dim]: this rank's positions in the layout's storage order, in the module's dtype and on
  // its device. n = 0 gives [B, 0, dim]. Collective, and so is its backward. Raises on every rank, as attention() does,
  // even if only one rank was given something invalid.
  at::Tensor forward(const at::Tensor& x, const AttentionScope& scope) const;
  // Cross-attention: queries from x, keys and values from memory [B, m, memory_dim].
  at::Tensor forward(const at::Tensor& x, const at::Tensor& memory, const AttentionScope& scope) const;

  const MultiheadAttentionOptions& options() const { return options_; }

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  // For torch::save and torch::load: weights together with the options. load raises Error(kInput) if the saved options
  // are not this module's.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  torch::nn::Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, out_proj{nullptr};
  torch::nn::LayerNorm norm{nullptr};  // null if there is none

 private:
  void check_inputs(const at::Tensor& x, const at::Tensor& memory) const;
  at::Tensor attend(const at::Tensor& x, const at::Tensor& memory, const AttentionScope& scope) const;

  MultiheadAttentionOptions options_;
};
TORCH_MODULE(MultiheadAttention);

}  // namespace annulus
