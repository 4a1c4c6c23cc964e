// Tests what is read from the NVIDIA driver, with fake_driver.cc in its place.
#include "launcher/topology/nvidia_driver.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace annulus::nvidia_driver_test {
namespace {

const char* const kFake = "tests/launcher/libfake_driver.so";

using Access = std::vector<std::vector<bool>>;

TEST(NvidiaDriver, ReadsPeerAccess) {
  EXPECT_EQ(peer_access(kFake), (Access{{true, true, false}, {true, true, true}, {false, true, true}}));
  setenv("FAKE_DRIVER", "old", 1);
  EXPECT_EQ(peer_access(kFake), Access());
  unsetenv("FAKE_DRIVER");
  EXPECT_EQ(peer_access("no such library"), Access());
}

TEST(NvidiaDriver, ReadsCudaVersionOfTheDriver) {
  EXPECT_EQ(cuda_of_driver(kFake), "12.4");
  EXPECT_EQ(cuda_of_driver("no such library"), "");
  EXPECT_EQ(cuda_version_text(13000), "13.0");
}

TEST(NvidiaDriver, ReadsVersionAndGpusOfTheKernelDriver) {
  const std::filesystem::path root = std::filesystem::path(::testing::TempDir()) / "a driver";
  EXPECT_EQ(driver_version(root), "");
  EXPECT_EQ(gpus_of_driver(root), -1);
  const std::filesystem::path folder = root / "proc/driver/nvidia";
  std::filesystem::create_directories(folder / "gpus/0000:1b:00.0");
  std::filesystem::create_directories(folder / "gpus/0000:1c:00.0");
  EXPECT_EQ(gpus_of_driver(root), 2);
  for (const char* line : {"NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:12:27 UTC 2025",
                           "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"}) {
    std::ofstream(folder / "version") << line << "\n";
    EXPECT_EQ(driver_version(root), "580.65.06");
  }
}

}  // namespace
}  // namespace annulus::nvidia_driver_test
