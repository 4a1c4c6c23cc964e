// See nvml.h.
#include "launcher/topology/nvml.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "common/error.h"

namespace annulus {
namespace {

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

class Nvml {
 public:
  static std::unique_ptr<Nvml> open(const std::string& library) {
    void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return nullptr;
    std::unique_ptr<Nvml> nvml(new Nvml(handle));
    nvml->ready_ = nvml->call<>("nvmlInit_v2");
    return nvml->ready_ ? std::move(nvml) : nullptr;
  }
  ~Nvml() {
    if (ready_) call<>("nvmlShutdown");
    dlclose(handle_);
  }
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  // Returns the GPUs that this process may open.
  std::vector<Device> devices() {
    unsigned count = 0;
    std::vector<Device> devices;
    if (!call("nvmlDeviceGetCount_v2", &count)) return devices;
    for (unsigned i = 0; i < std::min(count, static_cast<unsigned>(kMaxGpus)); ++i) {
      Device device = nullptr;
      if (call("nvmlDeviceGetHandleByIndex_v2", i, &device)) devices.push_back(device);
    }
    return devices;
  }

  std::optional<std::string> pci(Device device) {
    PciInfo info{};
    if (!call("nvmlDeviceGetPciInfo_v3", device, &info)) return std::nullopt;
    return id_of(info);
  }

  std::string name(Device device) {
    std::array<char, 96> text{};
    return call("nvmlDeviceGetName", device, text.data(), static_cast<unsigned>(text.size() - 1)) ? text.data() : "";
  }

  int64_t memory(Device device) {
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
  std::optional<Remote> remote(Device device, unsigned link) {
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
  explicit Nvml(void* handle) : handle_(handle) {}

  // Returns whether the library has the function and the call succeeded.
  template <typename... Arguments>
  bool call(const char* name, Arguments... arguments) {
    auto* const function = reinterpret_cast<int (*)(Arguments...)>(dlsym(handle_, name));
    return function != nullptr && function(arguments...) == 0;
  }

  static std::optional<std::string> id_of(const PciInfo& info) {
    try {
      return normalize_pci_bus_id(std::string(info.id.data(), strnlen(info.id.data(), info.id.size())));
    } catch (const Error&) {
      return std::nullopt;
    }
  }

  int64_t speed(Device device, unsigned link) {
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

  void* const handle_;
  bool ready_ = false;
};

}  // namespace

bool add_nvml(Machine& machine, const std::string& library) {
  const std::unique_ptr<Nvml> nvml = Nvml::open(library);
  if (!nvml) return false;
  std::map<std::string, Device> devices;
  std::vector<std::string> ids;
  for (Device device : nvml->devices()) {
    const std::optional<std::string> id = nvml->pci(device);
    if (id && devices.emplace(*id, device).second) ids.push_back(*id);
  }
  machine.set_visible_gpus(ids);

  using Speeds = std::map<std::string, int64_t>;  // by PCI bus id: the sum over all links that lead there
  std::vector<Speeds> gpus, switches;
  std::map<std::string, bool> all_switches;
  for (Gpu& gpu : machine.gpus) {
    const Device device = devices.at(gpu.pci);
    if (std::string name = nvml->name(device); !name.empty()) gpu.model = std::move(name);
    if (gpu.memory_bytes == 0) gpu.memory_bytes = nvml->memory(device);
    Speeds& to_gpus = gpus.emplace_back();
    Speeds& to_switches = switches.emplace_back();
    for (unsigned link = 0; link < kLinks; ++link) {
      const auto remote = nvml->remote(device, link);
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

}  // namespace annulus
