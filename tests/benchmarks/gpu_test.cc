// Tests benchmarks/gpu/gpu.h in its tiny version on the CPU: what is measured and written, not how long it takes.
#include "benchmarks/gpu/gpu.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <utility>

#include "common/error.h"
#include "tests/common/exactness.h"

namespace annulus::gpu_test {
namespace {

// Returns the names of the figures of each part, read from the lines of JSON; each figure must be a number.
std::map<std::string, std::set<std::string>> figures_in(const std::string& text) {
  std::map<std::string, std::set<std::string>> parts;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("{")) continue;
    const nlohmann::json json = nlohmann::json::parse(line);
    EXPECT_EQ(json.at("bench"), "gpu");
    std::set<std::string>& names = parts[json.at("part")];
    for (const auto& figure : json.at("figures")) {
      EXPECT_TRUE(figure.at("value").is_number() && figure.at("median").is_number()) << line;
      EXPECT_TRUE(names.insert(figure.at("name")).second) << line;
    }
  }
  return parts;
}

std::string model_file(int lines = 100) {
  const std::string path = std::string(std::getenv("TEST_TMPDIR")) + "/tiny.toml";
  std::ofstream(path) << "[run]\nsteps = 1\n[data]\ntrain = [\"" << path << ".text\"]\nbatch = 1\n[model]\nlayers = 1\n"
                      << "dim = 16\nheads = 2\n[optimizer]\nlr = 1e-3\n";
  std::ofstream text(path + ".text");
  for (int i = 0; i < lines; ++i) text << "a text of a thousand bytes\n";
  return path;
}

std::set<std::string> ratios_in(const std::string& text) {
  std::set<std::string> names;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("{")) continue;
    const nlohmann::json json = nlohmann::json::parse(line);
    for (const auto& ratio : json.at("ratios")) {
      EXPECT_TRUE(names.insert(ratio.at("name")).second) << line;
    }
  }
  return names;
}

TEST(GpuBench, TinyVersionMeasuresAllOfAttention) {
  std::ostringstream out;
  const std::vector<BenchRatio> ratios = run_gpu_bench(gpu_bench_options(at::kCPU), out).ratios;
  std::set<std::string> names;
  for (const BenchRatio& r : ratios) {
    EXPECT_TRUE(names.insert(r.name).second) << r.name;
    EXPECT_TRUE(std::isfinite(r.ratio) && r.ratio > 0) << r.name;
    EXPECT_FALSE(r.goal) << r.name;  // goals apply to GPUs only
  }
  // Two directions for each of two lengths; two for the ring, and both together; two for each of three patterns.
  EXPECT_EQ(names.size(), 4u + 3u + 6u);
  // Each length and pattern has a line of its own, so a run that is cut off keeps what it has measured.
  EXPECT_EQ(ratios_in(out.str()), names);
  const std::string text = out.str();
  EXPECT_LT(text.find("{\"bench\""), text.find("       200  forward")) << text;
  const auto figures = figures_in(out.str());
  ASSERT_EQ(figures.size(), 3u) << out.str();
  EXPECT_EQ(figures.at("dense").size(), 8u);
  EXPECT_EQ(figures.at("ring").size(), 4u);
  EXPECT_EQ(figures.at("patterns").size(), 21u);
}

// Each figure and ratio, by its name, from the lines of JSON.
std::map<std::string, nlohmann::json> entries_in(const std::string& text) {
  std::map<std::string, nlohmann::json> entries;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("{")) continue;
    const nlohmann::json json = nlohmann::json::parse(line);
    for (const char* const kind : {"figures", "ratios"}) {
      for (const auto& entry : json.at(kind)) entries[entry.at("name")] = entry;
    }
  }
  return entries;
}

TEST(GpuBench, EachFigureNamesTheOperatorThatComputedIt) {
  std::ostringstream out;
  GpuBenchOptions options = gpu_bench_options(at::kCPU);
  const std::vector<BenchRatio> ratios = run_gpu_bench(options, out).ratios;
  for (const auto& [name, entry] : entries_in(out.str())) {
    EXPECT_FALSE(entry.contains("invalid")) << entry;
    if (name.starts_with("gpu/")) {
      EXPECT_NE(entry.at("settings").get<std::string>().find(", by "), std::string::npos) << entry;
    } else if (name.find("off the oracle") == std::string::npos) {
      EXPECT_TRUE(entry.contains("operators")) << entry;
    }
  }
  EXPECT_EQ(entries_in(out.str()).at("dense backward 200").at("operators"), "cpu_flash");
  EXPECT_EQ(entries_in(out.str()).at("ring forward").at("operators"), "cpu_flash");
  EXPECT_EQ(out.str().find("INVALID"), std::string::npos) << out.str();
  // So do the tables.
  std::istringstream lines(out.str());
  int rows = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("{") || (line.find(" forward ") == line.npos && line.find(" backward ") == line.npos))
      continue;
    EXPECT_TRUE(line.find("cpu_flash") != line.npos || line.find("no operator") != line.npos) << line;
    ++rows;
  }
  EXPECT_EQ(rows, 4 + 2 + 6);
}

TEST(GpuBench, FiguresOfAnotherOperatorThanTheBaselinesAreInvalid) {
  std::ostringstream out;
  GpuBenchOptions options = gpu_bench_options(at::kCPU);
  options.kernel = KernelKind::kCpu;  // the baseline of dense is LibTorch's operator
  options.parts = {"dense", "ring"};
  options.lengths = {64};
  const std::vector<BenchRatio> ratios = run_gpu_bench(options, out).ratios;
  ASSERT_EQ(ratios.size(), 5u);
  const std::string why = "the executor computed by cpu, the baseline by cpu_flash";
  for (const BenchRatio& r : ratios) {
    const bool dense = r.name.starts_with("gpu/dense");
    EXPECT_EQ(r.invalid, dense ? why : "") << r.name;  // a ring and its one call are computed by the same kernel
    EXPECT_EQ(r.met(), !dense) << r.name;
  }
  const auto entries = entries_in(out.str());
  EXPECT_EQ(entries.at("dense forward 64").at("invalid"), why);
  EXPECT_EQ(entries.at("dense forward 64").at("operators"), "cpu");
  EXPECT_EQ(entries.at("dense forward 64, operator").at("operators"), "cpu_flash");
  EXPECT_EQ(entries.at("gpu/dense backward 64").at("invalid"), why);
  EXPECT_NE(out.str().find("INVALID: " + why), std::string::npos) << out.str();
}

// With the dense reference no operator computes, so its figures are none of an operator.
TEST(GpuBench, FiguresWithoutAnOperatorAreInvalid) {
  std::ostringstream out;
  GpuBenchOptions options = gpu_bench_options(at::kCPU);
  options.kernel = KernelKind::kReference;
  options.parts = {"ring", "patterns"};
  options.length = 64;
  for (const BenchRatio& r : run_gpu_bench(options, out).ratios) {
    EXPECT_NE(r.invalid.find("no operator"), std::string::npos) << r.name << ": " << r.invalid;
  }
}

// 6 FLOPs a token and weight of a matrix, and 12 a pair and element of a head, of which 4 are the forward's.
TEST(GpuBench, TrainingCountsFlopsOfThePairsThatCount) {
  GpuBenchOptions options = gpu_bench_options(at::kCPU);
  options.parts = {"train"};
  options.config = model_file();
  options.length = 256;
  options.rounds = 1;
  options.peak_flops = 1e12;
  const double weights = 2 * (16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 40) + 16 * 300;
  const double causal = 256 * 257 / 2, window = causal - (256 - 10) * (256 - 10 + 1) / 2;
  for (const bool windowed : {false, true}) {
    options.sets = {"model.layers=2", "model.kv_heads=1", "model.ffn=40", "model.vocab=300"};
    if (windowed) {
      options.sets.push_back(R"(model.pattern=[{ kind = "causal" }, { kind = "window", left = 9, right = 0 }])");
    }
    std::ostringstream out;
    run_gpu_bench(options, out);
    const auto entries = entries_in(out.str());
    const double seconds = entries.at("training step").at("value");
    const double pairs = 2 * (causal + (windowed ? window : causal));  // 2 heads
    const double flops = 256 * 6 * weights + 12 * 8 * pairs;
    const auto value = [&](const char* name) { return entries.at(name).at("value").get<double>(); };
    const double allowed = testing::kExact * flops;
    EXPECT_NEAR(1e12 * value("training") * seconds, flops, allowed) << out.str();
    EXPECT_NEAR(value("training, MFU") * seconds * 1e12, flops, allowed);
    EXPECT_NEAR(value("training, tokens per second") * seconds, 256, testing::kExact * 256);
    EXPECT_EQ(entries.at("training step").at("operators"), "cpu");
  }
}

TEST(GpuBench, MemoryIsPlannedByPurpose) {
  GpuBenchOptions options = gpu_bench_options(at::kCPU);
  options.parts = {"train", "longest"};
  options.config = model_file();
  options.sets = {"model.layers=4"};
  options.length = options.longest_length = 512;
  options.rounds = 1;
  std::ostringstream out;
  run_gpu_bench(options, out);
  const auto entries = entries_in(out.str());
  const auto gib = [&](const std::string& name) { return entries.at(name).at("value").get<double>(); };
  for (const std::string step : {"training", "longest 512"}) {
    double sum = 0;
    for (const char* const kind : {"weights", "gradients", "optimizer", "activations", "working memory"}) {
      EXPECT_GT(gib(step + ", planned " + kind), 0) << kind;
      sum += gib(step + ", planned " + kind);
    }
    EXPECT_NEAR(sum, gib(step + ", planned memory"), testing::kExact * sum);
    EXPECT_FALSE(entries.contains(step + ", memory of the device"));  // a CPU's allocator counts nothing
  }
  EXPECT_EQ(gib("training, planned weights"), gib("longest 512, planned weights"));
  // The longest row is trained with recomputed activations.
  EXPECT_LT(gib("longest 512, planned activations"), gib("training, planned activations"));
}

// LibTorch's allocator, until its tensors take more than a limit: then it fails as it does where memory ends. A limit
// of the process would also refuse the little memory that other libraries take, which fail in other words.
class LimitedAllocator : public c10::Allocator {
 public:
  // It is never destroyed, because tensors may outlive the limit.
  static LimitedAllocator& one() {
    static LimitedAllocator* const one = new LimitedAllocator;
    return *one;
  }

  c10::DataPtr allocate(size_t bytes) override {
    const std::lock_guard lock(mutex_);
    if (held_ + bytes > most_) return from_->allocate(size_t{1} << 50);
    void* const memory = from_->raw_allocate(bytes);
    if (memory != nullptr) sizes_[memory] = bytes;
    held_ += bytes;
    return {memory, memory, &release, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { from_->copy_data(to, from, bytes); }

 private:
  friend class LittleMemory;

  static void release(void* memory) {
    if (memory == nullptr) return;
    LimitedAllocator& it = one();
    const std::lock_guard lock(it.mutex_);
    const auto taken = it.sizes_.find(memory);
    it.held_ -= taken->second;
    it.sizes_.erase(taken);
    it.from_->raw_deallocate(memory);
  }

  c10::Allocator* const from_ = c10::GetCPUAllocator();
  std::mutex mutex_;
  size_t most_ = 0, held_ = 0;
  std::map<void*, size_t> sizes_;
};

// While it exists, LibTorch's tensors may take only so many bytes.
class LittleMemory {
 public:
  explicit LittleMemory(size_t most) {
    LimitedAllocator::one().most_ = most;
    c10::SetCPUAllocator(&LimitedAllocator::one(), kPriority);
  }
  ~LittleMemory() { c10::SetCPUAllocator(LimitedAllocator::one().from_, kPriority); }
  LittleMemory(const LittleMemory&) = delete;
  LittleMemory& operator=(const LittleMemory&) = delete;

 private:
  static constexpr uint8_t kPriority = 255;
};

// Too little memory ends the search.
TEST(GpuBench, LongestRowSearchEndsWhenMemoryDoes) {
  GpuBenchOptions options = gpu_bench_options(at::kCPU);
  options.parts = {"longest"};
  options.config = model_file(1 << 16);
  // Tiles of a layer take the same for rows of any length; what grows with the row are the layer's input and output.
  options.sets = {"model.dim=2048", "model.head_dim=8", "model.ffn=8"};
  options.length = 128;
  std::ostringstream out;
  {
    const LittleMemory limit(size_t{64} << 20);
    run_gpu_bench(options, out);
  }
  const auto entries = entries_in(out.str());
  const int64_t longest = entries.at("longest row trained").at("value");
  EXPECT_TRUE(entries.contains("longest " + std::to_string(longest))) << out.str();
  EXPECT_GE(longest, 128) << out.str();
  EXPECT_LT(longest, 8192) << out.str();
  EXPECT_NE(out.str().find("out of memory"), std::string::npos) << out.str();
}

TEST(GpuBench, TrainingPartsNeedAModelAndStopAtTheTextLength) {
  GpuBenchOptions options = gpu_bench_options(at::kCPU);
  options.parts = {"train", "longest"};
  options.length = 512;
  std::ostringstream out;
  EXPECT_THROW(run_gpu_bench(options, out), Error);
  options.config = model_file();
  options.peak_flops = 1e12;
  const std::vector<BenchRatio> ratios = run_gpu_bench(options, out).ratios;
  ASSERT_EQ(ratios.size(), 1u);
  EXPECT_EQ(ratios[0].goal, 1.0);
  const auto figures = figures_in(out.str());
  EXPECT_TRUE(figures.at("train").contains("training, MFU")) << out.str();
  // The text has 2,700 bytes: rows of 2,048 can be drawn, but not rows of 4,096.
  EXPECT_TRUE(figures.at("longest").contains("longest 2048")) << out.str();
  // After a row that failed, a longer one than 2,048 that is planned to fit is tried.
  options.parts = {"longest"};
  const double planned = entries_in(out.str()).at("longest 2048, planned memory").at("value");
  options.longest_memory = static_cast<int64_t>(1.03 * planned * (int64_t{1} << 30));
  std::ostringstream closer;
  run_gpu_bench(options, closer);
  EXPECT_GT(entries_in(closer.str()).at("longest row trained").at("value"), 2048) << closer.str();
  EXPECT_FALSE(figures.at("longest").contains("longest 4096")) << out.str();
}

TEST(GpuBench, LongestRowSearchStopsAtItsTimeLimit) {
  GpuBenchOptions options = gpu_bench_options(at::kCPU);
  options.parts = {"longest"};
  options.config = model_file();
  options.length = 128;
  options.longest_seconds = 1e-6;  // the first length is always tried
  std::ostringstream out;
  run_gpu_bench(options, out);
  EXPECT_TRUE(figures_in(out.str()).at("longest").contains("longest 128"));
  EXPECT_FALSE(figures_in(out.str()).at("longest").contains("longest 256"));
  EXPECT_NE(out.str().find("256  not tried"), std::string::npos) << out.str();
}

// Where the memory is known, rows that are shorter than what is planned to fit are left out, after the first two.
TEST(GpuBench, LongestRowSearchGoesToWhatIsPlannedToFit) {
  GpuBenchOptions options = gpu_bench_options(at::kCPU);
  options.parts = {"longest"};
  options.config = model_file();
  options.length = 64;
  options.longest_length = 1024;
  const auto tried = [&] {
    std::ostringstream out;
    run_gpu_bench(options, out);
    std::set<int64_t> lengths;
    const auto figures = figures_in(out.str());
    for (const std::string& name : figures.at("longest")) {
      if (name.find(',') == std::string::npos && name != "longest row trained")
        lengths.insert(std::stoll(name.substr(8)));
    }
    return std::pair{lengths, entries_in(out.str())};
  };
  const auto [all, entries] = tried();
  EXPECT_EQ(all, (std::set<int64_t>{64, 128, 192, 256, 384, 512, 768, 1024}));
  options.longest_memory =
      static_cast<int64_t>(entries.at("longest 512, planned memory").at("value").get<double>() * (int64_t{1} << 30)) +
      1;
  const auto [few, found] = tried();
  // After 512, rows that are planned to take more are tried one after the other, because plans may be too high.
  EXPECT_EQ(few, (std::set<int64_t>{64, 128, 512, 768, 1024}));
  EXPECT_EQ(found.at("longest row trained").at("value"), 1024);
}

TEST(GpuBench, RefusesInvalidOptions) {
  std::ostringstream out;
  GpuBenchOptions options = gpu_bench_options(at::kCPU);
  options.parts = {"dnse"};
  EXPECT_THROW(run_gpu_bench(options, out), Error);
  options = gpu_bench_options(at::kCPU);
  options.kv_heads = 3;
  EXPECT_THROW(run_gpu_bench(options, out), Error);
  options = gpu_bench_options(at::kCPU);
  options.rounds = 0;
  EXPECT_THROW(run_gpu_bench(options, out), Error);
  EXPECT_EQ(out.str(), "");
}

}  // namespace
}  // namespace annulus::gpu_test
