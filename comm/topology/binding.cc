// See binding.h.
#include "comm/topology/binding.h"

#include <hwloc.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "common/error.h"

namespace annulus {
namespace {

struct TopologyDeleter {
  void operator()(hwloc_topology* t) const { hwloc_topology_destroy(t); }
};
using Topology = std::unique_ptr<hwloc_topology, TopologyDeleter>;

struct BitmapDeleter {
  void operator()(hwloc_bitmap_s* b) const { hwloc_bitmap_free(b); }
};
using Bitmap = std::unique_ptr<hwloc_bitmap_s, BitmapDeleter>;

// The kernel below us with as little discovery as binding needs: processors and memory nodes.
Topology load_this_system() {
  for (const char* name : {"HWLOC_XMLFILE", "HWLOC_SYNTHETIC", "HWLOC_FSROOT"}) {
    if (std::getenv(name) == nullptr) continue;
    throw Error(ErrorKind::kPlan, "topology",
                std::string("a process can be bound to the machine it runs on only, but ") + name +
                    " makes hwloc describe another; unset it");
  }
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) {
    throw Error(ErrorKind::kResource, "topology", "hwloc could not be started: out of memory?");
  }
  Topology topology(raw);
  hwloc_topology_set_all_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_NONE);
  if (hwloc_topology_load(raw) != 0) {
    throw Error(ErrorKind::kUnavailable, "topology",
                std::string("hwloc cannot describe this machine (") + std::strerror(errno) + ")");
  }
  return topology;
}

Bitmap to_bitmap(const std::vector<int>& values) {
  Bitmap bitmap(hwloc_bitmap_alloc());
  for (int value : values) {
    if (!bitmap || value < 0 || hwloc_bitmap_set(bitmap.get(), static_cast<unsigned>(value)) != 0) {
      throw Error(ErrorKind::kInternal, "topology",
                  "a set with the number " + std::to_string(value) + " cannot be made");
    }
  }
  return bitmap;
}

std::vector<int> to_vector(hwloc_const_bitmap_t bitmap) {
  std::vector<int> out;
  if (hwloc_bitmap_weight(bitmap) < 0) return out;
  for (int i = hwloc_bitmap_first(bitmap); i >= 0; i = hwloc_bitmap_next(bitmap, i)) out.push_back(i);
  return out;
}

Binding ask(hwloc_topology_t topology) {
  Binding binding;
  const Bitmap set(hwloc_bitmap_alloc());
  if (!set || hwloc_get_cpubind(topology, set.get(), HWLOC_CPUBIND_THREAD) != 0) {
    throw Error(ErrorKind::kUnavailable, "topology",
                std::string("the kernel does not say where this thread may run (") + std::strerror(errno) + ")");
  }
  binding.cpus = CpuSet(to_vector(set.get()));
  hwloc_membind_policy_t policy = HWLOC_MEMBIND_DEFAULT;
  if (hwloc_get_membind(topology, set.get(), &policy, HWLOC_MEMBIND_THREAD | HWLOC_MEMBIND_BYNODESET) == 0) {
    binding.memory_bound = policy == HWLOC_MEMBIND_BIND;
    binding.memory_nodes = to_vector(set.get());
  }
  return binding;
}

std::string list(const std::vector<int>& nodes) { return CpuSet(nodes).to_string(); }

}  // namespace

BindingResult bind_this_process(const RankPlacement& rank) {
  const std::string who = "rank " + std::to_string(rank.rank);
  if (!rank.is_this_system) {
    throw Error(ErrorKind::kPlan, "topology",
                who + " was placed on a description of host " + rank.host +
                    ", not on the machine it runs on; place it with Machine::this_machine() before binding");
  }
  if (rank.cpus.empty() || rank.memory_nodes.empty()) {
    throw Error(ErrorKind::kInternal, "topology", who + " was placed on no processors or no memory");
  }
  const Topology topology = load_this_system();
  const Binding before = ask(topology.get());

  const Bitmap cpus = to_bitmap(rank.cpus.pus());
  if (hwloc_set_cpubind(topology.get(), cpus.get(), HWLOC_CPUBIND_PROCESS) != 0) {
    throw Error(ErrorKind::kResource, "topology",
                who + " cannot be bound to processors " + rank.cpus.to_string() + " (" + std::strerror(errno) +
                    "); it may run on " + before.cpus.to_string());
  }
  // The kernel cuts what a cgroup forbids out of the set without a word.
  const CpuSet now = ask(topology.get()).cpus;
  if (now != rank.cpus) {
    const Bitmap old = to_bitmap(before.cpus.pus());
    hwloc_set_cpubind(topology.get(), old.get(), HWLOC_CPUBIND_PROCESS);
    throw Error(ErrorKind::kResource, "topology",
                who + " was to run on processors " + rank.cpus.to_string() + ", the kernel allows " + now.to_string() +
                    "; has its cgroup changed since it was placed?");
  }

  BindingResult result;
  const Bitmap nodes = to_bitmap(rank.memory_nodes);
  // STRICT is what makes it a binding: without it hwloc asks the kernel for a preference only. Per thread, inherited:
  // Linux has no call that sets it for all threads of a process.
  if (hwloc_set_membind(topology.get(), nodes.get(), HWLOC_MEMBIND_BIND,
                        HWLOC_MEMBIND_THREAD | HWLOC_MEMBIND_BYNODESET | HWLOC_MEMBIND_STRICT) != 0) {
    result.warnings.push_back("memory of " + who + " is not bound to NUMA node " + list(rank.memory_nodes) +
                              ": the kernel refuses (" + std::strerror(errno) +
                              "; in a container, allow set_mempolicy, e.g. with the capability SYS_NICE)");
  }
  result.binding = ask(topology.get());
  if (result.warnings.empty() && (!result.binding.memory_bound || result.binding.memory_nodes != rank.memory_nodes)) {
    result.warnings.push_back("memory of " + who + " was to come from NUMA node " + list(rank.memory_nodes) +
                              ", the kernel reports " +
                              (result.binding.memory_nodes.empty() ? "nothing" : list(result.binding.memory_nodes)));
  }
  return result;
}

Binding current_binding() {
  const Topology topology = load_this_system();
  return ask(topology.get());
}

std::optional<int> memory_node_of(const void* address) {
  const Topology topology = load_this_system();
  const Bitmap set(hwloc_bitmap_alloc());
  if (!set || hwloc_get_area_memlocation(topology.get(), address, 1, set.get(), HWLOC_MEMBIND_BYNODESET) != 0) {
    return std::nullopt;
  }
  const int node = hwloc_bitmap_first(set.get());
  return node < 0 ? std::nullopt : std::optional<int>(node);
}

}  // namespace annulus
