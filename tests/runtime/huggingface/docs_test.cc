// Tests that docs/reference/models.md holds the table of the keys of config.json that model_config_reference() prints.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "runtime/huggingface/model_config.h"

namespace annulus::docs_test {
namespace {

TEST(ModelsPage, ContainsTheTableOfKeys) {
  std::ifstream file("docs/reference/models.md");
  std::stringstream text;
  text << file.rdbuf();
  std::string table = model_config_reference();
  while (!table.empty() && table.back() == '\n') table.pop_back();
  EXPECT_NE(text.str().find(table), std::string::npos) << "docs/reference/models.md should hold:\n" << table;
}

}  // namespace
}  // namespace annulus::docs_test
