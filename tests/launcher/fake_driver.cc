// Stands in for libcuda.so.1 and libnvidia-ml.so.1: a driver for CUDA 12.4 with three GPUs, of which the first and the
// last cannot read each other's memory. FAKE_DRIVER=old: without the function that tells of it.
#include <cstdint>
#include <cstdlib>

extern "C" {

int cuDriverGetVersion(int* version) {
  *version = 12040;
  return 0;
}

int nvmlInit_v2() { return 0; }
int nvmlShutdown() { return 0; }

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 3;
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = reinterpret_cast<void*>(static_cast<uintptr_t>(index + 1));
  return 0;
}

int nvmlDeviceGetP2PStatus(void* a, void* b, int index, int* status) {
  if (std::getenv("FAKE_DRIVER") != nullptr || index != 0) return 3;  // not supported
  const auto sum = reinterpret_cast<uintptr_t>(a) + reinterpret_cast<uintptr_t>(b);
  *status = sum == 4 ? 1 : 0;  // 1 and 3: the chipset does not do it
  return 0;
}

}  // extern "C"
