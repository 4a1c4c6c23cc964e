// See run_data.h.
#include "runtime/report/run_data.h"

#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/files.h"
#include "common/logging/record.h"
#include "common/text.h"
#include "common/version.h"
#include "runtime/report/metrics_file.h"
#include "runtime/report/run_files.h"
#include "runtime/report/run_log.h"
#include "runtime/report/thinning.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// What a screen of 800 points across shows.
constexpr size_t kBuckets = 400, kBars = 160, kColumns = 120;

// Rounds to the 6 digits that a page shows, because shortest texts of doubles would make it three times as large.
Json shown(double value) {
  if (!std::isfinite(value)) return nullptr;
  if (value == std::floor(value) && std::abs(value) < 9e15) return static_cast<int64_t>(value);
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", value);
  return std::strtod(text, nullptr);
}

Json list_of(const std::vector<double>& values) {
  Json list = Json::array();
  for (const double value : values) list.push_back(shown(value));
  return list;
}

Json series(const Points& all) {
  const Points points = thinned(all, kBuckets);
  Json out = {{"x", list_of(points.x)}, {"y", list_of(points.y)}};
  if (points.x.size() < all.x.size()) out["of"] = all.x.size();
  return out;
}

Json table_of_series(const std::map<std::string, Points>& all) {
  Json out = Json::object();
  for (const auto& [name, points] : all) out[name] = series(points);
  return out;
}

Json time_of(const MetricsFile& metrics) {
  Json bars = Json::array();
  const std::vector<Interval> intervals = joined(metrics.intervals, kBars);
  for (const Interval& interval : intervals) {
    Json bar = {shown(interval.begin), shown(interval.end)};
    for (const double seconds : interval.seconds) bar.push_back(shown(seconds));
    bars.push_back(std::move(bar));
  }
  Json out = {{"kinds", kTimeKinds}, {"bars", std::move(bars)}};
  if (intervals.size() < metrics.intervals.size()) out["of"] = metrics.intervals.size();
  return out;
}

// The seconds of a step of each rank, in means over as many lines as a column of the picture stands for.
Json ranks_of(const MetricsFile& metrics) {
  Json measures = Json::object(), rows = Json::array(), steps = Json::array();
  for (const auto& [name, values] : metrics.ranks) measures[name] = table_of_series(values);
  const size_t size = metrics.rank_steps.size(), each = std::max<size_t>(1, (size + kColumns - 1) / kColumns);
  for (size_t begin = 0; begin < size; begin += each) {
    const size_t end = std::min(size, begin + each);
    std::vector<double> mean(metrics.rank_seconds[end - 1].size(), 0);
    double lines = 0;
    for (size_t i = begin; i < end; ++i) {
      if (metrics.rank_seconds[i].size() != mean.size()) continue;  // the run was resumed with other ranks
      for (size_t r = 0; r < mean.size(); ++r) mean[r] += metrics.rank_seconds[i][r];
      ++lines;
    }
    for (double& value : mean) value /= lines;
    steps.push_back(shown(metrics.rank_steps[end - 1]));
    rows.push_back(list_of(mean));
  }
  const size_t rows_out = rows.size();
  Json out = {{"measures", std::move(measures)}, {"x", std::move(steps)}, {"rows", std::move(rows)}};
  if (metrics.rank_lines > static_cast<int64_t>(rows_out)) out["of"] = metrics.rank_lines;
  return out;
}

Json log_of(const RunLog& log) {
  Json list = Json::array();
  for (const RunLog::Entry& entry : log.entries) {
    const LogRecord& record = entry.record;
    list.push_back({{"time", time_text(record.time)},
                    {"last", entry.last},
                    {"level", level_name(record.level)},
                    {"ranks", record.ranks},
                    {"host", record.host},
                    {"module", record.module},
                    {"message", record.message},
                    {"last_message", entry.last_message == record.message ? "" : entry.last_message},
                    {"times", entry.times}});
  }
  return list;
}

// What the run is and computes on, by its configuration and what it said when it began.
Json facts_of(const RunConfiguration& config, const MetricsFile& metrics, const RunLog& log) {
  Json facts = Json::array();
  const auto add = [&](const std::string& name, const std::string& text) {
    if (!text.empty()) facts.push_back({name, text});
  };
  for (const auto& [name, text] : config.facts) add(name, text);
  if (metrics.starts.empty()) {  // a run of an earlier version
    for (const LogRecord& record : log.begins) {
      const size_t blank = record.message.find(' ');
      const bool kernel = record.message.starts_with("attention kernel ");
      const bool whole = record.message.starts_with("MFU") || record.message.starts_with("no MFU");
      std::string name = kernel ? "kernel" : whole ? "MFU" : record.message.substr(0, blank);
      if (name.ends_with(':')) name.pop_back();
      const size_t from = kernel ? sizeof "attention kernel" : whole ? 0 : blank + 1;
      add(name, record.message.substr(std::min(from, record.message.size())));
    }
    return facts;
  }
  for (const LogRecord& record : log.begins) {
    if (record.message.starts_with("data ")) add("data", record.message.substr(5));
  }
  const MetricsFile::Json& start = metrics.starts.back()["started"];
  const auto text = [&](const char* key) {
    if (!start.is_object() || !start.contains(key)) return std::string();
    const MetricsFile::Json& value = start[key];
    if (value.is_string()) return value.get<std::string>();
    return value.is_number() ? with_commas(std::llround(std::clamp(value.get<double>(), -9e15, 9e15))) : std::string();
  };
  const auto begun = text("time");
  add("started",
      begun + (begun.empty() || metrics.starts.size() < 2
                   ? ""
                   : " (the last of " + counted(static_cast<int64_t>(metrics.starts.size()), "process") + ")"));
  const std::string hosts = text("hosts");
  add("ranks", text("ranks") + (hosts.empty() ? "" : " on " + hosts + (hosts == "1" ? " host" : " hosts")));
  for (const char* key : {"host", "device", "kernel", "mesh", "version"}) add(key, text(key));
  add("parameters", text("model_parameters"));
  return facts;
}

// Whether the run goes on, and if not, how it ended.
Json state_of(const std::string& path, const std::optional<RunNow>& now, const RunLog& log, double step, double steps) {
  const auto state = [](const char* kind, const std::string& text) { return Json{{"kind", kind}, {"text", text}}; };
  if (now && !now->error.empty()) return state("failed", now->error);
  if (now ? now->running : run_is_locked(path)) return state("running", "");
  if (log.end == RunLog::End::kFailed) return state("failed", log.end_text);
  if (steps > 0 && step >= steps) return state("complete", log.end_text);
  if (log.end == RunLog::End::kStopped) return state("stopped", log.end_text);
  return state("ended",
               "no process uses the folder any more, and its logs do not say why: it was killed, or it goes on on "
               "another host");
}

void add_notes(const MetricsFile& metrics, const RunLog& log, Json& notes) {
  const auto note = [&](const std::string& text) { notes.push_back(text); };
  if (metrics.half_line)
    note("metrics.jsonl ends within a line, which is left out: it is being written, or a process was killed");
  if (metrics.damaged > 0) {
    note(with_commas(metrics.damaged, "line") + " of metrics.jsonl " + (metrics.damaged == 1 ? "is" : "are") +
         " no object of JSON with a \"step\", and left out");
  }
  if (log.cut) note("of large logs only the end was read");
  if (metrics.starts.empty()) return;
  const MetricsFile::Json& start = metrics.starts.back()["started"];
  if (!start.is_object() || !start.contains("version") || start["version"] == kVersion) return;
  note("the run is of annulus " + (start["version"].is_string() ? start["version"].get<std::string>() : "?") +
       ", this page of " + kVersion + ": what only the run's version knows is not shown");
}

// The line of the log with the planned memory, of a run whose metrics do not have it.
std::string memory_text(const RunLog& log) {
  for (const LogRecord& record : log.begins) {
    if (record.message.starts_with("memory: ")) return record.message.substr(8);
  }
  return "";
}

}  // namespace

nlohmann::ordered_json run_data(const std::string& path, const std::optional<RunNow>& now) {
  const MetricsFile metrics = read_metrics(path + "/metrics.jsonl");
  const RunLog log = read_run_log(path);
  Json notes = Json::array();
  const RunConfiguration config = read_run_configuration(path, notes);
  Json checkpoints = checkpoints_of(path, metrics, notes), evaluations = evaluations_of(path, notes);
  add_notes(metrics, log, notes);

  Json columns = table_of_series(metrics.columns);
  columns["elapsed"] = series(metrics.elapsed);
  Json rewinds = Json::array();
  for (const auto& [from, to] : metrics.rewinds) rewinds.push_back({from, to});

  std::error_code error;
  const fs::path folder = fs::weakly_canonical(path, error);
  const double elapsed = metrics.elapsed.y.empty() ? 0 : metrics.elapsed.y.back();
  return {{"path", path},
          {"name", error ? path : folder.filename().string()},
          {"state", state_of(path, now, log, metrics.last_step, config.steps)},
          {"step", shown(metrics.last_step)},
          {"steps", shown(config.steps)},
          {"elapsed", shown(elapsed)},
          {"written", shown(seconds_of_file(path + "/metrics.jsonl"))},
          {"facts", facts_of(config, metrics, log)},
          {"config", config.text},
          {"notes", std::move(notes)},
          {"columns", std::move(columns)},
          {"validation_sources", table_of_series(metrics.validation_sources)},
          {"tasks", table_of_series(metrics.task_exact)},
          {"sources", metrics.sources},
          {"source_targets", table_of_series(metrics.source_targets)},
          {"time", time_of(metrics)},
          {"ranks", ranks_of(metrics)},
          {"slow", metrics.slow_ranks},
          {"memory", {{"plan", metrics.memory_plan}, {"text", memory_text(log)}}},
          {"starts", metrics.starts},
          {"resumed", list_of(metrics.resumed_at)},
          {"rewinds", std::move(rewinds)},
          {"checkpoints", std::move(checkpoints)},
          {"evaluations", std::move(evaluations)},
          {"log", log_of(log)},
          {"log_left_out", log.left_out}};
}

}  // namespace annulus
