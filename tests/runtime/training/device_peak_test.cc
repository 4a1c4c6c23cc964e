// Tests that peak rates are known only for devices with certain exact names.
#include "runtime/training/device_peak.h"

#include <gtest/gtest.h>

namespace annulus::device_peak_test {
namespace {

TEST(DevicePeak, IsKnownByDeviceAndDtype) {
  EXPECT_EQ(peak_flops("NVIDIA H200", at::kBFloat16, false), 989.5e12);
  EXPECT_EQ(peak_flops("NVIDIA H200", at::kFloat, true), 494.5e12);
  EXPECT_EQ(peak_flops("NVIDIA H200", at::kFloat, false), 67e12);
  EXPECT_EQ(peak_flops("NVIDIA A100-SXM4-80GB", at::kBFloat16, true), 312e12);
}

TEST(DevicePeak, IsEmptyForUnknownDevices) {
  for (const char* name : {"", "NVIDIA H200 MIG 1g.18gb", "NVIDIA H100", "NVIDIA GeForce RTX 4090 Laptop GPU",
                           "NVIDIA A10G", "NVIDIA H300"}) {
    EXPECT_FALSE(peak_flops(name, at::kBFloat16, false)) << name;
  }
  EXPECT_FALSE(peak_flops("NVIDIA H200", at::kDouble, false));
}

TEST(DevicePeak, CpuHasNoGpuName) { EXPECT_EQ(gpu_name(at::kCPU), ""); }

}  // namespace
}  // namespace annulus::device_peak_test
