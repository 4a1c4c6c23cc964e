// See available.h. This reads both versions of control groups, because a host may have either or both (the kernel's
// Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst).
#include "memory/available.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>
#include <sstream>
#include <string_view>

#include "common/text.h"

namespace annulus {
namespace {

// The number that a file consists of; nullopt if there is no such file, or if it contains a word ("max").
std::optional<int64_t> number_in(const std::string& path) {
  std::ifstream in(path);
  std::string text;
  if (!(in >> text)) return std::nullopt;
  int64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  // In version 1 a group without a limit has one close to 2^63.
  if (error == std::errc::result_out_of_range) return std::numeric_limits<int64_t>::max();
  if (error != std::errc() || stop != end || number < 0) return std::nullopt;
  return number;
}

// The number that follows a name in a file of lines such as "MemAvailable:  123 kB", "inactive_file 123".
std::optional<int64_t> number_behind(const std::string& name, const std::string& path) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string first;
    int64_t number = 0;
    if (words >> first >> number && first == name) return number;
  }
  return std::nullopt;
}

// The names of the files in one version of control groups, and of the line of the reclaimable cache.
struct Names {
  const char *limit, *usage, *cache;
};
constexpr Names kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
constexpr Names kVersion2 = {"memory.max", "memory.current", "inactive_file"};

void take_least(std::optional<AvailableMemory>& least, int64_t bytes, const std::string& limit) {
  if (!least || bytes < least->bytes) least = {std::max<int64_t>(0, bytes), limit};
}

// The limits of a group and of all groups above it apply to its processes. In a container the path may be that of the
// host while the files are those of the group itself; then only the files of the top folder exist.
void look_at_groups(const std::string& mount, std::string group, const Names& names,
                    std::optional<AvailableMemory>& least) {
  while (true) {
    const std::string folder = mount + (group == "/" ? "" : group) + "/";
    const std::optional<int64_t> limit = number_in(folder + names.limit), usage = number_in(folder + names.usage);
    if (limit && usage && *limit < int64_t{1} << 60) {
      const int64_t cache = number_behind(names.cache, folder + "memory.stat").value_or(0);
      take_least(least, *limit - *usage + std::min(cache, *usage),
                 "the limit of " + bytes_text(*limit) + " of the control group " + group);
    }
    const size_t slash = group.rfind('/');
    if (group.size() <= 1 || slash == std::string::npos) return;
    group.resize(std::max<size_t>(1, slash));
  }
}

}  // namespace

std::optional<AvailableMemory> available_memory(const std::string& root) {
  std::optional<AvailableMemory> least;
  if (const auto free = number_behind("MemAvailable:", root + "/proc/meminfo")) {
    take_least(least, *free * 1024, "the host's memory");
  }
  const std::string mount = root + "/sys/fs/cgroup";
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "0::/a/b", "4:cpu,memory:/a/b"
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string group = line.substr(second + 1);
    if (group.empty() || group[0] != '/') continue;
    if (controllers == ",,") {
      look_at_groups(mount, group, kVersion2, least);
      look_at_groups(mount + "/unified", group, kVersion2, least);
    }
    if (controllers.find(",memory,") != std::string::npos) look_at_groups(mount + "/memory", group, kVersion1, least);
  }
  return least;
}

}  // namespace annulus
