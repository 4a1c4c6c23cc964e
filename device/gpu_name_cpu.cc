// Implements gpu_name of device_peak.h for a build without CUDA.
#include "device/device_peak.h"

namespace annulus {

std::string gpu_name(at::Device /*device*/) { return {}; }

}  // namespace annulus
