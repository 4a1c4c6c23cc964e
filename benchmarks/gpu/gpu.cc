// `annulus bench gpu`: its options, its parts in turn, and how they measure and print; see gpu.h.
#include "benchmarks/gpu/gpu.h"

#include <c10/core/Event.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "benchmarks/benchmark.h"
#include "benchmarks/gpu/gpu_parts.h"
#include "benchmarks/measure.h"
#include "benchmarks/operators_seen.h"
#include "common/error.h"
#include "common/names.h"
#include "memory/device_memory.h"

namespace annulus {
namespace {

constexpr int kWarmUps = 3;
// A round repeats a short call for about this long, at most 100 times. A round begins on a device that waits for the
// host, which takes a few tens of microseconds, so that of a shorter round they would be a measurable part.
constexpr double kRoundSeconds = 0.1;

const std::vector<std::pair<std::string, void (*)(GpuBench&)>> kParts = {{"dense", bench_dense},
                                                                         {"ring", bench_ring},
                                                                         {"train", bench_training_step},
                                                                         {"patterns", bench_attention_patterns},
                                                                         {"longest", bench_longest_sequence}};

void validate_options(const GpuBenchOptions& o) {
  std::vector<std::string> parts;
  for (const auto& [name, run] : kParts) parts.push_back(name);
  for (const std::string& part : o.parts) index_of_name(part, parts, "part", "--part");
  std::vector<int64_t> lengths = o.lengths;
  lengths.push_back(o.length);
  for (const int64_t length : lengths) {
    if (length < 1) throw Error(ErrorKind::kUsage, "bench", "expected lengths of at least 1 token");
    validate(shape_of(o, length));
  }
  if (o.rounds < 1) throw Error(ErrorKind::kUsage, "bench", "expected at least 1 round");
}

// Measures the seconds that a device spends on the work started since it was made: on a GPU the time between two events
// on the current stream, on a CPU the wall time.
class DeviceClock {
 public:
  explicit DeviceClock(at::Device device) : device_(device) {
    if (device.is_cuda()) event_.emplace(event());
  }
  double stop() const {  // waits for the device
    if (!event_) return wall_seconds() - begin_;
    const c10::Event end = event();
    end.synchronize();
    return 1e-3 * event_->elapsedTime(end);
  }

 private:
  c10::Event event() const {
    c10::Event event(device_.type(), c10::EventFlag::BACKEND_DEFAULT);  // with its time
    event.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    return event;
  }

  const at::Device device_;
  const double begin_ = wall_seconds();
  std::optional<c10::Event> event_;
};

bool wanted(const GpuBenchOptions& o, const std::string& part) {
  if (!o.parts.empty()) return std::find(o.parts.begin(), o.parts.end(), part) != o.parts.end();
  return !o.config.empty() || (part != "train" && part != "longest");
}

}  // namespace

AttentionShape shape_of(const GpuBenchOptions& o, int64_t length) {
  return {1, o.heads, o.kv_heads, length, length, 0};
}

void measure_in_turn(std::vector<TimedSide>& sides, at::Device device, int64_t rounds) {
  std::vector<int64_t> repeats;
  for (TimedSide& side : sides) {
    const OperatorsSeen seen;
    double once = 0;
    for (int i = 0; i < kWarmUps; ++i) {
      const DeviceClock clock(device);
      side.call();
      once = clock.stop();
    }
    const double calls = once > 0 ? kRoundSeconds / once : 1;
    repeats.push_back(std::clamp<int64_t>(static_cast<int64_t>(std::ceil(calls)), 1, 100));
    side.computed = seen.names();
  }
  for (int64_t round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < sides.size(); ++i) {
      const size_t s = round % 2 ? sides.size() - 1 - i : i;  // so that no side is always the first
      const DeviceClock clock(device);
      for (int64_t n = 0; n < repeats[s]; ++n) sides[s].call();
      sides[s].seconds.push_back(clock.stop() / static_cast<double>(repeats[s]));
    }
  }
  for (TimedSide& side : sides) {
    const OperatorsSeen seen;
    side.call();
    side.computed.merge(seen.names());
  }
}

void GpuBench::end_figures(const std::string& part) {
  if (figures.empty() && reported == result.ratios.size()) return;
  nlohmann::ordered_json json = {{"bench", "gpu"},
                                 {"part", part},
                                 {"device", facts.name},
                                 {"versions", facts.versions},
                                 {"highest_mhz", facts.highest_mhz},
                                 {"figures", std::exchange(figures, nlohmann::ordered_json::array())},
                                 {"ratios", nlohmann::ordered_json::array()}};
  for (; reported < result.ratios.size(); ++reported) json["ratios"].push_back(json_of(result.ratios[reported]));
  out << json.dump() << std::endl;
}

GpuBenchOptions gpu_bench_options(at::Device device) {
  GpuBenchOptions o;
  o.device = device;
  if (device.is_cuda()) {
    o.lengths = {8192, 16384, 32768};
    o.length = 32768;
    o.heads = 64, o.kv_heads = 8, o.head_dim = 128;
  } else {
    o.lengths = {64, 200};
    o.length = 256;
    o.heads = 4, o.kv_heads = 2, o.head_dim = 16;
    o.type = at::kFloat;
    o.kernel = KernelKind::kEfficient;  // composed of the operator that is the baseline
    o.rounds = 2;
  }
  return o;
}

GpuBenchResult run_gpu_bench(const GpuBenchOptions& options, std::ostream& out) {
  validate_options(options);
  if (wanted(options, "train") || wanted(options, "longest")) check_training_part(options);
  GpuBenchResult result;
  GpuBench bench{options, out, result};
  out << bench.facts.name;
  if (bench.facts.multiprocessors > 0) {
    out << line(", %lld multiprocessors, at most %lld MHz; %s", bench.facts.multiprocessors, bench.facts.highest_mhz,
                bench.facts.versions);
  }
  out << line("\nTimes are the least of %lld interleaved rounds, by the device's clock.\n\n", options.rounds)
      << std::flush;
  for (const auto& [name, run] : kParts) {
    if (!wanted(options, name)) continue;
    run(bench);
    bench.end_figures(name);
    release_cached_memory(options.device);
  }
  return result;
}

namespace {

class GpuBenchmark : public Benchmark {
 public:
  void declare(CLI::App& app) override {
    app_ = &app;
    add(app, "--part", options_.parts,
        "measure only this: dense, ring, train, patterns or longest; default: all, but "
        "train and longest only with --config");
    add(app, "--length", options_.length, "tokens; dense by default: 8192, 16384 and 32768");
    add(app, "--heads", options_.heads, "query heads");
    add(app, "--kv-heads", options_.kv_heads, "kv heads");
    add(app, "--head-dim", options_.head_dim, "head size");
    add(app, "--kernel", kernel_,
        "the executor's kernel (default: auto); where it computes with another operator than the baseline, figures are "
        "marked as invalid");
    add(app, "--ranks", options_.ranks, "ranks of the ring");
    add(app, "--rounds,--repeats", options_.rounds, "rounds that count");
    add(app, "--config", options_.config, "the TOML file of the model for train and longest")->type_name("FILE");
    add(app, "--set", options_.sets, "override one key of --config, as --set model.layers=4")->type_name("KEY=VALUE");
    app.add_option("--seconds", options_.longest_seconds,
                   "longest tries no length that would take it beyond this many seconds")
        ->check(CLI::PositiveNumber);
    add(app, "--device", device_, "cuda, or cpu: tiny sizes, which only test the program")
        ->check(CLI::IsMember({"cuda", "cpu"}));
    app.footer(
        "Examples:\n  ./annulus bench gpu --json gpu.json\n"
        "  ./annulus bench gpu --part dense --length 16384 --heads 32 --kv-heads 32");
  }

  void check() override {
    // The defaults are those of a GPU; a CPU has its own for what was not given.
    const GpuBenchOptions usual =
        gpu_bench_options(device_ == "cuda" ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU));
    const auto unless_given = [&](const char* name, auto member) {
      if (app_->count(name) == 0) options_.*member = usual.*member;
    };
    unless_given("--length", &GpuBenchOptions::length);
    unless_given("--heads", &GpuBenchOptions::heads);
    unless_given("--kv-heads", &GpuBenchOptions::kv_heads);
    unless_given("--head-dim", &GpuBenchOptions::head_dim);
    unless_given("--rounds", &GpuBenchOptions::rounds);
    options_.device = usual.device;
    options_.type = usual.type;
    options_.lengths = app_->count("--length") > 0 ? std::vector<int64_t>{options_.length} : usual.lengths;
    options_.kernel = kernel_.empty() ? usual.kernel : parse_kernel(kernel_, "--kernel");
  }

  std::string device() const override { return device_; }

  std::vector<BenchRatio> run(Communicator&, std::ostream& out) override {
    GpuBenchResult result = run_gpu_bench(options_, out);
    wrong_ = result.wrong;
    return std::move(result.ratios);
  }

  std::string wrong() const override { return wrong_; }

 private:
  GpuBenchOptions options_ = gpu_bench_options(at::Device(at::kCUDA, 0));
  const CLI::App* app_ = nullptr;
  std::string device_ = "cuda", kernel_, wrong_;
};

}  // namespace

std::unique_ptr<Benchmark> make_gpu_benchmark() { return std::make_unique<GpuBenchmark>(); }

}  // namespace annulus
