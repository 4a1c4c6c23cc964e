// What benchmarks leave behind: ratios of costs from one run each, with their spread, and a JSON file of them that a
// later run is compared with (compare.h). Written by `annulus bench ... --json F`; the format: docs/formats.md.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// A cost over that of a baseline measured in turn with it, in the same run. Lower is better.
struct BenchRatio {
  std::string name;      // "patterns/causal": what is compared over versions
  std::string settings;  // sizes and the like: ratios of different settings are not compared
  double ratio = 0;      // least cost of all rounds over the baseline's least
  double low = 0;        // quartiles of the rounds' own ratios
  double high = 0;
  int64_t rounds = 0;
  std::optional<double> goal;  // the ratio should be at most this

  bool met() const { return !goal || ratio <= *goal; }
};

// From the costs of each round. Both of the same size, at least 1, costs of the baseline above 0.
BenchRatio ratio_of(std::string name, std::string settings, const std::vector<double>& costs,
                    const std::vector<double>& baseline, std::optional<double> goal = std::nullopt);

// As it stands in the file.
nlohmann::ordered_json json_of(const BenchRatio& ratio);

struct BenchMachine {
  int64_t cores = 0;
  std::string isa;  // what LibTorch's kernels use: "AVX512"

  std::string text() const;  // "4 cores, AVX512"
  friend bool operator==(const BenchMachine&, const BenchMachine&) = default;
};

struct BenchReport {
  BenchMachine machine;
  std::string version;
  std::string date;  // UTC, "2026-11-21T21:40:00Z"
  std::vector<BenchRatio> ratios;
};

// Of this machine, this version and now.
BenchReport report_of(std::vector<BenchRatio> ratios);

// Replaces the file whole. Raises Error(kResource), Error(kUsage) where it is no regular file.
void write_report(const BenchReport& report, const std::string& path);

// Raises Error(kInput) naming the file and the place: missing, no JSON, not of this format, a name twice, a number
// that is no cost.
BenchReport read_report(const std::string& path);
BenchReport parse_report(std::string_view json, const std::string& source);

}  // namespace annulus
