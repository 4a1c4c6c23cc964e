// Implements attention.h.
#include "benchmarks/kernel/attention.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>

#include "attention/execution/attention.h"
#include "benchmarks/kernel/fma_peak.h"
#include "benchmarks/measure.h"
#include "benchmarks/patterns.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "common/names.h"
#include "simd/instruction_set.h"

namespace annulus {
namespace {

constexpr int64_t kHeads = 2;    // kv heads, and query heads except for "grouped"
constexpr int64_t kGrouped = 8;  // query heads of "grouped"
const std::vector<std::string> kDtypes = {"fp32", "bf16", "fp64"};

struct Cell {
  std::string mask;
  int64_t length, dim;
  std::string dtype;

  std::string name() const { return mask + " " + std::to_string(length) + " x " + std::to_string(dim) + " " + dtype; }
  bool dense() const { return mask == "causal" || mask == "full"; }
  int64_t heads() const { return mask == "grouped" ? kGrouped : kHeads; }
  at::ScalarType type() const { return dtype == "bf16" ? at::kBFloat16 : dtype == "fp64" ? at::kDouble : at::kFloat; }
  AttentionShape shape() const { return {1, heads(), kHeads, length, length, 0}; }
};

PatternSpec pattern_of(const Cell& cell) {
  if (cell.mask == "full") return {};
  if (cell.mask == "causal" || cell.mask == "grouped" || cell.mask == "dropout") return causal_pattern();
  if (cell.mask == "window1024") return parse_pattern("{ kind = \"window\", left = 1023, right = 0 }", "bench");
  if (cell.mask == "window256") return parse_pattern("{ kind = \"window\", left = 255, right = 0 }", "bench");
  if (cell.mask == "dilated") {
    return parse_pattern("{ kind = \"dilated\", segment_lengths = [2048, 4096, 8192], dilation_rates = [1, 2, 4] }",
                         "bench");
  }
  PatternSpec spec;
  spec.kind = PatternSpec::Kind::kBlocks;
  spec.blocks = given_map(std::make_shared<const BlockMap>(random_block_map(128, 1, (cell.length + 127) / 128, 0.1)));
  return spec;
}

// Without options, the shapes that the goals are stated for and some others, which take about two minutes. With
// options, every combination of their values.
std::vector<Cell> cells_of(const AttentionBenchOptions& o) {
  std::vector<Cell> cells;
  if (o.lengths.empty() && o.dims.empty() && o.masks.empty() && o.dtypes.empty()) {
    for (const char* mask : {"causal", "full"}) {
      for (const int64_t length : {512, 1024, 4096}) cells.push_back({mask, length, 64, "fp32"});
      cells.push_back({mask, 4096, 128, "fp32"});
      for (const int64_t dim : {32, 80, 256}) cells.push_back({mask, 1024, dim, "fp32"});
    }
    cells.push_back({"causal", 16384, 64, "fp32"});
    cells.push_back({"dropout", 4096, 64, "fp32"});
    for (const char* dtype : {"bf16", "fp64"}) {
      cells.push_back({"causal", 1024, 64, dtype});
      cells.push_back({"causal", 4096, 64, dtype});
      cells.push_back({"causal", 4096, 128, dtype});
    }
    for (const char* mask : {"grouped", "window1024", "window256", "dilated", "blocks"}) {
      cells.push_back({mask, 8192, 64, "fp32"});
    }
    return cells;
  }
  const auto or_else = [](const auto& given, auto usual) { return given.empty() ? usual : given; };
  for (const std::string& mask : or_else(o.masks, std::vector<std::string>{"causal", "full"})) {
    for (const std::string& dtype : or_else(o.dtypes, std::vector<std::string>{"fp32"})) {
      for (const int64_t dim : or_else(o.dims, std::vector<int64_t>{64, 128})) {
        for (const int64_t length : or_else(o.lengths, std::vector<int64_t>{512, 1024, 4096, 16384})) {
          cells.push_back({mask, length, dim, dtype});
        }
      }
    }
  }
  return cells;
}

// One direction of one side, with the CPU seconds of the turns that count.
struct Turns {
  std::vector<double> costs;
  double least() const { return *std::min_element(costs.begin(), costs.end()); }
  void take(bool counted, const std::function<void()>& work) {
    const double begin = thread_cpu_seconds();
    work();
    if (counted) costs.push_back(thread_cpu_seconds() - begin);
  }
};

struct Measured {
  Turns forward, backward, their_forward, their_backward;
  Turns fp32_forward, fp32_backward;  // the same calls in fp32, if the cell's dtype is bf16
  double pairs = 0;                   // the (query, key) pairs that count, of all heads
};

Measured measure(const Cell& cell, double seconds) {
  Measured m;
  const auto options = at::TensorOptions().dtype(cell.type());
  const std::vector<int64_t> sizes = {1, cell.length, cell.heads(), cell.dim};
  const std::vector<int64_t> key_sizes = {1, cell.length, kHeads, cell.dim};
  const at::Tensor q = at::randn(sizes, options), dout = at::randn(sizes, options);
  const at::Tensor k = at::randn(key_sizes, options), v = at::randn(key_sizes, options);
  const std::shared_ptr<Communicator> self = make_self_communicator();
  AttentionCall call;
  call.request.shape = cell.shape();
  call.request.pattern = pattern_of(cell);
  call.comm = self.get();
  call.label = "bench attention";
  if (cell.mask == "dropout") call.dropout.rate = 0.1;
  const auto heads_first = [](const at::Tensor& t) { return t.transpose(1, 2); };
  const bool causal = cell.mask == "causal";
  const auto take = [&call](Turns& forward, Turns& backward, bool counted, const auto& q, const auto& k, const auto& v,
                            const auto& dout) {
    AttentionOutput out;
    forward.take(counted, [&] { out = attention_forward(q, k, v, call); });
    backward.take(counted, [&] { attention_backward(dout, q, k, v, out, call); });
  };
  const bool compared = cell.dtype == "bf16";
  const auto wide = [&](const at::Tensor& t) { return compared ? t.to(at::kFloat) : at::Tensor(); };
  const at::Tensor q32 = wide(q), k32 = wide(k), v32 = wide(v), dout32 = wide(dout);
  const double sides = 1 + cell.dense() + compared;
  m.pairs = static_cast<double>(count_pairs(*cached_pattern(call.request)));
  const double begin = wall_seconds();
  // The first turn does not count: it makes the plan and touches memory for the first time.
  for (int turn = 0; turn < 4 || wall_seconds() - begin < sides * seconds; ++turn) {
    const bool counted = turn > 0, later = turn % 2 > 0;  // what follows LibTorch's call is slower
    if (compared && later) take(m.fp32_forward, m.fp32_backward, counted, q32, k32, v32, dout32);
    take(m.forward, m.backward, counted, q, k, v, dout);
    if (compared && !later) take(m.fp32_forward, m.fp32_backward, counted, q32, k32, v32, dout32);
    if (!cell.dense()) continue;
    std::tuple<at::Tensor, at::Tensor> theirs;
    m.their_forward.take(counted, [&] {
      theirs =
          at::_scaled_dot_product_flash_attention_for_cpu(heads_first(q), heads_first(k), heads_first(v), 0.0, causal);
    });
    m.their_backward.take(counted, [&] {
      at::_scaled_dot_product_flash_attention_for_cpu_backward(heads_first(dout), heads_first(q), heads_first(k),
                                                               heads_first(v), std::get<0>(theirs), std::get<1>(theirs),
                                                               0.0, causal);
    });
  }
  return m;
}

// The goal: the share of the FMA peak that a cell should reach; empty if there is no goal for it.
std::optional<double> share_goal(const Cell& cell, bool backward) {
  if (!cell.dense() || cell.dtype != "fp32") return std::nullopt;
  const double less = backward ? 0.05 : 0;
  if (cell.length >= 4096 && cell.dim == 128) return 0.78 - less;
  if (cell.length >= 4096 && cell.dim == 64) return 0.73 - less;
  if (cell.length == 1024 && cell.dim == 64) return 0.68 - less;
  return std::nullopt;
}

}  // namespace

const std::vector<std::string>& attention_bench_masks() {
  static const std::vector<std::string> masks = {"causal",  "full",    "window1024", "window256",
                                                 "grouped", "dilated", "blocks",     "dropout"};
  return masks;
}

void check(const AttentionBenchOptions& options) {
  for (const std::string& mask : options.masks) index_of_name(mask, attention_bench_masks(), "mask", "--mask");
  for (const std::string& dtype : options.dtypes) index_of_name(dtype, kDtypes, "dtype", "--dtype");
  for (const Cell& cell : cells_of(options)) validate(pattern_of(cell), cell.shape());
}

std::vector<BenchRatio> run_attention_bench(const AttentionBenchOptions& options, std::ostream& out) {
  at::set_num_threads(1);
  const char* const isa = instruction_set_name(instruction_set());
  const double peak = fma_flops(false), wide_peak = fma_flops(true);
  const std::optional<double> bf16_peak = bf16_flops();
  out << line("attention on one core: annulus with %s, LibTorch with %s; GFLOP/s of counted pairs\n", isa,
              at::get_cpu_capability().c_str())
      << line(
             "peak of the core: %.1f GFLOP/s in fp32, %.1f in fp64, %.1f in bf16. CPU seconds, the least of "
             "interleaved turns.\n\n",
             peak / 1e9, wide_peak / 1e9, bf16_peak.value_or(peak) / 1e9)
      << line("%-26s  %-8s  %8s  %8s  %8s  %s\n", "mask, length x head size", "", "annulus", "of peak", "LibTorch",
              "times as fast");
  std::vector<BenchRatio> ratios;
  for (const Cell& cell : cells_of(options)) {
    const Measured m = measure(cell, options.seconds);
    // The core's clock rate may have changed since the peak was measured.
    const double now = cell.dtype == "fp64"                ? wide_peak
                       : cell.dtype == "bf16" && bf16_peak ? std::max(*bf16_peak, *bf16_flops())
                                                           : std::max(peak, fma_flops(false));
    for (const bool backward : {false, true}) {
      const Turns& ours = backward ? m.backward : m.forward;
      const Turns& theirs = backward ? m.their_backward : m.their_forward;
      const double flops = m.pairs * static_cast<double>(cell.dim) * (backward ? 10 : 4),
                   reached = flops / ours.least();
      const char* const direction = backward ? "backward" : "forward";
      out << line("%-26s  %-8s  %8.1f  %8.3f", cell.name().c_str(), direction, reached / 1e9, reached / now);
      const std::optional<double> share = share_goal(cell, backward);
      if (!theirs.costs.empty()) {
        const double faster = theirs.least() / ours.least();
        std::optional<double> goal;
        if (cell.dtype != "fp64") goal = cell.mask == "causal" ? 1 / 1.15 : 1;
        const BenchRatio& ratio = ratios.emplace_back(
            ratio_of("attention/" + cell.name() + " " + direction, isa, ours.costs, theirs.costs, goal));
        out << line("  %8.1f  %13.2f", flops / theirs.least() / 1e9, faster);
        if (goal) out << line("  goal %.2f: %s", 1 / *goal, ratio.met() ? "met" : "missed");
      }
      const Turns& fp32 = backward ? m.fp32_backward : m.fp32_forward;
      if (!fp32.costs.empty()) {
        const BenchRatio& ratio = ratios.emplace_back(
            ratio_of("attention/" + cell.name() + " " + direction + ", over fp32", isa, ours.costs, fp32.costs, 1));
        out << line("%s%.3f times fp32's speed, goal 1: %s", theirs.costs.empty() ? "  " : "; ",
                    fp32.least() / ours.least(), ratio.met() ? "met" : "missed");
      }
      if (share) out << line("; of peak %.2f: %s", *share, reached / now >= *share ? "met" : "missed");
      out << "\n";
      out.flush();
    }
  }
  return ratios;
}

}  // namespace annulus
