// `annulus bench gpu`: its options, its parts in turn, and how they measure and print; see gpu.h.
#include "benchmarks/gpu/gpu.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "benchmarks/gpu/gpu_parts.h"
#include "benchmarks/gpu/operators_seen.h"
#include "benchmarks/measure.h"
#include "common/error.h"
#include "common/names.h"
#include "memory/device_memory.h"

namespace annulus {
namespace {

constexpr int kWarmUps = 3;
// A round repeats a short call for about this long, at most 100 times. A round begins on a device that waits for the
// host, which takes a few tens of microseconds, so that of a shorter round they would be a measurable part.
constexpr double kRoundSeconds = 0.1;

void validate_options(const GpuBenchOptions& o) {
  for (const std::string& part : o.parts) index_of_name(part, gpu_bench_parts(), "part", "--part");
  std::vector<int64_t> lengths = o.lengths;
  lengths.push_back(o.length);
  for (const int64_t length : lengths) {
    if (length < 1) throw Error(ErrorKind::kUsage, "bench", "expected lengths of at least 1 token");
    validate(shape_of(o, length));
  }
  if (o.rounds < 1) throw Error(ErrorKind::kUsage, "bench", "expected at least 1 round");
}

bool wanted(const GpuBenchOptions& o, const std::string& part) {
  if (!o.parts.empty()) return std::find(o.parts.begin(), o.parts.end(), part) != o.parts.end();
  return !o.config.empty() || (part != "train" && part != "longest");
}

}  // namespace

AttentionShape shape_of(const GpuBenchOptions& o, int64_t length) {
  return {1, o.heads, o.kv_heads, length, length, 0};
}

double least(const std::vector<double>& costs) { return *std::min_element(costs.begin(), costs.end()); }

void measure_in_turn(std::vector<TimedSide>& sides, at::Device device, int64_t rounds) {
  const std::unique_ptr<DeviceClock> clock = make_device_clock(device);
  std::vector<int64_t> repeats;
  for (TimedSide& side : sides) {
    const OperatorsSeen seen;
    double once = 0;
    for (int i = 0; i < kWarmUps; ++i) {
      clock->start();
      side.call();
      once = clock->stop();
    }
    const double calls = once > 0 ? kRoundSeconds / once : 1;
    repeats.push_back(std::clamp<int64_t>(static_cast<int64_t>(std::ceil(calls)), 1, 100));
    side.calls = seen.calls();
  }
  for (int64_t round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < sides.size(); ++i) {
      const size_t s = round % 2 ? sides.size() - 1 - i : i;  // so that no side is always the first
      clock->start();
      for (int64_t n = 0; n < repeats[s]; ++n) sides[s].call();
      sides[s].seconds.push_back(clock->stop() / static_cast<double>(repeats[s]));
    }
  }
  for (TimedSide& side : sides) {
    const OperatorsSeen seen;
    side.call();
    for (const auto& [name, calls] : seen.calls()) side.calls[name] += calls;
    side.operators = text_of_operators(side.calls);
  }
}

void GpuBench::end_figures(const std::string& part) {
  if (figures.empty() && reported == ratios.size()) return;
  nlohmann::ordered_json json = {{"bench", "gpu"},
                                 {"part", part},
                                 {"device", facts.name},
                                 {"versions", facts.versions},
                                 {"highest_mhz", facts.highest_mhz},
                                 {"figures", nlohmann::ordered_json::array()},
                                 {"ratios", nlohmann::ordered_json::array()}};
  for (const GpuFigure& f : figures) {
    json["figures"].push_back({{"name", f.name}, {"unit", f.unit}, {"value", f.value}, {"median", f.median}});
    if (!f.operators.empty()) json["figures"].back()["operators"] = f.operators;
    if (!f.invalid.empty()) json["figures"].back()["invalid"] = f.invalid;
  }
  for (; reported < ratios.size(); ++reported) json["ratios"].push_back(json_of(ratios[reported]));
  out << json.dump() << std::endl;
  figures.clear();
}

const std::vector<std::string>& gpu_bench_parts() {
  static const std::vector<std::string> parts = {"dense", "ring", "train", "patterns", "longest"};
  return parts;
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

std::vector<BenchRatio> run_gpu_bench(const GpuBenchOptions& options, std::ostream& out,
                                      const std::function<void(const std::vector<BenchRatio>&)>& keep) {
  validate_options(options);
  if (wanted(options, "train") || wanted(options, "longest")) check_training_part(options);
  GpuBench bench{options, device_facts(options.device), out, {}, {}, 0, {}};
  out << bench.facts.name;
  if (bench.facts.multiprocessors > 0) {
    out << line(", %lld multiprocessors, at most %lld MHz; %s", static_cast<long long>(bench.facts.multiprocessors),
                static_cast<long long>(bench.facts.highest_mhz), bench.facts.versions.c_str());
  }
  out << line("\nTimes are the least of %lld interleaved rounds, by the device's clock.\n\n",
              static_cast<long long>(options.rounds));
  out.flush();
  const std::vector<std::pair<std::string, void (*)(GpuBench&)>> parts = {{"dense", bench_dense},
                                                                          {"ring", bench_ring},
                                                                          {"train", bench_training_step},
                                                                          {"patterns", bench_attention_patterns},
                                                                          {"longest", bench_longest_sequence}};
  for (const auto& [name, run] : parts) {
    if (!wanted(options, name)) continue;
    run(bench);
    bench.end_figures(name);
    release_cached_memory(options.device);
  }
  if (keep) keep(bench.ratios);
  if (!bench.wrong.empty()) {
    std::string text;
    for (const std::string& each : bench.wrong) text += (text.empty() ? "" : "; ") + each;
    throw Error(ErrorKind::kInternal, "bench", text);
  }
  return std::move(bench.ratios);
}

}  // namespace annulus
