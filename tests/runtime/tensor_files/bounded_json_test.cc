// Tests of runtime/tensor_files/bounded_json.h: why JSON from a file is refused, whichever file it is.
#include "runtime/tensor_files/bounded_json.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

namespace annulus::bounded_json_test {
namespace {

std::string refusal(const std::string& text, size_t deepest) {
  try {
    parse_bounded_json(text, deepest);
  } catch (const JsonRefused& refused) {
    return refused.what();
  }
  return "";
}

TEST(BoundedJson, MatchesTheJsonParser) {
  const std::string text = R"({"a":[1,-2,2.5,null,true],"b":{"a":"x"},"c":{"a":{}}})";
  EXPECT_EQ(parse_bounded_json(text, 3), nlohmann::json::parse(text));
  EXPECT_EQ(parse_bounded_json("3", 0), 3);
}

TEST(BoundedJson, RefusesDeepNesting) {
  for (const std::string text : {"[[[]]]", "{\"a\":[{}]}", "{\"a\":{\"a\":{\"b\":1}}}"}) {
    EXPECT_EQ(refusal(text, 3), "") << text;
    EXPECT_EQ(refusal(text, 2), "nested too deeply") << text;
  }
  EXPECT_EQ(refusal(std::string(10'000'000, '['), 8), "nested too deeply");
}

TEST(BoundedJson, RefusesRepeatedNames) {
  EXPECT_EQ(refusal(R"({"a":1,"b":{"a":1},"a":2})", 9), "\"a\" appears twice");
  EXPECT_EQ(refusal(R"([{"a":1},{"a":{"b":1,"b":1}}])", 9), "\"b\" appears twice");
  EXPECT_EQ(refusal(R"({"\u0001":1,"\u0001":2})", 9), "\"?\" appears twice");
  EXPECT_EQ(refusal(R"([{"a":1},{"a":1}])", 9), "");  // the names are in different objects
}

TEST(BoundedJson, RefusesMalformedJson) {
  for (const std::string text : {"", "{", "{\"a\":}", "[1,]", "{} {}", "\"\xff\"", "1e999"}) {
    EXPECT_NE(refusal(text, 9).find("json.exception"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace annulus::bounded_json_test
