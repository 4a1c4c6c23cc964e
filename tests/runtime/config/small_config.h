// A small configuration and what reading others says. Used by the tests of runtime/config/.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "common/error.h"
#include "runtime/config/config.h"
#include "tests/common/expect_error.h"

namespace annulus::testing {

inline const std::string kSmall = R"(
[run]
steps = 600
[data]
train = ["*.txt"]
[model]
layers = 2
dim = 64
heads = 4
[optimizer]
lr = 1e-3
)";

// The message of the Error of this kind that parsing throws.
inline std::string refusal(const std::string& toml, const std::vector<std::string>& sets = {},
                           ErrorKind kind = ErrorKind::kUsage) {
  SCOPED_TRACE(toml);
  return error_text(kind, [&] { parse_config(toml, "small.toml", sets); });
}

inline void expect_in(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << "\nin: " << text;
}

}  // namespace annulus::testing
