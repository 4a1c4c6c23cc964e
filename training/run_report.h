// What a run reports of its steps: metrics.jsonl for programs and the progress line for people, with speeds that leave
// out validations and checkpoints. Used by trainer.cc; every rank has one, rank 0's alone writes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "comm/communicator.h"
#include "training/run/metrics.h"
#include "training/training.h"

namespace annulus {

// Not thread-safe.
class RunReport {
  struct Clock {
    double time = 0, waited = 0, planned = 0, read = 0;  // seconds
    double ring = 0, reduced = 0, gathered = 0;          // of what was waited
  };

 public:
  struct Settings {
    int64_t steps = 0;                      // of the whole run
    int64_t log_every = 1;                  // steps between two lines of metrics
    std::optional<double> peak_flops = {};  // of all ranks' devices together, where it is known
    double flops_per_token = 0;             // of the model; read where peak_flops is known
    bool spikes = false;                    // there is a rule for them
  };

  // The run's clock starts here. `metrics` and `progress`: null on ranks other than 0; `progress` outlives the report.
  RunReport(const Settings& settings, Communicator& world, Training& training, std::unique_ptr<MetricsWriter> metrics,
            Progress* progress);

  // After each step. `validated`: a validation followed it.
  void step(const StepResult& result, bool validated);
  // After a return from step `from`, a spike, to the checkpoint of steps_done().
  void rewound(int64_t from, const StepResult& spike);
  // After a validation.
  void validation(const ValidationResult& result);
  std::optional<double> validation_loss() const { return validation_; }
  double seconds() const;  // since the run's first step

  // What happens while one of these lives is no part of the steps that speeds are computed from.
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
  void leave_out_since(const Clock& before);
  // Model FLOPs utilization at this speed; empty where the devices' peak is not known.
  std::optional<double> utilization(double tokens_per_second) const;

  Settings settings_;
  Communicator& world_;
  Training& training_;
  std::unique_ptr<MetricsWriter> metrics_;
  Progress* progress_;
  std::optional<double> validation_;  // nats per token, of the last validation
  int64_t begin_step_;
  Clock interval_;  // at the last metrics line, put forward by pauses since
  double begin_;    // of the first step
  int64_t interval_tokens_ = 0, interval_targets_ = 0;
  double tokens_per_second_ = 0;
};

}  // namespace annulus
