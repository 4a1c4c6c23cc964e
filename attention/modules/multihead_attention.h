// MultiheadAttention: a torch module for C++ programs, projections and attention() over the ranks of a communicator.
// Every rank has the same weights and its own positions of the sequence. Constructed directly or by name (factory.h).
//
//   x [B, n, dim] -> q, k, v projections -> rotary embedding by global position -> attention over all ranks, with sinks
//                 -> normalisation, if any -> output projection -> [B, n, dim]
//
// Thread safety: forward stores nothing in the module, so threads may share a module, each with its own communicator,
// as long as nothing changes the parameters.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <iosfwd>
#include <optional>
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
  int64_t kv_heads = 0;    // divides heads; 0: equal to heads
  int64_t head_dim = 0;    // 0: dim / heads
  int64_t memory_dim = 0;  // width of the memory in cross-attention; 0: dim
  bool bias = true;        // of the four projections
  bool norm = false;       // LayerNorm over all heads, before the output projection
  double norm_eps = 1e-5;
  double rotary_base = 0;      // base of the rotary embedding's wavelengths, usually 10000; 0: no rotary embedding
  double scale = 0;            // of the scores; 0: 1 / sqrt(head_dim)
  double softcap = 0;          // a soft cap of the scores (AttentionCall::softcap); 0: none
  bool learned_sinks = false;  // a parameter `sinks` [heads]: logits in the softmaxes' denominators, at first 0
  PatternSpec pattern = {};  // full by default; map = "file" must be loaded by read_block_maps (runtime/tensor_files/)
  // The positions of this rank's rows of x and memory, which the module cannot check.
  LayoutKind layout = LayoutKind::kContiguous;
  std::optional<PatternSpec> balance_by = std::nullopt;  // PlanRequest::balance_by, if layers have different patterns
  // These affect the result only by rounding.
  ScheduleKind schedule = ScheduleKind::kAuto;
  int within = 0;            // how many consecutive ranks form an inner group (PlanRequest::within)
  std::string machine = {};  // by which `auto` chooses (find_machine); empty: ANNULUS_MACHINE, or that of the device
  KernelKind kernel = KernelKind::kAuto;
  // Save x, out and lse for the backward instead of q, k and v; it recomputes the projections, but not attention.
  bool recompute = false;
  // Rate of attention dropout, only while training (module.train()).
  double dropout = 0;
  uint64_t seed = 0;
  int64_t layer = 0;  // also named in errors

  // Returns one line, similar to TOML, with all options that affect the result. Loading requires equal texts.
  std::string text() const;
  // Returns whether a text that was saved is that of these options, in whichever way its pattern was written.
  bool same_as(const std::string& saved) const;
};

// The arguments of a call besides tensors. All ranks pass equal values except `comm`.
struct AttentionScope {
  Communicator& comm;        // of this call; shared ownership is held until the backward has run
  int64_t step = 0;          // the training step, for dropout
  int64_t first_row = 0;     // the global number of batch row 0, for dropout
  int64_t query_offset = 0;  // query i has position i + query_offset; may be kBottomRight
  // Packed sequences, as in PatternSpec. If `documents` is empty, the pattern's own documents apply.
  std::vector<std::vector<int64_t>> documents = {};
  std::vector<std::vector<int64_t>> key_documents = {};
};

class MultiheadAttentionImpl final : public torch::nn::Cloneable<MultiheadAttentionImpl> {
 public:
  // Raises Error(kPlan), before it allocates, if sizes are inconsistent. Initial weights are Xavier-uniform, biases 0.
  explicit MultiheadAttentionImpl(const MultiheadAttentionOptions& options);

  // Self-attention. x [B, n, dim]: this rank's positions in the layout's storage order, in the module's dtype and on
  // its device. n = 0 gives [B, 0, dim]. Collective, and so is its backward. Raises on every rank, as attention() does,
  // even if the arguments of only one rank are invalid.
  at::Tensor forward(const at::Tensor& x, const AttentionScope& scope) const;
  // Cross-attention: queries from x, keys and values from memory [B, m, memory_dim].
  at::Tensor forward(const at::Tensor& x, const at::Tensor& memory, const AttentionScope& scope) const;

  const MultiheadAttentionOptions& options() const { return options_; }

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  // For torch::save and torch::load: weights and options. load raises Error(kInput) if the saved options differ from
  // this module's.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  torch::nn::Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, out_proj{nullptr};
  torch::nn::LayerNorm norm{nullptr};  // null if there is none
  at::Tensor sinks;                    // undefined if there are none

 private:
  void check_inputs(const at::Tensor& x, const at::Tensor& memory) const;
  at::Tensor attend(const at::Tensor& x, const at::Tensor& memory, const AttentionScope& scope) const;

  MultiheadAttentionOptions options_;
};
TORCH_MODULE(MultiheadAttention);

}  // namespace annulus
