// See nvidia_driver.h.
#include "launcher/topology/nvidia_driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <sstream>
#include <system_error>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/files.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;

// Declarations from NVML's documentation ("nvml.h"). Versioned functions and structures do not change between drivers.
using Device = void*;
constexpr unsigned kLinks = 18;                             // NVML_NVLINK_MAX_LINKS
constexpr unsigned kActive = 1;                             // NVML_FEATURE_ENABLED
constexpr unsigned kSpeedOfLink = 164, kSpeedOfLinks = 90;  // NVML_FI_DEV_NVLINK_GET_SPEED, ..._SPEED_MBPS_COMMON
constexpr int kRemoteSwitch = 2;                            // NVML_NVLINK_DEVICE_TYPE_SWITCH
constexpr int64_t kUsualSpeed = 25000;                      // MB/s per link and direction, from NVLink 2 to 4

struct PciInfo {
  std::array<char, 16> legacy_id;
  unsigned domain, bus, device, device_id, subsystem_id;
  std::array<char, 32> id;
};
struct Memory {
  unsigned long long total, free, used;
};
struct FieldValue {
  unsigned field, scope;
  long long timestamp, latency;
  int type, result;
  union {
    double real;
    unsigned whole;
    unsigned long long wide;
  } value;
};

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

class Nvml : private Library {
 public:
  explicit Nvml(const std::string& library) : Library(library), ready_(call("nvmlInit_v2")) {}
  ~Nvml() {
    if (ready_) call("nvmlShutdown");
  }
  bool ready() const { return ready_; }
  using Library::call;

  // Returns the GPUs that this process may open.
  std::vector<Device> devices() const {
    unsigned count = 0;
    std::vector<Device> devices;
    if (!call("nvmlDeviceGetCount_v2", &count)) return devices;
    for (unsigned i = 0; i < std::min(count, static_cast<unsigned>(kMaxGpus)); ++i) {
      Device device = nullptr;
      if (call("nvmlDeviceGetHandleByIndex_v2", i, &device)) devices.push_back(device);
    }
    return devices;
  }

  std::optional<std::string> pci(Device device) const {
    PciInfo info{};
    if (!call("nvmlDeviceGetPciInfo_v3", device, &info)) return std::nullopt;
    return id_of(info);
  }

  std::string name(Device device) const {
    std::array<char, 96> text{};
    return call("nvmlDeviceGetName", device, text.data(), static_cast<unsigned>(text.size() - 1)) ? text.data() : "";
  }

  int64_t memory(Device device) const {
    Memory memory{};
    if (!call("nvmlDeviceGetMemoryInfo", device, &memory)) return 0;
    return static_cast<int64_t>(std::min(memory.total, 1ULL << 60));
  }

  struct Remote {
    std::string pci;  // empty: the driver does not say, as in virtual machines
    bool is_switch = false;
    int64_t megabytes_per_s = 0;
  };
  // Returns what the link leads to, or nothing if it is down.
  std::optional<Remote> remote(Device device, unsigned link) const {
    unsigned state = 0;
    if (!call("nvmlDeviceGetNvLinkState", device, link, &state) || state != kActive) return std::nullopt;
    Remote remote;
    PciInfo info{};
    if (call("nvmlDeviceGetNvLinkRemotePciInfo_v2", device, link, &info)) remote.pci = id_of(info).value_or("");
    int type = 0;
    remote.is_switch = call("nvmlDeviceGetNvLinkRemoteDeviceType", device, link, &type) && type == kRemoteSwitch;
    remote.megabytes_per_s = speed(device, link);
    return remote;
  }

 private:
  static std::optional<std::string> id_of(const PciInfo& info) {
    try {
      return normalize_pci_bus_id(std::string(info.id.data(), strnlen(info.id.data(), info.id.size())));
    } catch (const Error&) {
      return std::nullopt;
    }
  }

  int64_t speed(Device device, unsigned link) const {
    for (const unsigned field : {kSpeedOfLink, kSpeedOfLinks}) {
      FieldValue value{};
      value.field = field;
      value.scope = link;
      value.result = -1;
      if (call("nvmlDeviceGetFieldValues", device, 1, &value) && value.result == 0 && value.value.whole > 0) {
        return value.value.whole;
      }
    }
    return kUsualSpeed;
  }

  const bool ready_;
};

}  // namespace

bool add_nvml(Machine& machine, const std::string& library) {
  Nvml nvml(library);
  if (!nvml.ready()) return false;
  std::map<std::string, Device> devices;
  std::vector<std::string> ids;
  for (Device device : nvml.devices()) {
    const std::optional<std::string> id = nvml.pci(device);
    if (id && devices.emplace(*id, device).second) ids.push_back(*id);
  }
  machine.set_visible_gpus(ids);

  using Speeds = std::map<std::string, int64_t>;  // by PCI bus id: the sum over all links that lead there
  std::vector<Speeds> gpus, switches;
  std::map<std::string, bool> all_switches;
  for (Gpu& gpu : machine.gpus) {
    const Device device = devices.at(gpu.pci);
    if (std::string name = nvml.name(device); !name.empty()) gpu.model = std::move(name);
    if (gpu.memory_bytes == 0) gpu.memory_bytes = nvml.memory(device);
    Speeds& to_gpus = gpus.emplace_back();
    Speeds& to_switches = switches.emplace_back();
    for (unsigned link = 0; link < kLinks; ++link) {
      const auto remote = nvml.remote(device, link);
      if (!remote) continue;
      (remote->is_switch ? to_switches : to_gpus)[remote->pci] += remote->megabytes_per_s;
      if (remote->is_switch) all_switches[remote->pci] = true;
    }
  }

  for (const auto& row : machine.links) {
    for (const Link& link : row) {
      if (link.kind == LinkKind::kNvlink) return true;  // hwloc has shown NVLink
    }
  }
  const auto of = [](const Speeds& speeds, const std::string& id) {
    const auto found = speeds.find(id);
    return found == speeds.end() ? int64_t{0} : found->second;
  };
  for (size_t i = 0; i < machine.gpus.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      int64_t speed = std::min(of(gpus[i], machine.gpus[j].pci), of(gpus[j], machine.gpus[i].pci));
      for (const auto& [id, to_switch] : switches[i]) speed += std::min(to_switch, of(switches[j], id));
      if (speed == 0) continue;
      machine.links[i][j] = machine.links[j][i] = {LinkKind::kNvlink, speed};
    }
  }
  machine.nvswitches = static_cast<int>(std::min(all_switches.size(), kMaxNvswitches));
  return true;
}

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
  const Nvml nvml(library);
  const std::vector<Device> gpus = nvml.devices();
  std::vector<std::vector<bool>> access(gpus.size(), std::vector<bool>(gpus.size(), true));
  for (size_t a = 0; a < gpus.size(); ++a) {
    for (size_t b = 0; b < gpus.size(); ++b) {
      int status = 0;  // NVML_P2P_STATUS_OK
      if (a == b) continue;
      if (!nvml.call("nvmlDeviceGetP2PStatus", gpus[a], gpus[b], kRead, &status)) return {};
      access[a][b] = status == 0;
    }
  }
  return gpus.size() > 1 ? access : std::vector<std::vector<bool>>();
}

}  // namespace annulus
