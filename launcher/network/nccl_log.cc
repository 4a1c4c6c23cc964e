// See nccl_log.h.
#include "launcher/network/nccl_log.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <vector>

#include "common/text.h"

namespace annulus {
namespace {

// The memfd to which NCCL writes its log, or -1 if NCCL was not asked. It disappears with the process, however that
// ends, and no other process can have made it in advance.
int log_file = -1;

std::string path_of(int file) { return "/proc/self/fd/" + std::to_string(file); }

// Parses "[0]mlx5_0:1/RoCE [1]eth0:10.0.0.1<0> [RO]; OOB ..." into 0: "mlx5_0:1", 1: "eth0". Devices that NCCL has
// merged into one, "[0]={[0] mlx5_0:1/RoCE, [1] mlx5_1:1/RoCE}", get the name of the first.
std::map<int, std::string> listed(const std::string& list) {
  static const std::regex others_merged(",[^}]*\\}"),
      device(R"(\[(\d{1,6})\](?:=\{\[\d+\])? ?([\w.-]+(?::\d+(?=/))?))");
  const std::string text = std::regex_replace(list.substr(0, list.find(';')), others_merged, "");
  std::map<int, std::string> devices;
  for (std::sregex_iterator at(text.begin(), text.end(), device), end; at != end; ++at) {
    devices.emplace(std::stoi((*at)[1]), (*at)[2]);
  }
  return devices;
}

}  // namespace

std::string devices_in_nccl_log(const std::string& log) {
  static const std::regex known_devices("NET/([^:/]+) : Using (.*)"), used_device(" via NET/([^/]+)/(\\d{1,6})");
  std::map<std::string, std::map<int, std::string>> known;  // the devices of "IB" and of "Socket"
  std::vector<std::string> used;
  for (const std::string& line : split(log, '\n')) {
    std::smatch found;
    if (std::regex_search(line, found, known_devices)) {
      known[found[1]] = listed(found[2]);
    } else if (std::regex_search(line, found, used_device)) {
      const std::map<int, std::string>& of_kind = known[found[1]];
      const auto name = of_kind.find(std::stoi(found[2]));
      const std::string device = name == of_kind.end() ? found.str(1) + " " + found.str(2) : name->second;
      if (std::find(used.begin(), used.end(), device) == used.end()) used.push_back(device);
    }
  }
  if (!used.empty()) return join(used, " ");
  for (const char* kind : {"IB", "Socket"}) {
    for (const auto& [index, device] : known[kind]) used.push_back(device);
    if (!used.empty()) return (used.size() > 1 ? "one of " : "") + join(used, " ");
  }
  return "";
}

void record_nccl_log() {
  if (log_file >= 0 || std::getenv("NCCL_DEBUG") != nullptr || std::getenv("NCCL_DEBUG_FILE") != nullptr) return;
  const int made = memfd_create("annulus-nccl", MFD_CLOEXEC);
  if (made < 0) return;
  const std::string path = path_of(made);
  // If NCCL could not open this path, it would write its log to standard output.
  if (access(path.c_str(), R_OK | W_OK) != 0) {
    close(made);
    return;
  }
  log_file = made;
  setenv("NCCL_DEBUG", "INFO", 1);
  setenv("NCCL_DEBUG_SUBSYS", "NET", 0);
  setenv("NCCL_DEBUG_FILE", path.c_str(), 1);
}

std::string nccl_devices() {
  if (log_file < 0) return "";
  std::ifstream log(path_of(log_file));
  return devices_in_nccl_log({std::istreambuf_iterator<char>(log), {}});
}

}  // namespace annulus
