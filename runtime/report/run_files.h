// Reads what a run's folder holds beside metrics and logs, for run_data.cc: its configuration, checkpoints and
// evaluations, and whether a process uses it. What is missing, damaged or of another version becomes a note. Needs no
// LibTorch. Thread safe: functions without state.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "runtime/report/metrics_file.h"

namespace annulus {

struct RunConfiguration {
  std::string text;                                        // config.toml
  double steps = 0;                                        // run.steps; 0: not known
  std::vector<std::pair<std::string, std::string>> facts;  // what a reader wants to know first, by name
};

RunConfiguration read_run_configuration(const std::string& run, nlohmann::ordered_json& notes);

// The checkpoints that are there, and those that metrics name though they are gone, by step.
nlohmann::ordered_json checkpoints_of(const std::string& run, const MetricsFile& metrics,
                                      nlohmann::ordered_json& notes);

// The results of `annulus evaluate --json` that lie in the folder or in evaluations/ below it, by name.
nlohmann::ordered_json evaluations_of(const std::string& run, nlohmann::ordered_json& notes);

// Whether a process of this host holds the run's lock. It asks the kernel without taking the lock, which could make a
// run that is being resumed fail.
bool run_is_locked(const std::string& run);

// When the file was written, in seconds since 1970; NaN if it is not there.
double seconds_of_file(const std::string& path);

}  // namespace annulus
