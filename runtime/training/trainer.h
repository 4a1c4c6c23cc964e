// Carries out `annulus train` on one rank: from a configuration to a run folder with metrics and checkpoints. The
// launcher's subcommand and tests call it. Several ranks of one process may each call it on a thread of its own.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "comm/communicator.h"
#include "common/files.h"
#include "memory/available.h"
#include "runtime/config/config.h"
#include "runtime/run/run_trace.h"
#include "runtime/training/layer_requests.h"

namespace annulus {

struct TrainOptions {
  // The value of --resume: a run folder, or the name of one below run.folder; "" is the newest run of run.name.
  std::optional<std::string> resume;
  // The result of check_training for the configuration and the world; if absent, run_training computes it.
  std::optional<std::vector<Stage>> stages;
  at::Device device = at::kCPU;
  std::string device_reason;      // for the first line of a run: "cpu (no GPU on this host)"
  std::string placement;          // a short form of the ranks' placement, for the same line
  std::vector<std::string> ring;  // lines that say which ranks form a ring, and where each of them is
  // The words that the user typed to start this job, unquoted, from which the commands to continue are made:
  // "./annulus", "launch", "-n", "2", "train", "quickstart.toml".
  std::vector<std::string> command;
  std::string program = "./annulus";  // the first word of the sample command
  // Called on rank 0 when the run has begun and, on any thread, after each checkpoint, with the step from which the run
  // could continue and the command to do so. `folder` is that of the checkpoint of `step`, empty if there is none yet;
  // `command` is empty once the run is complete.
  std::function<void(int64_t step, const std::string& folder, const std::vector<std::string>& command)> on_checkpoint;
  // Called on rank 0 after each step, with the number of steps done.
  std::function<void(int64_t step)> on_step;
  // Called on rank 0 once the run's folder is open, before the first step, with its path.
  std::function<void(const std::string& folder)> on_folder;
  int ranks_here = 1;  // the ranks of this host, which share its memory
  // Returns the memory that is available for the run's tensors: that of the host for all its ranks together, or that of
  // this rank's GPU. Null: the host or the GPU is queried.
  std::function<std::optional<AvailableMemory>()> available;
  FileSystem* files = nullptr;      // that writes the checkpoints; null: the real one
  std::optional<TraceSteps> trace;  // of --trace
  std::ostream* out = nullptr;      // receives rank 0's progress and messages; null: standard output
  // Called once per step and before each validation batch; null: interrupted() of common/interrupt.h.
  std::function<bool()> stop;
};

// Trains to config.run.steps. Collective. Returns the exit code: 0 if the run is complete, interrupt_exit_code() if it
// was stopped before; a checkpoint of its last step has then been written, unless it was stopped while packing its
// data. Raises Error with the kinds in docs/how-to/troubleshooting.md; if one rank fails, all ranks raise.
int run_training(const Config& config, Communicator& world, const TrainOptions& options);

}  // namespace annulus
