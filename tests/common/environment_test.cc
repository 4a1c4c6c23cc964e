// Tests of common/environment.h.
#include "common/environment.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <map>
#include <string>

#include "common/error.h"
#include "tests/common/expect_error.h"

namespace annulus::environment_test {
namespace {

TEST(Environment, SwitchIsOneOrZero) {
  for (const auto& [text, meant] : std::map<std::string, bool>{{"", true}, {"1", true}, {"0", false}}) {
    setenv("ANNULUS_BIND", text.c_str(), 1);
    EXPECT_EQ(switch_from_environment("ANNULUS_BIND", true), meant) << text;
  }
  setenv("ANNULUS_BIND", "no", 1);
  EXPECT_THROW(switch_from_environment("ANNULUS_BIND", true), Error);
  unsetenv("ANNULUS_BIND");
  EXPECT_FALSE(switch_from_environment("ANNULUS_BIND", false));
}

TEST(Environment, ErrorNamesTheAllowedRange) {
  setenv("ANNULUS_BOOTSTRAP_TIMEOUT", "0", 1);
  expect_error(ErrorKind::kUsage, {"expected a number from 0.1 to 86400;"},
               [] { number_from_environment("ANNULUS_BOOTSTRAP_TIMEOUT", 60, 0.1, 86400); });
}

}  // namespace
}  // namespace annulus::environment_test
