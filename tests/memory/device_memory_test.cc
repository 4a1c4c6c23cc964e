// Tests that nothing is said of a GPU where the device is a CPU.
#include "memory/device_memory.h"

#include <gtest/gtest.h>

namespace annulus::device_memory_test {
namespace {

TEST(DeviceMemory, OfACpuIsNothing) {
  const c10::Device cpu(c10::kCPU);
  EXPECT_EQ(gpu_name(cpu), "");
  EXPECT_EQ(gpu_bus_id(cpu), "");
  EXPECT_EQ(device_memory(cpu).total, 0);
}

}  // namespace
}  // namespace annulus::device_memory_test
