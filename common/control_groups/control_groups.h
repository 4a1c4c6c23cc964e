// Finds the Linux control groups (cgroups) of this process, as set by a container or batch system, and their CPU quota;
// memory/available.h reads their memory limits. A process belongs to one group per controller, and the limits of that
// group's ancestors apply as well. Used by memory and topology. Reads only files of the kernel. Thread safe.
//
// Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

struct ControlGroup {
  int version = 2;     // cgroup v1 or v2; the files of a group have different names in each
  std::string name;    // "/job/step", or "/" for the root that this process sees
  std::string folder;  // with its files, without a trailing slash: "/sys/fs/cgroup/job/step"
};

// Returns the groups of this process that may limit `controller` ("cpu", "memory"), innermost first and the root last.
// A host may have either version or both, so some groups may lack the controller's files, or the whole folder: in a
// container the names may be those of the host, while the root folder holds the files of the container's own group.
// root: a prefix of the kernel's paths, for tests.
std::vector<ControlGroup> control_groups(std::string_view controller, const std::string& root = "");

// The CPU time that the processes of a group may use together.
struct CpuQuota {
  double cpus = 0;    // seconds of CPU time per second, > 0: 1.5 is one and a half processors
  std::string group;  // the name of the group that sets it

  bool operator==(const CpuQuota&) const = default;
};

// Returns the number of threads that `cpus` processors keep busy: `cpus` rounded, and at least 1.
int whole_processors(double cpus);

// Returns the smallest quota of the groups of this process; nullopt if none has one. `root` as above.
std::optional<CpuQuota> cpu_quota(const std::string& root = "");

}  // namespace annulus
