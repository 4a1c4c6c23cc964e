// MultiheadAttention: projections around attention(), as a torch module for C++ programs, over the ranks of a
// communicator. Every rank has the same weights and its own positions of the sequence. Made directly or by name
// (factory.h).
//
//   x [B, n, dim] -> q, k, v projections -> rotary embedding by global position -> attention over all ranks
//                 -> normalisation, if any -> output projection -> [B, n, dim]
//
// Thread safety: forward is const and keeps nothing in the module, so threads may use one module at the same time, each
// with a communicator of its own, as long as nobody changes the parameters meanwhile.
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
#include "attention/plan/plan.h"
#include "comm/communicator.h"
#include "modules/sequence.h"

namespace annulus {

struct MultiheadAttentionOptions {
  int64_t dim = 0;         // of x and of the result
  int64_t heads = 0;       // query heads
  int64_t kv_heads = 0;    // heads is a multiple of it; 0: as many as heads
  int64_t head_dim = 0;    // 0: dim / heads
  int64_t memory_dim = 0;  // of what cross-attention looks at; 0: dim
  bool bias = true;        // of the four projections
  bool norm = false;       // LayerNorm of the attention's result, over all heads, before the output projection
  double norm_eps = 1e-5;
  double rotary_base = 0;    // of the rotary embedding's wavelengths, usually 10000; 0: no rotary embedding
  double scale = 0;          // of the scores; 0: 1 / sqrt(head_dim)
  PatternSpec pattern = {};  // full unless given; map = "file" only as read_block_maps gives it (tensor_files/)
  // Which positions this rank's rows of x and memory are: the caller's rows must lie so, the module cannot see it.
  LayoutKind layout = LayoutKind::kContiguous;
  // How it is computed; none of it changes the result beyond rounding.
  ScheduleKind schedule = ScheduleKind::kAuto;
  KernelKind kernel = KernelKind::kAuto;
  // Keep x, out and lse for the backward, not q, k and v: the projections are computed again there, attention never is.
  bool recompute = false;
  // Dropout of attention probabilities, while training only (module.train()).
  double dropout = 0;
  uint64_t seed = 0;
  int64_t layer = 0;  // also in error messages

  // TOML-like, one line: what is computed, and so what a saved module must share with the one it is loaded into.
  std::string text() const;
};

// What one call needs beside tensors. All ranks give the same but for `comm`.
struct AttentionScope {
  Communicator& comm;        // of the call; its backward keeps a share of it
  int64_t step = 0;          // of training, and
  int64_t first_row = 0;     // the global number of batch row 0: for dropout
  int64_t query_offset = 0;  // query i has the position i + query_offset
  // Packed sequences: as in PatternSpec, in place of the pattern's own. Both empty: those of the pattern.
  std::vector<std::vector<int64_t>> documents = {};
  std::vector<std::vector<int64_t>> key_documents = {};
};

class MultiheadAttentionImpl final : public torch::nn::Cloneable<MultiheadAttentionImpl> {
 public:
  // Error(kPlan) when sizes do not fit, before memory is taken. Weights are Xavier-uniform, biases 0.
  explicit MultiheadAttentionImpl(const MultiheadAttentionOptions& options);

  // Self-attention. x [B, n, dim] of this rank's positions, in the layout's storage order, of the module's dtype and
  // device. n = 0 gives [B, 0, dim]. Collective, and so is its backward. Raises on every rank, as attention() does,
  // also where one rank alone was given what cannot be.
  at::Tensor forward(const at::Tensor& x, const AttentionScope& scope) const;
  // Cross-attention: queries from x, keys and values from memory [B, m, memory_dim].
  at::Tensor forward(const at::Tensor& x, const at::Tensor& memory, const AttentionScope& scope) const;

  const MultiheadAttentionOptions& options() const { return options_; }

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  // torch::save and torch::load: weights together with the options. Error(kInput) when those saved are not this
  // module's.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  torch::nn::Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, out_proj{nullptr};
  torch::nn::LayerNorm norm{nullptr};  // null without it

 private:
  void check_inputs(const at::Tensor& x, const at::Tensor& memory) const;
  at::Tensor attend(const at::Tensor& x, const at::Tensor& memory, const AttentionScope& scope) const;

  MultiheadAttentionOptions options_;
};
TORCH_MODULE(MultiheadAttention);

}  // namespace annulus
