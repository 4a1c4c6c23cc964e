// See metrics_file.h.
#include "runtime/report/metrics_file.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <utility>

#include "common/error.h"
#include "common/files.h"
#include "common/text.h"

namespace annulus {
namespace {

using PlainJson = MetricsFile::Json;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A number, or null in place of one.
bool is_number(const PlainJson& value) { return value.is_number() || value.is_null(); }
double number(const PlainJson& value) { return value.is_number() ? value.get<double>() : kNan; }

// Takes the lines of a file in their order.
class Reader {
 public:
  explicit Reader(MetricsFile& into) : m_(into) {}

  // Returns whether the line is one of metrics.
  bool take(const std::string& line) {
    const PlainJson json = PlainJson::parse(line, nullptr, /*allow_exceptions=*/false);
    const auto step = json.is_object() ? json.find("step") : json.end();
    if (!json.is_object() || step == json.end() || !step->is_number()) return false;
    step_ = step->get<double>();
    m_.last_step = std::max(m_.last_step, step_);
    if (json.contains("started")) begin_process(json);
    if (const auto from = json.find("rewound_from"); from != json.end() && from->is_number()) {
      m_.rewinds.emplace_back(from->get<double>(), step_);
      between_ = step_;
      return true;  // its gradient norm is that of a step which is gone
    }
    if (json.contains("slow_rank") || json.contains("slow_rank_over")) {
      m_.slow_ranks.push_back(json);
      return true;
    }
    if (const auto name = json.find("checkpoint"); name != json.end() && name->is_string()) {
      m_.checkpoints[name->get<std::string>()] = json;
      return true;
    }
    for (const std::string_view key : kColumns) {
      if (const auto value = json.find(key); value != json.end() && is_number(*value)) {
        m_.columns[std::string(key)].add(step_, number(*value));
      }
    }
    take_tables(json);
    if (json.contains("seconds") && json["seconds"].is_number()) take_time(json);
    return true;
  }

 private:
  void begin_process(const PlainJson& json) {
    m_.starts.push_back(json);
    if (const auto plan = json.find("memory_plan"); plan != json.end() && plan->is_object()) m_.memory_plan = *plan;
    if (lines_with_time_ > 0 && !announced_) end_process(/*announced_in_line=*/true);
    announced_ = true;
  }

  void end_process(bool announced_in_line) {
    m_.resumed_at.push_back(announced_in_line ? step_ : between_);
    base_ += process_seconds_;
    process_seconds_ = 0;
    fresh_ = true;
  }

  void take_tables(const PlainJson& json) {
    const auto each = [&](const char* key, auto&& take) {
      const auto table = json.find(key);
      if (table == json.end() || !table->is_object()) return;
      for (const auto& [name, row] : table->items()) {
        if (row.is_object()) take(name, row);
      }
    };
    each("validation_sources", [&](const std::string& name, const PlainJson& row) {
      if (row.contains("loss")) m_.validation_sources[name].add(step_, number(row["loss"]));
    });
    each("validation_tasks", [&](const std::string& name, const PlainJson& row) {
      if (row.contains("exact")) m_.task_exact[name].add(step_, number(row["exact"]));
    });
    each("sources", [&](const std::string& name, const PlainJson& row) {
      for (const auto& [key, value] : row.items()) {
        if (value.is_number()) m_.sources[name][key] = value.get<double>();
      }
      if (row.contains("targets")) m_.source_targets[name].add(step_, number(row["targets"]));
    });
    each("ranks", [&](const std::string& name, const PlainJson& row) {
      for (const auto& [key, value] : row.items()) {
        if (!is_number(value)) continue;
        Points& points = m_.ranks[name][key];
        if (name != "memory_bytes") points = {};
        points.add(step_, number(value));
      }
    });
  }

  // Divides the time since the line before.
  void take_time(const PlainJson& json) {
    const double seconds = json["seconds"].get<double>();
    // The clock of a process begins at 0. Earlier versions wrote no line at a start.
    if (lines_with_time_ > 0 && !announced_ && seconds < process_seconds_) end_process(/*announced_in_line=*/false);
    announced_ = false;
    ++lines_with_time_;
    process_seconds_ = seconds;
    m_.elapsed.add(step_, base_ + seconds);

    // A process of one rank leaves out waits that have not changed.
    constexpr std::pair<const char*, size_t> kWaits[] = {
        {"exposed_ring_seconds", 1}, {"exposed_reduce_seconds", 2},   {"exposed_gather_seconds", 3},
        {"exposed_data_seconds", 5}, {"exposed_planning_seconds", 6}, {"exposed_offload_seconds", 7}};
    if (fresh_) waits_ = {};
    for (const auto& [key, kind] : kWaits) {
      if (json.contains(key)) waits_[kind] = std::max(0.0, number(json[key]));
    }
    if (json.contains("exposed_communication_seconds")) {
      communication_ = std::max(0.0, number(json["exposed_communication_seconds"]));
    }
    waits_[4] = std::max(0.0, communication_ - waits_[1] - waits_[2] - waits_[3]);

    const double tokens = json.contains("tokens") ? number(json["tokens"]) : kNan;
    const double speed = json.contains("tokens_per_second") ? number(json["tokens_per_second"]) : kNan;
    double whole = (tokens - tokens_) / speed;
    // The line before may be of steps after the checkpoint from which this process began.
    if (fresh_ && !(whole <= seconds)) whole = seconds;
    const double begin = std::max(between_, 0.0);
    if (std::isfinite(whole) && whole > 0 && step_ > begin) {
      Interval interval{.begin = begin, .end = step_, .seconds = waits_};
      double waited = 0;
      for (size_t i = 1; i < waits_.size(); ++i) waited += waits_[i];
      interval.seconds[0] = std::max(0.0, whole - waited);
      m_.intervals.push_back(interval);
    }
    take_ranks(json, step_ - begin);
    between_ = step_;
    if (std::isfinite(tokens)) tokens_ = tokens;
    fresh_ = false;
  }

  void take_ranks(const PlainJson& json, double steps) {
    const auto list = json.find("rank_compute_seconds");
    if (list == json.end() || !list->is_array() || steps <= 0) return;
    std::vector<double> row;
    for (const PlainJson& value : *list) row.push_back(number(value) / steps);
    ++m_.rank_lines;
    std::vector<std::vector<double>>& rows = m_.rank_seconds;
    const bool same_ranks = !rows.empty() && rows.back().size() == row.size();
    if (same_ranks && in_row_ < row_lines_) {
      add_to_mean(rows.back(), row, static_cast<double>(in_row_++));
      m_.rank_steps.back() = step_;
      return;
    }
    if (rows.size() >= kMostRankRows) join_rank_rows();
    rows.push_back(std::move(row));
    m_.rank_steps.push_back(step_);
    in_row_ = 1;
  }

  // Adds `row` to the mean of `count` others.
  static void add_to_mean(std::vector<double>& mean, const std::vector<double>& row, double count) {
    for (size_t r = 0; r < mean.size(); ++r) mean[r] += (row[r] - mean[r]) / (count + 1);
  }

  // Makes one row of each two. Of two with different ranks, because the run was resumed with others, the later one
  // stays.
  void join_rank_rows() {
    std::vector<std::vector<double>>& rows = m_.rank_seconds;
    std::vector<double>& at = m_.rank_steps;
    size_t kept = 0;
    for (size_t i = 0; i < rows.size(); i += 2, ++kept) {
      const size_t last = std::min(i + 1, rows.size() - 1);
      if (last > i && rows[i].size() == rows[last].size()) add_to_mean(rows[last], rows[i], 1);
      rows[kept] = std::move(rows[last]);
      at[kept] = at[last];
    }
    rows.resize(kept);
    at.resize(kept);
    row_lines_ *= 2;
  }

  MetricsFile& m_;
  double step_ = 0;
  double between_ = 0;  // the step of the last line with a time
  double tokens_ = 0;
  double base_ = 0, process_seconds_ = 0;  // of earlier processes; of this one
  double communication_ = 0;
  int64_t in_row_ = 0, row_lines_ = 1;  // lines in the last row of rank_seconds; in each row before
  std::array<double, kTimeKinds.size()> waits_{};
  int64_t lines_with_time_ = 0;
  bool announced_ = false;  // whether a line "started" was read since the last line with a time
  bool fresh_ = true;       // whether no line of this process was read yet
};

}  // namespace

const Points& MetricsFile::column(const std::string& name) const {
  static const Points none;
  const auto found = columns.find(name);
  return found == columns.end() ? none : found->second;
}

MetricsFile read_metrics(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) {
    const int reason = errno;
    throw Error(
        kind_of_errno(reason), "report",
        path + " cannot be read: " + std::strerror(reason) +
            (reason == ENOENT ? "; a run writes it when it begins to train, so there is nothing to show yet" : ""));
  }
  MetricsFile metrics;
  Reader reader(metrics);
  for (std::string line; std::getline(in, line);) {
    if (in.eof()) {
      metrics.half_line = true;  // a running process is writing it, or one was killed in the middle
      break;
    }
    ++metrics.lines;
    if (!reader.take(line)) ++metrics.damaged;
  }
  if (in.bad()) throw Error(ErrorKind::kResource, "report", path + " cannot be read: " + std::strerror(errno));
  if (metrics.lines == metrics.damaged) {
    throw Error(ErrorKind::kInput, "report",
                path + (metrics.lines == 0
                            ? " holds no line yet: the run has not logged a step (run.log_every). Try again later, or "
                              "look at the run's logs"
                            : ": none of its " + with_commas(metrics.lines, "line") +
                                  " is an object of JSON with a \"step\", so it was not written by `annulus train`"));
  }
  return metrics;
}

}  // namespace annulus
