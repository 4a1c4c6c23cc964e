// Tests the configuration to begin with that `train --help-config` prints: it can be read, and explains every key.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/config/config.h"

namespace annulus::config_template_test {
namespace {

void expect_in(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << part << "\nin: " << text;
}

// The template read as a file: the keys in order, and of each the words of the comment above it.
struct TemplateKey {
  std::string key, comment;
};
std::vector<TemplateKey> keys_of_template() {
  std::vector<TemplateKey> found;
  std::istringstream lines(config_template());
  std::string section, comment;
  for (std::string line; std::getline(lines, line);) {
    EXPECT_LE(line.size(), line.starts_with("#") ? 100U : 120U) << line;
    if (line.starts_with("# ")) {
      comment += line.substr(1);
    } else if (line.starts_with("[")) {
      section = line.substr(1, line.size() - 2) + ".";
    } else if (const size_t equals = line.find(" = "); equals != std::string::npos) {
      found.push_back({section + line.substr(0, equals), comment});
    } else {
      EXPECT_EQ(line, "");
      comment.clear();
    }
  }
  return found;
}

TEST(ConfigTemplate, ReadsBackAsTheDefaults) {
  const std::string path = ::testing::TempDir() + "/template.toml";
  std::ofstream(path) << config_template();
  Config expected;
  expected.run.steps = 1000;
  expected.data.train = {"python-sources"};
  expected.model.layers = 4, expected.model.dim = 256, expected.model.heads = 4;
  expected.model.kv_heads = 4, expected.model.ffn = 704;  // what 0 stands for
  expected.optimizer.lr = 1e-3;
  const Config c = load_config(path, {}, [](const Config&) -> ModelSection { throw std::logic_error("no folder"); });
  EXPECT_EQ(flatten(c), flatten(expected));
  EXPECT_EQ(c, expected);
}

TEST(ConfigTemplate, ExplainsEveryKey) {
  const std::vector<TemplateKey> found = keys_of_template();
  // A row of the reference is | `key` | default | values | meaning |.
  std::istringstream rows(config_reference());
  size_t i = 0;
  for (std::string row; std::getline(rows, row);) {
    if (!row.starts_with("| `")) continue;
    ASSERT_LT(i, found.size()) << row;
    const std::string key = row.substr(3, row.find('`', 3) - 3);
    const size_t meaning = row.rfind(" | ", row.size() - 3) + 3;
    EXPECT_EQ(found[i].key, key);
    expect_in(found[i].comment, " " + row.substr(meaning, row.size() - 2 - meaning) + " (");
    EXPECT_EQ(row.find(" | required") != std::string::npos, found[i].comment.find("(required") != std::string::npos)
        << key;
    ++i;
  }
  EXPECT_EQ(i, found.size());
  const auto comment = [&](const std::string& key) {
    return std::find_if(found.begin(), found.end(), [&](const TemplateKey& k) { return k.key == key; })->comment;
  };
  expect_in(comment("run.steps"), "(required; a whole number, 1 or more)");
  expect_in(comment("model.dim"), "(required without model.from; a whole number, 2 to 16777216)");
  expect_in(comment("device"), "(one of \"auto\", \"cpu\", \"cuda\")");
  expect_in(comment("tf32"), "(true or false)");
  expect_in(comment("model.pattern"), "(a table, or a list of tables)");
  expect_in(comment("optimizer.min_lr_ratio"), "(a number, at least 0, at most 1)");
}

}  // namespace
}  // namespace annulus::config_template_test
