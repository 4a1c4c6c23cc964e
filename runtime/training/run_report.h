// Reports the steps of a run: metrics.jsonl for programs, the progress line and warnings of slow ranks for people.
// Speeds do not include the time of validations and checkpoints. trainer.cc uses it; every rank has a report, and only
// rank 0's writes.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "comm/communicator.h"
#include "common/logging/record.h"
#include "memory/caches.h"
#include "memory/pool/pool.h"
#include "runtime/config/config.h"
#include "runtime/run/metrics.h"
#include "runtime/training/memory_plan.h"
#include "runtime/training/rank_metrics.h"
#include "runtime/training/run_saves.h"
#include "runtime/training/training.h"

namespace annulus {

// Logs a message of a run and shows it above the progress line. Does nothing on ranks without a progress line
// (`progress` is null). If the log is in JSON, the message goes to standard error instead, and standard output has only
// progress.
void tell(Progress* progress, LogLevel level, std::string_view text);

// What a run is, for the line with which a process begins.
struct RunStart {
  at::Device device = at::kCPU;
  std::string device_text;                // "cpu (no GPU on this host)"
  std::string kernel;                     // of attention, and why
  MemoryKinds memory = {};                // as planned for a rank
  std::optional<double> peak_flops = {};  // FLOP/s of all ranks' devices together, if known
  bool resumed = false;
};

// Not thread safe.
class RunReport {
  // What this process has written of the keys that a line may leave out because the last line with them still holds
  // (docs/reference/formats.md).
  struct Written {
    std::map<std::string_view, std::variant<int64_t, double>> fields;
    std::map<std::string_view, CacheStats> caches;
    std::map<std::string_view, PoolStats> pool;
  };

 public:
  // Starts the run's clock. Collective. `metrics` and `progress` are null on ranks other than 0. All but `metrics` must
  // outlive the report.
  RunReport(const Config& config, const RunStart& start, Communicator& world, Training& training,
            std::unique_ptr<MetricsWriter> metrics, Progress* progress);
  RunReport(const RunReport&) = delete;
  RunReport& operator=(const RunReport&) = delete;

  // Returns what Training::step is given: this rank's numbers for all ranks. On a CPU they are those up to the exchange
  // of the step's results; on a GPU, where the host only knows what the device has done once it has waited for it,
  // those up to that of the step before.
  std::function<Training::Carried()> carry();
  // Called after each step. `validated` says whether a validation followed the step.
  void step(const StepResult& result, bool validated);
  // Called after a return from step `from`, a spike, to the checkpoint of steps_done().
  void rewound(int64_t from, const StepResult& spike);
  // Called after a validation.
  void validation(const ValidationResult& result);
  // Called when a checkpoint is on the disk, of which training may have done later steps by now.
  void checkpoint(const SavedCheckpoint& saved);
  std::optional<double> validation_loss() const { return validation_; }
  double seconds() const;  // since the run's first step

  // The time during which a Pause exists does not count for speeds.
  class Pause {
   public:
    explicit Pause(RunReport& report) : report_(report), before_(TrainingClock::now(report.world_, report.training_)) {}
    ~Pause() { report_.left_out_ += TrainingClock::now(report_.world_, report_.training_) - before_; }
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    RunReport& report_;
    TrainingClock before_;
  };

 private:
  // This rank's clock since the run began, less all pauses.
  TrainingClock clock() const { return TrainingClock::now(world_, training_) - left_out_; }
  void write(int64_t step, const MetricsWriter::Fields& fields);
  void write_start();
  void sample();  // takes this rank's numbers for all ranks
  // Adds a field, if `all` or if its value is not the one last written.
  void add_changed(MetricsWriter::Fields& fields, std::string_view name, std::variant<int64_t, double> value, bool all);
  // Returns the counters of the caches of this process that have been used so far: of all, or of those of which
  // something other than the hits, which grow with every step, is not as it was last written.
  MetricsWriter::Table changed_caches(bool all);
  // The same for the pool of this process, by purpose; here the free blocks that were used again do not count.
  MetricsWriter::Table changed_pool(bool all);
  // Returns the model FLOPs utilization (MFU) at this speed, or nothing if the devices' peak is not known.
  std::optional<double> utilization(double tokens_per_second) const;

  const Config& config_;
  const RunStart& start_;
  const double flops_per_token_;  // of the model; 0 if the devices' peak is not known
  Communicator& world_;
  Training& training_;
  std::unique_ptr<MetricsWriter> metrics_;
  Progress* progress_;
  const double begin_;      // seconds when the run's first step began
  TrainingClock left_out_;  // what is not counted: all before the first step, and pauses
  TrainingClock interval_;  // the clock at the last line of metrics
  RankMetrics ranks_;
  Training::Carried carried_{};  // the numbers taken last, and the clock then
  TrainingClock sampled_;
  Written written_;
  bool lines_lost_ = false;           // the last line could not be written
  std::optional<double> validation_;  // nats per token, of the last validation
  int64_t begin_step_;
  int64_t interval_tokens_ = 0, interval_targets_ = 0;
  double tokens_per_second_ = 0;
};

}  // namespace annulus
