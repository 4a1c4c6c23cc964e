// See control_groups.h.
#include "common/control_groups/control_groups.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>

namespace annulus {
namespace {

// Adds a group and those above it.
void add_with_parents(int version, const std::string& mount, std::string name, std::vector<ControlGroup>& groups) {
  while (true) {
    groups.push_back({version, name, mount + (name == "/" ? "" : name)});
    const size_t slash = name.rfind('/');
    if (name.size() <= 1 || slash == std::string::npos) return;
    name.resize(slash == 0 ? 1 : slash);
  }
}

// The processors' time that one group allows. Without a limit, version 1 has a quota of -1, and version 2 the word
// "max", which is no number.
std::optional<double> quota_of(const ControlGroup& group) {
  double quota = 0, period = 0;
  if (group.version == 1) {
    std::ifstream(group.folder + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(group.folder + "/cpu.cfs_period_us") >> period;
  } else {
    std::ifstream(group.folder + "/cpu.max") >> quota >> period;
  }
  if (!(quota > 0 && period > 0)) return std::nullopt;
  return quota / period;
}

}  // namespace

std::vector<ControlGroup> control_groups(std::string_view controller, const std::string& root) {
  const std::string top = root + "/sys/fs/cgroup";
  std::vector<ControlGroup> groups;
  std::ifstream lines(root + "/proc/self/cgroup");
  for (std::string line; std::getline(lines, line);) {  // "0::/a/b", "4:cpu,cpuacct:/a/b"
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), name = line.substr(second + 1);
    if (name.empty() || name[0] != '/') continue;
    if (controllers.empty()) {
      add_with_parents(2, top, name, groups);
      add_with_parents(2, top + "/unified", name, groups);  // where version 1 has the other controllers
    } else if (("," + controllers + ",").find("," + std::string(controller) + ",") != std::string::npos) {
      // Controllers of one line share a folder. Most systems have a link to it for each of them.
      for (const std::string& folder : std::set<std::string>{std::string(controller), controllers}) {
        add_with_parents(1, top + "/" + folder, name, groups);
      }
    }
  }
  return groups;
}

int whole_processors(double cpus) { return std::max(1, static_cast<int>(std::lround(std::min(cpus, 1e6)))); }

std::optional<CpuQuota> cpu_quota(const std::string& root) {
  std::optional<CpuQuota> least;
  for (const ControlGroup& group : control_groups("cpu", root)) {
    const std::optional<double> cpus = quota_of(group);
    if (cpus && (!least || *cpus < least->cpus)) least = {*cpus, group.name};
  }
  return least;
}

}  // namespace annulus
