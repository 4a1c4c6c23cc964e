// See binding.h.
#include "launcher/topology/binding.h"

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

// Loads this system's topology with as little discovery as binding needs.
Topology load_this_system() {
  for (const char* name : {"HWLOC_XMLFILE", "HWLOC_SYNTHETIC", "HWLOC_FSROOT"}) {
    if (std::getenv(name) == nullptr) continue;
    throw Error(ErrorKind::kPlan, "topology",
                std::string("a process can be bound only to the machine it runs on, but ") + name +
                    " makes hwloc describe another one; unset it");
  }
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) {
    throw Error(ErrorKind::kResource, "topology", "hwloc could not be initialized, probably for lack of memory");
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
                  "a set that contains processor " + std::to_string(value) + " cannot be made");
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

CpuSet ask(hwloc_topology_t topology) {
  const Bitmap set(hwloc_bitmap_alloc());
  if (!set || hwloc_get_cpubind(topology, set.get(), HWLOC_CPUBIND_THREAD) != 0) {
    throw Error(ErrorKind::kUnavailable, "topology",
                std::string("the kernel does not say where this thread may run (") + std::strerror(errno) + ")");
  }
  return CpuSet(to_vector(set.get()));
}

}  // namespace

void bind_to_cpus(const RankPlacement& rank) {
  const std::string who = "rank " + std::to_string(rank.rank);
  if (!rank.is_this_system) {
    throw Error(ErrorKind::kPlan, "topology",
                who + " was placed on a description of host " + rank.host +
                    ", not on the machine it runs on; place it with Machine::this_machine() before binding");
  }
  if (rank.cpus.empty()) throw Error(ErrorKind::kInternal, "topology", who + " was placed on no processors");
  const Topology topology = load_this_system();
  const CpuSet before = ask(topology.get());

  const Bitmap cpus = to_bitmap(rank.cpus.pus());
  if (hwloc_set_cpubind(topology.get(), cpus.get(), HWLOC_CPUBIND_PROCESS) != 0) {
    throw Error(ErrorKind::kResource, "topology",
                who + " cannot be bound to processors " + rank.cpus.to_string() + " (" + std::strerror(errno) +
                    "); it may run on " + before.to_string());
  }
  // The kernel silently removes from the set what a cgroup forbids.
  const CpuSet now = ask(topology.get());
  if (now != rank.cpus) {
    const Bitmap old = to_bitmap(before.pus());
    hwloc_set_cpubind(topology.get(), old.get(), HWLOC_CPUBIND_PROCESS);
    throw Error(ErrorKind::kResource, "topology",
                who + " was placed on processors " + rank.cpus.to_string() + ", but the kernel allows only " +
                    now.to_string() + "; check whether its cgroup has changed since it was placed");
  }
}

CpuSet current_cpus() {
  const Topology topology = load_this_system();
  return ask(topology.get());
}

}  // namespace annulus
