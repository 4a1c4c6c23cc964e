// See meters.h.
#include "runtime/run/meters.h"

#include <dlfcn.h>
#include <sched.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <mutex>

namespace annulus {
namespace {

constexpr int kMultiprocessors = 1;  // NVML_CLOCK_SM

// A loaded library; its functions return 0 for success.
class ClockLibrary {
 public:
  explicit ClockLibrary(const std::string& name) : handle_(dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL)) {
    ready_ = call("nvmlInit_v2");
  }

  double mhz(const std::string& bus_id) const {
    void* gpu = nullptr;
    unsigned mhz = 0;
    const bool known = ready_ && call("nvmlDeviceGetHandleByPciBusId_v2", bus_id.c_str(), &gpu) &&
                       call("nvmlDeviceGetClockInfo", gpu, kMultiprocessors, &mhz);
    return known ? mhz : 0;
  }

 private:
  template <typename... Arguments>
  bool call(const char* name, Arguments... arguments) const {
    if (handle_ == nullptr) return false;
    auto* const function = reinterpret_cast<int (*)(Arguments...)>(dlsym(handle_, name));
    return function != nullptr && function(arguments...) == 0;
  }

  void* handle_;
  bool ready_ = false;
};

}  // namespace

int64_t resident_bytes(const std::string& root) {
  std::ifstream file(root + "/proc/self/statm");
  int64_t size = 0, resident = 0;  // in pages
  return file >> size >> resident ? resident * sysconf(_SC_PAGESIZE) : 0;
}

double processor_mhz(int cpu, const std::string& root) {
  std::ifstream file(root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cpufreq/scaling_cur_freq");
  double khz = 0;
  return file >> khz ? khz / 1000 : 0;
}

double processor_mhz() {
  const int cpu = sched_getcpu();
  return cpu < 0 ? 0 : processor_mhz(cpu);
}

double gpu_mhz(const std::string& bus_id, const std::string& library) {
  static std::mutex mutex;
  static std::map<std::string, ClockLibrary> libraries;
  const std::lock_guard lock(mutex);
  return libraries.try_emplace(library, library).first->second.mhz(bus_id);
}

}  // namespace annulus
