// The names of a job's hosts, and how many ranks each may have. They come from --hosts, a host file, or the Slurm
// allocation that this process is in. Used by `launch`, `topology` and `doctor`, and by host discovery.
//
// Names are checked before anything uses them: they consist of letters, digits and "-._" and do not begin with "-", so
// that no name can act as an option or as shell syntax. Thread safe: functions without state.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

struct HostSlots {
  std::string name;  // a name or an IPv4 address, as written
  int slots = 0;     // 0: not given
  bool operator==(const HostSlots&) const = default;
};

struct HostList {
  std::vector<HostSlots> hosts;  // each host once, in the order of the list
  std::string source;            // for messages: "--hosts", "--hostfile F", "Slurm's allocation (SLURM_JOB_NODELIST)"
  // What to do if there are too few slots.
  std::string remedy = "name more slots, or leave them out to let a host take any number";
};

// Parses "a:8,b,10.0.0.3:4". A host that occurs several times has as many slots as all its entries together; an entry
// without a number is then one slot, as for mpirun: "a,a,b" are two slots and one. Throws Error(kUsage), which names
// `where` and the faulty name. An IPv6 address is refused, because mpirun does not accept one.
HostList parse_hosts(std::string_view text, std::string_view where);

// Reads a file in Open MPI's form, "name slots=8 max_slots=8", or in MPICH's, "name:8"; "#" begins a comment. A host
// may occur several times, as in parse_hosts and in the file of a PBS job. Throws Error(kInput), which names the line,
// or Error(kUsage) if the file cannot be read.
HostList read_hostfile(const std::string& path);

// The hosts of the Slurm allocation that this process is in, one host or several: SLURM_JOB_NODELIST
// ("n[1-3,07],login"), with the slots of SLURM_TASKS_PER_NODE ("2(x3),1") if tasks were requested (SLURM_NTASKS,
// SLURM_NTASKS_PER_NODE). Nothing outside of an allocation. Throws Error(kUsage) if a variable cannot be parsed.
std::optional<HostList> hosts_of_slurm();

// The hosts that the options --hosts and --hostfile of a subcommand name, else those of Slurm's allocation. Throws as
// these functions do, and Error(kUsage) if both are given.
std::optional<HostList> hosts_of_options(const std::optional<std::string>& hosts,
                                         const std::optional<std::string>& hostfile);

// The number of ranks on each host. With `ranks` > 0, these are distributed as evenly as the slots allow, and the first
// hosts get one more each if they do not divide evenly: 8 ranks on slots 2, 4 and 4 give 2, 3 and 3. With `ranks` = 0,
// every slot gets a rank. A host without slots takes any number, and then `ranks` must be given. Throws Error(kUsage)
// if there are more ranks than slots, or if the number of ranks is not given.
std::vector<int> ranks_of_hosts(const HostList& list, int ranks);

// Whether `name` means this host: its own name in upper or lower case; "localhost"; an address of one of its
// interfaces; or its own name with the domain where that lacks one, or without it, if the name has no other host's
// address.
bool is_this_host(std::string_view name);

// Whether `name` has a domain, as in "node1.cluster.example". An address has none.
bool is_full_name(std::string_view name);

}  // namespace annulus
