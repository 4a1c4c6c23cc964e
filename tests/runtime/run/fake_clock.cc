// A driver's library with one GPU, for meters_test.cc.
#include <cstring>

extern "C" {

int nvmlInit_v2() { return 0; }

int nvmlDeviceGetHandleByPciBusId_v2(const char* bus_id, void** gpu) {
  static int handle = 0;
  if (std::strcmp(bus_id, "00000000:1B:00.0") != 0) return 6;  // NVML_ERROR_NOT_FOUND
  *gpu = &handle;
  return 0;
}

int nvmlDeviceGetClockInfo(void*, int clock, unsigned* mhz) {
  *mhz = clock == 1 ? 1980 : 7;  // that of the multiprocessors, or another
  return 0;
}

}  // extern "C"
