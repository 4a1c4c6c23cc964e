// Makes this process a rank of a job: bootstrap (comm/bootstrap/bootstrap.h) with the fields that all subcommands
// compare. Used by the subcommands that have ranks.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "comm/bootstrap/bootstrap.h"
#include "common/trace/beat.h"

namespace annulus {

// Collective. `fields` must be the same on all ranks, and so must the version. Throws as bootstrap does. A message that
// concerns all ranks is printed once.
Job start_job(std::vector<Field> fields, const std::string& device = "cpu");

// While it exists, the watch of this host expects the rank to make progress (common/trace/beat.h), with the time that
// loading may take. Subcommands other than train, which says more, have one from start_job() to their end.
struct WatchedWork {
  ExpectProgress expected;
  LongPhase lasts;
};

// Warns once in a job of several ranks that --layout was left out: its default was contiguous in earlier versions. To
// be removed with the version after 0.1. `subcommand` names the module of the record.
void warn_of_default_layout(std::string_view subcommand, const Job& job);

}  // namespace annulus
