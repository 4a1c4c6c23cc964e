// Tests of runtime/run/meters.h.
#include "runtime/run/meters.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <vector>

namespace annulus::meters_test {
namespace {

TEST(Meters, ResidentBytesFollowWhatIsTouched) {
  const int64_t before = resident_bytes();
  EXPECT_GT(before, 0);
  const std::vector<char> touched(64 << 20, 1);
  EXPECT_GE(resident_bytes(), before + (60 << 20) * touched[0]);
}

TEST(Meters, ReadsTheKernelsFiles) {
  const std::string root = ::testing::TempDir() + "/meters";
  EXPECT_EQ(resident_bytes(root), 0) << "unknown";
  EXPECT_EQ(processor_mhz(3, root), 0);
  const std::string cpu = root + "/sys/devices/system/cpu/cpu3/cpufreq";
  std::filesystem::create_directories(root + "/proc/self");
  std::filesystem::create_directories(cpu);
  std::ofstream(root + "/proc/self/statm") << "1000 200 30 4 0 500 0\n";
  std::ofstream(cpu + "/scaling_cur_freq") << "2596138\n";
  EXPECT_EQ(resident_bytes(root), 200 * sysconf(_SC_PAGESIZE));
  EXPECT_DOUBLE_EQ(processor_mhz(3, root), 2596.138);
  EXPECT_EQ(processor_mhz(2, root), 0);
}

TEST(Meters, AsksTheDriverForTheMultiprocessorsOfAGpu) {
  const std::string library = "tests/runtime/run/libfake_clock.so";
  EXPECT_EQ(gpu_mhz("00000000:1B:00.0", library), 1980);
  EXPECT_EQ(gpu_mhz("00000000:1C:00.0", library), 0);
  EXPECT_EQ(gpu_mhz("00000000:1B:00.0", "no such library"), 0);
}

}  // namespace
}  // namespace annulus::meters_test
