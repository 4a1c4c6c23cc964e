// The options by which a schedule of attention is chosen. Used by plan.cc, attend.cc, logits.cc and evaluate.cc.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "attention/plan/plan.h"

namespace annulus {

// Declares --schedule and --within. `schedule` and `within` must outlive the parsing.
inline void add_schedule_options(CLI::App& app, std::string& schedule, int& within) {
  std::string others;
  for (const std::string& name : schedule_names()) {
    if (name != to_string(ScheduleKind::kAuto)) others += ", " + name;
  }
  app.add_option("--schedule", schedule, "how keys, values and queries travel: auto (default)" + others);
  app.add_option("--within", within,
                 "consecutive ranks that form an inner group, such as those of a host, for schedules with groups "
                 "(default: 0, one group)");
}

}  // namespace annulus
