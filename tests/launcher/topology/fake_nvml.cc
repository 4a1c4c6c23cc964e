// A stand-in for the NVIDIA driver's library with the functions that launcher/topology/nvidia_driver.cc calls.
// devices_test.cc loads it. It reports what the environment variable FAKE_NVML describes, one item per line:
//   gpu PCI NAME           a GPU; NAME "-" if the driver does not know it
//   locked                 a GPU that this process may not open
//   link KIND PCI SPEED    a link of the preceding GPU; KIND is "gpu", "switch" or "down"; PCI is "-" if the driver
//                          does not report it; SPEED is in MB/s, 0 if the driver does not know the field
// Without FAKE_NVML the library behaves as if no driver were loaded.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

namespace {

struct Link {
  std::string kind, pci;
  unsigned speed = 0;
};
struct Gpu {
  bool locked = false;
  std::string pci, name;
  std::vector<Link> links;
};
std::vector<Gpu>& gpus() {
  static std::vector<Gpu> all;
  return all;
}

struct PciInfo {
  char legacy_id[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char id[32];
};
struct Memory {
  unsigned long long total, free, used;
};
struct FieldValue {
  unsigned field, scope;
  long long timestamp, latency;
  int type, result;
  unsigned long long value;
};

constexpr int kGood = 0, kNoDriver = 9, kNoPermission = 4, kNotSupported = 3;

const Link* link_of(const void* device, unsigned link) {
  const auto& links = static_cast<const Gpu*>(device)->links;
  return link < links.size() ? &links[link] : nullptr;
}

// Writes an id with eight digits for the domain, as the driver does.
void write_id(const std::string& id, PciInfo* info) { std::snprintf(info->id, sizeof info->id, "0000%s", id.c_str()); }

}  // namespace

extern "C" {

int nvmlInit_v2() {
  const char* const text = std::getenv("FAKE_NVML");
  if (text == nullptr) return kNoDriver;
  gpus().clear();
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string what;
    words >> what;
    if (what == "gpu") {
      Gpu gpu;
      words >> gpu.pci >> std::ws;
      std::getline(words, gpu.name);
      gpus().push_back(gpu);
    } else if (what == "locked") {
      gpus().push_back({true, "", "", {}});
    } else {
      Link link;
      words >> link.kind >> link.pci >> link.speed;
      gpus().back().links.push_back(link);
    }
  }
  return kGood;
}

int nvmlShutdown() { return kGood; }

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(gpus().size());
  return kGood;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  if (gpus()[index].locked) return kNoPermission;
  *device = &gpus()[index];
  return kGood;
}

int nvmlDeviceGetPciInfo_v3(void* device, PciInfo* info) {
  write_id(static_cast<Gpu*>(device)->pci, info);
  return kGood;
}

int nvmlDeviceGetName(void* device, char* name, unsigned length) {
  const std::string& own = static_cast<Gpu*>(device)->name;
  if (own == "-") return kNotSupported;
  std::snprintf(name, length, "%s", own.c_str());
  return kGood;
}

int nvmlDeviceGetMemoryInfo(void* /*device*/, Memory* memory) {
  memory->total = 80ULL << 30;
  return kGood;
}

int nvmlDeviceGetNvLinkState(void* device, unsigned link, unsigned* state) {
  const Link* const found = link_of(device, link);
  if (found == nullptr) return kNotSupported;
  *state = found->kind == "down" ? 0 : 1;
  return kGood;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* device, unsigned link, PciInfo* info) {
  const Link* const found = link_of(device, link);
  if (found->pci == "-") return kNotSupported;
  write_id(found->pci, info);
  return kGood;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void* device, unsigned link, int* type) {
  *type = link_of(device, link)->kind == "switch" ? 2 : 0;
  return kGood;
}

int nvmlDeviceGetFieldValues(void* device, int count, FieldValue* values) {
  for (int i = 0; i < count; ++i) {
    const Link* const found = link_of(device, values[i].scope);
    const bool known = found != nullptr && found->speed > 0 && values[i].field == 164;
    values[i].result = known ? kGood : kNotSupported;
    values[i].value = known ? found->speed : 0;
  }
  return kGood;
}

}  // extern "C"
