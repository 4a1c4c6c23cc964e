// The decoder that a ModelShape describes: RMSNorm, rotary embedding by global position, grouped heads, SwiGLU. It
// depends neither on ranks nor on attention patterns: the caller gives it the positions of its tokens (as a rotary
// table) and a function that computes attention. Used by runtime/training/ and runtime/inference/.
//
// Thread safety: const calls may run at the same time as long as nothing updates the parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "memory/charge.h"
#include "runtime/model/fused_ops.h"
#include "runtime/model/model_shape.h"
#include "runtime/model/parameters.h"

namespace annulus {

// Where weights are used, in the order of the forward: place 0 is the embedding, place 1 + i is layer i (the last one
// with the final norm), and place 1 + layers is the output. A place's weights are those of the unit of that number,
// except that a tied output has the embedding's.
//
// The holder of the weights is called when those of a place are about to be used and when they no longer are, in the
// forward and in the backward; an exception that it throws ends the call. Calls come on the thread that runs the model,
// or on autograd's. The backward reads the last layer's weights first, so they are used from its forward to the end of
// its backward. The output's are used only in the forward, which computes their gradient, and the embedding's also only
// in the forward. after_backward is not called for the embedding: the caller of the backward knows when it has ended.
class WeightUse {
 public:
  virtual ~WeightUse() = default;
  virtual void before_forward(size_t place) = 0;
  virtual void after_forward(size_t place) = 0;
  virtual void before_backward(size_t place) = 0;
  // The gradients that this place contributes are complete.
  virtual void after_backward(size_t place) = 0;
};

// q [B, n, heads, D], k and v [B, n, kv_heads, D], all contiguous -> out like q.
using Attend = std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t layer)>;

// Memory in bytes that the holder of the weights takes while a place's part of the model runs, forward and backward.
struct PlaceCharges {
  int64_t forward = 0, backward = 0;
  int64_t kept = 0;  // from the forward to the backward
  int64_t ends = 0;  // when its backward has ended and nothing else of the place is held
};
inline constexpr std::string_view kWeightsKept = "weights that the backward reads first";

// Adds what a step of the model with `rows` tokens holds (memory/charge.h) to `step`, in the order of the forward.
// `attention`: the attention of each layer, whose parts lie between those of the model. `places`: what each place takes
// if weights or gradients are not held all the time; may be empty.
void add_model_charges(const ModelShape& shape, int64_t rows, const Computes& on, bool recompute,
                       const std::vector<Part>& attention, const std::vector<PlaceCharges>& places, StepCharges& step);
// The most bytes that a forward alone holds at once, if its results are released as soon as they are read.
int64_t forward_bytes(const ModelShape& shape, int64_t rows, const Computes& on);

class Model {
 public:
  // Checks the shape (Error(kPlan)) and takes the memory. Initial weights are those of described_units(shape) and
  // depend only on (shape, seed). `dtype` is the one that it computes in; with bf16, norms' statistics, rotations and
  // the loss are fp32.
  Model(const ModelShape& shape, uint64_t seed, at::ScalarType dtype = at::kFloat, at::Device device = at::kCPU);
  // The same without weights: their holder takes the memory and fills it. Units can be cut into `parts`.
  struct Unheld {
    int parts = 1;
  };
  Model(const ModelShape& shape, at::ScalarType dtype, at::Device device, Unheld unheld);

  const ModelShape& shape() const { return shape_; }
  Parameters& parameters() { return parameters_; }
  const Parameters& parameters() const { return parameters_; }

  // `use` is called at each use of the weights from then on; null: nothing is. It must outlive the calls and their
  // backwards.
  void set_use(WeightUse* use) { use_ = use; }
  // For each layer, keep only what is added to the residual stream and what attention keeps (q, k, v, out, lse). The
  // backward computes norms, projections and the MLP again, but not attention. The gradients are the same.
  void set_recompute(bool on) { recompute_ = on; }

  // The table for these positions, on the model's device: int64 [n] if all rows of tokens have the same ones, or [B *
  // n].
  RotaryTable rotary(const at::Tensor& positions) const;

  // tokens int64 [B, n] -> logits [B * n, vocab]. Differentiable in the parameters. `last_only`: only the logits of the
  // last position of each row, [B, vocab].
  at::Tensor logits(const at::Tensor& tokens, const RotaryTable& table, const Attend& attend,
                    bool last_only = false) const;

  // The hidden states to which the output matrix is applied: [B * n, dim], or [B, dim] with `last_only`.
  // Differentiable.
  at::Tensor hidden(const at::Tensor& tokens, const RotaryTable& table, const Attend& attend,
                    bool last_only = false) const;
  // The logits of some of these rows: [rows, vocab], in the accumulator's dtype (fp32 for bf16). Not differentiable.
  at::Tensor wide_logits(const at::Tensor& hidden) const;

  // scale * sum of the cross entropies of what hidden() returned with targets int64 [rows], of which those of -1 do not
  // count. Differentiable. Never holds the logits of all rows (linear_cross_entropy_sum, which says who checks
  // targets).
  at::Tensor loss_of(const at::Tensor& hidden, const at::Tensor& targets, double scale) const;
  // The same from tokens.
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets, const RotaryTable& table, const Attend& attend,
                  double scale) const;

 private:
  // Tensors that the shape does not have are undefined.
  struct Layer {
    at::Tensor attention_norm;         // [dim]
    at::Tensor qkv, qkv_bias;          // [(heads + 2 kv_heads) head_dim, dim]
    at::Tensor q_norm, k_norm;         // [head_dim]
    at::Tensor out, out_bias;          // [dim, heads head_dim]
    at::Tensor mlp_norm;               // [dim]
    at::Tensor gate_up, gate_up_bias;  // [2 ffn, dim]
    at::Tensor down, down_bias;        // [dim, ffn]
  };
  // Marks the tensors that pass from one place to the next, or to the loss. When the backward comes to them, the use of
  // the next place ends and that of `place` begins.
  void pass_from(size_t place, std::vector<at::Tensor>& between) const;

  ModelShape shape_;
  bool recompute_ = false;
  WeightUse* use_ = nullptr;
  Parameters parameters_;
  at::Tensor embedding_;  // [vocab, dim]
  std::vector<Layer> layers_;
  at::Tensor norm_;
  at::Tensor head_;  // [vocab, dim]; the embedding if tied
};

}  // namespace annulus
