// What a run's folder holds, as one object of JSON for the page that report_page.h writes: configuration, metrics,
// checkpoints, evaluations and logs. Needs no LibTorch, and changes and locks nothing. Thread safe: functions without
// state.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace annulus {

// What the caller knows of a run that it takes part in; without it the folder alone tells.
struct RunNow {
  bool running = false;
  std::string error = {};  // the message of the error with which the run has just failed
};

// Reads a run's folder. Keys of the result (page/sections.js draws them; steps, seconds and bytes are numbers):
//   path, name, state {kind: running, complete, stopped, failed or ended; text}, step, steps, elapsed, written
//   facts [[name, text], ...], config (TOML), notes [text, ...]
//   columns {name: {x, y, of}} (thinned; `of`: how many points there are if some are left out)
//   validation_sources, tasks, source_targets {name: {x, y, of}}, sources {name: {key: number}}
//   time {kinds, bars [[begin, end, seconds of each kind ...], ...], of}
//   ranks {measures {name: {least, median, most, most_rank: {x, y}}}, x, rows, of}, slow [object, ...]
//   memory {plan: {name: bytes}, text}, starts [object, ...], resumed [step, ...], rewinds [[from, to], ...]
//   checkpoints [{name, step, bytes, written, stopped, durable, there}, ...]
//   evaluations [{file, step, sources [...], tasks [...]}, ...], log [{time, last, level, ranks, host, module, message,
//   last_message, times}, ...], log_left_out
// Raises Error(kInput) if there are no metrics to show (metrics_file.h), Error(kResource) if they cannot be read. What
// else is missing or damaged is a note.
nlohmann::ordered_json run_data(const std::string& path, const std::optional<RunNow>& now = std::nullopt);

}  // namespace annulus
