// expect_error and error_text: a call that must raise an Error. Used by tests of all packages.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "common/error.h"

namespace annulus {

// Returns the text of the Error that a call raises, and "" after a failure of the test if it raises none. Its kind must
// be this one.
template <typename Call>
std::string error_text(ErrorKind kind, const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was raised";
  return "";
}

// Checks that a call raises an Error of this kind whose text contains all parts.
template <typename Call>
void expect_error(ErrorKind kind, const std::vector<std::string>& parts, const Call& call) {
  const std::string text = error_text(kind, call);
  for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << "\nin: " << text;
}

}  // namespace annulus
