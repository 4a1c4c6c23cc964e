// Tests the binding of memory to NUMA nodes against what the kernel reports. Each test binds a child process.
#include "memory/numa.h"

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/mempolicy.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/error.h"
#include "tests/common/in_child.h"

namespace annulus::numa_test {
namespace {

// Returns the NUMA nodes of this machine from /sys, or node 0 if /sys has none.
std::vector<int> nodes_of_this_machine() {
  std::vector<int> nodes;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/sys/devices/system/node", error)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("node")) nodes.push_back(std::stoi(name.substr(4)));
  }
  if (nodes.empty()) nodes.push_back(0);
  std::sort(nodes.begin(), nodes.end());
  return nodes;
}

// What the kernel reports about new memory of the calling thread.
struct MemoryBinding {
  bool bound = false;      // it may come from `nodes` only
  std::vector<int> nodes;  // ascending; empty when it is not bound or the kernel would not tell
  bool operator==(const MemoryBinding&) const = default;
};

MemoryBinding current_memory_binding() {
  constexpr size_t kMaxNodes = 4096, kWordBits = sizeof(unsigned long) * CHAR_BIT;
  std::array<unsigned long, kMaxNodes / kWordBits> mask{};
  int policy = MPOL_DEFAULT;
  MemoryBinding binding;
  if (syscall(SYS_get_mempolicy, &policy, mask.data(), kMaxNodes + 1, nullptr, 0UL) != 0) return binding;
  binding.bound = (policy & ~MPOL_MODE_FLAGS) == MPOL_BIND;
  for (size_t node = 0; binding.bound && node < kMaxNodes; ++node) {
    if ((mask[node / kWordBits] >> (node % kWordBits) & 1) != 0) binding.nodes.push_back(static_cast<int>(node));
  }
  return binding;
}

// Returns the NUMA node of the page at `address`, which must be readable, or nothing if the kernel does not tell.
std::optional<int> memory_node_of(const void* address) {
  int node = -1;
  if (syscall(SYS_get_mempolicy, &node, nullptr, 0UL, address, MPOL_F_NODE | MPOL_F_ADDR) != 0 || node < 0) {
    return std::nullopt;
  }
  return node;
}

// Binds memory to the nodes. Where the kernel refuses, as it often does in containers, checks that it really does, that
// the message names the nodes and that nothing is bound, and skips the rest of the test.
void bind_or_skip(const std::vector<int>& nodes) {
  const std::string warning = bind_memory(nodes);
  if (warning.empty()) return;
  if (current_memory_binding().bound) throw std::runtime_error("bound, but said: " + warning);
  std::array<unsigned long, 64> mask{};
  constexpr size_t kWordBits = sizeof(unsigned long) * CHAR_BIT;
  for (const int node : nodes) {
    if (warning.find(std::to_string(node)) == std::string::npos) throw std::runtime_error("no node in: " + warning);
    mask[static_cast<size_t>(node) / kWordBits] |= 1UL << (static_cast<size_t>(node) % kWordBits);
  }
  const bool binds = syscall(SYS_set_mempolicy, MPOL_BIND, mask.data(), mask.size() * kWordBits + 1) == 0;
  if (binds && current_memory_binding() == MemoryBinding{true, nodes}) {
    throw std::runtime_error("the kernel binds memory, but bind_memory said: " + warning);
  }
  throw SkipTheTest{warning};
}

TEST(Numa, NothingIsBoundInitially) {
  in_child([]() -> std::string {
    const MemoryBinding now = current_memory_binding();
    return !now.bound && now.nodes.empty() ? "" : "bound";
  });
}

TEST(Numa, KernelReportsTheBinding) {
  for (int node : nodes_of_this_machine()) {
    in_child([&]() -> std::string {
      bind_or_skip({node});
      return current_memory_binding() == MemoryBinding{true, {node}} ? "" : "the kernel reports another binding";
    });
  }
}

TEST(Numa, LaterThreadsInheritTheBinding) {
  in_child([]() -> std::string {
    const std::vector<int> nodes = nodes_of_this_machine();
    bind_or_skip(nodes);
    std::string wrong = "the thread did not run";
    std::thread([&] { wrong = current_memory_binding() == MemoryBinding{true, nodes} ? "" : "not inherited"; }).join();
    return wrong;
  });
}

TEST(Numa, MemoryComesFromTheNode) {
  for (int allowed : nodes_of_this_machine()) {
    in_child([&]() -> std::string {
      bind_or_skip({allowed});
      constexpr size_t kBytes = size_t{8} << 20;
      const auto memory = std::make_unique<char[]>(kBytes);  // written to: zeroed
      const std::optional<int> node = memory_node_of(memory.get() + kBytes / 2);
      if (!node) throw SkipTheTest{"the kernel does not say where memory is"};
      return *node == allowed ? "" : "memory on node " + std::to_string(*node);
    });
  }
}

// From here on the kernel refuses this thread set_mempolicy, as it does in many containers.
void refuse_binding() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_set_mempolicy, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{static_cast<unsigned short>(std::size(program)), program};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0) {
    throw SkipTheTest{std::string("no system call can be refused here: ") + std::strerror(errno)};
  }
}

TEST(Numa, RefusalWarnsAndBindsNothing) {
  in_child([]() -> std::string {
    refuse_binding();
    const std::string warning = bind_memory(nodes_of_this_machine());
    if (warning.find("refused (Operation not permitted") == std::string::npos) return "it said: " + warning;
    return current_memory_binding().bound ? "bound" : "";
  });
}

TEST(Numa, MissingNodeWarnsAndBindsNothing) {
  in_child([]() -> std::string {
    const std::string warning = bind_memory({1023});
    if (warning.find("NUMA node 1023") == std::string::npos) return "it said: " + warning;
    return current_memory_binding().bound ? "bound" : "";
  });
  EXPECT_THROW(bind_memory({-1}), Error);
  EXPECT_THROW(bind_memory({1 << 20}), Error);
}

}  // namespace
}  // namespace annulus::numa_test
