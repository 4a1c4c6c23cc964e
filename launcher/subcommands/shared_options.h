// The options that several subcommands have: of a model, and of how attention is computed over ranks. The strings and
// numbers that they set must outlive the parsing. Used by plan.cc, attend.cc, logits.cc, evaluate.cc and sample.cc.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "attention/pattern/pattern.h"
#include "attention/plan/machine.h"
#include "attention/plan/plan.h"
#include "common/error.h"
#include "common/names.h"
#include "common/text.h"
#include "runtime/inference/row_forward.h"
#include "runtime/tensor_files/model_dtypes.h"

namespace annulus {

// Declares --schedule, --within and --machine.
inline void add_schedule_options(CLI::App& app, std::string& schedule, int& within, std::string& machine) {
  app.add_option("--schedule", schedule,
                 "how ranks exchange keys, values and queries: " + schedule_kinds() + " (default: auto)");
  app.add_option("--within", within,
                 "consecutive ranks that form an inner group, such as those of a host, for schedules with groups "
                 "(default: 0, the schedule's own choice)");
  app.add_option("--machine", machine,
                 "the machine by which auto chooses and times are predicted: " + join(built_in_machines(), ", ") +
                     ", or the path of a profile (default: ANNULUS_MACHINE, or else cpu, on GPUs h100)");
}

inline void add_device_option(CLI::App& app, std::string& device) {
  app.add_option("--device", device, "auto (default: GPUs if there is one for each rank), cpu or cuda");
}

// Declares --runs, --step and --dtype: where a run is looked up, its checkpoint, and what the model computes in.
template <typename Options>
void add_model_options(CLI::App& app, Options& options) {
  app.add_option("--runs", options.root, "folder in which the name of a run is looked up (default: runs)")
      ->type_name("FOLDER");
  app.add_option("--step", options.step, "step of the run's checkpoint (default: the newest)");
  app.add_option("--dtype", options.dtype, "dtype that the model computes in: fp32 (default), bf16 or fp64");
}

// Declares the groups "Attention" and "Ranks" of a subcommand that computes rows of tokens with a model.
inline void add_row_options(CLI::App& app, RowOptions& rows, std::string& device) {
  app.option_defaults()->group("Attention");
  app.add_option("--pattern", rows.pattern,
                 "which keys a query sees, in all layers: { kind = ..., ... } with " + pattern_kinds() +
                     "; docs/explanation/attention.md has their keys (default: the model's own)");
  add_device_option(app, device);
  app.add_option("--kernel", rows.kernel, "auto (default), cpu, reference, efficient, cudnn, flash2 or flash3");
  app.option_defaults()->group("Ranks");
  app.add_option("--layout", rows.layout,
                 "how positions are divided among ranks: zigzag (default), contiguous, striped, balanced, "
                 "per-document or auto");
  add_schedule_options(app, rows.schedule, rows.within, rows.machine);
}

// Refuses a device or a dtype that there is not. fp64 computes on CPUs alone, and sets `device`.
inline void check_device_and_dtype(const char* subcommand, std::string& device, const std::string& dtype) {
  index_of_name(device, {"auto", "cpu", "cuda"}, "device", "--device");
  index_of_name(dtype, model_dtypes(), "dtype", "--dtype");
  if (dtype != "fp64") return;
  if (device == "cuda") {
    throw Error(ErrorKind::kUsage, subcommand, "--dtype fp64 computes on CPUs only: leave --device cuda out");
  }
  device = "cpu";
}

}  // namespace annulus
