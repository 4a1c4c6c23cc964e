// Tests of common/names.h.
#include "common/names.h"

#include <gtest/gtest.h>

namespace annulus::names_test {
namespace {

const std::vector<std::string> kNames{"zigzag", "contiguous", "striped", "lr", "kv_heads", "heads"};

TEST(Nearest, FindsTheIntendedName) {
  EXPECT_EQ(nearest("zig-zag", kNames), "zigzag");
  EXPECT_EQ(nearest("ZigZag", kNames), "zigzag");
  EXPECT_EQ(nearest("stripde", kNames), "striped");
  EXPECT_EQ(nearest("kvheads", kNames), "kv_heads");
  EXPECT_EQ(nearest("head", kNames), "heads");
  EXPECT_EQ(nearest("rl", kNames), "lr");
}

TEST(Alternatives, AreJoinedByCommasAndOr) {
  EXPECT_EQ(alternatives({}), "");
  EXPECT_EQ(alternatives({"a"}), "a");
  EXPECT_EQ(alternatives({"a", "b", "c"}), "a, b or c");
}

TEST(Nearest, IsEmptyIfNothingIsNear) {
  EXPECT_EQ(nearest("rotary", kNames), "");
  EXPECT_EQ(nearest("", kNames), "");
  EXPECT_EQ(nearest("x", {"y"}), "");
  EXPECT_EQ(nearest("anything", {}), "");
  EXPECT_EQ(nearest(std::string(1 << 20, 'z'), kNames), "");
}

}  // namespace
}  // namespace annulus::names_test
