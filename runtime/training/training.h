// Training: the state of a training job on one rank (model, optimizer, mesh, attention) and its step. trainer.cc uses
// it for `annulus train`; benchmarks and tests use it directly.
//
// Every rank of the world calls collective functions in the same order. Not thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "attention/execution/planned_call.h"
#include "comm/communicator.h"
#include "memory/pinned.h"
#include "memory/storage_bytes.h"
#include "memory/tiers/offload.h"
#include "memory/tiers/tiered_tensors.h"
#include "runtime/config/config.h"
#include "runtime/data/batch_reader.h"
#include "runtime/data/dataset.h"
#include "runtime/model/model.h"
#include "runtime/run/checkpoint.h"
#include "runtime/training/job.h"
#include "runtime/training/layer_requests.h"
#include "runtime/training/mesh.h"
#include "runtime/training/state/left_out.h"
#include "runtime/training/state/model_state.h"
#include "runtime/training/state/optimizer.h"
#include "runtime/training/state/spike_rule.h"
#include "runtime/training/step_graph.h"

namespace annulus {

// The numbers of a rank that a step carries to all others for whoever calls it (runtime/training/rank_metrics.h).
inline constexpr size_t kCarriedNumbers = 20;

struct StepResult {
  double loss = 0;           // mean over the targets that count, by their weights, in nats; 0 if none counts
  double gradient_norm = 0;  // before clipping
  double lr = 0;
  int64_t tokens = 0;   // positions of all rows
  int64_t targets = 0;  // positions among them whose target counts
  double weight = 0;    // the sum of the weights of these; their number unless the data weigh targets
  // False if the loss or the norm was not finite, no target counts, or the norm is a spike. The weights are then
  // unchanged, and `note` says why.
  bool applied = true;
  bool spike = false;            // the norm is more than optimizer.spike times its running median
  std::optional<double> median;  // running, of earlier norms; nothing without optimizer.spike or with too few of them
  bool stop = false;             // some rank was asked to stop
  std::string note;              // a message for the user, usually empty
  // What each rank's `carry` returned (Training::step), by rank.
  std::vector<std::array<double, kCarriedNumbers>> carried;
};

// What this rank has computed so far.
struct TrainingWork {
  int64_t tokens = 0;  // its positions of all rows
  double pairs = 0;    // of attention in its plans, over all layers and query heads; NaN if a pattern selects them
};

// The bytes of memory that a rank holds for each of these; they are parts of the plan (MemoryKinds).
struct HeldBytes {
  int64_t weights = 0, gradients = 0, optimizer = 0;  // now
  int64_t activations = 0;                            // what the layers of the last forward have left to its backward
};

// How a task of validation.tasks (runtime/tasks/task.h) was answered.
struct TaskResult {
  std::string task;
  double exact = 0;  // the share of prompts whose answer is right to the last token
  double loss = 0;   // mean over the answers' tokens, in nats
};

struct ValidationResult {
  double loss = 0;                // mean over the targets of all sources by weight, in nats; meaningless after a stop
  std::vector<double> of_source;  // the same for each source; NaN if no held-out target of it counts
  std::vector<TaskResult> tasks;
  bool stop = false;
};

class Training {
 public:
  // Collective. The data and the world must outlive this object. `stages` is the result of check_training for this
  // configuration and number of ranks. The first step is data.first_step(). `chunk` is that of optimizer.offload
  // (memory/tiers/tiered_tensors.h).
  Training(const Config& config, std::vector<Stage> stages, Communicator& world, const Dataset& data, at::Device device,
           const Sharding& sharding, int64_t chunk = TieredTensors::kChunk);
  // For tests and benchmarks, with all ranks on one host.
  Training(const Config& config, Communicator& world, const Dataset& data, at::Device device,
           int64_t chunk = TieredTensors::kChunk)
      : Training(config, check_training(config, world.size()), world, data, device,
                 make_sharding(config, world.size(), world.size()), chunk) {}
  ~Training();

  using Carried = std::array<double, kCarriedNumbers>;

  // Makes one update from data.accumulate global batches. Collective. `stop` says that this rank was asked to stop, and
  // every rank's result then says so. `carry` is called when this rank has done its part of the step, just before the
  // ranks exchange their results; without it the rank carries zeros. Raises Error(kUsage) when an update is left out
  // for the optimizer.skips-th time in a row; steps that are repeated after a restore() of an earlier state do not
  // interrupt such a series.
  StepResult step(bool stop = false, const std::function<Carried()>& carry = nullptr);

  // Called at the end of a run. Raises Error(kUsage) if the last updates were left out, and at least as many of them as
  // this Training has applied.
  void require_updates() const { left_out_.require_updates(); }

  // Computes the loss over validation.batches batches of each source's held-out rows, and answers validation.trials
  // prompts of each of validation.tasks; both are always the same.
  // Collective. Calls `stop` before each batch and ends early when it returns true on any rank.
  ValidationResult validate(const std::function<bool()>& stop);

  int64_t steps_done() const { return steps_done_; }
  int64_t tokens_done() const { return tokens_; }  // positions of all rows so far
  const SpikeRule& spike_rule() const { return spikes_; }
  // The rows, targets and documents that each source has given so far.
  const std::vector<SourceUse>& uses() const { return uses_; }
  const Dataset& data() const { return data_; }
  // The seconds that steps have waited for their tokens so far.
  double waited_for_data() const;
  const TrainingWork& own_work() const { return work_; }
  HeldBytes held() const {
    const StateBytes state = model_state_.held();
    return {state.weights, state.gradients, optimizer_.held(), kept_.bytes()};
  }
  const Model& model() const { return model_; }
  // The requests from which the layers' attention is planned, with the digests of block maps read from files and
  // without the data's documents. Ranks compare this text.
  std::string attention_text() const;
  // The FLOPs of one token of the current stage, forward and backward, with a multiply-add as two. Attention counts the
  // pairs of the patterns, not those of a causal triangle; documents of the data are not considered.
  double flops_per_token() const;
  Mesh& mesh() { return mesh_; }
  // Whether steps are replayed from a recorded CUDA graph (step_graph.h).
  bool replays() const;
  // What memory.offload and optimizer.offload have moved so far; nothing without both.
  std::optional<OffloadStats> offloaded() const;

  // For a checkpoint: the counters and the model's description, and the slices of tensors that this rank writes. The
  // slices are views that are valid until the next step.
  TrainingState state() const;
  std::vector<TensorSlice> slices_to_write() const { return slices(/*written=*/true); }
  // Takes over the state of a checkpoint. `read` fills the slices that it is given, which are those that this rank
  // holds, as CheckpointStore::read does. Raises Error(kInput) and changes nothing if a counter is missing; passes on
  // what `read` raises. Collective if state is sharded. When it returns to an earlier state of this run, the counters
  // of the data's use return, too. Nothing reads the data until the next step.
  void restore(const TrainingState& state, const std::function<void(const std::vector<TensorSlice>& into)>& read);

  // Replaces the weights made from the seed by others. `read` is as for restore().
  void begin_with(const std::function<void(const std::vector<TensorSlice>& into)>& read);

  // A digest of all weights, which ranks compare after a start or a resume. Collective if weights are sharded.
  std::string weights_digest() const { return model_state_.digest(); }
  const ModelState& model_state() const { return model_state_; }

 private:
  struct Share;  // this rank's share of the rows of a stage

  // Makes this rank's share of `stage`, which contains `step`.
  void enter(size_t stage, int64_t step);
  void stop_reading();
  // Enters the stage that contains `step` if it is not the current one.
  void require_stage(int64_t step);
  // Returns this rank's part of the loss: a sum over targets, divided by the number of tokens of a step.
  at::Tensor loss(const at::Tensor& batch, const RotaryTables& tables, const Attend& attend) const;
  // Updates the weights, or leaves the update out and says so in `result` if the gradients cannot be used.
  void apply(double gradient_scale, StepResult& result);
  // Gathers the numbers of every rank for a step, in rank order. Only here does a step wait for the device.
  static constexpr int64_t kOwnNumbers = 5, kNumbers = kOwnNumbers + int64_t{kCarriedNumbers};
  std::vector<std::array<double, kNumbers>> read_out();
  // Advances all begun communication and raises the errors that it has met.
  void progress();
  std::vector<TensorSlice> slices(bool written) const;
  // Raises Error(kUsage) if a prompt of validation.tasks cannot be made for the rows of a stage.
  void require_tasks() const;
  // Answers one of validation.tasks. Collective. Sets `stop` as validate() does.
  TaskResult answer(const std::string& task, const std::function<bool()>& stop, bool& stopped);
  // Returns the distinct requests of a batch with these rows, which are this rank's.
  std::vector<PlanRequest> requests(const std::vector<DrawnRow>& rows) const;
  // The same for batch i of a later step, which may belong to another stage.
  std::vector<PlanRequest> requests_ahead(int64_t step, int64_t i) const;
  // Begins to plan these requests on another thread.
  void plan_ahead(const std::vector<PlanRequest>& requests);
  void plan_what_follows();
  // Returns the calls of attention of a batch, one for each layer.
  std::vector<PlannedCall> calls(const std::vector<PlanRequest>& requests, const Dropout& dropout,
                                 const std::string& when);
  // Plans the calls and lets the ranks agree on them once, so that none of them waits for another rank.
  void plan(const std::vector<PlannedCall>& calls, OpLabel label) const;
  // Returns read(), which reads this rank's tokens. If it raises, the other ranks of the ring are in plan() with this
  // label, or are about to be: they raise the same error.
  template <typename Read>
  auto read_for(OpLabel agreement, const Read& read);
  static Attend attend(std::vector<PlannedCall> calls);
  // Returns the pairs of these planned calls (TrainingWork::pairs).
  double planned_pairs(const std::vector<PlannedCall>& calls);

  Config config_;
  std::vector<Stage> stages_;
  const Dataset& data_;
  Mesh mesh_;
  at::Device device_;
  bool recorded_;                     // whether steps are recorded if the device can do so (step_graph.h)
  std::unique_ptr<Offload> offload_;  // null without memory.offload
  StorageBytes kept_;                 // by the layers of the last forward
  Model model_;
  std::unique_ptr<TieredTensors> tier_;  // null without optimizer.offload
  ModelState model_state_;
  AdamW optimizer_;
  SpikeRule spikes_;
  LeftOut left_out_;
  at::Tensor numbers_;     // fp64 [kNumbers], of this rank
  at::Tensor everybodys_;  // fp64 [ranks, kNumbers]
  Readback readout_;       // of everybodys_
  size_t stage_ = 0;
  std::unique_ptr<Share> share_;  // of the current stage
  std::vector<SourceUse> uses_;
  double waited_for_data_ = 0;  // seconds, by readers that have ended
  TrainingWork work_;
  std::unordered_map<uint64_t, double> pairs_;  // of the last step's plans, by the numbers of their programs
  int64_t tokens_ = 0;
  int64_t steps_done_ = 0;
};

}  // namespace annulus
