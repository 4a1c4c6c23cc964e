// Reports the steps of a run: metrics.jsonl for programs and the progress line for people. Speeds do not include the
// time of validations and checkpoints. trainer.cc uses it; every rank has a report, and only rank 0's writes.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <variant>

#include "comm/communicator.h"
#include "common/logging/record.h"
#include "memory/caches.h"
#include "runtime/run/metrics.h"
#include "runtime/training/training.h"

namespace annulus {

// Logs a message of a run and shows it above the progress line. Does nothing on ranks without a progress line
// (`progress` is null). If the log is in JSON, the message goes to standard error instead, and standard output has only
// progress.
void tell(Progress* progress, LogLevel level, std::string_view text);

// Not thread safe.
class RunReport {
  // What this process has written of the keys that a line may leave out because the last line with them still holds
  // (docs/reference/formats.md).
  struct Written {
    std::map<std::string_view, std::variant<int64_t, double>> fields;
    std::map<std::string_view, CacheStats> caches;
  };

  struct Clock {
    double time = 0, waited = 0, planned = 0, read = 0, offload = 0;  // seconds
    double ring = 0, reduced = 0, gathered = 0;                       // seconds, parts of `waited`
  };

 public:
  struct Settings {
    int64_t steps = 0;                      // of the whole run
    int64_t log_every = 1;                  // steps between two lines of metrics
    std::optional<double> peak_flops = {};  // FLOP/s of all ranks' devices together, if known
    double flops_per_token = 0;             // of the model; used only if peak_flops is known
    bool spikes = false;                    // whether optimizer.spike is set
  };

  // Starts the run's clock. `metrics` and `progress` are null on ranks other than 0; `progress` must outlive the
  // report.
  RunReport(const Settings& settings, Communicator& world, Training& training, std::unique_ptr<MetricsWriter> metrics,
            Progress* progress);

  // Called after each step. `validated` says whether a validation followed the step.
  void step(const StepResult& result, bool validated);
  // Called after a return from step `from`, a spike, to the checkpoint of steps_done().
  void rewound(int64_t from, const StepResult& spike);
  // Called after a validation.
  void validation(const ValidationResult& result);
  std::optional<double> validation_loss() const { return validation_; }
  double seconds() const;  // since the run's first step

  // The time during which a Pause exists does not count for speeds.
  class Pause {
   public:
    explicit Pause(RunReport& report) : report_(report), before_(report.clock()) {}
    ~Pause() { report_.leave_out_since(before_); }
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    RunReport& report_;
    Clock before_;
  };

 private:
  Clock clock() const;
  // Adds a field, if `all` or if its value is not the one last written.
  void add_changed(MetricsWriter::Fields& fields, std::string_view name, std::variant<int64_t, double> value, bool all);
  // Returns the counters of the caches of this process that have been used so far: of all, or of those of which
  // something other than the hits, which grow with every step, is not as it was last written.
  MetricsWriter::Table changed_caches(bool all);
  void leave_out_since(const Clock& before);
  // Returns the model FLOPs utilization (MFU) at this speed, or nothing if the devices' peak is not known.
  std::optional<double> utilization(double tokens_per_second) const;

  Settings settings_;
  Communicator& world_;
  Training& training_;
  std::unique_ptr<MetricsWriter> metrics_;
  Progress* progress_;
  Written written_;
  std::optional<double> validation_;  // nats per token, of the last validation
  int64_t begin_step_;
  Clock interval_;  // the clock at the last line of metrics, advanced by the pauses since
  double begin_;    // seconds on the clock when the run's first step began
  int64_t interval_tokens_ = 0, interval_targets_ = 0;
  double tokens_per_second_ = 0;
};

}  // namespace annulus
