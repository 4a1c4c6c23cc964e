// `annulus bench counts`; see counts.h.
#include "benchmarks/counts.h"

#include <ATen/Parallel.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <utility>

#include "attention/pattern/pattern.h"
#include "attention/plan/layout.h"
#include "attention/proof/plans.h"
#include "benchmarks/attention_calls.h"
#include "benchmarks/benchmark.h"
#include "benchmarks/measure.h"
#include "benchmarks/small_llama.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "common/files.h"
#include "memory/peak_bytes.h"
#include "runtime/data/dataset.h"
#include "runtime/training/memory_plan.h"
#include "runtime/training/training.h"

namespace annulus {
namespace {

struct CountedMask {
  const char* name;
  const char* text;
};
constexpr std::array<CountedMask, 5> kCountedMasks = {{
    {"causal", "{ kind = \"causal\" }"},
    {"window", "{ kind = \"window\", left = 63, right = 0 }"},
    {"documents", "{ kind = \"causal\", documents = [300, 20, 192] }"},
    {"dilated", "{ kind = \"dilated\", segment_lengths = [128, 512], dilation_rates = [1, 4] }"},
    {"blocks", "{ kind = \"blocks\", map = \"local\", block = 32, window_blocks = 2, causal = true }"},
}};

// Attention forward and backward over threads, by each schedule.
void count_attention(const CountedMask& mask, ScheduleKind schedule, Counts& counts) {
  constexpr int kRanks = 4;
  constexpr int64_t kHeadDim = 16;
  PlanRequest request;
  request.shape = {1, 4, 2, 512, 512, 0};
  request.pattern = parse_pattern(mask.text, "counts");
  request.layout = LayoutKind::kZigzag;
  request.schedule = schedule;
  request.ranks = kRanks;
  int64_t messages = 0, bytes = 0, held = 0;
  const int64_t planned = plan_stats().programs_made;
  std::mutex mutex;
  run_ranks(kRanks, [&](Communicator& world) {
    AttentionCall call;
    call.request = request;
    call.comm = &world;
    call.kernel = KernelKind::kReference;  // others choose what they hold by the processor
    AttentionShape mine = request.shape;
    mine.q_len = query_layout(request).count(world.rank());
    mine.k_len = key_layout(request).count(world.rank());
    ExecutorCall run(random_inputs(mine, kHeadDim, at::kFloat), std::move(call));
    for (int step = 0; step < 2; ++step) run.run();  // the second one finds its plan
    const std::lock_guard lock(mutex);
    const AttentionStats &there = run.forward_stats(), &back = run.backward_stats();
    messages += there.messages_sent + back.messages_sent;
    bytes += there.bytes_sent + back.bytes_sent;
    held = std::max(
        {held, there.peak_kv_elements, back.peak_kv_elements + back.peak_grad_elements + back.peak_result_elements});
  });
  const std::string name =
      std::string("attention, ") + mask.name + ", " + schedule_names()[static_cast<size_t>(schedule)] + ", 4 ranks: ";
  counts[name + "messages"] = messages;
  counts[name + "bytes sent"] = bytes;
  counts[name + "most bytes of keys, values and gradients on a rank"] = 4 * held;
  counts[name + "programs planned in two steps"] = plan_stats().programs_made - planned;
}

Config small_model(bool recompute, int level) {
  Config config =
      config_of({.layers = 3, .dim = 64, .ffn = 160, .context = 256, .batch = 2, .steps = 4, .text_bytes = 1 << 16});
  config.model.recompute = recompute;
  config.optimizer.shard = level;
  return config;
}

// A step of training on one rank: what LibTorch's allocator gives to it. How often it does so is counted in fp64 with
// the reference kernel, because in fp32 oneDNN and the CPU kernel take scratch by the processor.
void count_step(bool recompute, bool exact, Counts& counts) {
  Config config = small_model(recompute, 0);
  if (exact) {
    config.model.dtype = "fp64";
    config.attention.kernel = "reference";
  }
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  run_ranks(1, [&](Communicator& world) {
    const auto bytes = std::make_shared<PeakBytes>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, bytes);
    Training training(config, world, data, at::kCPU);
    training.step();  // the optimizer takes memory for its state
    const int64_t allocations = bytes->allocations();
    training.step();
    const std::string name = std::string("training, ") + (recompute ? "recomputed" : "all kept") + ", 1 rank: ";
    if (exact) {
      counts[name + "allocations of a step in fp64"] = bytes->allocations() - allocations;
    } else {
      counts[name + "most bytes allocated"] = bytes->peak();
    }
  });
}

// A step of training over two ranks, whose state is sharded by `level`.
void count_sharded_step(int level, Counts& counts) {
  const Config config = small_model(/*recompute=*/true, level);
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  const std::string name = "training, shard level " + std::to_string(level) + ", 2 ranks: ";
  const MemoryPlan plan =
      plan_memory(config, check_training(config, 2), make_sharding(config, 2, 2), 2, /*rank=*/0, RanksAre::kProcesses);
  counts[name + "bytes planned on a rank"] = plan.total();
  run_ranks(2, [&](Communicator& world) {
    Training training(config, world, data, at::kCPU);
    training.step();
    const Communicator& state = *training.model_state().sharers();
    const CommStats before = state.stats();
    training.step();
    if (world.rank() > 0) return;
    const CommStats after = state.stats();
    counts[name + "collectives of the state"] = after.collectives - before.collectives;
    counts[name + "bytes that these send"] = after.collective_bytes_sent - before.collective_bytes_sent;
  });
}

class CountsBenchmark : public Benchmark {
 public:
  void declare(CLI::App& app) override {
    app.add_option("--write", path_, "write the counts to a file, such as benchmarks/results/counts.json")
        ->type_name("FILE");
    app.footer("Example:\n  ./annulus bench counts");
  }

  void check() override {
    if (!path_.empty()) require_output("bench", "--write " + path_, path_);
  }

  std::vector<BenchRatio> run(Communicator&, std::ostream& out) override {
    const Counts counts = count_cases();
    for (const auto& [name, count] : counts) out << line("%14lld  %s\n", count, name);
    if (!path_.empty()) write_counts(counts, path_);
    return {};
  }

 private:
  std::string path_;
};

}  // namespace

Counts count_cases() {
  const int threads = at::get_num_threads();
  at::set_num_threads(1);  // what is planned for a rank has scratch for each thread
  Counts counts;
  for (const CountedMask& mask : kCountedMasks) {
    for (const ScheduleKind schedule : {ScheduleKind::kRing, ScheduleKind::kAllGather, ScheduleKind::kGroupCast}) {
      count_attention(mask, schedule, counts);
    }
  }
  for (const bool recompute : {false, true}) {
    for (const bool exact : {false, true}) count_step(recompute, exact, counts);
  }
  for (const int level : {0, 1, 2, 3}) count_sharded_step(level, counts);
  at::set_num_threads(threads);
  return counts;
}

Counts read_counts(const std::string& path) {
  try {
    return nlohmann::json::parse(read_small_file("bench", path)).get<Counts>();
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorKind::kInput, "bench", path + " is no file of counts: " + error.what());
  }
}

void write_counts(const Counts& counts, const std::string& path) {
  write_atomically(FileSystem::real(), path, nlohmann::json(counts).dump(1) + "\n");
}

std::vector<std::string> differences(const Counts& before, const Counts& now) {
  std::vector<std::string> lines;
  for (const auto& [name, count] : now) {
    const auto found = before.find(name);
    if (found == before.end()) {
      lines.push_back(name + ": not counted before, " + std::to_string(count) + " now");
    } else if (found->second != count) {
      lines.push_back(name + ": " + std::to_string(found->second) + " before, " + std::to_string(count) + " now");
    }
  }
  for (const auto& [name, count] : before) {
    if (!now.contains(name)) lines.push_back(name + ": " + std::to_string(count) + " before, not counted now");
  }
  return lines;
}

std::unique_ptr<Benchmark> make_counts_benchmark() { return std::make_unique<CountsBenchmark>(); }

}  // namespace annulus
