// Training: the state of a training job on one rank (model, optimizer, mesh, attention) and its step. trainer.cc drives
// it for `annulus train`; benchmarks and tests drive it directly.
//
// Collective functions are called by every rank of the world in the same order. Not thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "attention/execution/attention.h"
#include "comm/communicator.h"
#include "config/config.h"
#include "data/text_source.h"
#include "memory/pinned.h"
#include "model/model.h"
#include "training/layer_requests.h"
#include "training/mesh.h"
#include "training/optimizer.h"
#include "training/run/checkpoint.h"
#include "training/step_graph.h"

namespace annulus {

// The decoder that a configuration describes, and what it computes in.
ModelShape model_shape(const Config& config);
at::ScalarType compute_dtype(const Config& config);
// Its [mesh], not fitted to any ranks yet.
std::vector<MeshAxis> mesh_axes(const Config& config);
// What learning_rate() follows, with the rest of the optimizer's numbers.
OptimizerSettings optimizer_settings(const Config& config);

// Everything about a configuration that can be wrong for a number of ranks: mesh, rows over the data axis, heads,
// length, layout, patterns. Raises Error(kPlan), on every rank alike, before memory is taken or anything is sent;
// Error(kInput) where a file of block maps cannot be read, which may be so on one host alone. What was read and checked
// is what a Training is made with.
LayerRequests check_training(const Config& config, int ranks);

struct StepResult {
  double loss = 0;           // mean over all targets, nats
  double gradient_norm = 0;  // before clipping
  double lr = 0;
  bool applied = true;  // false: the loss or the norm was not finite, the weights are as they were
  bool stop = false;    // some rank was asked to stop
  std::string note;     // something to tell the user, mostly nothing
};

struct ValidationResult {
  double loss = 0;  // mean over all targets, nats; meaningless after a stop
  bool stop = false;
};

// Copies a checkpoint's tensors into those of the same names. Raises Error(kInput) when one is missing or of another
// shape or dtype; touches nothing then. Tensors of other names are ignored.
void restore_tensors(const TrainingState& state, const std::vector<NamedTensor>& into);

// What a step of Training holds (memory/charge.h) besides the model's parts: what lasts, and what the step begins and
// ends with. `rows` of `positions` each are this rank's; `ranks` of the world.
void add_training_charges(const Config& config, int64_t rows, int64_t positions, int ranks, bool gpu,
                          StepCharges& step);

class Training {
 public:
  // Collective. The text and the world must outlive this. `layers`: of check_training, for this configuration and as
  // many ranks.
  Training(const Config& config, LayerRequests layers, Communicator& world, const TextSource& text, at::Device device);
  Training(const Config& config, Communicator& world, const TextSource& text, at::Device device)
      : Training(config, check_training(config, world.size()), world, text, device) {}

  // One update from one global batch. Collective. `stop`: this rank was asked to stop; every rank learns of it.
  // Raises Error(kUsage) when loss or gradients are not finite for the optimizer.skips-th time in a row.
  StepResult step(bool stop = false);

  // At the end of a run. Raises Error(kUsage) where the last updates were left out, and as many as this Training has
  // applied: then nothing was learned, whatever the number of steps.
  void require_updates() const;

  // Loss over the fixed validation rows. Collective. Calls `stop` before each batch; ends early when it is true on any
  // rank.
  ValidationResult validate(const std::function<bool()>& stop);

  int64_t steps_done() const { return steps_done_; }
  int64_t tokens_per_step() const { return config_.data.batch * config_.data.context; }
  const Model& model() const { return model_; }
  // What the layers' attention is planned from, documents of the data left out, with the digests of block maps read
  // from files: ranks compare it.
  std::string attention_text() const;
  // Of one token, forward and backward, multiply-additions counted twice: what the patterns count, not what a causal
  // triangle would be. Documents of the data are left out of account.
  double flops_per_token() const;
  Mesh& mesh() { return mesh_; }
  // Steps are replayed from a record (step_graph.h).
  bool replays() const { return graph_.recorded(); }

  // For a checkpoint: views, valid until the next step.
  TrainingState state() const;
  // Raises Error(kInput) as restore_tensors does, or when a counter is missing. Touches nothing then.
  void restore(const TrainingState& state);

  // Of all weights: ranks compare it after a start or a resume.
  std::string weights_digest() const;

 private:
  // Fills batch_ with rows numbered globally within `row(i)`: this rank takes its part of the data axis and its
  // positions.
  template <typename Row>
  void load_batch(const Row& row);
  at::Tensor loss(const Attend& attend) const;
  // This rank's gradients and its part of the loss, into the parameters.
  void forward_backward(const Attend& attend);
  // Waits for the device and brings Parameters::readout() to the host: the only such wait of a step.
  std::array<double, Parameters::kReadout> read_out();
  // The distinct requests of a step; `documents(row)` are those of a row of the global batch.
  template <typename Documents>
  std::vector<PlanRequest> requests(const Documents& documents) const;
  // Makes or finds what these need, and counts the time that it took as waited (PlanStats).
  void look_up(const std::vector<PlanRequest>& requests);
  // Begins to plan on another thread.
  void plan_ahead(const std::vector<PlanRequest>& requests);
  Attend attend(const std::vector<PlanRequest>& requests, const Dropout& dropout, const std::string& when);

  Config config_;
  LayerRequests layers_;
  const TextSource& text_;
  Mesh mesh_;
  Span rows_;                          // of the global batch, this rank's
  std::vector<PlanRequest> requests_;  // layers_.distinct for these
  at::Device device_;
  Model model_;
  AdamW optimizer_;
  at::Tensor positions_;  // int64, of this rank, on the CPU
  RotaryTable rotary_;
  at::Tensor batch_;  // int64 [2, rows, positions] of this rank: tokens, and what follows each of them
  StepGraph graph_;
  Readback readout_;  // of Parameters::readout()
  int64_t steps_done_ = 0;
  int64_t applied_ = 0;     // updates, by this Training
  int64_t not_finite_ = 0;  // updates that were left out, in a row
};

}  // namespace annulus
