// The report of a benchmark: ratios of costs with their spread, each from one run, and the JSON file of them with which
// a later run is compared. `annulus bench ... --json F` writes it, and `annulus bench compare OLD NEW` compares two;
// docs/reference/formats.md describes the format. Used by all benchmarks.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// A cost divided by that of a baseline, both measured in turn in the same run. Lower is better.
struct BenchRatio {
  std::string name;      // such as "patterns/causal"; ratios of the same name are compared between versions
  std::string settings;  // sizes and the like; ratios measured at different settings are not compared
  double ratio = 0;      // least cost of all rounds over the baseline's least
  double low = 0;        // lower and upper quartile of the ratios of the single rounds
  double high = 0;
  int64_t rounds = 0;
  std::optional<double> goal;  // the ratio should be at most this
  // Why the ratio does not say what its name says, for example because the two sides computed with other operators;
  // empty: it does. Such a ratio meets no goal and is not compared.
  std::string invalid = {};

  bool met() const { return invalid.empty() && (!goal || ratio <= *goal); }
  std::string goal_text() const;  // "goal 1.050: met"; empty without a goal
};

// The ratio from the costs of each round. Both lists have the same size, at least 1, and all costs of the baseline are
// above 0.
BenchRatio ratio_of(std::string name, std::string settings, const std::vector<double>& costs,
                    const std::vector<double>& baseline, std::optional<double> goal = std::nullopt);

// The ratio as an entry of the file.
nlohmann::ordered_json json_of(const BenchRatio& ratio);

struct BenchMachine {
  int64_t cores = 0;
  std::string isa;  // as instruction_set_name() says it: "AVX-512"; in reports of old versions LibTorch's "AVX512"

  std::string text() const;  // "4 cores, AVX-512"
  friend bool operator==(const BenchMachine&, const BenchMachine&) = default;
};

struct BenchReport {
  BenchMachine machine;
  std::string version;
  std::string date;  // UTC, "2026-11-21T21:40:00Z"
  std::vector<BenchRatio> ratios;
};

// A report of these ratios with this machine, this version and the current time.
BenchReport report_of(std::vector<BenchRatio> ratios);

// Replaces the file as a whole. Raises Error(kResource) if it cannot be written, Error(kUsage) if the path is not a
// regular file.
void write_report(const BenchReport& report, const std::string& path);

// Raises Error(kInput), naming the file and the place, if the file is missing or not JSON, has another format or a name
// twice, or holds a number that cannot be a cost. parse_report takes the text, and `source` as the name of the file.
BenchReport read_report(const std::string& path);
BenchReport parse_report(std::string_view json, const std::string& source);

// Returns the ratio of this name, or nullptr.
const BenchRatio* find_ratio(const BenchReport& report, const std::string& name);

// Returns by how much the ratio changed, "+5.0 %"; empty if it was 0.
std::string change_text(const BenchRatio& before, const BenchRatio& after);

enum class Outcome { kSame, kBetter, kWorse };

// A ratio counts as changed if it moved by more than margin * old ratio plus the larger of the two spreads (high -
// low). For example, from 1.00 (0.98 to 1.02) with a margin of 0.1 it may change by 0.14: 1.13 is kSame, 1.15 is
// kWorse.
double allowed_change(const BenchRatio& before, const BenchRatio& after, double margin);
Outcome judge(const BenchRatio& before, const BenchRatio& after, double margin);

// Prints each ratio that both reports have, and names those that only one has, those measured at other settings, and
// machines that differ. Returns the names of the ratios that got worse. Raises Error(kInput) if no ratio can be
// compared.
std::vector<std::string> compare_reports(const BenchReport& before, const BenchReport& after, double margin,
                                         std::ostream& out);

}  // namespace annulus
