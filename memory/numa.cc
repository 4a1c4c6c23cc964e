// See numa.h. It uses system calls directly, because libnuma and hwloc would first discover the whole machine.
#include "memory/numa.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <set>

#include "common/error.h"

namespace annulus {
namespace {

// More nodes than any kernel is built for. The kernel refuses masks that are shorter than its own.
constexpr size_t kMaxNodes = 4096;
constexpr size_t kWordBits = sizeof(unsigned long) * CHAR_BIT;
using NodeMask = std::array<unsigned long, kMaxNodes / kWordBits>;

std::string list(const std::vector<int>& nodes) {
  std::string out;
  for (int node : nodes) out += (out.empty() ? "" : ",") + std::to_string(node);
  return out;
}

// The nodes to which a policy binds, as the kernel reports them: that of new memory of the calling thread, or of the
// page at `address`. Empty if it does not bind.
std::vector<int> bound_nodes(const void* address = nullptr) {
  NodeMask mask{};
  int policy = MPOL_DEFAULT;
  std::vector<int> nodes;
  const unsigned long flags = address != nullptr ? MPOL_F_ADDR : 0;
  if (syscall(SYS_get_mempolicy, &policy, mask.data(), kMaxNodes + 1, address, flags) != 0) return nodes;
  if ((policy & ~MPOL_MODE_FLAGS) != MPOL_BIND) return nodes;
  for (size_t node = 0; node < kMaxNodes; ++node) {
    if ((mask[node / kWordBits] >> (node % kWordBits) & 1) != 0) nodes.push_back(static_cast<int>(node));
  }
  return nodes;
}

NodeMask mask_of(const std::vector<int>& nodes) {
  NodeMask mask{};
  for (const int node : nodes) {
    if (node < 0 || node >= static_cast<int>(kMaxNodes)) {
      throw Error(ErrorKind::kInternal, "memory", "no NUMA node can have the number " + std::to_string(node));
    }
    mask[static_cast<size_t>(node) / kWordBits] |= 1UL << (static_cast<size_t>(node) % kWordBits);
  }
  return mask;
}

}  // namespace

std::string bind_memory(const std::vector<int>& nodes) {
  const NodeMask mask = mask_of(nodes);
  // This sets the policy of one thread, which its new threads inherit: Linux has no call for all threads of a process.
  // The kernel reads one bit less than the length that it is given.
  if (syscall(SYS_set_mempolicy, MPOL_BIND, mask.data(), kMaxNodes + 1) != 0) {
    return "memory is not bound to NUMA node " + list(nodes) + ": the kernel refused (" + std::strerror(errno) +
           "; in a container, allow set_mempolicy, e.g. with the capability SYS_NICE)";
  }
  const std::vector<int> now = bound_nodes();
  if (now == nodes) return "";
  return "memory should come from NUMA node " + list(nodes) + ", but the kernel reports " +
         (now.empty() ? "nothing" : list(now));
}

bool bind_pages(void* memory, int64_t bytes, const std::vector<int>& nodes) {
  const NodeMask mask = mask_of(nodes);
  return syscall(SYS_mbind, memory, static_cast<unsigned long>(bytes), MPOL_BIND, mask.data(), kMaxNodes + 1, 0U) == 0;
}

// move_pages without target nodes moves nothing, and reports the node of each page, or an error for one that was not
// touched.
std::vector<int> nodes_of_pages(const void* memory, int64_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::vector<void*> pages;
  for (size_t at = 0; at < static_cast<size_t>(bytes); at += page) {
    pages.push_back(const_cast<char*>(static_cast<const char*>(memory) + at));
  }
  std::vector<int> status(pages.size(), -1);
  if (syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, status.data(), 0) != 0) return {};
  std::set<int> nodes;
  for (const int node : status) {
    if (node >= 0) nodes.insert(node);
  }
  return {nodes.begin(), nodes.end()};
}

std::vector<int> nodes_bound_to(const void* memory) { return bound_nodes(memory); }

}  // namespace annulus
