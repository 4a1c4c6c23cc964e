// `annulus bench attention`: compares attention on one core with the core's peak, with LibTorch's operator, and bf16
// with fp32, forward and backward separately, over shapes, masks and dtypes, with the instruction set that this process
// uses (ANNULUS_ISA).
#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "benchmarks/attention_calls.h"
#include "benchmarks/benchmark.h"
#include "benchmarks/fma_peak.h"
#include "benchmarks/measure.h"
#include "benchmarks/patterns.h"
#include "common/names.h"
#include "common/simd/instruction_set.h"

namespace annulus {
namespace {

constexpr int64_t kHeads = 2;    // kv heads, and query heads except for "grouped"
constexpr int64_t kGrouped = 8;  // query heads of "grouped"

// The masks and their patterns; "blocks" is drawn for each length. "grouped" has four query heads for each kv head, and
// "dropout" drops a tenth of the pairs. "sinks" has a sink for each head, and "softcap" a soft cap of 50, as Gemma 2
// has; that of "softcap2" is 2, about as large as the scores.
const std::map<std::string, std::string> kMasks = {
    {"causal", "{ kind = 'causal' }"},
    {"full", "{ kind = 'full' }"},
    {"window1024", "{ kind = 'window', left = 1023, right = 0 }"},
    {"window256", "{ kind = 'window', left = 255, right = 0 }"},
    {"grouped", "{ kind = 'causal' }"},
    {"dilated", "{ kind = 'dilated', segment_lengths = [2048, 4096, 8192], dilation_rates = [1, 2, 4] }"},
    {"blocks", ""},
    {"dropout", "{ kind = 'causal' }"},
    {"sinks", "{ kind = 'causal' }"},
    {"softcap", "{ kind = 'causal' }"},
    {"softcap2", "{ kind = 'causal' }"},
};
const std::map<std::string, at::ScalarType> kDtypes = {
    {"fp32", at::kFloat}, {"bf16", at::kBFloat16}, {"fp64", at::kDouble}};

template <typename Table>
std::vector<std::string> names_of(const Table& table) {
  std::vector<std::string> names;
  for (const auto& [name, value] : table) names.push_back(name);
  return names;
}
struct Cell {
  std::string mask;
  int64_t length, dim;
  std::string dtype;

  std::string name() const { return mask + " " + std::to_string(length) + " x " + std::to_string(dim) + " " + dtype; }
  bool changes_softmax() const { return mask == "sinks" || mask == "softcap" || mask == "softcap2"; }
  bool dense() const { return mask == "causal" || mask == "full"; }
  int64_t heads() const { return mask == "grouped" ? kGrouped : kHeads; }
  AttentionShape shape() const { return {1, heads(), kHeads, length, length, 0}; }
  PatternSpec pattern() const {
    if (mask == "blocks") return random_blocks(128, 1, length, 0.1);
    return parse_pattern(kMasks.at(mask), "bench");
  }
};

// What is measured without options: the shapes that the goals are stated for and some others, which take about two
// minutes.
std::vector<Cell> usual_cells() {
  std::vector<Cell> cells;
  for (const char* mask : {"causal", "full"}) {
    for (const int64_t length : {512, 1024, 4096}) cells.push_back({mask, length, 64, "fp32"});
    cells.push_back({mask, 4096, 128, "fp32"});
    for (const int64_t dim : {32, 80, 256}) cells.push_back({mask, 1024, dim, "fp32"});
  }
  cells.push_back({"causal", 16384, 64, "fp32"});
  cells.push_back({"dropout", 4096, 64, "fp32"});
  for (const char* mask : {"sinks", "softcap"}) {
    for (const int64_t length : {1024, 4096}) cells.push_back({mask, length, 64, "fp32"});
    cells.push_back({mask, 4096, 128, "fp32"});
  }
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

// The CPU seconds of one side in the turns that count.
struct Costs {
  std::vector<double> forward, backward;
  void take(auto& call, bool counted) {
    add_cost(forward, counted, [&] { call.forward(); });
    add_cost(backward, counted, [&] { call.backward(); });
  }
  const std::vector<double>& of(bool back) const { return back ? backward : forward; }
};

struct Measured {
  Costs ours, theirs, fp32;  // theirs: where LibTorch's operator knows the mask; fp32: where the cell's dtype is bf16
  Costs plain;               // causal alone, where the cell adds sinks or a soft cap to it
  double pairs = 0;          // the (query, key) pairs that count, of all heads
};

Measured measure(const Cell& cell, double seconds) {
  const AttentionInputs in = random_inputs(cell.shape(), cell.dim, at::TensorOptions().dtype(kDtypes.at(cell.dtype)));
  AttentionCall call;
  call.request.shape = cell.shape();
  call.request.pattern = cell.pattern();
  call.label = "bench attention";
  if (cell.mask == "dropout") call.dropout.rate = 0.1;
  std::optional<ExecutorCall> plain;
  if (cell.changes_softmax()) plain.emplace(in, call);
  call.sinks = cell.mask == "sinks";
  call.softcap = cell.mask == "softcap" ? 50 : cell.mask == "softcap2" ? 2 : 0;
  ExecutorCall ours(in, call);
  std::optional<ExecutorCall> fp32;
  if (cell.dtype == "bf16") {
    const auto wide = [](const at::Tensor& t) { return t.to(at::kFloat); };
    fp32.emplace(AttentionInputs{wide(in.q), wide(in.k), wide(in.v), wide(in.dout)}, call);
  }
  std::optional<OperatorCall> theirs;
  if (cell.dense()) theirs.emplace(in, cell.mask == "causal");
  const double sides = 1.0 + theirs.has_value() + fp32.has_value() + plain.has_value();
  Measured m;
  const double begin = wall_seconds();
  // The first turn does not count: it makes the plan and touches memory for the first time.
  for (int turn = 0; turn < 4 || wall_seconds() - begin < sides * seconds; ++turn) {
    const bool counted = turn > 0, later = turn % 2 > 0;  // what follows LibTorch's call is slower
    if (fp32 && later) m.fp32.take(*fp32, counted);
    if (plain && later) m.plain.take(*plain, counted);
    m.ours.take(ours, counted);
    if (fp32 && !later) m.fp32.take(*fp32, counted);
    if (plain && !later) m.plain.take(*plain, counted);
    if (theirs) m.theirs.take(*theirs, counted);
  }
  m.pairs = ours.pairs();
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

class AttentionBenchmark : public Benchmark {
 public:
  void declare(CLI::App& app) override {
    add(app, "--length", lengths_, "tokens");
    add(app, "--dim,--head-dim", dims_, "head size");
    add(app, "--mask", masks_, "one of " + join(names_of(kMasks), ", "));
    add(app, "--dtype", dtypes_, "fp32, bf16 or fp64");
    add(app, "--seconds", seconds_, "seconds to measure each cell for, for each side");
    app.footer(
        "Without options it measures a choice of shapes, masks and dtypes. Calls in bf16 take turns with the same\n"
        "calls in fp32. The environment variable ANNULUS_ISA (baseline, avx2, avx512, avx512bf16 or amx) limits the\n"
        "vector instructions of all sides.\n"
        "Example:\n  ./annulus bench attention --length 1024 --dtype bf16");
  }

  void check() override {
    for (const std::string& mask : masks_) index_of_name(mask, names_of(kMasks), "mask", "--mask");
    for (const std::string& dtype : dtypes_) index_of_name(dtype, names_of(kDtypes), "dtype", "--dtype");
    for (const Cell& cell : cells()) validate(cell.pattern(), cell.shape());
  }

  std::vector<BenchRatio> run(Communicator&, std::ostream& out) override {
    at::set_num_threads(1);
    const char* const isa = instruction_set_name(instruction_set());
    const double peak = fma_flops(false), wide_peak = fma_flops(true);
    const std::optional<double> bf16_peak = bf16_flops();
    out << line("attention on one core: annulus with %s, LibTorch with %s; GFLOP/s of counted pairs\n", isa,
                at::get_cpu_capability())
        << line(
               "peak of the core: %.1f GFLOP/s in fp32, %.1f in fp64, %.1f in bf16. CPU seconds, the least of "
               "interleaved turns.\n\n",
               peak / 1e9, wide_peak / 1e9, bf16_peak.value_or(peak) / 1e9)
        << line("%-26s  %-8s  %8s  %8s  %8s  %s\n", "mask, length x head size", "", "annulus", "of peak", "LibTorch",
                "times as fast");
    std::vector<BenchRatio> ratios;
    for (const Cell& cell : cells()) {
      const Measured m = measure(cell, seconds_);
      // The core's clock rate may have changed since the peak was measured.
      const double now = cell.dtype == "fp64"                ? wide_peak
                         : cell.dtype == "bf16" && bf16_peak ? std::max(*bf16_peak, *bf16_flops())
                                                             : std::max(peak, fma_flops(false));
      for (const bool back : {false, true}) {
        const std::vector<double>&ours = m.ours.of(back), &theirs = m.theirs.of(back), &fp32 = m.fp32.of(back);
        const double flops = m.pairs * static_cast<double>(cell.dim) * (back ? 10 : 4), reached = flops / least(ours);
        const char* const direction = back ? "backward" : "forward";
        const std::string name = "attention/" + cell.name() + " " + direction;
        out << line("%-26s  %-8s  %8.1f  %8.3f", cell.name(), direction, reached / 1e9, reached / now);
        if (!theirs.empty()) {
          std::optional<double> goal;
          if (cell.dtype != "fp64") goal = cell.mask == "causal" ? 1 / 1.15 : 1;
          const BenchRatio& ratio = ratios.emplace_back(ratio_of(name, isa, ours, theirs, goal));
          out << line("  %8.1f  %13.2f", flops / least(theirs) / 1e9, least(theirs) / least(ours));
          if (goal) out << line("  goal %.2f: %s", 1 / *goal, met_or_missed(ratio.met()));
        }
        if (!fp32.empty()) {
          const BenchRatio& ratio = ratios.emplace_back(ratio_of(name + ", over fp32", isa, ours, fp32, 1));
          out << line("%s%.3f times fp32's speed, goal 1: %s", theirs.empty() ? "  " : "; ", least(fp32) / least(ours),
                      met_or_missed(ratio.met()));
        }
        if (const std::vector<double>& plain = m.plain.of(back); !plain.empty()) {
          const bool has_goal = cell.mask != "softcap2";
          const BenchRatio& ratio = ratios.emplace_back(
              ratio_of(name + ", over causal", isa, ours, plain, has_goal ? std::optional(1.03) : std::nullopt));
          out << line("  %.3f times the cost of causal", least(ours) / least(plain));
          if (has_goal) out << line(", goal 1.03: %s", met_or_missed(ratio.met()));
        }
        if (const std::optional<double> share = share_goal(cell, back)) {
          out << line("; of peak %.2f: %s", *share, met_or_missed(reached / now >= *share));
        }
        out << std::endl;
      }
    }
    return ratios;
  }

 private:
  // Every combination of the options' values; an empty list stands for its usual values.
  std::vector<Cell> cells() const {
    if (lengths_.empty() && dims_.empty() && masks_.empty() && dtypes_.empty()) return usual_cells();
    const auto or_else = [](const auto& given, auto usual) { return given.empty() ? usual : given; };
    std::vector<Cell> cells;
    for (const std::string& mask : or_else(masks_, std::vector<std::string>{"causal", "full"})) {
      for (const std::string& dtype : or_else(dtypes_, std::vector<std::string>{"fp32"})) {
        for (const int64_t dim : or_else(dims_, std::vector<int64_t>{64, 128})) {
          for (const int64_t length : or_else(lengths_, std::vector<int64_t>{512, 1024, 4096, 16384})) {
            cells.push_back({mask, length, dim, dtype});
          }
        }
      }
    }
    return cells;
  }

  std::vector<int64_t> lengths_, dims_;
  std::vector<std::string> masks_, dtypes_;
  double seconds_ = 0.5;
};

}  // namespace

std::unique_ptr<Benchmark> make_attention_benchmark() { return std::make_unique<AttentionBenchmark>(); }

}  // namespace annulus
