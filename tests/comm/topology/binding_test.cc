// Binding, against what the kernel itself says. Each case binds a child process of its own.
#include "comm/topology/binding.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <thread>

#include "comm/topology/machine.h"
#include "common/error.h"

namespace annulus {
namespace {

CpuSet mask_from_kernel() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof(mask), &mask) != 0) return {};
  std::vector<int> pus;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &mask)) pus.push_back(i);
  }
  return CpuSet(pus);
}

// Runs `body` in a child; it reports by returning an empty text or what is wrong.
void in_child(const std::function<std::string()>& body) {
  std::cout.flush();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::string wrong;
    try {
      wrong = body();
    } catch (const std::exception& error) {
      wrong = std::string("raised: ") + error.what();
    }
    if (!wrong.empty()) std::cerr << "child: " << wrong << std::endl;
    _exit(wrong.empty() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}

std::string compare(const Binding& got, const RankPlacement& rank, bool memory) {
  if (got.cpus != rank.cpus) return "cpus " + got.cpus.to_string() + ", placed on " + rank.cpus.to_string();
  if (memory && !got.memory_bound) return "memory is not bound";
  if (memory && got.memory_nodes != rank.memory_nodes) return "memory on other nodes than placed";
  return "";
}

TEST(Binding, EqualsThePlacement) {
  const Machine machine = Machine::this_machine();
  for (int ranks : {1, 2, 3}) {
    const Placement placement = place({machine}, ranks);
    for (const RankPlacement& rank : placement.ranks) {
      in_child([&]() -> std::string {
        const BindingResult result = bind_this_process(rank);
        for (const std::string& warning : result.warnings) std::cout << "note: " << warning << std::endl;
        const bool memory = result.warnings.empty();
        if (std::string wrong = compare(result.binding, rank, memory); !wrong.empty()) return wrong;
        if (std::string wrong = compare(current_binding(), rank, memory); !wrong.empty()) return "later: " + wrong;
        if (mask_from_kernel() != rank.cpus) return "sched_getaffinity says " + mask_from_kernel().to_string();
        return "";
      });
    }
  }
}

TEST(Binding, ThreadsMadeLaterInheritIt) {
  const Placement placement = place({Machine::this_machine()}, 2);
  const RankPlacement& rank = placement.ranks[1];
  in_child([&]() -> std::string {
    const BindingResult result = bind_this_process(rank);
    std::string wrong = "the thread did not run";
    std::thread([&] {
      std::thread([&] { wrong = compare(current_binding(), rank, result.warnings.empty()); }).join();
    }).join();
    return wrong;
  });
}

TEST(Binding, ThreadsThatExistAreMovedToo) {
  const Placement placement = place({Machine::this_machine()}, 2);
  const RankPlacement& rank = placement.ranks[0];
  in_child([&]() -> std::string {
    std::string wrong;
    std::thread([&] {
      // This thread binds the process while the main thread exists.
      bind_this_process(rank);
    }).join();
    if (mask_from_kernel() != rank.cpus) wrong = "main thread on " + mask_from_kernel().to_string();
    return wrong;
  });
}

TEST(Binding, MemoryComesFromTheNode) {
  const Machine machine = Machine::this_machine();
  const Placement placement = place({machine}, 2);
  for (const RankPlacement& rank : placement.ranks) {
    in_child([&]() -> std::string {
      const BindingResult result = bind_this_process(rank);
      constexpr size_t kBytes = size_t{8} << 20;
      const auto memory = std::make_unique<char[]>(kBytes);  // written to: zeroed
      const std::optional<int> node = memory_node_of(memory.get() + kBytes / 2);
      if (!result.warnings.empty() || !node) {
        std::cout << "note: the kernel does not bind memory or does not say where it is" << std::endl;
        return "";
      }
      for (int allowed : rank.memory_nodes) {
        if (*node == allowed) return "";
      }
      return "memory on node " + std::to_string(*node);
    });
  }
}

TEST(Binding, NothingIsBoundByAForeignPlacement) {
  Machine foreign = Machine::from_synthetic("pack:2 [numa] core:2 pu:1");
  const Placement placement = place({foreign}, 4);
  const CpuSet before = mask_from_kernel();
  try {
    bind_this_process(placement.ranks[0]);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kPlan);
    EXPECT_NE(std::string(error.what()).find("host synthetic"), std::string::npos) << error.what();
  }
  EXPECT_EQ(mask_from_kernel(), before);
}

TEST(Binding, NothingIsBoundWhenHwlocIsToldOfAnotherMachine) {
  const Placement placement = place({Machine::this_machine()}, 1);
  ASSERT_EQ(setenv("HWLOC_SYNTHETIC", "[numa] pu:3", 1), 0);
  EXPECT_THROW(bind_this_process(placement.ranks[0]), Error);
  EXPECT_THROW(current_binding(), Error);
  ASSERT_EQ(unsetenv("HWLOC_SYNTHETIC"), 0);
}

TEST(Binding, ProcessorsThatAreNotThereAreAnErrorThatBindsNothing) {
  RankPlacement rank = place({Machine::this_machine()}, 1).ranks[0];
  const CpuSet before = mask_from_kernel();
  const CpuSet there = rank.cpus;
  for (const CpuSet& bad : {CpuSet({60000}), there.united(CpuSet({60000}))}) {
    rank.cpus = bad;
    try {
      bind_this_process(rank);
      ADD_FAILURE() << "no error for " << bad.to_string();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kResource);
      EXPECT_NE(std::string(error.what()).find("60000"), std::string::npos) << error.what();
    }
    EXPECT_EQ(mask_from_kernel(), before);
  }
}

TEST(Binding, AMaskThatIsNarrowerIsRespected) {
  const Machine whole = Machine::this_machine();
  if (whole.cores.size() < 2) GTEST_SKIP() << "needs two cores";
  const RankPlacement half = place({whole}, 2).ranks[1];
  in_child([&]() -> std::string {
    bind_this_process(half);
    const Machine seen = Machine::this_machine();
    if (seen.cpus() != half.cpus) return "sees " + seen.cpus().to_string();
    if (Machine::this_machine(false).cpus() != whole.cpus()) return "does not see the whole machine when asked to";
    return "";
  });
}

}  // namespace
}  // namespace annulus
