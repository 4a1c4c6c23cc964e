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
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attention/execution/attention.h"
#include "comm/communicator.h"
#include "config/config.h"
#include "data/batch_reader.h"
#include "data/dataset.h"
#include "memory/pinned.h"
#include "model/model.h"
#include "training/job.h"
#include "training/layer_requests.h"
#include "training/mesh.h"
#include "training/run/checkpoint.h"
#include "training/state/left_out.h"
#include "training/state/model_state.h"
#include "training/state/optimizer.h"
#include "training/state/spike_rule.h"
#include "training/step_graph.h"

namespace annulus {

struct StepResult {
  double loss = 0;           // mean over the targets that count, nats
  double gradient_norm = 0;  // before clipping
  double lr = 0;
  int64_t tokens = 0;   // positions of all rows
  int64_t targets = 0;  // of them, those with a target that counts
  // false: the loss or the norm was not finite, no target counts, or it is a spike; the weights are as they were and
  // `note` says why
  bool applied = true;
  bool spike = false;            // the norm is that far above its median
  std::optional<double> median;  // running, of the norms before it: where there is a rule, and enough of them
  bool stop = false;             // some rank was asked to stop
  std::string note;              // something to tell the user, mostly nothing
};

struct ValidationResult {
  double loss = 0;                // mean over the targets of all sources, nats; meaningless after a stop
  std::vector<double> of_source;  // the same of each; not a number where nothing is held out
  bool stop = false;
};

class Training {
 public:
  // Collective. The data and the world must outlive this. `stages`: of check_training, for this configuration and as
  // many ranks. The first step is the one from which the data has rows.
  Training(const Config& config, std::vector<Stage> stages, Communicator& world, const Dataset& data, at::Device device,
           const Sharding& sharding);
  // All ranks on one host.
  Training(const Config& config, Communicator& world, const Dataset& data, at::Device device)
      : Training(config, check_training(config, world.size()), world, data, device,
                 make_sharding(config, world.size(), world.size())) {}
  ~Training();

  // One update from data.accumulate global batches. Collective. `stop`: this rank was asked to stop; every rank learns
  // of it. Raises Error(kUsage) when an update is left out for the optimizer.skips-th time in a row; steps that are
  // made again, after a restore() of an earlier state, do not count as steps between.
  StepResult step(bool stop = false);

  // At the end of a run. Raises Error(kUsage) where the last updates were left out, and as many as this Training has
  // applied: then nothing was learned, whatever the number of steps.
  void require_updates() const { left_out_.require_updates(); }

  // Loss over validation.batches batches of each source's held-out rows, always the same ones. Collective. Calls `stop`
  // before each batch; ends early when it is true on any rank.
  ValidationResult validate(const std::function<bool()>& stop);

  int64_t steps_done() const { return steps_done_; }
  int64_t tokens_done() const { return tokens_; }  // positions of all rows so far
  const SpikeRule& spike_rule() const { return spikes_; }
  // What each source has given so far, and how many of its epochs.
  const std::vector<SourceUse>& uses() const { return uses_; }
  const Dataset& data() const { return data_; }
  // Seconds that steps have waited for their tokens so far.
  double waited_for_data() const;
  const Model& model() const { return model_; }
  // What the layers' attention is planned from, documents of the data left out, with the digests of block maps read
  // from files: ranks compare it.
  std::string attention_text() const;
  // Of one token of the current stage, forward and backward, multiply-additions counted twice: what the patterns count,
  // not what a causal triangle would be. Documents of the data are left out of account.
  double flops_per_token() const;
  Mesh& mesh() { return mesh_; }
  // Steps are replayed from a record (step_graph.h).
  bool replays() const;

  // For a checkpoint: counters and the model's description, and the slices of tensors that this rank writes: views,
  // valid until the next step.
  TrainingState state() const;
  std::vector<TensorSlice> slices_to_write() const { return slices(/*written=*/true); }
  // `read` fills the slices that it is given, of what this rank holds, as CheckpointStore::read does. Raises
  // Error(kInput) when a counter is missing, with nothing touched, and what `read` raises. Where state is cut,
  // collective. Of an earlier state of this run what the data gave is taken back, too; until the next step nothing
  // reads the data.
  void restore(const TrainingState& state, const std::function<void(const std::vector<TensorSlice>& into)>& read);

  // Begins with other weights than those of the seed: `read` as for restore().
  void begin_with(const std::function<void(const std::vector<TensorSlice>& into)>& read);

  // Of all weights: ranks compare it after a start or a resume. Collective where weights are cut.
  std::string weights_digest() const { return model_state_.digest(); }
  const ModelState& model_state() const { return model_state_; }

 private:
  struct Share;  // of the rows of a stage, this rank's

  // Makes the share of a stage in which `step` lies; require_stage, where that is another one.
  void enter(size_t stage, int64_t step);
  void stop_reading();
  size_t stage_of(int64_t step) const;
  void require_stage(int64_t step);
  // This rank's part of the loss: a sum divided by the number of tokens of a step.
  at::Tensor loss(const at::Tensor& batch, const RotaryTable& table, const Attend& attend) const;
  // Updates the weights, unless the result says that nothing can be learned from the gradients.
  void apply(double gradient_scale, StepResult& result);
  // What every rank tells of a step, in rank order. Waits for the device: the only such wait of a step.
  static constexpr int64_t kNumbers = 4;
  std::vector<std::array<double, kNumbers>> read_out();
  // Of all that is under way: moves it along, and raises what it has met.
  void progress();
  std::vector<TensorSlice> slices(bool written) const;
  // The distinct requests of a batch whose rows have these parts (BatchReader).
  std::vector<PlanRequest> requests(const std::vector<std::vector<int64_t>>& parts) const;
  // The same of batch i of a coming step, of whichever stage.
  std::vector<PlanRequest> requests_ahead(int64_t step, int64_t i) const;
  // Makes or finds what these need, and counts the time that it took as waited (PlanStats).
  void look_up(const std::vector<PlanRequest>& requests);
  // Begins to plan on another thread.
  void plan_ahead(const std::vector<PlanRequest>& requests);
  void plan_what_follows();
  Attend attend(const std::vector<PlanRequest>& requests, const Dropout& dropout, const std::string& when);

  Config config_;
  std::vector<Stage> stages_;
  const Dataset& data_;
  Mesh mesh_;
  at::Device device_;
  bool recorded_;  // steps are, where the device can (step_graph.h)
  Model model_;
  ModelState model_state_;
  AdamW optimizer_;
  SpikeRule spikes_;
  LeftOut left_out_;
  at::Tensor numbers_;     // fp64 [kNumbers], of this rank
  at::Tensor everybodys_;  // fp64 [ranks, kNumbers]
  Readback readout_;       // of those
  size_t stage_ = 0;
  std::unique_ptr<Share> share_;  // of that stage
  std::vector<SourceUse> uses_;
  double waited_for_data_ = 0;  // in stages before
  int64_t tokens_ = 0;
  int64_t steps_done_ = 0;
};

}  // namespace annulus
