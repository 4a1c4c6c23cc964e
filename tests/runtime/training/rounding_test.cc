// Tests of training in fp32 and bf16 against the same training in fp64: how much is lost to rounding, and that several
// ranks lose no more than one does.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "comm/threads/threads.h"
#include "runtime/training/training.h"
#include "tests/runtime/training/rounding_errors.h"
#include "tests/runtime/training/tiny_run.h"

namespace annulus::rounding_test {
namespace {

RunFirstSteps over_ranks(int ranks) {
  return [ranks](const Config& config) {
    FirstSteps first;
    run_ranks(ranks, [&](Communicator& world) {
      FirstSteps mine = first_steps(config, world, at::kCPU);
      if (world.rank() == 0) first = std::move(mine);
    });
    return first;
  };
}

class Rounding : public ::testing::TestWithParam<std::string> {
 protected:
  Config config(const std::string& dtype) const {
    Config c = tiny_config(folder_);
    c.model.dtype = dtype;
    return c;
  }

 private:
  const TestFolder folder_;
};

// One rank rounds each tensor on the way from a weight to the loss and back; with 2 layers these are at most 64. Errors
// of either sign add up to the square root of that, 8 roundings, and 16 leave a factor of 2. Several ranks round the
// parts of a sum and then the sum, which is twice where one rank rounds once; another factor of 2 is for the chance
// that is left in a mean square over few runs.
TEST_P(Rounding, RanksLoseNoMoreThanOneRankDoes) {
  const std::string dtype = GetParam();
  const std::vector<FirstSteps> exact = with_each_seed(config("fp64"), over_ranks(1));
  const RoundingErrors one = errors_of(with_each_seed(config(dtype), over_ranks(1)), exact);
  std::printf("%s, 1 rank: losses %.2g, gradients %.2g\n", dtype.c_str(), one.losses, one.gradients);
  EXPECT_LT(one.losses, 16 * roundoff(dtype));
  EXPECT_LT(one.gradients, 16 * roundoff(dtype));
  EXPECT_GT(one.gradients, roundoff(dtype) / 16) << "it computes in " << dtype;
  for (const auto& [ranks, data] : {std::pair(2, 1), std::pair(2, 2), std::pair(4, 1), std::pair(4, 2)}) {
    Config many = config(dtype);
    many.mesh.data = data;
    const RoundingErrors errors = errors_of(with_each_seed(many, over_ranks(ranks)), exact);
    std::printf("%s, %d ranks, data %d: losses %.2g, gradients %.2g\n", dtype.c_str(), ranks, data, errors.losses,
                errors.gradients);
    EXPECT_LE(errors.losses, 4 * one.losses + roundoff(dtype)) << ranks << " ranks, data " << data;
    EXPECT_LE(errors.gradients, 4 * one.gradients) << ranks << " ranks, data " << data;
  }
}

INSTANTIATE_TEST_SUITE_P(Training, Rounding, ::testing::Values("fp32", "bf16"),
                         [](const auto& of) { return of.param; });

}  // namespace
}  // namespace annulus::rounding_test
