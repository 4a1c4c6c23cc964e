// Implements gpu_name and gpu_bus_id of device_peak.h for a build without CUDA.
#include "runtime/training/device_peak.h"

namespace annulus {

std::string gpu_name(at::Device /*device*/) { return {}; }
std::string gpu_bus_id(at::Device /*device*/) { return {}; }

}  // namespace annulus
