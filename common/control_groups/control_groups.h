// The control groups of this process (a container, a job of a batch system) and what they limit: here the processors'
// time; memory/available.h asks for memory. A process belongs to one group for each controller, and the limits of all
// groups above that one apply as well. Used by memory and topology. It reads only files of the Linux kernel. Thread
// safe.
//
// Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

struct ControlGroup {
  int version = 2;     // of the interface, 1 or 2: the files of a group have other names in each
  std::string name;    // "/job/step", or "/" for the top one that this process sees
  std::string folder;  // of its files, without a slash at the end: "/sys/fs/cgroup/job/step"
};

// The groups of this process that may limit `controller` ("cpu", "memory"), the innermost first. A host may have either
// version or both, so some may lack the files that the caller wants, or the whole folder: in a container the names may
// be those of the host, while the files of the group itself are those of the top folder, which is always the last.
// root: the folder of the kernel's files, for tests.
std::vector<ControlGroup> control_groups(std::string_view controller, const std::string& root = "");

// How much time of processors the processes of a group get together.
struct CpuQuota {
  double cpus = 0;    // in each second, in seconds: 1.5 are one and a half processors; > 0
  std::string group;  // the name of the group that sets it

  bool operator==(const CpuQuota&) const = default;
};

// Rounds the time of `cpus` processors to a number of threads that have work at once, at least 1.
int whole_processors(double cpus);

// The least quota of the groups of this process; nullopt if none has one. `root` as above.
std::optional<CpuQuota> cpu_quota(const std::string& root = "");

}  // namespace annulus
