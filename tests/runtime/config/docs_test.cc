// Tests that docs/reference/configuration.md holds the table of keys that config_reference() returns.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "runtime/config/config.h"

namespace annulus::docs_test {
namespace {

TEST(ConfigurationPage, ContainsTheTableOfKeys) {
  std::ifstream file("docs/reference/configuration.md");
  std::stringstream text;
  text << file.rdbuf();
  std::string table = config_reference();
  while (!table.empty() && table.back() == '\n') table.pop_back();
  EXPECT_NE(text.str().find(table), std::string::npos)
      << "docs/reference/configuration.md should hold what config_reference() returns:\n"
      << table;
}

}  // namespace
}  // namespace annulus::docs_test
