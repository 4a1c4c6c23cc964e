// Rows of tokens through a model over all ranks of a communicator: each rank computes its positions, and attention runs
// across ranks by a plan. Used by logits.h, by runtime/evaluation and by generated text (its prompt).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention/kernels/choose_kernel.h"
#include "attention/pattern/rollouts.h"
#include "attention/plan/layout.h"
#include "comm/communicator.h"
#include "runtime/config/config.h"
#include "runtime/model/model.h"
#include "runtime/training/layer_requests.h"

namespace annulus {

// Unchecked options of the user; check_options validates them.
struct RowOptions {
  std::string pattern;                // overrides the model's patterns in all layers
  std::optional<std::string> layout;  // default zigzag, as in training; may be "auto"
  std::string schedule = "auto";
  int within = 0;       // PlanRequest::within
  std::string machine;  // by which `auto` chooses, as attention.machine
  std::string kernel = "auto";
};
// Raises Error(kUsage) for an option that names nothing.
void check_options(const RowOptions& options);

// Rows that pass through a model together.
struct RowShape {
  int64_t rows = 1, length = 0;
  bool apart = false;  // as ForwardRows::apart

  auto operator<=>(const RowShape&) const = default;
};

// Returns the attention requests of such rows over `ranks` ranks, before `auto` has chosen (RowChoices). Raises
// Error(kPlan) if length, heads or layout are incompatible with them, or if a rank has no position; `module` names the
// subcommand in the message. backward: whether `auto` is to count a backward.
LayerRequests row_requests(const ModelSection& model, const RowOptions& options, const RowShape& shape, int ranks,
                           bool backward, const char* module);

// Returns the bytes that a rank holds at most in the forward of a layer with these requests, if nothing is kept for a
// backward: the layer's own, and what attention takes by its program.
int64_t row_forward_bytes(const ModelShape& model, const LayerRequests& layers, int64_t rows, int rank,
                          KernelKind kernel, const Computes& on);

// The requests of rows of each shape, in which `auto` has chosen: the fastest of those with which all fits that a rank
// holds (choose_for_run). Not thread safe.
class RowChoices {
 public:
  struct Settings {
    ModelSection model;  // with the dtype that it computes in
    RowOptions options;
    bool backward = false;
    const char* module = "";
    at::Device device = at::kCPU;
    std::optional<double> free;  // bytes that this rank may take; nothing: not known
    // The bytes that this rank takes, while it computes rows with these requests.
    std::function<double(const LayerRequests& layers, const RowShape& shape)> bytes;
  };
  // `world` must outlive this.
  RowChoices(Settings settings, Communicator& world) : settings_(std::move(settings)), world_(world) {}

  // Collective if rows of this shape are new. Raises what row_requests raises. What is chosen is logged as "debug".
  const LayerRequests& of(const RowShape& shape);

 private:
  Settings settings_;
  Communicator& world_;
  std::map<RowShape, LayerRequests> known_;
};

// Rows [B, S] that pass through the model together, equal on all ranks.
struct ForwardRows {
  at::Tensor tokens;  // int64 [B, S], on the CPU
  // For each row the parts that it is made of; may be empty if neither of the following is set.
  std::vector<RowParts> parts = {};
  bool apart = false;    // tokens attend only to their own document, or path of a prefix tree
  bool restart = false;  // rotary positions begin again with each document or tree
};

// Returns which positions of such rows each rank computes. A layout that is dealt follows documents if they are apart.
Layout row_layout(const LayerRequests& layers, const ForwardRows& rows = {});

// Not thread safe. The model and the communicator must outlive this, and a std::shared_ptr must own the communicator.
class RowForward {
 public:
  RowForward(const Model& model, Communicator& ring, KernelKind kernel) : model_(model), ring_(ring), kernel_(kernel) {}

  // Called in each layer in place of `attention`, which it may call: with this rank's positions of q, k and v after the
  // rotary embedding, [B, n, heads, D].
  using Around = std::function<Attended(const Attend& attention, const at::Tensor& q, const at::Tensor& k,
                                        const at::Tensor& v, int64_t layer, const at::Tensor& sinks)>;

  // Returns the hidden states of this rank's positions, [B * n, dim], in the order of row_layout. Collective.
  // Differentiable. `layers` are the requests of rows of this shape; `label` names the call in messages. Raises the
  // errors of planning and of attention.
  at::Tensor hidden(const LayerRequests& layers, const ForwardRows& rows, const std::string& label,
                    const Around& around = nullptr) const;

 private:
  const Model& model_;
  Communicator& ring_;
  KernelKind kernel_;
};

}  // namespace annulus
