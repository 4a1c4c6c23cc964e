// The decoder that a ModelShape describes: RMSNorm, rotary embedding by global position, grouped heads, SwiGLU. It
// knows neither ranks nor attention patterns: it is given the positions of its tokens (as a rotary table) and a
// function that attends. Used by trainer.cc and sampler.cc.
//
// Thread safety: const calls may run at the same time as long as nobody updates the parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "memory/charge.h"
#include "model/description/model_shape.h"
#include "model/fused_ops.h"
#include "model/parameters.h"

namespace annulus {

// Where weights are used, in the order of the forward: place 0 is the embedding, place 1 + i layer i (the last with the
// norm behind it), and place 1 + layers the output. A place's weights are the unit of that number, but for an output
// that is tied, whose unit is the embedding's.
//
// Who holds the weights is told when those of a place are about to be used and when they no longer are, in the forward
// and in the backward; what is raised there ends the call. Calls come on the thread that runs the model, or on
// autograd's. The last layer's weights are used from its forward to the end of its backward, the output's only in the
// forward, where its gradient is made, and the embedding's likewise. Whoever calls the backward knows when the
// embedding's has ended: nobody else is told.
class WeightUse {
 public:
  virtual ~WeightUse() = default;
  virtual void before_forward(size_t place) = 0;
  virtual void after_forward(size_t place) = 0;
  virtual void before_backward(size_t place) = 0;
  // The place's gradients are complete, as far as they are its own.
  virtual void after_backward(size_t place) = 0;
};

// q [B, n, heads, D], k and v [B, n, kv_heads, D], all contiguous -> out like q.
using Attend = std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t layer)>;

// What the holder of the weights takes while a place's part of the model runs, forward and backward.
struct PlaceCharges {
  int64_t forward = 0, backward = 0;
  int64_t kept = 0;  // from the one to the other
  int64_t ends = 0;  // when its backward has ended, besides nothing of the place's own
};
inline constexpr std::string_view kWeightsKept = "weights that the backward reads first";

// What a step of the model holds (memory/charge.h), added to `step` in the order of the forward: `rows` tokens, and
// `attention` of each layer, whose parts are between those of the model. `places`: of each, where weights or gradients
// are not there all the time; may be empty.
void add_model_charges(const ModelShape& shape, int64_t rows, const Computes& on, bool recompute,
                       const std::vector<Part>& attention, const std::vector<PlaceCharges>& places, StepCharges& step);
// The same of a forward alone, whose results are let go as soon as they are read: the most at once.
int64_t forward_bytes(const ModelShape& shape, int64_t rows, const Computes& on);

class Model {
 public:
  // Checks the shape and takes the memory. Weights begin as described_units(shape) says and depend on (shape, seed)
  // only. `dtype` is what it computes in: in bf16
  // norms' statistics, rotations and the loss are fp32.
  Model(const ModelShape& shape, uint64_t seed, at::ScalarType dtype = at::kFloat, at::Device device = at::kCPU);
  // The same without weights: who holds them takes their memory, and fills it. Units can be cut into `parts`.
  struct Unheld {
    int parts = 1;
  };
  Model(const ModelShape& shape, at::ScalarType dtype, at::Device device, Unheld unheld);

  const ModelShape& shape() const { return shape_; }
  Parameters& parameters() { return parameters_; }
  const Parameters& parameters() const { return parameters_; }

  // Told of each use of the weights from then on; null: nobody is. It outlives the calls and their backwards.
  void set_use(WeightUse* use) { use_ = use; }
  // Of each layer, keep only what is added to the residual stream and what attention keeps (q, k, v, out, lse): norms,
  // projections and the MLP are computed again in the backward, attention is not. The gradients are the same.
  void set_recompute(bool on) { recompute_ = on; }

  // The table for these positions, on the model's device: int64 [n] where all rows of tokens have the same, or [B * n].
  RotaryTable rotary(const at::Tensor& positions) const;

  // tokens int64 [B, n] -> logits [B * n, vocab]. Differentiable in the parameters. Where `last_only`, the logits of
  // the last position of each row alone: [B, vocab].
  at::Tensor logits(const at::Tensor& tokens, const RotaryTable& table, const Attend& attend,
                    bool last_only = false) const;

  // What the output matrix is applied to: [B * n, dim], or where `last_only` [B, dim]. Differentiable.
  at::Tensor hidden(const at::Tensor& tokens, const RotaryTable& table, const Attend& attend,
                    bool last_only = false) const;
  // Logits of some rows of that: [rows, vocab], in the accumulator's dtype (fp32 for bf16). Not differentiable.
  at::Tensor wide_logits(const at::Tensor& hidden) const;

  // scale * sum of the cross entropies of targets int64 [rows], of which those of -1 do not count, from what hidden()
  // gave; differentiable; never holds all logits (linear_cross_entropy_sum, which says who checks targets).
  at::Tensor loss_of(const at::Tensor& hidden, const at::Tensor& targets, double scale) const;
  // The same of tokens.
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets, const RotaryTable& table, const Attend& attend,
                  double scale) const;

 private:
  // Undefined where the shape has none.
  struct Layer {
    at::Tensor attention_norm;         // [dim]
    at::Tensor qkv, qkv_bias;          // [(heads + 2 kv_heads) head_dim, dim]
    at::Tensor q_norm, k_norm;         // [head_dim]
    at::Tensor out, out_bias;          // [dim, heads head_dim]
    at::Tensor mlp_norm;               // [dim]
    at::Tensor gate_up, gate_up_bias;  // [2 ffn, dim]
    at::Tensor down, down_bias;        // [dim, ffn]
  };
  // What passes from one place to the next, or the loss: in the backward, the next ends there and `place` begins.
  void pass_from(size_t place, std::vector<at::Tensor>& between) const;

  ModelShape shape_;
  bool recompute_ = false;
  WeightUse* use_ = nullptr;
  Parameters parameters_;
  at::Tensor embedding_;  // [vocab, dim]
  std::vector<Layer> layers_;
  at::Tensor norm_;
  at::Tensor head_;  // [vocab, dim]; the embedding where tied
};

}  // namespace annulus
