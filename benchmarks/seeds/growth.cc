// Implements growth.h.
#include "benchmarks/seeds/growth.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <utility>

#include "benchmarks/measure.h"
#include "benchmarks/patterns.h"
#include "benchmarks/seeds/calls.h"
#include "common/text.h"

namespace annulus {
namespace {

constexpr int64_t kGrowthHeads = 2, kGrowthDim = 64;
constexpr size_t kGrowthLengths = 4;
constexpr double kLinearGoal = 1.05;

PatternSpec narrow_window(int64_t) { return parse_pattern("{ kind = 'window', left = 255, right = 0 }", "bench"); }
PatternSpec fixed_segments(int64_t) {
  return parse_pattern("{ kind = 'dilated', segment_lengths = [512, 2048], dilation_rates = [1, 4] }", "bench");
}
PatternSpec fixed_density(int64_t length) { return random_blocks(128, 1, length, 0.1); }
PatternSpec causal_growth(int64_t) { return causal_pattern(); }

// The calls of one case at one length.
struct Point {
  int64_t length;
  ExecutorCall call;
  std::vector<double> costs = {};  // CPU seconds of the rounds that count
};

}  // namespace

double fitted_exponent(const std::vector<int64_t>& lengths, const std::vector<double>& costs) {
  const double n = static_cast<double>(lengths.size());
  double mean_x = 0, mean_y = 0, xx = 0, xy = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    mean_x += std::log(static_cast<double>(lengths[i])) / n;
    mean_y += std::log(costs[i]) / n;
  }
  for (size_t i = 0; i < lengths.size(); ++i) {
    const double x = std::log(static_cast<double>(lengths[i])) - mean_x;
    xx += x * x;
    xy += x * (std::log(costs[i]) - mean_y);
  }
  return xy / xx;
}

const std::vector<GrowthCase>& growth_cases() {
  static const std::vector<GrowthCase> cases = {
      {"window of 256", kLinearGoal, narrow_window, 8192},
      {"dilated, segments 512 and 2,048", kLinearGoal, fixed_segments, 8192},
      {"blocks of 128, 6 a row", kLinearGoal, six_blocks_a_row, 8192},
      {"blocks of 128, density 0.1", {}, fixed_density, 4096},
      {"causal", {}, causal_growth, 2048},
  };
  return cases;
}

std::vector<BenchRatio> run_growth(const GrowthOptions& options, std::ostream& out) {
  at::set_num_threads(1);
  out << line(
      "== time against length\n%lld heads of %lld, fp32, forward and backward, one rank, one thread; least CPU seconds "
      "of %lld\ninterleaved rounds; the exponent of the length that fits best; the most bytes a token that LibTorch "
      "has\nallocated, q, k, v, out and their gradients among them, at the first and the last length\n",
      kGrowthHeads, kGrowthDim, options.rounds);
  std::vector<BenchRatio> ratios;
  const std::string settings = line("%lld heads of %lld, lengths over %lld", kGrowthHeads, kGrowthDim, options.shorten);
  out << line("  %-32s  %8s  %-39s  %8s  %-22s  %s\n", "pattern", "shortest", "CPU s at 1, 2, 4 and 8 times it",
              "exponent", "goal", "bytes a token");
  for (const GrowthCase& c : growth_cases()) {
    std::deque<Point> points;
    std::vector<int64_t> lengths;
    std::vector<double> token_bytes;
    for (size_t i = 0; i < kGrowthLengths; ++i) {
      const int64_t length = std::max<int64_t>(16, c.shortest / options.shorten) << i;
      AttentionCall call;
      call.request.shape = {1, kGrowthHeads, kGrowthHeads, length, length, 0};
      call.request.pattern = c.pattern(length);
      call.label = "bench seeds";
      lengths.push_back(length);
      const AllocatedPeak peak;
      points.push_back({length, ExecutorCall(random_inputs(call.request.shape, kGrowthDim, at::kFloat), call)});
      points.back().call.run();  // plans, and touches memory
      token_bytes.push_back(static_cast<double>(peak.bytes()) / static_cast<double>(length));
    }
    for (int64_t round = 0; round < options.rounds; ++round) {
      for (Point& p : points) add_cost(p.costs, true, [&] { p.call.run(); });
    }
    std::vector<double> best, each;
    for (const Point& p : points) best.push_back(least(p.costs));
    for (size_t round = 0; round < static_cast<size_t>(options.rounds); ++round) {
      std::vector<double> costs;
      for (const Point& p : points) costs.push_back(p.costs[round]);
      each.push_back(std::max(0.0, fitted_exponent(lengths, costs)));
    }
    std::sort(each.begin(), each.end());
    BenchRatio r{"seeds/exponent of " + c.name, settings, std::max(0.0, fitted_exponent(lengths, best)),
                 each[each.size() / 4], each[each.size() - 1 - each.size() / 4], options.rounds,
                 // The goal is one of long rows.
                 options.shorten == 1 ? c.goal : std::nullopt};
    std::string costs;
    for (const double cost : best) costs += line("%9.4f", cost) + " ";
    const std::string goal = c.goal ? r.goal_text() : "about 2";
    const auto whole = [](double bytes) { return with_commas(std::llround(bytes)); };
    out << line("  %-32s  %8s  %-39s  %8.3f  %-22s  %s, %s\n", c.name, with_commas(lengths.front()), costs, r.ratio,
                goal, whole(token_bytes.front()), whole(token_bytes.back()))
        << std::flush;
    ratios.push_back(std::move(r));
  }
  out << "\n";
  return ratios;
}

}  // namespace annulus
