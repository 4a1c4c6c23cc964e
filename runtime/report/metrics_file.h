// Reads a run's metrics.jsonl into columns of numbers over the steps, for the report of a run (run_data.h). The keys
// are those of docs/reference/formats.md; keys that a run lacks, because an earlier version wrote it, are left out, and
// unknown ones are ignored. Needs no LibTorch. Thread safe: functions without state.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// Numbers at steps, in the order of the file. A number that JSON could not write (`null`) is NaN.
struct Points {
  std::vector<double> x, y;

  void add(double at, double value) {
    x.push_back(at);
    y.push_back(value);
  }
};

// What a step's time is spent on, each as it is exposed: time that a rank only waited.
inline constexpr std::array<std::string_view, 8> kTimeKinds = {"compute", "ring", "reduce",   "gather",
                                                               "other",   "data", "planning", "offload"};

// The keys with numbers that are kept for each step; a report shows no other ones.
inline constexpr std::array<std::string_view, 11> kColumns = {"loss",
                                                              "bits_per_byte",
                                                              "validation_loss",
                                                              "gradient_norm",
                                                              "gradient_norm_median",
                                                              "learning_rate",
                                                              "spikes_left_out",
                                                              "rows_left_out",
                                                              "tokens",
                                                              "tokens_per_second",
                                                              "model_flops_utilization"};

inline constexpr size_t kMostRankRows = 240;

// The seconds of rank 0 from one line to the next, without validations and checkpoints.
struct Interval {
  double begin = 0, end = 0;                        // steps: (begin, end]
  std::array<double, kTimeKinds.size()> seconds{};  // by kTimeKinds
};

struct MetricsFile {
  using Json = nlohmann::json;
  // The keys of kColumns that lines have.
  std::map<std::string, Points> columns;
  std::map<std::string, Points> validation_sources;              // the loss of each source
  std::map<std::string, Points> task_exact;                      // the share of exact answers of each task
  std::map<std::string, std::map<std::string, double>> sources;  // what each source has given so far
  std::map<std::string, Points> source_targets;                  // positions of each source so far
  // measure -> "least", "median", "most", "most_rank"; of measures other than memory_bytes the last ones alone.
  std::map<std::string, std::map<std::string, Points>> ranks;
  Points elapsed;  // seconds of training, over all processes of the run
  std::vector<Interval> intervals;
  // Seconds of a step of each rank, of the lines with `rank_compute_seconds`: means over as many lines each as it takes
  // to keep at most kMostRankRows rows, so that long runs of many ranks stay small; and the step of the last line of
  // each.
  std::vector<double> rank_steps;
  std::vector<std::vector<double>> rank_seconds;
  int64_t rank_lines = 0;
  std::vector<Json> starts;                        // lines with "started", one for each process
  std::vector<double> resumed_at;                  // steps before which another process began, also without such a line
  std::vector<std::pair<double, double>> rewinds;  // from the step, to the step
  std::vector<Json> slow_ranks;                    // lines with "slow_rank" or "slow_rank_over"
  std::map<std::string, Json> checkpoints;         // by the name of the folder
  Json memory_plan;                                // null if no line has it
  int64_t lines = 0, damaged = 0;                  // whole lines; lines among them that are not metrics
  bool half_line = false;                          // whether the file ends within a line, which is then ignored
  double last_step = 0;

  // Returns a column, empty if there is none.
  const Points& column(const std::string& name) const;
};

// Reads the file. Raises Error(kInput) if there is none, it is empty or no line of it is of metrics; Error(kResource)
// if it cannot be read.
MetricsFile read_metrics(const std::string& path);

}  // namespace annulus
