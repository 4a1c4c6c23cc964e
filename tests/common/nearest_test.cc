// Tests of common/nearest.h.
#include "common/nearest.h"

#include <gtest/gtest.h>

namespace annulus::nearest_test {
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

TEST(Nearest, IsEmptyIfNothingIsNear) {
  EXPECT_EQ(nearest("rotary", kNames), "");
  EXPECT_EQ(nearest("", kNames), "");
  EXPECT_EQ(nearest("x", {"y"}), "");
  EXPECT_EQ(nearest("anything", {}), "");
  EXPECT_EQ(nearest(std::string(1 << 20, 'z'), kNames), "");
}

}  // namespace
}  // namespace annulus::nearest_test
