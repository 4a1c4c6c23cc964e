// Implements patterns.h.
#include "benchmarks/patterns.h"

#include <ATen/Parallel.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>
#include <utility>

#include "attention/execution/attention.h"
#include "benchmarks/measure.h"
#include "comm/threads/threads.h"
#include "tensor_files/block_map_file.h"

namespace annulus {
namespace {

constexpr int64_t kBlock = 128;
constexpr double kDensity = 0.1;
// The goals hold from this length on; below it fixed costs weigh more.
constexpr int64_t kGoalsFrom = 16384;

PatternSpec given_blocks(const PatternsBenchOptions& options, int64_t heads) {
  PatternSpec spec;
  spec.kind = PatternSpec::Kind::kBlocks;
  spec.blocks = given_map(std::make_shared<const BlockMap>(
      random_block_map(kBlock, heads, (options.length + kBlock - 1) / kBlock, kDensity)));
  return spec;
}

// Documents of halving lengths, as in packed batches: 16 tokens give 8, 4, 2, 1 and 1.
PatternSpec packed_documents(int64_t length) {
  PatternSpec spec;
  std::vector<int64_t> lengths;
  int64_t left = length;
  while (left > length / 16 && left > 1) {
    lengths.push_back(left - left / 2);
    left /= 2;
  }
  if (left > 0) lengths.push_back(left);
  spec.documents = {lengths};
  return spec;
}

constexpr const char* kDilated =
    "{ kind = \"dilated\", segment_lengths = [2048, 4096, 8192, 16384], dilation_rates = [1, 2, 4, 8] }";
constexpr const char* kWindow = "{ kind = \"window\", left = 1023, right = 0 }";
constexpr const char* kNarrowWindow = "{ kind = \"window\", left = 255, right = 0 }";
constexpr const char* kBigBird =
    "{ kind = \"blocks\", map = \"bigbird\", block = 128, window_blocks = 1, global_blocks = 1, random_blocks = 3 }";
constexpr const char* kUnion =
    "{ kind = \"union\", of = [{ kind = \"window\", left = 1023, right = 0 }, "
    "{ kind = \"blocks\", map = \"strided\", block = 128, window_blocks = 1, stride = 16 }] }";

// The call with one pattern on one rank, and the cost of its rounds.
class Side {
 public:
  Side(const PatternSpec& spec, const PatternsBenchOptions& options, Communicator& self) {
    call_.request.shape = options.shape();
    call_.request.pattern = spec;
    call_.comm = &self;
    call_.label = "bench patterns";
  }

  // Runs forward and backward. `counted` is false in the first round, which also plans and touches memory first.
  void run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& dout, bool counted) {
    const double cpu = cpu_seconds(), wall = wall_seconds();
    const AttentionOutput out = attention_forward(q, k, v, call_);
    attention_backward(dout, q, k, v, out, call_);
    if (counted) {
      cpu_.push_back(cpu_seconds() - cpu);
      wall_.push_back(wall_seconds() - wall);
    } else {
      // Counted after the call, because an adaptive map is known only then.
      pairs_ = static_cast<double>(count_pairs(*cached_pattern(out.program->request)));
    }
  }

  const std::vector<double>& cpu() const { return cpu_; }
  double least_cpu() const { return *std::min_element(cpu_.begin(), cpu_.end()); }
  double least_wall() const { return *std::min_element(wall_.begin(), wall_.end()); }
  double pairs() const { return pairs_; }

 private:
  AttentionCall call_;
  std::vector<double> cpu_, wall_;
  double pairs_ = 0;
};

std::string settings_of(const PatternsBenchOptions& o) {
  return line("%lld tokens, %lld heads of %lld, fp32, %d thread%s", static_cast<long long>(o.length),
              static_cast<long long>(o.heads), static_cast<long long>(o.head_dim), o.threads,
              o.threads == 1 ? "" : "s");
}

}  // namespace

BlockMap random_block_map(int64_t block, int64_t heads, int64_t blocks, double density) {
  std::mt19937_64 draw(20251121);  // gives the same numbers with every library; standard distributions do not
  std::vector<uint8_t> active(static_cast<size_t>(heads * blocks * blocks), 0);
  std::vector<int64_t> others;
  const double row = density * static_cast<double>(blocks);
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t i = 0; i < blocks; ++i) {
      uint8_t* const keys = active.data() + (h * blocks + i) * blocks;
      keys[i] = 1;
      others.clear();
      for (int64_t j = 0; j < blocks; ++j) {
        if (j != i) others.push_back(j);
      }
      // As many blocks as give the rows so far the density.
      const int64_t wanted =
          static_cast<int64_t>(row * static_cast<double>(i + 1)) - static_cast<int64_t>(row * static_cast<double>(i));
      for (int64_t n = 0; n + 1 < std::min(wanted, blocks); ++n) {
        const size_t at = static_cast<size_t>(n) + draw() % (others.size() - static_cast<size_t>(n));
        std::swap(others[static_cast<size_t>(n)], others[at]);
        keys[others[static_cast<size_t>(n)]] = 1;
      }
    }
  }
  return block_map_from_dense(active.data(), block, 1, heads, blocks, blocks);
}

std::vector<BenchPattern> bench_patterns(const PatternsBenchOptions& options) {
  std::vector<BenchPattern> patterns;
  if (options.patterns.empty()) {
    const auto goal = [&](double of_share) {
      return options.length >= kGoalsFrom ? std::optional(of_share) : std::nullopt;
    };
    patterns.push_back({"blocks, density 0.1", given_blocks(options, 1), goal(1.1)});
    patterns.push_back({"blocks, density 0.1, a map per head", given_blocks(options, options.heads), goal(1.1)});
    patterns.push_back({"dilated", parse_pattern(kDilated, "bench"), goal(1.1)});
    patterns.push_back({"window 1024", parse_pattern(kWindow, "bench"), goal(1.12)});
    patterns.push_back({"window 256", parse_pattern(kNarrowWindow, "bench"), goal(1.3)});
    patterns.push_back({"causal", causal_pattern(), {}});
    patterns.push_back({"documents", packed_documents(options.length), {}});
    patterns.push_back({"bigbird", parse_pattern(kBigBird, "bench"), {}});
    patterns.push_back({"union of window and strided", parse_pattern(kUnion, "bench"), {}});
  }
  for (const std::string& text : options.patterns) {
    PatternSpec spec = parse_pattern(text, "--pattern");
    const std::string name = spec.text();
    const bool twice = std::any_of(patterns.begin(), patterns.end(), [&](const auto& p) { return p.name == name; });
    if (!twice) patterns.push_back({name, std::move(spec), {}});
  }
  for (const BenchPattern& p : patterns) validate(p.spec, options.shape());
  return patterns;
}

std::vector<BenchRatio> run_patterns_bench(const PatternsBenchOptions& options, std::ostream& out) {
  std::vector<BenchPattern> patterns = bench_patterns(options);
  for (BenchPattern& p : patterns) p.spec = read_block_maps(p.spec, options.shape());
  at::set_num_threads(options.threads);
  const std::string settings = settings_of(options);
  out << line("attention, forward and backward, one rank: %s\n", settings.c_str())
      << line(
             "least CPU seconds of %lld interleaved rounds, compared with those of the dense call; without "
             "planning\n\n",
             static_cast<long long>(options.rounds));
  out.flush();

  const std::vector<int64_t> sizes = {1, options.length, options.heads, options.head_dim};
  const at::Tensor q = at::randn(sizes), k = at::randn(sizes), v = at::randn(sizes), dout = at::randn(sizes);
  const std::shared_ptr<Communicator> self = make_self_communicator();
  Side dense(PatternSpec{}, options, *self);
  std::vector<Side> sides;
  for (const BenchPattern& p : patterns) sides.emplace_back(p.spec, options, *self);
  for (int64_t round = -1; round < options.rounds; ++round) {
    dense.run(q, k, v, dout, round >= 0);
    for (Side& side : sides) side.run(q, k, v, dout, round >= 0);
  }

  size_t width = 7;
  for (const BenchPattern& p : patterns) width = std::max(width, p.name.size());
  const auto padded = [&](std::string name) {
    name.resize(width, ' ');
    return "  " + name;
  };
  out << padded("pattern")
      << "  share of pairs  CPU seconds  over dense  quartiles       over share  wall over dense\n";
  out << padded("dense") << line("  %14.4f  %11.3f  %10.3f\n", 1.0, dense.least_cpu(), 1.0);
  std::vector<BenchRatio> ratios;
  for (size_t i = 0; i < patterns.size(); ++i) {
    const BenchPattern& p = patterns[i];
    const Side& side = sides[i];
    const double share = side.pairs() / dense.pairs();
    const std::optional<double> goal = p.goal_of_share ? std::optional(*p.goal_of_share * share) : std::nullopt;
    const BenchRatio& r = ratios.emplace_back(ratio_of("patterns/" + p.name, settings, side.cpu(), dense.cpu(), goal));
    out << padded(p.name)
        << line("  %14.4f  %11.3f  %10.3f  %.3f to %.3f  ", share, side.least_cpu(), r.ratio, r.low, r.high)
        << (share > 0 ? line("%10.2f", r.ratio / share) : line("%10s", ""))
        << line("  %15.3f", side.least_wall() / dense.least_wall());
    if (goal) out << line("  goal %.3f: %s", *goal, r.met() ? "met" : "missed");
    out << "\n";
  }
  out << "\nShare of pairs: the (query, key) pairs that the pattern counts over all pairs of the dense call.\n";
  out.flush();
  return ratios;
}

}  // namespace annulus
