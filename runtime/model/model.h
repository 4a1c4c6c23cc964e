// The decoder that a ModelShape describes: RMSNorm, rotary embedding by global position, grouped-query attention, gated
// MLP. It depends neither on ranks nor on attention patterns: the caller passes the positions of its tokens (as a
// rotary table) and a function that computes attention. Used by runtime/training/ and runtime/inference/.
//
// Thread safety: const calls may run at the same time as long as nothing updates the parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "memory/charge.h"
#include "runtime/model/decoder_layer.h"
#include "runtime/model/fused_ops.h"
#include "runtime/model/model_shape.h"
#include "runtime/model/parameters.h"
#include "runtime/model/weight_use.h"

namespace annulus {

// What the charges of a step depend on besides the model.
struct StepRows {
  int64_t batch = 0, length = 0;
  bool recompute = false;
  int64_t offloaded = 0;  // the layers, the first ones, of which what they keep leaves the device until their backward
};
// Adds the charges (memory/charge.h) of a step of the model to `step`, in the order of the forward. `attention`: that
// of each layer. `places`: the charges of each place if weights or gradients are not held all the time; may be empty.
void add_model_charges(const ModelShape& shape, const StepRows& rows, const Computes& on,
                       const std::vector<AttentionCharges>& attention, const std::vector<PlaceCharges>& places,
                       StepCharges& step);

class Model {
 public:
  // Allocates and initializes the weights, as functions of (shape, seed). `dtype` is the compute dtype; with bf16, norm
  // statistics, rotations and the loss are fp32. Raises Error(kPlan) for an invalid shape.
  Model(const ModelShape& shape, uint64_t seed, at::ScalarType dtype = at::kFloat, at::Device device = at::kCPU);
  // Makes a model without weights, whose holder allocates and fills them. Units are padded to `parts` equal parts.
  struct Unheld {
    int parts = 1;
  };
  Model(const ModelShape& shape, at::ScalarType dtype, at::Device device, Unheld unheld);

  const ModelShape& shape() const { return shape_; }
  Parameters& parameters() { return parameters_; }
  const Parameters& parameters() const { return parameters_; }

  // Sets the callbacks, which must outlive later calls and their backwards; null: none.
  void set_use(WeightUse* use) { use_ = use; }
  // Selective recomputation (decoder_layer.h): each layer keeps its input and what attention keeps but q, k and v. The
  // gradients are the same.
  void set_recompute(bool on) { recompute_ = on; }
  // With recomputation: what layers keep is offloaded. `offload` must outlive later backwards; null: it stays.
  // A backward must then run before the next forward whose gradients are asked for.
  void set_offload(Offload* offload) { offload_ = offload; }
  // Each forward with gradients counts there what its layers keep for the backward and do not offload; null: none does.
  void set_kept(StorageBytes* kept) { kept_ = kept; }
  // For tests: the most rows of a tile, instead of tile_rows() (decoder_layer.h).
  void set_tile_rows(int64_t rows) { tile_ = rows; }

  // Returns the tables for these positions, on the model's device: int64 [n] for all rows of tokens, or [B * n].
  RotaryTables rotary(const at::Tensor& positions) const;

  // Returns logits [B * n, vocab] for tokens int64 [B, n]; with `last_only` only those of the last position of each
  // row, [B, vocab]. Differentiable in the parameters.
  at::Tensor logits(const at::Tensor& tokens, const RotaryTables& tables, const Attend& attend,
                    bool last_only = false) const;

  // Returns the hidden states before the output projection: [B * n, dim], or [B, dim] with `last_only`. Differentiable.
  at::Tensor hidden(const at::Tensor& tokens, const RotaryTables& tables, const Attend& attend,
                    bool last_only = false) const;
  // Returns the logits of rows of hidden(): [rows, vocab], in the accumulator's dtype (fp32 for bf16). Not
  // differentiable.
  at::Tensor wide_logits(const at::Tensor& hidden) const;
  // The same for `rows` rows at a time: visit(first, logits) has those of the rows from `first` on. The weights are
  // used once, even if there is no row.
  using LogitsVisitor = std::function<void(int64_t first, const at::Tensor& logits)>;
  void visit_wide_logits(const at::Tensor& hidden, int64_t rows, const LogitsVisitor& visit) const;

  // Returns linear_cross_entropy_sum (fused_ops.h) of the result of hidden(), targets int64 [rows], -1 ignored, and
  // their weights, fp32 [rows] or undefined. Differentiable. Never holds the logits of all rows.
  at::Tensor loss_of(const at::Tensor& hidden, const at::Tensor& targets, double scale,
                     const at::Tensor& weights = {}) const;
  // Returns loss_of(hidden(...)).
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets, const RotaryTables& tables, const Attend& attend,
                  double scale, const at::Tensor& weights = {}) const;

 private:
  // Marks the tensors that a place outside of the layers, or the final norm, makes. When the backward reaches them, the
  // use of the output ends if `place` is the last before it, and that of `place` begins.
  void pass_from(size_t place, std::vector<at::Tensor>& made) const;
  // Returns the embeddings of tokens int64 [rows], scaled if the shape says so: [rows, dim].
  at::Tensor embedded(const at::Tensor& tokens) const;

  ModelShape shape_;
  bool recompute_ = false;
  Offload* offload_ = nullptr;
  StorageBytes* kept_ = nullptr;
  int64_t tile_ = 0;
  WeightUse* use_ = nullptr;
  Parameters parameters_;
  at::Tensor embedding_;  // [vocab, dim]
  std::vector<LayerWeights> layers_;
  NormWeight norm_;
  at::Tensor head_;  // [vocab, dim]; the embedding if tied
};

}  // namespace annulus
