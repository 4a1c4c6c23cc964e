// Tests of launcher/topology/binding.h against the affinity that the kernel reports. Each case that binds does so in a
// child process.
#include "launcher/topology/binding.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "common/error.h"
#include "launcher/topology/machine.h"
#include "tests/common/in_child.h"

namespace annulus::binding_test {
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

std::string compare(const CpuSet& got, const RankPlacement& rank) {
  return got == rank.cpus ? "" : "cpus " + got.to_string() + ", placed on " + rank.cpus.to_string();
}

TEST(Binding, BindsToThePlacement) {
  const Machine machine = Machine::this_machine();
  for (int ranks : {1, 2, 3}) {
    const Placement placement = place({machine}, ranks);
    for (const RankPlacement& rank : placement.ranks) {
      in_child([&]() -> std::string {
        bind_to_cpus(rank);
        if (std::string wrong = compare(current_cpus(), rank); !wrong.empty()) return wrong;
        if (mask_from_kernel() != rank.cpus) return "sched_getaffinity says " + mask_from_kernel().to_string();
        return "";
      });
    }
  }
}

TEST(Binding, LaterThreadsInheritTheBinding) {
  const Placement placement = place({Machine::this_machine()}, 2);
  const RankPlacement& rank = placement.ranks[1];
  in_child([&]() -> std::string {
    bind_to_cpus(rank);
    std::string wrong = "the thread did not run";
    std::thread([&] { std::thread([&] { wrong = compare(current_cpus(), rank); }).join(); }).join();
    return wrong;
  });
}

TEST(Binding, ExistingThreadsAreBoundToo) {
  const Placement placement = place({Machine::this_machine()}, 2);
  const RankPlacement& rank = placement.ranks[0];
  in_child([&]() -> std::string {
    std::string wrong;
    std::thread([&] {
      // This thread binds the whole process, including the main thread.
      bind_to_cpus(rank);
    }).join();
    if (mask_from_kernel() != rank.cpus) wrong = "main thread on " + mask_from_kernel().to_string();
    return wrong;
  });
}

TEST(Binding, RefusesThePlacementOfAnotherMachine) {
  Machine foreign = Machine::from_synthetic("pack:2 [numa] core:2 pu:1");
  const Placement placement = place({foreign}, 4);
  const CpuSet before = mask_from_kernel();
  try {
    bind_to_cpus(placement.ranks[0]);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kPlan);
    EXPECT_NE(std::string(error.what()).find("host synthetic"), std::string::npos) << error.what();
  }
  EXPECT_EQ(mask_from_kernel(), before);
}

TEST(Binding, RefusesToBindIfHwlocDescribesAnotherMachine) {
  const Placement placement = place({Machine::this_machine()}, 1);
  ASSERT_EQ(setenv("HWLOC_SYNTHETIC", "[numa] pu:3", 1), 0);
  EXPECT_THROW(bind_to_cpus(placement.ranks[0]), Error);
  EXPECT_THROW(current_cpus(), Error);
  ASSERT_EQ(unsetenv("HWLOC_SYNTHETIC"), 0);
}

TEST(Binding, RefusesMissingProcessorsWithoutBinding) {
  RankPlacement rank = place({Machine::this_machine()}, 1).ranks[0];
  const CpuSet before = mask_from_kernel();
  const CpuSet there = rank.cpus;
  std::vector<int> one_too_many = there.pus();
  one_too_many.push_back(60000);
  for (const CpuSet& bad : {CpuSet({60000}), CpuSet(one_too_many)}) {
    rank.cpus = bad;
    try {
      bind_to_cpus(rank);
      ADD_FAILURE() << "no error for " << bad.to_string();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kResource);
      EXPECT_NE(std::string(error.what()).find("60000"), std::string::npos) << error.what();
    }
    EXPECT_EQ(mask_from_kernel(), before);
  }
}

TEST(Binding, RespectsANarrowerAffinityMask) {
  const Machine whole = Machine::this_machine();
  if (whole.cores.size() < 2) GTEST_SKIP() << "needs two cores";
  const RankPlacement half = place({whole}, 2).ranks[1];
  in_child([&]() -> std::string {
    bind_to_cpus(half);
    const Machine seen = Machine::this_machine();
    if (seen.cpus() != half.cpus) return "sees " + seen.cpus().to_string();
    if (Machine::this_machine(false).cpus() != whole.cpus()) return "does not see the whole machine when asked for it";
    return "";
  });
}

}  // namespace
}  // namespace annulus::binding_test
