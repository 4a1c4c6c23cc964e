// Tests of common/checked_json.h: which untrusted JSON is refused, and with which error texts.
#include "common/checked_json.h"

#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "common/error.h"

namespace annulus::checked_json_test {
namespace {

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    return error.what();
  }
  return "nothing was refused";
}

TEST(CheckedJson, RefusesInvalidAndOversizedJson) {
  const auto parsed = [](const std::string& text) {
    return refusal([&] { parse_checked_json(text, "room", "here.json"); });
  };
  EXPECT_EQ(parsed(""), "[room] here.json: it is not JSON, or is cut off, at byte 1 of 0");
  EXPECT_EQ(parsed("{\"a\": 1"), "[room] here.json: it is not JSON, or is cut off, at byte 8 of 7");
  EXPECT_EQ(parsed("[1e999]"), "[room] here.json: a number in it is too large");
  EXPECT_EQ(parsed(std::string(1'000'000, '[')), "[room] here.json: it is nested deeper than 32 values");
  std::string many = "[0";
  for (int i = 0; i < 4'000'000; ++i) many += ",0";
  EXPECT_EQ(parsed(many + "]"), "[room] here.json: it has more than 4,000,000 values");
  EXPECT_EQ(parse_checked_json("[[1, \"a\"]]", "room", "here.json"), nlohmann::json::parse("[[1, \"a\"]]"));
}

TEST(CheckedJson, ErrorsNameThePathToTheMember) {
  const nlohmann::json json = nlohmann::json::parse(
      R"({"list": [{"n": 7, "x": 1.5, "b": true, "t": "text", "none": null}], "large": 18446744073709551615})");
  const CheckedJson whole(json, "room", "here.json");
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
    EXPECT_EQ(refusal(call), "[room] here.json: " + words);
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
