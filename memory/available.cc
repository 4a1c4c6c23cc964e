// See available.h.
#include "memory/available.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>
#include <sstream>

#include "common/control_groups/control_groups.h"
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

}  // namespace

std::optional<AvailableMemory> available_memory(const std::string& root) {
  std::optional<AvailableMemory> least;
  if (const auto free = number_behind("MemAvailable:", root + "/proc/meminfo")) {
    take_least(least, *free * 1024, "the host's memory");
  }
  for (const ControlGroup& group : control_groups("memory", root)) {
    const Names& names = group.version == 1 ? kVersion1 : kVersion2;
    const std::string folder = group.folder + "/";
    const std::optional<int64_t> limit = number_in(folder + names.limit), usage = number_in(folder + names.usage);
    if (!limit || !usage || *limit >= int64_t{1} << 60) continue;
    const int64_t cache = number_behind(names.cache, folder + "memory.stat").value_or(0);
    take_least(least, *limit - *usage + std::min(cache, *usage),
               "the limit of " + bytes_text(*limit) + " of the control group " + group.name);
  }
  return least;
}

}  // namespace annulus
