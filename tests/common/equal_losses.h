// Compares losses of runs that mathematics makes equal. Used by tests that train in fp64.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

namespace annulus {

// How much the loss of step `step` (from 0), or of a validation after so many steps, may differ relatively in fp64
// between runs that add in another order: at other numbers of ranks, layouts, schedules, levels of sharding or
// packings. In these small models a number is rounded less than 10,000 times on its way to the loss, by 2^-53 = 1.1e-16
// each time, so that even roundings that all go the same way stay below 1e-12. Updates amplify differences, here less
// than tenfold in ten steps. What is rounded to fp32 anywhere is wrong by up to 6e-8 and fails.
inline double fp64_tolerance(size_t step) { return 1e-12 * std::pow(10.0, static_cast<double>(step) / 10); }

// Expects the losses of steps `first`, `first` + 1, ... to be equal up to fp64_tolerance().
inline void expect_equal_losses(const std::vector<double>& got, const std::vector<double>& want,
                                const std::string& what, size_t first = 0) {
  ASSERT_EQ(got.size(), want.size()) << what;
  double most = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double allowed = fp64_tolerance(first + i) * std::abs(want[i]);
    EXPECT_NEAR(got[i], want[i], allowed) << what << ", step " << first + i + 1;
    most = std::max(most, std::abs(got[i] - want[i]) / allowed);
  }
  ::testing::Test::RecordProperty(what + ": largest difference, relative to the tolerance", std::to_string(most));
}

}  // namespace annulus
