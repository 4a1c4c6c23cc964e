// See nccl_words.h.
#include "launcher/network/nccl_words.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <map>
#include <system_error>
#include <vector>

namespace annulus {
namespace {

// The memfd to which NCCL writes its log, or -1 if NCCL was not asked. It disappears with the process, however that
// ends, and no other process can have made it in advance.
int words = -1;

// Parses "[0]mlx5_0:1/RoCE [1]eth0:10.0.0.1<0> [RO]; OOB ..." into 0: "mlx5_0:1", 1: "eth0". Devices that NCCL has
// merged into one, "[0]={[0] mlx5_0:1/RoCE, [1] mlx5_1:1/RoCE}", get the name of the first.
std::map<int, std::string> listed(std::string_view list, bool socket) {
  std::map<int, std::string> devices;
  list = list.substr(0, list.find(';'));
  for (size_t open = 0; (open = list.find('[', open)) != std::string_view::npos; ++open) {
    const size_t close = list.find(']', open);
    if (close == std::string_view::npos) break;
    int index = -1;
    const auto [end, error] = std::from_chars(list.data() + open + 1, list.data() + close, index);
    if (error != std::errc() || end != list.data() + close) continue;  // "[RO]"
    std::string_view name = list.substr(close + 1);
    name.remove_prefix(std::min(name.find_first_not_of(" ={"), name.size()));
    if (!name.empty() && name.front() == '[') name = name.substr(std::min(name.find(']') + 1, name.size()));
    name.remove_prefix(std::min(name.find_first_not_of(' '), name.size()));
    name = name.substr(0, name.find_first_of(socket ? ":, }" : "/, }"));
    if (!name.empty()) devices.emplace(index, std::string(name));
    if (list.substr(close + 1).starts_with("={")) open = std::min(list.find('}', close), list.size() - 1);
  }
  return devices;
}

}  // namespace

std::string devices_in_words(std::string_view log) {
  std::map<std::string, std::map<int, std::string>, std::less<>> known;  // the devices of "IB" and of "Socket"
  std::vector<std::string> used;
  while (!log.empty()) {
    const std::string_view line = log.substr(0, log.find('\n'));
    log.remove_prefix(std::min(line.size() + 1, log.size()));
    const size_t net = line.find("NET/");
    if (net == std::string_view::npos) continue;
    const std::string_view rest = line.substr(net + 4);
    constexpr std::string_view kUsing = " : Using ";
    if (const size_t at = rest.find(kUsing); at != std::string_view::npos) {
      const std::string name(rest.substr(0, at));
      known[name] = listed(rest.substr(at + kUsing.size()), name == "Socket");
    } else if (line.find(" via NET/") != std::string_view::npos) {
      const size_t slash = std::min(rest.find('/'), rest.size());
      int index = -1;
      if (slash < rest.size()) std::from_chars(rest.data() + slash + 1, rest.data() + rest.size(), index);
      if (index < 0) continue;
      const auto kind = known.find(rest.substr(0, slash));
      const bool named = kind != known.end() && kind->second.contains(index);
      const std::string device =
          named ? kind->second.at(index) : std::string(rest.substr(0, slash)) + " " + std::to_string(index);
      if (std::find(used.begin(), used.end(), device) == used.end()) used.push_back(device);
    }
  }
  std::string out;
  for (const std::string& device : used) out += (out.empty() ? "" : " ") + device;
  if (!out.empty()) return out;
  for (const char* kind : {"IB", "Socket"}) {
    if (!out.empty() || !known.contains(kind) || known[kind].empty()) continue;
    if (known[kind].size() > 1) out = "one of";
    for (const auto& [index, device] : known[kind]) out += (out.empty() ? "" : " ") + device;
  }
  return out;
}

void ask_nccl_for_words() {
  if (words >= 0 || std::getenv("NCCL_DEBUG") != nullptr || std::getenv("NCCL_DEBUG_FILE") != nullptr) return;
  const int made = memfd_create("annulus-nccl", MFD_CLOEXEC);
  if (made < 0) return;
  const std::string path = "/proc/self/fd/" + std::to_string(made);
  // If NCCL could not open this path, it would write its log to standard output.
  if (access(path.c_str(), R_OK | W_OK) != 0) {
    close(made);
    return;
  }
  words = made;
  setenv("NCCL_DEBUG", "INFO", 1);
  setenv("NCCL_DEBUG_SUBSYS", "NET", 0);
  setenv("NCCL_DEBUG_FILE", path.c_str(), 1);
}

std::string nccl_devices() {
  if (words < 0) return "";
  std::string log;
  std::array<char, 4096> piece;
  ssize_t got = 0;
  while ((got = pread(words, piece.data(), piece.size(), static_cast<off_t>(log.size()))) > 0) {
    log.append(piece.data(), static_cast<size_t>(got));
  }
  return devices_in_words(log);
}

}  // namespace annulus
