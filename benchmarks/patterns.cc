// Implements patterns.h.
#include "benchmarks/patterns.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>
#include <random>
#include <utility>

#include "benchmarks/attention_calls.h"
#include "benchmarks/benchmark.h"
#include "benchmarks/measure.h"
#include "common/text.h"
#include "runtime/tensor_files/block_map_file.h"

namespace annulus {
namespace {

constexpr int64_t kBlock = 128;
constexpr double kDensity = 0.1;
// The goals hold from this length on; below it fixed costs weigh more.
constexpr int64_t kGoalsFrom = 16384;

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

// Rollouts of one prompt: four beginnings of answers, and four ends of each, together three quarters of the row.
PatternSpec rollouts(int64_t length) {
  const int64_t beginning = length / 16, end = length / 32;
  PatternSpec spec;
  spec.kind = PatternSpec::Kind::kTree;
  std::vector<int64_t> lengths = {length - 4 * beginning - 16 * end}, parents = {-1};
  for (int64_t i = 0; i < 4; ++i) {
    const auto node = static_cast<int64_t>(lengths.size());
    lengths.insert(lengths.end(), {beginning, end, end, end, end});
    parents.insert(parents.end(), {0, node, node, node, node});
  }
  spec.tree = {{lengths}, {parents}};
  return spec;
}

constexpr const char* kDilated =
    "{ kind = \"dilated\", segment_lengths = [2048, 4096, 8192, 16384], dilation_rates = [1, 2, 4, 8] }";
constexpr const char* kWindow = "{ kind = \"window\", left = 1023, right = 0 }";
constexpr const char* kNarrowWindow = "{ kind = \"window\", left = 255, right = 0 }";
constexpr const char* kSinks = "{ kind = \"window\", left = 1023, right = 0, sink_tokens = 4 }";
constexpr const char* kBigBird =
    "{ kind = \"blocks\", map = \"bigbird\", block = 128, window_blocks = 1, global_blocks = 1, random_blocks = 3 }";
constexpr const char* kUnion =
    "{ kind = \"union\", of = [{ kind = \"window\", left = 1023, right = 0 }, "
    "{ kind = \"blocks\", map = \"strided\", block = 128, window_blocks = 1, stride = 16 }] }";

// The pairs of kWindow, as a mask of tokens: of its blocks those at both edges have bits.
PatternSpec window_as_mask(int64_t length) {
  std::vector<uint8_t> shown;
  const MaskRows rows = [&](int64_t, int64_t first, int64_t count) {
    shown.assign(static_cast<size_t>(count * length), 0);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t query = first + i;
      std::fill_n(shown.begin() + i * length + std::max<int64_t>(0, query - 1023), std::min<int64_t>(1024, query + 1),
                  1);
    }
    return shown.data();
  };
  PatternSpec spec;
  spec.mask = given_mask(std::make_shared<const TokenMask>(
      make_token_mask(1, 1, length, length, rows, HeldBits::everything(), "the mask")));
  return spec;
}

// The call with one pattern, and the cost of its rounds.
struct Side {
  ExecutorCall call;
  std::vector<double> cpu = {}, wall = {};

  // The first round, which also plans and touches memory, does not count.
  void run(bool counted) {
    const double cpu_begin = cpu_seconds(), wall_begin = wall_seconds();
    call.run();
    if (!counted) return;
    cpu.push_back(cpu_seconds() - cpu_begin);
    wall.push_back(wall_seconds() - wall_begin);
  }
};

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

PatternSpec random_blocks(int64_t block, int64_t heads, int64_t length, double density) {
  PatternSpec spec;
  spec.kind = PatternSpec::Kind::kBlocks;
  spec.blocks = given_map(
      std::make_shared<const BlockMap>(random_block_map(block, heads, (length + block - 1) / block, density)));
  return spec;
}

std::vector<BenchPattern> bench_patterns(const PatternsBenchOptions& options) {
  std::vector<BenchPattern> patterns;
  if (options.patterns.empty()) {
    const auto goal = [&](double of_share) {
      return options.length >= kGoalsFrom ? std::optional(of_share) : std::nullopt;
    };
    patterns.push_back({"blocks, density 0.1", random_blocks(kBlock, 1, options.length, kDensity), goal(1.1)});
    patterns.push_back({"blocks, density 0.1, a map per head",
                        random_blocks(kBlock, options.heads, options.length, kDensity), goal(1.1)});
    patterns.push_back({"dilated", parse_pattern(kDilated, "bench"), goal(1.1)});
    patterns.push_back({"window 1024", parse_pattern(kWindow, "bench"), goal(1.12)});
    patterns.push_back({"window 256", parse_pattern(kNarrowWindow, "bench"), goal(1.3)});
    patterns.push_back({"window 1024, 4 sink tokens", parse_pattern(kSinks, "bench"), goal(1.15)});
    patterns.push_back({"tree", rollouts(options.length), goal(1.15)});
    patterns.push_back({"causal", causal_pattern(), {}});
    patterns.push_back({"documents", packed_documents(options.length), {}});
    patterns.push_back({"bigbird", parse_pattern(kBigBird, "bench"), {}});
    patterns.push_back({"mask of tokens, window 1024", window_as_mask(options.length), {}});
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
  const std::vector<BenchPattern> patterns = bench_patterns(options);
  at::set_num_threads(options.threads);
  const std::string settings =
      line("%s, %s of %lld, fp32, %s", counted(options.length, "token"), counted(options.heads, "head"),
           options.head_dim, counted(options.threads, "thread"));
  out << line("attention, forward and backward, one rank: %s\n", settings)
      << line(
             "least CPU seconds of %lld interleaved rounds, compared with those of the dense call; without "
             "planning\n\n",
             options.rounds)
      << std::flush;
  const AttentionInputs in = random_inputs(options.shape(), options.head_dim, at::kFloat);
  const auto side = [&](const PatternSpec& pattern) {
    AttentionCall call;
    call.request.shape = options.shape();
    call.request.pattern = read_block_maps(pattern, options.shape());
    call.label = "bench patterns";
    return Side{ExecutorCall(in, std::move(call))};
  };
  Side dense = side(PatternSpec{});
  std::vector<Side> sides;
  for (const BenchPattern& p : patterns) sides.push_back(side(p.spec));
  for (int64_t round = -1; round < options.rounds; ++round) {
    dense.run(round >= 0);
    for (Side& s : sides) s.run(round >= 0);
  }

  Width width = {7};
  for (const BenchPattern& p : patterns) width.value = std::max(width.value, static_cast<int>(p.name.size()));
  const auto padded = [&](const std::string& name) { return line("  %-*s", width, name); };
  out << padded("pattern") << "  share of pairs  CPU seconds  over dense  quartiles       over share  wall over dense\n"
      << padded("dense") << line("  %14.4f  %11.3f  %10.3f\n", 1.0, least(dense.cpu), 1.0);
  std::vector<BenchRatio> ratios;
  for (size_t i = 0; i < patterns.size(); ++i) {
    const BenchPattern& p = patterns[i];
    const Side& s = sides[i];
    const double share = s.call.pairs() / dense.call.pairs();
    const std::optional<double> goal = p.goal_of_share ? std::optional(*p.goal_of_share * share) : std::nullopt;
    const BenchRatio& r = ratios.emplace_back(ratio_of("patterns/" + p.name, settings, s.cpu, dense.cpu, goal));
    out << padded(p.name)
        << line("  %14.4f  %11.3f  %10.3f  %.3f to %.3f  ", share, least(s.cpu), r.ratio, r.low, r.high)
        << (share > 0 ? line("%10.2f", r.ratio / share) : line("%10s", ""))
        << line("  %15.3f", least(s.wall) / least(dense.wall)) << (goal ? "  " + r.goal_text() : "") << "\n";
  }
  out << "\nShare of pairs: the (query, key) pairs that the pattern counts over all pairs of the dense call.\n"
      << std::flush;
  return ratios;
}

namespace {

class PatternsBenchmark : public Benchmark {
 public:
  void declare(CLI::App& app) override {
    add(app, "--length", options_.length, "tokens; the goals hold from 16384 on");
    add(app, "--heads", options_.heads, "heads");
    add(app, "--dim,--head-dim", options_.head_dim, "head size");
    add(app, "--rounds,--repeats", options_.rounds, "rounds that count");
    add(app, "--threads", options_.threads, "threads");
    add(app, "--pattern", options_.patterns, "measure this pattern instead");
    app.footer(
        "Examples:\n  ./annulus bench patterns\n"
        "  ./annulus bench patterns --pattern '{ kind = \"window\", left = 255, right = 0 }'");
  }
  void check() override { bench_patterns(options_); }
  std::vector<BenchRatio> run(Communicator&, std::ostream& out) override { return run_patterns_bench(options_, out); }

 private:
  PatternsBenchOptions options_;
};

}  // namespace

std::unique_ptr<Benchmark> make_patterns_benchmark() { return std::make_unique<PatternsBenchmark>(); }

}  // namespace annulus
