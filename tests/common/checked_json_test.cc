// Tests of common/checked_json.h: which untrusted JSON is refused, and with which error texts.
#include "common/checked_json.h"

#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "common/error.h"
#include "tests/common/expect_error.h"

namespace annulus::checked_json_test {
namespace {

std::string bounded_refusal(const std::string& text, size_t deepest) {
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
    EXPECT_EQ(bounded_refusal(text, 3), "") << text;
    EXPECT_EQ(bounded_refusal(text, 2), "nested too deeply") << text;
  }
  EXPECT_EQ(bounded_refusal(std::string(10'000'000, '['), 8), "nested too deeply");
}

TEST(BoundedJson, RefusesRepeatedNames) {
  EXPECT_EQ(bounded_refusal(R"({"a":1,"b":{"a":1},"a":2})", 9), "\"a\" appears twice");
  EXPECT_EQ(bounded_refusal(R"([{"a":1},{"a":{"b":1,"b":1}}])", 9), "\"b\" appears twice");
  EXPECT_EQ(bounded_refusal(R"({"\u0001":1,"\u0001":2})", 9), "\"?\" appears twice");
  EXPECT_EQ(bounded_refusal(R"([{"a":1},{"a":1}])", 9), "");  // the names are in different objects
}

TEST(BoundedJson, RefusesMalformedJson) {
  for (const std::string text : {"", "{", "{\"a\":}", "[1,]", "{} {}", "\"\xff\""}) {
    EXPECT_TRUE(bounded_refusal(text, 9).starts_with("not JSON, or cut off, at byte ")) << text;
  }
  EXPECT_EQ(bounded_refusal("1e999", 9), "a number in it is too large");
}

TEST(CheckedJson, RefusesInvalidAndOversizedJson) {
  const auto parsed = [](const std::string& text) {
    return error_text(ErrorKind::kInput, [&] { parse_checked_json(text, "module", "here.json"); });
  };
  EXPECT_EQ(parsed(""), "[module] here.json: not JSON, or cut off, at byte 1 of 0");
  EXPECT_EQ(parsed("{\"a\": 1"), "[module] here.json: not JSON, or cut off, at byte 8 of 7");
  EXPECT_EQ(parsed("[1e999]"), "[module] here.json: a number in it is too large");
  EXPECT_EQ(parsed(std::string(1'000'000, '[')), "[module] here.json: nested too deeply");
  std::string many = "[0";
  for (int i = 0; i < 4'000'000; ++i) many += ",0";
  EXPECT_EQ(parsed(many + "]"), "[module] here.json: more than 4,000,000 values");
  EXPECT_EQ(parse_checked_json("[[1, \"a\"]]", "module", "here.json"), nlohmann::json::parse("[[1, \"a\"]]"));
}

TEST(CheckedJson, ErrorsNameThePathToTheMember) {
  const nlohmann::json json = nlohmann::json::parse(
      R"({"list": [{"n": 7, "x": 1.5, "b": true, "t": "text", "none": null}], "large": 18446744073709551615})");
  const CheckedJson whole(json, "module", "here.json");
  const CheckedJson item = whole.at("list").list(1).at(0);
  EXPECT_EQ(item.at("n").integer(7, 7), 7);
  EXPECT_EQ(item.at("x").number(1.5, 1.5), 1.5);
  EXPECT_EQ(item.at("n").number(0, 10), 7);
  EXPECT_TRUE(item.at("b").boolean());
  EXPECT_EQ(item.at("t").text(4), "text");
  EXPECT_TRUE(item.has("t"));
  EXPECT_FALSE(item.has("none"));
  EXPECT_FALSE(item.has("other"));
  EXPECT_EQ(whole.keys(2), (std::vector<std::string>{"large", "list"}));

  const auto expect = [](const std::string& words, const std::function<void()>& call) {
    EXPECT_EQ(error_text(ErrorKind::kInput, call), "[module] here.json: " + words);
  };
  expect("list[0].other is missing", [&] { item.at("other"); });
  expect("list[0].n should be a whole number from 8 to 9, not 7", [&] { item.at("n").integer(8, 9); });
  expect("list[0].n should be a whole number from 5 to 6, not 7", [&] { item.at("n").integer(5, 6); });
  expect("list[0].x should be a whole number from 0 to 9, not 1.5", [&] { item.at("x").integer(0, 9); });
  expect("large should be a whole number from 0 to 9, not 18446744073709551615",
         [&] { whole.at("large").integer(0, 9); });
  expect("list[0].x should be a number from 2 to 3, not 1.5", [&] { item.at("x").number(2, 3); });
  expect("list[0].t should be a number from 2 to 3, not \"text\"", [&] { item.at("t").number(2, 3); });
  expect("list[0].n should be true or false, not 7", [&] { item.at("n").boolean(); });
  expect("list[0].n should be a text, not 7", [&] { item.at("n").text(); });
  expect("list[0].t should be a text of at most 3 bytes, not \"text\"", [&] { item.at("t").text(3); });
  expect("list[0] should be a list, not an object", [&] { item.list(1); });
  expect("list should be a list of length at most 0, not a list of 1 value", [&] { whole.at("list").list(0); });
  expect("list should be an object, not a list of 1 value", [&] { whole.at("list").at("n"); });
  expect("list should be an object, not a list of 1 value", [&] { whole.at("list").has("n"); });
  expect("the whole should be an object of at most 1 member, not an object", [&] { whole.keys(1); });
}

}  // namespace
}  // namespace annulus::checked_json_test
