// The options by which a schedule of attention is chosen. Used by plan.cc, attend.cc, logits.cc and evaluate.cc.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "attention/plan/machine.h"
#include "attention/plan/plan.h"
#include "common/text.h"

namespace annulus {

// Declares --schedule, --within and --machine. The strings and the number must outlive the parsing.
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

}  // namespace annulus
