// Tests of the measurement of a machine: all ranks get the same figures, and the profile that is written can be read.
#include "benchmarks/calibration.h"

#include <gtest/gtest.h>

#include <vector>

#include "attention/plan/machine.h"
#include "benchmarks/measure.h"
#include "comm/threads/threads.h"

namespace annulus::calibration_test {
namespace {

TEST(Calibration, MeasuresAMachineThatAProfileHolds) {
  std::vector<MachineProfile> machines(3);
  run_ranks(3, [&](Communicator& world) {
    machines[static_cast<size_t>(world.rank())] =
        calibrate(world, {.head_dim = 16, .heads = 1, .seconds = 1e-3}, thread_cpu_seconds);
  });
  const MachineProfile& machine = machines[0];
  EXPECT_EQ(machines[1], machine);
  EXPECT_EQ(machines[2], machine);
  EXPECT_EQ(parse_machine(machine.text(), "test"), machine);
  EXPECT_FALSE(machine.overlap);
  EXPECT_EQ(machine.ranks_per_host, 0);
  ASSERT_TRUE(machine.fp32 && machine.bf16);
  for (const KernelRate* rate : {&machine.fp32->forward, &machine.fp32->backward, &machine.bf16->forward}) {
    EXPECT_EQ(rate->rates.size(), rate->rows.size());
    EXPECT_GT(rate->rate(1024, 1024), 0);
  }
}

}  // namespace
}  // namespace annulus::calibration_test
