// Implements device_facts of gpu_parts.h for a build without CUDA.
#include "benchmarks/gpu/gpu_parts.h"

namespace annulus {

DeviceFacts device_facts(at::Device) { return {"cpu"}; }

}  // namespace annulus
