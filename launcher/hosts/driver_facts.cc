// See driver_facts.h.
#include "launcher/hosts/driver_facts.h"

#include <dlfcn.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <sstream>
#include <system_error>

#include "common/files.h"
#include "launcher/topology/machine.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;

class Library {
 public:
  explicit Library(const std::string& name) : handle_(dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL)) {}
  ~Library() {
    if (handle_ != nullptr) dlclose(handle_);
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  // Whether the library exists, has the function, and the call returned 0, which is success for CUDA and NVML.
  template <typename... Arguments>
  bool call(const char* name, Arguments... arguments) const {
    if (handle_ == nullptr) return false;
    auto* const function = reinterpret_cast<int (*)(Arguments...)>(dlsym(handle_, name));
    return function != nullptr && function(arguments...) == 0;
  }

 private:
  void* handle_;
};

}  // namespace

// The file reads "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 ...".
std::string driver_version(const std::string& root) {
  std::istringstream words(first_line(root + "/proc/driver/nvidia/version"));
  for (std::string word; words >> word;) {
    if (word.find('.') != std::string::npos &&
        std::all_of(word.begin(), word.end(), [](unsigned char c) { return std::isdigit(c) != 0 || c == '.'; })) {
      return word;
    }
  }
  return "";
}

int gpus_of_driver(const std::string& root) {
  std::error_code error;
  int count = 0;
  fs::directory_iterator folders(root + "/proc/driver/nvidia/gpus", error);
  for (; !error && folders != fs::directory_iterator(); folders.increment(error)) ++count;
  return error ? -1 : count;
}

std::string cuda_version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string cuda_of_driver(const std::string& library) {
  int version = 0;
  return Library(library).call("cuDriverGetVersion", &version) && version > 0 ? cuda_version_text(version) : "";
}

std::vector<std::vector<bool>> peer_access(const std::string& library) {
  constexpr int kRead = 0;  // NVML_P2P_CAPS_INDEX_READ
  const Library nvml(library);
  if (!nvml.call("nvmlInit_v2")) return {};
  unsigned count = 0;
  std::vector<void*> gpus;
  nvml.call("nvmlDeviceGetCount_v2", &count);
  for (unsigned i = 0; i < std::min(count, static_cast<unsigned>(kMaxGpus)); ++i) {
    void* gpu = nullptr;
    if (nvml.call("nvmlDeviceGetHandleByIndex_v2", i, &gpu)) gpus.push_back(gpu);
  }
  std::vector<std::vector<bool>> access(gpus.size(), std::vector<bool>(gpus.size(), true));
  bool known = gpus.size() > 1;
  for (size_t a = 0; a < gpus.size() && known; ++a) {
    for (size_t b = 0; b < gpus.size() && known; ++b) {
      int status = 0;  // NVML_P2P_STATUS_OK
      if (a == b) continue;
      known = nvml.call("nvmlDeviceGetP2PStatus", gpus[a], gpus[b], kRead, &status);
      access[a][b] = status == 0;
    }
  }
  nvml.call("nvmlShutdown");
  return known ? access : std::vector<std::vector<bool>>();
}

}  // namespace annulus
