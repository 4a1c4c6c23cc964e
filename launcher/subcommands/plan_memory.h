// annulus plan --model: computes whether a training configuration fits into the memory of a device, at each level of
// optimizer.shard, with and without recomputation, for any number of ranks. It runs nothing
// (runtime/training/fitting.h). Part of the subcommand `plan` (plan.cc), whose other options plan attention.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "runtime/config/config.h"
#include "runtime/training/fitting.h"

namespace CLI {
class App;
}

namespace annulus {

class PlanMemory {
 public:
  void declare(CLI::App& app);
  // Whether --model was given.
  bool asked() const { return !model_.empty(); }
  // Reads the configuration. `given` holds the names of all options on the command line. Throws Error(kUsage) if some
  // belong to this planner and some to the other, or if a required one is missing; and the errors of load_config.
  void check(const std::vector<std::string>& given, std::optional<int> ranks);
  // Prints a table or JSON to standard output. Returns the exit code.
  int run(bool json) const;

 private:
  std::string model_, memory_text_;
  std::vector<std::string> sets_;
  std::optional<int> ranks_per_host_;
  bool cpu_ = false;
  Config config_;
  FitRanks ranks_;
};

}  // namespace annulus
