// Takes the place of libcuda.so.1 and libnvidia-ml.so.1 in nvidia_driver_test.cc: a driver for CUDA 12.4 with three
// GPUs, of which the first and the last cannot access each other's memory. With FAKE_DRIVER=old the query of peer
// access is not supported.
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
  *status = sum == 4 ? 1 : 0;  // 1: the chipset does not support it (the first and the last GPU)
  return 0;
}

}  // extern "C"
