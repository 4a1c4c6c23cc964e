// What the documents say of the configuration is what the program does.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "config/config.h"

namespace annulus {
namespace {

TEST(UserGuide, HoldsTheTableOfKeys) {
  std::ifstream file("docs/user-guide.md");
  std::stringstream text;
  text << file.rdbuf();
  std::string table = config_reference();
  while (!table.empty() && table.back() == '\n') table.pop_back();
  EXPECT_NE(text.str().find(table), std::string::npos)
      << "docs/user-guide.md should hold what `annulus train --help-config` prints:\n"
      << table;
}

}  // namespace
}  // namespace annulus
