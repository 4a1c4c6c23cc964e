// What `annulus train` does on every rank: from a configuration to a run folder with metrics and checkpoints. Called by
// the launcher's verb and by tests. Not thread-safe; several ranks in one process may run it on threads of their own.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "comm/communicator.h"
#include "config/config.h"
#include "memory/available.h"
#include "training/layer_requests.h"

namespace annulus {

struct TrainOptions {
  // --resume: a run folder, or the name of one below run.folder; "" is the newest run of run.name.
  std::optional<std::string> resume;
  // What check_training returned for the configuration and the world; without it run_training asks.
  std::optional<std::vector<Stage>> stages;
  at::Device device = at::kCPU;
  std::string device_reason;      // "cpu (no GPU on this host)": the first line of a run
  std::string placement;          // short form of the ranks' placement, for the same line
  std::vector<std::string> ring;  // lines that say which ranks are a ring, and where each is
  // The words that the user typed to start this job, to print how to go on: "./annulus", "launch", "-n", "2", "train",
  // "quickstart.toml". What prints them quotes them.
  std::vector<std::string> command;
  std::string program = "./annulus";  // its first word, for the sample command
  // Told on rank 0 from where the run could go on, and with which command: when it has begun and after each checkpoint.
  // `folder`: of the checkpoint of `step`; empty where there is none yet. `command` is empty once the run is complete.
  std::function<void(int64_t step, const std::string& folder, const std::vector<std::string>& command)> on_checkpoint;
  int ranks_here = 1;  // of this host, which its memory is for
  // What may still be taken where a run's tensors lie: the host's memory for all its ranks together, or the memory of
  // this rank's GPU; null: asks the host or the GPU.
  std::function<std::optional<AvailableMemory>()> available;
  std::ostream* out = nullptr;  // rank 0's lines; null: standard output
  // Asked once a step and before each validation batch; null: interrupted() of interrupt.h.
  std::function<bool()> stop;
};

// Trains to config.run.steps. Collective. Returns the exit code: 0 when the run is complete, interrupt_exit_code() when
// it was stopped before, with a checkpoint written. Raises Error as documented in docs/user-guide.md; where one rank
// fails, all do.
int run_training(const Config& config, Communicator& world, const TrainOptions& options);

}  // namespace annulus
