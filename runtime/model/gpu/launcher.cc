// See launcher.h.
#include "runtime/model/gpu/launcher.h"

#include <atomic>

namespace annulus::gpu {

#ifdef ANNULUS_CUDA
const Launcher& cuda_launcher();  // launcher_cuda.cc
#endif

namespace {

std::atomic<const Launcher*>& cpu_launcher() {
  static std::atomic<const Launcher*> launcher = nullptr;
  return launcher;
}

}  // namespace

const Launcher* launcher_for(c10::DeviceType type) {
#ifdef ANNULUS_CUDA
  if (type == c10::DeviceType::CUDA) return &cuda_launcher();
#endif
  return type == c10::DeviceType::CPU ? cpu_launcher().load() : nullptr;
}

void set_cpu_launcher(const Launcher* launcher) { cpu_launcher().store(launcher); }

}  // namespace annulus::gpu
