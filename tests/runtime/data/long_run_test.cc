// Tests that the memory of a process does not grow over ten thousand steps of reading.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "attention/pattern/span.h"
#include "common/error.h"
#include "runtime/data/batch_reader.h"

namespace annulus::long_run_test {
namespace {

// The process's own (anonymous) resident memory, without pages of mapped files, which the system can reclaim.
int64_t anonymous_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kilobytes = 0;
    if (word == "RssAnon:" && status >> kilobytes) return kilobytes * 1024;
  }
  throw Error(ErrorKind::kInternal, "test", "/proc/self/status says no RssAnon");
}

TEST(LongRun, ReadingTakesConstantMemory) {
  const std::string root = ::testing::TempDir() + "/long";
  std::filesystem::remove_all(root);
  std::filesystem::create_directories(root);
  std::vector<SourceConfig> sources;
  for (const uint32_t source : {0U, 1U}) {
    std::vector<uint16_t> tokens;
    uint32_t state = 7 + source;
    for (int64_t i = 0; i < 20'000'000; ++i) {
      state = state * 1664525 + 1013904223;
      tokens.push_back(static_cast<uint16_t>((state >> 20) < 8 ? 0 : state >> 16));
    }
    const std::string path = root + "/" + std::to_string(source) + ".bin";
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(tokens.data()), static_cast<std::streamsize>(2 * tokens.size()));
    sources.push_back({.files = {path}, .format = "nanogpt", .end = 0, .weight = 1.0 + source});
  }
  DataConfig d;
  d.train = sources;
  d.context = 2048;
  d.batch = 4;
  d.packing = "best-fit";
  d.documents = true;
  const Dataset data(d, 1);
  const BatchShape shape{.rows = 4, .own_rows = 4, .positions = {Span::range(0, 2048)}, .restart = true};
  std::vector<std::vector<int64_t>> memory(3, std::vector<int64_t>(static_cast<size_t>(shape.values())));
  BatchReader reader(data, shape, 1, 0, 10'000, {memory[0].data(), memory[1].data(), memory[2].data()});
  int64_t before = 0;
  for (int64_t step = 0; step < 10'000; ++step) {
    reader.take();
    if (step == 500) before = anonymous_bytes();
  }
  EXPECT_GT(data.epochs(0, 10'000), 1) << "at least one epoch has ended";
  EXPECT_LT(anonymous_bytes() - before, 2 << 20);
}

}  // namespace
}  // namespace annulus::long_run_test
