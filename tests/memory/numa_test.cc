// Memory on NUMA nodes, against what the kernel itself says. Each case binds a child process of its own.
#include "memory/numa.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <thread>

#include "common/error.h"
#include "tests/common/in_child.h"

namespace annulus {
namespace {

// The nodes of this machine, as /sys shows them; node 0 where it shows none.
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

// Says so where this kernel does not bind: then there is nothing more to see.
bool binds(const std::vector<int>& nodes) {
  const std::string warning = bind_memory(nodes);
  if (!warning.empty()) std::cout << "note: " << warning << std::endl;
  return warning.empty();
}

TEST(Numa, NothingIsBoundToBeginWith) {
  in_child([]() -> std::string {
    const MemoryBinding now = current_memory_binding();
    return !now.bound && now.nodes.empty() ? "" : "bound";
  });
}

TEST(Numa, TheKernelReportsWhatWasBound) {
  for (int node : nodes_of_this_machine()) {
    in_child([&]() -> std::string {
      if (!binds({node})) return current_memory_binding().bound ? "a refusal, but bound" : "";
      return current_memory_binding() == MemoryBinding{true, {node}} ? "" : "the kernel reports another binding";
    });
  }
}

TEST(Numa, ThreadsMadeLaterInheritIt) {
  in_child([]() -> std::string {
    const std::vector<int> nodes = nodes_of_this_machine();
    if (!binds(nodes)) return "";
    std::string wrong = "the thread did not run";
    std::thread([&] { wrong = current_memory_binding() == MemoryBinding{true, nodes} ? "" : "not inherited"; }).join();
    return wrong;
  });
}

TEST(Numa, MemoryComesFromTheNode) {
  for (int allowed : nodes_of_this_machine()) {
    in_child([&]() -> std::string {
      const bool bound = binds({allowed});
      constexpr size_t kBytes = size_t{8} << 20;
      const auto memory = std::make_unique<char[]>(kBytes);  // written to: zeroed
      const std::optional<int> node = memory_node_of(memory.get() + kBytes / 2);
      if (!node) std::cout << "note: the kernel does not say where memory is" << std::endl;
      return !bound || !node || *node == allowed ? "" : "memory on node " + std::to_string(*node);
    });
  }
}

TEST(Numa, ANodeThatIsNotThereIsAWarningThatBindsNothing) {
  in_child([]() -> std::string {
    const std::string warning = bind_memory({1023});
    if (warning.find("NUMA node 1023") == std::string::npos) return "it said: " + warning;
    return current_memory_binding().bound ? "bound" : "";
  });
  EXPECT_THROW(bind_memory({-1}), Error);
  EXPECT_THROW(bind_memory({1 << 20}), Error);
}

}  // namespace
}  // namespace annulus
