// See device_memory.h: a build without CUDA computes on the CPU alone.
#include "memory/device_memory.h"

namespace annulus {

DeviceMemory device_memory(c10::Device) { return {}; }
void reset_peak_memory(c10::Device) {}
void release_cached_memory(c10::Device) {}

}  // namespace annulus
