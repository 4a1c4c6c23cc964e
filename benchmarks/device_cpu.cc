// See device.h: a build without CUDA measures on the CPU alone.
#include "benchmarks/device.h"
#include "benchmarks/wall_device.h"

namespace annulus {

std::unique_ptr<DeviceClock> make_device_clock(at::Device) { return std::make_unique<WallClock>(); }
DeviceFacts device_facts(at::Device) { return kCpuFacts; }

}  // namespace annulus
