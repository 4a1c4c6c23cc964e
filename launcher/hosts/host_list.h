// The hosts of a job by their names, and how many ranks each may have: from --hosts, a host file, or the allocation of
// Slurm that this process is in. Used by `launch`, `topology` and `doctor`.
//
// Names are checked before they reach anything: letters, digits and "-._" alone, not beginning with "-", so that no
// name is an option or a word of a shell. Thread safety: functions without state.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

struct HostSlots {
  std::string name;  // or an address, as written
  int slots = 0;     // 0: not said
  bool operator==(const HostSlots&) const = default;
};

struct HostList {
  std::vector<HostSlots> hosts;  // each once, in the order in which they were named
  std::string source;            // for messages: "--hosts", "--hostfile F", "Slurm's allocation (SLURM_JOB_NODELIST)"
  // What to do where it has too few slots.
  std::string remedy = "name more slots, or leave them out to let a host take any number";
};

// "a:8,b,10.0.0.3:4". Error(kUsage), naming `where` and what is wrong with which name. An IPv6 address is refused,
// since mpirun takes none.
HostList parse_hosts(std::string_view text, std::string_view where);

// Open MPI's form, "name slots=8 max_slots=8", and MPICH's, "name:8"; "#" begins a comment. Error(kInput) names the
// line; Error(kUsage) where the file cannot be read.
HostList read_hostfile(const std::string& path);

// Of an allocation of Slurm, of one host or several: SLURM_JOB_NODELIST ("n[1-3,07],login"), and
// SLURM_TASKS_PER_NODE ("2(x3),1") where tasks were asked for (SLURM_NTASKS, SLURM_NTASKS_PER_NODE), else no slots.
// Nothing outside of one. Error(kUsage) where they cannot be read.
std::optional<HostList> hosts_of_slurm();

// How many ranks go where: `ranks` where > 0, as evenly as the slots allow, the first hosts one more where it does not
// come out even; else all slots. A host without slots takes any number; then `ranks` must be said. Error(kUsage): more
// ranks than slots, or nobody says how many.
std::vector<int> ranks_of_hosts(const HostList& list, int ranks);

// Whether `name` is this host: its own name, whole or short, in any case; "localhost"; an address of its interfaces.
bool is_this_host(std::string_view name);

}  // namespace annulus
