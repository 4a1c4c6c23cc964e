// `annulus bench seeds`: the tables of the reports that this project grew out of (tables.h), each row beside what
// annulus measures here; how cost grows with length (growth.h); and with --long calls over millions of tokens (long.h).
#include <ATen/Parallel.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <array>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention/modules/factory.h"
#include "attention/plan/layout.h"
#include "benchmarks/benchmark.h"
#include "benchmarks/launched.h"
#include "benchmarks/measure.h"
#include "benchmarks/patterns.h"
#include "benchmarks/seeds/calls.h"
#include "benchmarks/seeds/growth.h"
#include "benchmarks/seeds/long.h"
#include "benchmarks/seeds/tables.h"
#include "comm/bootstrap/launch_info.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "common/files.h"
#include "common/text.h"
#include "memory/caches.h"

namespace annulus {
namespace {

constexpr int64_t kSeedHeads = 8, kSeedDim = 64;

// What a class of theirs stands for: its pattern and schedule. `blocks` and `dilated` are for those that take them.
CallWanted wanted_of(const char* name, int64_t length, int ranks, const BlocksSpec& blocks = {},
                     const std::optional<DilatedSpec>& dilated = {}) {
  AttentionFactoryOptions o;
  o.attention.dim = kSeedHeads * kSeedDim;
  o.attention.heads = kSeedHeads;
  o.length = length;
  o.ranks = ranks;
  o.blocks = blocks;
  if (dilated) o.dilated = *dilated;
  const AttentionChoice choice = choose_attention(name, o);
  CallWanted wanted;
  wanted.request.shape = {1, kSeedHeads, kSeedHeads, length, length, 0};
  wanted.request.pattern = choice.options.pattern;
  wanted.request.schedule = choice.options.schedule;
  wanted.request.ranks = ranks;
  wanted.head_dim = kSeedDim;
  return wanted;
}

nlohmann::json json_of_figures(const CallFigures& f) {
  return {f.forward_wall, f.forward_cpu, f.cpu, f.held_bytes, f.held_over, f.allocated, f.resident, f.resident_over};
}
CallFigures figures_of_json(const nlohmann::json& json) {
  const auto v = json.get<std::array<double, 8>>();
  return {v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]};
}

// Forwards of one rank that take turns, in CPU seconds.
struct Turn {
  ExecutorCall call;
  std::vector<double> costs = {};
};

class SeedsBenchmark : public Benchmark {
 public:
  void declare(CLI::App& app) override {
    add(app, "--rounds,--repeats", rounds_, "rounds that count");
    add(app, "--shorten", shorten_,
        "divide every length by this: a quick look, whose figures are not those of the rows");
    app.add_flag("--long", long_, "measure instead up to 4,194,304 tokens, on as many ranks as `launch` starts");
    add(app, "--length", options_.lengths, "tokens of --long");
    add(app, "--most-pairs", options_.most_pairs, "with --long: leave calls out that count more pairs");
    app.add_option("--check-rows", options_.check_rows,
                   "with --long: check this many drawn rows and keys of each call in fp64, besides what is measured; "
                   "0: none (default: " +
                       std::to_string(options_.check_rows) + ")")
        ->check(CLI::NonNegativeNumber);
    app.add_option("--measure", measure_path_, "")->group("");  // for ranks of the tables: the file to write
    app.add_option("--measure-length", measure_length_, "")->group("");
    app.add_option("--measure-pattern", measure_pattern_, "")->group("");
    app.footer(
        "Examples:\n  ./annulus bench seeds\n  ./annulus bench seeds --shorten 16 --rounds 1\n"
        "  ./annulus launch -n 2 bench seeds --long");
  }

  std::string request() const override {
    std::string text = line("%lld %lld %s", rounds_, measure_length_, measure_pattern_);
    for (const int64_t length : options_.lengths) text += " " + std::to_string(length);
    return text + " " + exact(options_.most_pairs) + line(" %lld", options_.check_rows);
  }

  std::vector<BenchRatio> run(Communicator& world, std::ostream& out) override {
    if (long_) {
      run_long(options_, world, out);
      return {};
    }
    if (!measure_path_.empty()) {
      measure_as_rank(world);
      return {};
    }
    if (launch_info().launched) {
      throw Error(ErrorKind::kUsage, "bench",
                  "seeds starts its ranks itself; run it without launch: ./annulus bench seeds; only --long takes the "
                  "ranks of `launch`");
    }
    at::set_num_threads(1);
    ours_.clear();
    ratios_.clear();
    rings(out);
    implementations();
    throughput();
    lengths();
    caching();
    time_and_memory();
    classes();
    print_tables(ours_, out);
    for (BenchRatio& r : run_growth({shorten_, rounds_}, out)) ratios_.push_back(std::move(r));
    for (const BenchRatio& r : ratios_) {
      if (r.goal) out << line("%s: %.3f, %s\n", r.name, r.ratio, r.goal_text());
    }
    out << std::flush;
    return std::exchange(ratios_, {});
  }

 private:
  int64_t shortened(int64_t length) const { return std::max<int64_t>(16, length / shorten_); }
  std::string& figure(const char* table, const std::string& row) { return ours_[{table, row}]; }
  void add_ratio(std::string name, std::string settings, double ratio, std::optional<double> goal = {}) {
    ratios_.push_back({std::move(name), std::move(settings), ratio, ratio, ratio, std::max<int64_t>(1, rounds_), goal});
  }

  CallWanted ring_of(const char* name, int64_t length, int ranks) const {
    CallWanted wanted = wanted_of(name, length, ranks);
    wanted.rounds = std::min<int64_t>(rounds_, 2);
    wanted.backward = true;
    return wanted;
  }

  // One rank's part of what rings() measures over processes; rank 0 writes the figures.
  void measure_as_rank(Communicator& world) const {
    at::set_num_threads(1);
    CallWanted wanted = ring_of("RingAttentionCorrectV2", measure_length_, world.size());
    wanted.request.pattern = parse_pattern(measure_pattern_, "--measure-pattern");
    wanted.processes = true;
    const CallFigures figures = measure_call(wanted, world);
    if (world.rank() == 0) {
      write_atomically(FileSystem::real(), measure_path_, json_of_figures(figures).dump() + "\n");
    }
  }

  // The same call over ranks that are processes; nothing without mpirun.
  std::optional<CallFigures> measure_processes(const CallWanted& wanted) const {
    const ScratchFolder scratch;
    const std::string path = scratch.file("rank.json");
    try {
      const int code =
          launch_ranks(wanted.request.ranks, {"bench", "seeds", "--rounds", std::to_string(rounds_), "--measure", path,
                                              "--measure-length", std::to_string(wanted.request.shape.q_len),
                                              "--measure-pattern", wanted.request.pattern.text()});
      if (code != 0) {
        throw Error(ErrorKind::kInternal, "bench",
                    line("seeds: a ring of %lld processes ended with exit code %lld", wanted.request.ranks, code));
      }
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kUnavailable) throw;
      return {};
    }
    return figures_of_json(nlohmann::json::parse(read_small_file("bench", path)));
  }

  void rings(std::ostream& out) {
    struct Row {
      const char* name;
      const char* row;
      int ranks;
    };
    const int64_t length = shortened(8192);
    double alone = 0, ring_of_4 = 0;
    for (const Row& r : {Row{"RingAttentionCorrectV2", "Standard Attention, 1", 1},
                         Row{"RingAttentionCorrectV2", "RingAttentionCorrectV2, 2", 2},
                         Row{"RingAttentionCorrectV2", "RingAttentionCorrectV2, 4", 4},
                         Row{"RingAttentionCorrectV2", "RingAttentionCorrectV2, 8", 8},
                         Row{"RingAttentionCorrectV2", "RingAttentionCorrectV2, 16", 16},
                         Row{"RingDilatedAttentionV2", "RingDilatedAttentionV2, 8", 8}}) {
      const CallWanted wanted = ring_of(r.name, length, r.ranks);
      const CallFigures threads = measure_threads(wanted);
      std::string& text = figure("rings", r.row);
      text = line("%s %.0f ms, %.2f CPU s, %.2f MB (%.2f)", r.ranks == 1 ? "one rank" : "threads",
                  1e3 * threads.forward_wall, threads.forward_cpu, threads.held_bytes / 1e6, threads.held_over);
      if (r.ranks == 1) alone = threads.forward_cpu;
      if (r.ranks == 4) ring_of_4 = threads.forward_cpu;
      if (r.ranks == 1) continue;
      add_ratio(line("seeds/memory a rank, %s", r.row), line("%lld tokens, threads", length), threads.held_over, 1.0);
      if (const std::optional<CallFigures> p = measure_processes(wanted)) {
        text += line("; processes %.0f ms, %.2f CPU s, %.2f MB (%.2f), %.1f MB (%.2f)", 1e3 * p->forward_wall,
                     p->forward_cpu, p->held_bytes / 1e6, p->held_over, p->resident / 1e6, p->resident_over);
        add_ratio(line("seeds/memory a rank, %s, processes", r.row), line("%lld tokens", length), p->held_over, 1.0);
      } else {
        text += "; processes left out: no mpirun";
      }
    }
    const CallFigures whole = measure_threads(ring_of("RingAttentionCorrectV2", shortened(4096), 1));
    const CallFigures part = measure_threads(ring_of("RingAttentionCorrectV2", shortened(4096), 16));
    figure("rings", "best reduction: 4,096 tokens, 16") =
        line("%.1f %% less than one rank holds", 100 * (1 - part.held_bytes / whole.held_bytes));
    figure("time", "ring over baseline") = line("%.2fx", alone / ring_of_4);
    out << "rings are measured; the other tables follow\n\n" << std::flush;
  }

  // The least CPU seconds of forwards of these calls on one rank, in turns.
  std::vector<double> least_of(const std::vector<CallWanted>& wanted) const {
    std::vector<Turn> turns;
    for (const CallWanted& w : wanted) {
      AttentionCall call;
      call.request = w.request;
      call.label = "bench seeds";
      turns.push_back({ExecutorCall(random_inputs(w.request.shape, w.head_dim, at::kFloat), std::move(call))});
    }
    for (int64_t round = -1; round < rounds_; ++round) {
      for (Turn& t : turns) add_cost(t.costs, round >= 0, [&] { t.call.forward(); });
    }
    std::vector<double> costs;
    for (const Turn& t : turns) costs.push_back(least(t.costs));
    return costs;
  }

  void implementations() {
    for (const int64_t length : {2048, 4096, 8192, 16384}) {
      const int64_t n = shortened(length);
      const std::vector<double> ms =
          least_of({wanted_of("DilatedAttention", n, 1), wanted_of("ImprovedDilatedAttention", n, 1),
                    wanted_of("ImprovedDilatedAttentionV2", n, 1)});
      figure("implementations", with_commas(length) + " tokens") =
          line("%.1f and improved %.1f ms, %.2fx", 1e3 * ms[0], 1e3 * ms[1], ms[0] / ms[1]);
      if (length == 2048) figure("speedups", "Improved V2") = line("%.2fx", ms[0] / ms[2]);
    }
    CallWanted longest = wanted_of("DilatedAttention", shortened(16384), 1);
    longest.rounds = 0;
    figure("implementations", "peak memory") =
        line("%.0f MB at %s, with q, k, v and out", measure_threads(longest).allocated / 1e6,
             with_commas(longest.request.shape.q_len, "token"));
  }

  void throughput() {
    double ring_gain = 0, sparse_gain = 0;
    for (const int64_t length : {1024, 4096, 8192, 16384}) {
      const int64_t n = shortened(length);
      const BlocksSpec blocks = random_blocks(64, 1, n, 0.05).blocks;
      const std::vector<double> alone =
          least_of({wanted_of("DilatedAttention", n, 1), wanted_of("BlockSparseRingDilatedAttention", n, 1, blocks)});
      CallWanted ring = wanted_of("RingAttentionCorrectV2", n, 4);
      ring.rounds = std::min<int64_t>(rounds_, 2);
      const double over = measure_threads(ring).forward_cpu;
      const double thousands = static_cast<double>(n) / 1e3;
      figure("throughput", with_commas(length) + " tokens") = line(
          "%.1f, ring %.1f, sparse %.1f thousand/CPU s", thousands / alone[0], thousands / over, thousands / alone[1]);
      ring_gain += alone[0] / over / 4;
      sparse_gain += alone[0] / alone[1] / 4;
    }
    figure("speedups", "Ring Attention") =
        line("%.2fx; exact attention of all pairs beside a sparse pattern", ring_gain);
    figure("speedups", "Block Sparse") = line("%.2fx", sparse_gain);
  }

  void lengths() {
    const auto measured = [&](const char* row, const char* name, int64_t length, bool sparse) {
      const int64_t n = shortened(length);
      CallWanted wanted = wanted_of(name, n, 2, sparse ? random_blocks(128, 1, n, 0.01).blocks : BlocksSpec{});
      wanted.request.shape.heads = wanted.request.shape.kv_heads = 1;
      wanted.rounds = 0;
      const CallFigures f = measure_threads(wanted);
      figure("lengths", row) =
          line("%s: %.2f CPU s, %.1f MB a rank", with_commas(n, "token"), f.forward_cpu, f.allocated / 1e6);
    };
    measured("ring, 40K", "RingAttentionCorrectV2", 40960, false);
    figure("lengths", "most of Ring Attention") = figure("lengths", "ring, 40K");
    measured("block-sparse, 512K", "BlockSparseRingDilatedAttention", 524288, true);
    measured("most of Block Sparse (99 %)", "BlockSparseRingDilatedAttention", 483328, true);
  }

  // Plans and proves anew where nothing is cached.
  struct Planning {
    double first = 0, anew = 0, once = 0;  // CPU seconds
  };
  Planning planning_of(const CallWanted& wanted) const {
    AttentionCall settings;
    settings.request = wanted.request;
    settings.label = "bench seeds";
    ExecutorCall call(random_inputs(wanted.request.shape, wanted.head_dim, at::kFloat), std::move(settings));
    const int64_t total = cache_total();
    struct Restore {
      int64_t total;
      ~Restore() { set_cache_total(total); }
    } const restore{total};
    std::vector<double> first, anew, once;
    for (int64_t round = 0; round < rounds_; ++round) {
      set_cache_total(0);
      add_cost(round == 0 ? first : anew, true, [&] { call.forward(); });
      if (round == 0) add_cost(anew, true, [&] { call.forward(); });
      set_cache_total(total);
      call.forward();
      add_cost(once, true, [&] { call.forward(); });
    }
    return {first[0], least(anew), least(once)};
  }

  void caching() {
    const auto text = [](const Planning& p) {
      return line("%.2f ms, then %.2f ms, %.3fx", 1e3 * p.anew, 1e3 * p.once, p.anew / p.once);
    };
    for (const int64_t length : {512, 1024, 2048, 4096, 8192}) {
      const int64_t n = shortened(length);
      CallWanted wanted = wanted_of("RingAttentionCorrectV2", n, 1);
      wanted.request.pattern = causal_pattern();
      const Planning p = planning_of(wanted);
      figure("caching", with_commas(length) + " tokens") = text(p);
      add_ratio(line("seeds/planned anew, %lld tokens", length), line("causal, %lld tokens", n), p.anew / p.once);
      if (length == 512) {
        figure("caching", "first and cached run") =
            line("%.2f ms, then %.2f ms, %.2fx (%s, the first also allocates)", 1e3 * p.first, 1e3 * p.once,
                 p.first / p.once, with_commas(n, "token"));
      }
    }
    figure("caching", "pattern caching") = text(planning_of(wanted_of("DilatedAttention", shortened(8192), 1)));
  }

  void time_and_memory() {
    const DilatedSpec short_segments = {.segment_lengths = {128, 512},
                                        .dilation_rates = {1, 4},
                                        .offsets = DilatedSpec::Offsets::kModulo,
                                        .combine = DilatedSpec::Combine::kMean,
                                        .equal_segments = false};
    const char* const name = "RingDilatedAttentionV2Collective";
    constexpr std::array<int64_t, 4> kLengths = {512, 1024, 2048, 4096};
    std::vector<CallWanted> wanted;
    for (const int64_t length : kLengths) wanted.push_back(wanted_of(name, shortened(length), 1, {}, short_segments));
    const std::vector<double> costs = least_of(wanted);
    for (size_t i = 0; i < kLengths.size(); ++i) {
      figure("time", with_commas(kLengths[i]) + " tokens") =
          line("%.2f ms, %.2fx", 1e3 * costs[i], costs[i] / costs[0]);
    }
    CallWanted call = wanted_of(name, shortened(8192), 1, {}, short_segments);
    call.rounds = 0;
    const double bytes = measure_threads(call).allocated;
    figure("memory", "8,192 tokens") = line("%.2f MiB, %.2f KiB a token", bytes / 1048576,
                                            bytes / 1024 / static_cast<double>(call.request.shape.q_len));
  }

  void classes() {
    constexpr int kRanks = 2;
    AttentionFactoryOptions o;
    o.attention.dim = kSeedHeads * kSeedDim;
    o.attention.heads = kSeedHeads;
    o.length = shortened(2048);
    o.ranks = kRanks;
    o.blocks.window_blocks = 1;
    const Layout layout = make_layout(LayoutKind::kContiguous, o.length, kRanks);
    for (const SeedTable& table : seed_tables()) {
      if (table.name != "classes") continue;
      for (const SeedRow& row : table.rows) {
        std::vector<double> costs;
        run_ranks(kRanks, [&](Communicator& comm) {
          std::string reason;
          MultiheadAttention attention = make_attention(row.name, o, &reason);
          const at::Tensor x = at::randn({1, layout.count(comm.rank()), o.attention.dim});
          for (int64_t round = -1; round < rounds_; ++round) {
            const double begin = thread_cpu_seconds();
            const at::Tensor y = attention->forward(x, {.comm = comm});
            torch::autograd::grad({y.sum()}, attention->parameters());
            const double cpu = over_ranks(comm, {thread_cpu_seconds() - begin}, ReduceOp::kSum)[0];
            if (comm.rank() == 0 && round >= 0) costs.push_back(cpu);
          }
          if (comm.rank() != 0) return;
          const size_t from = reason.find(": ") + 2;
          figure("classes", row.name) =
              line("%.1f ms; %s; schedule %s", 1e3 * least(costs), reason.substr(from, reason.find(';') - from),
                   std::string(to_string(attention->options().schedule)));
        });
      }
    }
  }

  LongOptions options_;
  bool long_ = false;
  int64_t shorten_ = 1, rounds_ = 5, measure_length_ = 0;
  std::string measure_path_, measure_pattern_ = "{ kind = \"full\" }";
  OurFigures ours_;
  std::vector<BenchRatio> ratios_;
};

}  // namespace

std::unique_ptr<Benchmark> make_seeds_benchmark() { return std::make_unique<SeedsBenchmark>(); }

}  // namespace annulus
