// Implements device.h for a build without CUDA, which measures on the CPU only.
#include "benchmarks/gpu/device.h"
#include "benchmarks/gpu/wall_device.h"

namespace annulus {

std::unique_ptr<DeviceClock> make_device_clock(at::Device) { return std::make_unique<WallClock>(); }
DeviceFacts device_facts(at::Device) { return kCpuFacts; }

}  // namespace annulus
