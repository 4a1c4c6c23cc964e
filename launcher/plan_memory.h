// annulus plan --model: what of a training configuration fits into the memory of a device, at each level of
// optimizer.shard, with recomputation and without, for any number of ranks; runs nothing (training/fitting.h). Part of
// the verb plan (verb_plan.cc), whose other options plan attention.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "training/fitting.h"

namespace CLI {
class App;
}

namespace annulus {

class PlanMemory {
 public:
  void declare(CLI::App& app);
  // Whether --model was given.
  bool asked() const { return !model_.empty(); }
  // `given`: the names of all options of the verb that were. Raises Error(kUsage) where some of them are of the one
  // planner and some of the other, or where one is missing; and what load_config raises.
  void check(const std::vector<std::string>& given, std::optional<int> ranks);
  // Prints a table, or JSON. Returns the exit code.
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
