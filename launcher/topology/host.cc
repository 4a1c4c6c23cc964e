// See host.h.
#include "launcher/topology/host.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <system_error>

#include "common/error.h"
#include "launcher/topology/nvidia_driver.h"
#include "launcher/topology/rdma.h"

namespace annulus {
namespace {

int prefix_bits(const unsigned char* mask, size_t bytes) {
  int bits = 0;
  for (size_t i = 0; i < bytes; ++i) bits += std::popcount(mask[i]);
  return bits;
}

// Returns for example "10.0.0.1/24", or an empty string for a family other than IPv4 and IPv6.
std::string address_text(const ifaddrs& entry) {
  char text[INET6_ADDRSTRLEN] = {};
  int bits = 0;
  if (entry.ifa_addr->sa_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(entry.ifa_addr)->sin_addr, text, sizeof text);
    const auto* const mask = reinterpret_cast<const sockaddr_in*>(entry.ifa_netmask);
    bits = mask == nullptr ? 32 : prefix_bits(reinterpret_cast<const unsigned char*>(&mask->sin_addr), 4);
  } else if (entry.ifa_addr->sa_family == AF_INET6) {
    inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(entry.ifa_addr)->sin6_addr, text, sizeof text);
    const auto* const mask = reinterpret_cast<const sockaddr_in6*>(entry.ifa_netmask);
    bits = mask == nullptr ? 128 : prefix_bits(reinterpret_cast<const unsigned char*>(&mask->sin6_addr), 16);
  } else {
    return "";
  }
  return std::string(text) + "/" + std::to_string(bits);
}

// Adds what the kernel says about the device behind an interface.
void add_device(NetInterface& interface) {
  const std::string folder = "/sys/class/net/" + interface.name;
  int64_t speed = 0;
  // Reading fails if there is no link, and a device without a speed says -1.
  if (std::ifstream(folder + "/speed") >> speed && speed > 0) interface.megabits_per_s = speed;
  std::error_code error;
  const std::string device = std::filesystem::read_symlink(folder + "/device", error).filename().string();
  if (error) return;
  try {
    interface.pci = normalize_pci_bus_id(device);
  } catch (const Error&) {
    // A virtual device, such as "virtio0".
  }
}

}  // namespace

Host this_host(bool respect_affinity) {
  Host host{Machine::this_machine(respect_affinity)};
  if (host.machine.is_this_system) {
    add_nvml(host.machine);
    add_rdma(host.machine);
  }
#ifdef ANNULUS_CUDA
  host.cuda = access("/dev/nvidiactl", R_OK | W_OK) == 0;
  if (const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES")) host.visible_devices = visible;
#endif
  host.interfaces = network_interfaces();
  return host;
}

std::vector<NetInterface> network_interfaces() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) {
    throw Error(ErrorKind::kUnavailable, "topology",
                std::string("cannot list the network interfaces of this host: ") + std::strerror(errno));
  }
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
  std::map<std::string, NetInterface> found;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    NetInterface& interface = found[entry->ifa_name];
    interface.name = entry->ifa_name;
    interface.up = (entry->ifa_flags & IFF_UP) != 0 && (entry->ifa_flags & IFF_RUNNING) != 0;
    interface.loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0;
    if (entry->ifa_addr == nullptr) continue;
    if (std::string text = address_text(*entry); !text.empty()) interface.addresses.push_back(std::move(text));
  }
  std::vector<NetInterface> interfaces;
  for (auto& [name, interface] : found) {
    add_device(interface);
    interfaces.push_back(std::move(interface));
  }
  return interfaces;
}

}  // namespace annulus
