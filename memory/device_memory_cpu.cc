// See device_memory.h. A build without CUDA computes only on the CPU.
#include "memory/device_memory.h"

namespace annulus {

DeviceMemory device_memory(c10::Device) { return {}; }
void reset_peak_memory(c10::Device) {}
void release_cached_memory(c10::Device) {}
std::string gpu_name(c10::Device) { return {}; }
std::string gpu_bus_id(c10::Device) { return {}; }

}  // namespace annulus
