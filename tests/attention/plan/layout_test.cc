// Tests layouts against their definitions, and the names of layouts and schedules.
#include "attention/plan/layout.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <set>

#include "attention/plan/plan.h"
#include "common/error.h"

namespace annulus::layout_test {
namespace {

RC_GTEST_PROP(Layout, EveryPositionHasOneOwnerAndAStorageRow, ()) {
  const auto kind = *rc::gen::element(LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped);
  const int64_t length = *rc::gen::inRange(0, 200);
  const int ranks = *rc::gen::inRange(1, 12);
  const Layout layout = make_layout(kind, length, ranks);
  std::multiset<int64_t> owned;
  for (int r = 0; r < ranks; ++r) {
    const std::vector<int64_t> positions = layout.positions(r);
    RC_ASSERT(static_cast<int64_t>(positions.size()) == layout.count(r));
    owned.insert(positions.begin(), positions.end());
  }
  RC_ASSERT(static_cast<int64_t>(owned.size()) == length);
  for (int64_t x = 0; x < length; ++x) RC_ASSERT(owned.count(x) == 1u);
}

TEST(Layout, ZigzagPairsChunksFromBothEnds) {
  const Layout layout = make_layout(LayoutKind::kZigzag, 16, 4);
  EXPECT_EQ(layout.spans[1], (std::vector<Span>{{2, 1, 2}, {12, 1, 2}}));
  EXPECT_EQ(layout.spans[3], (std::vector<Span>{{6, 1, 4}}));  // chunks 3 and 4 touch
}

TEST(Layout, UnevenSplitErrorSuggestsLengthsAndRankCounts) {
  require_even(LayoutKind::kZigzag, 2048, 4, "a sequence");
  try {
    require_even(LayoutKind::kZigzag, 2052, 8, "a sequence");
    FAIL() << "2052 is not a multiple of 16";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_EQ(error.kind(), ErrorKind::kPlan);
    EXPECT_NE(text.find("multiple of 16"), std::string::npos) << text;
    EXPECT_NE(text.find("2048 or 2064"), std::string::npos) << text;
    EXPECT_NE(text.find("1, 2, 3, 6, 9"), std::string::npos) << text;
  }
}

TEST(Layout, UnevenLengthsMustAddUp) {
  EXPECT_EQ(make_uneven_layout({5, 0, 2}, 7).spans[2], (std::vector<Span>{{5, 1, 2}}));
  EXPECT_THROW(make_uneven_layout({5, 1, 2}, 7), Error);
  EXPECT_THROW(make_uneven_layout({9, -2}, 7), Error);
}

TEST(Layout, NamesRoundTrip) {
  EXPECT_EQ(layout_names(), (std::vector<std::string>{"contiguous", "zigzag", "striped", "balanced", "per-document"}));
  EXPECT_EQ(schedule_names(), (std::vector<std::string>{"ring", "all-gather", "group-cast", "double-ring", "ulysses",
                                                        "ulysses-ring", "mesh", "auto"}));
  for (const std::string& name : layout_names()) EXPECT_EQ(to_string(parse_layout(name, "")), name);
  for (const std::string& name : schedule_names()) EXPECT_EQ(to_string(parse_schedule(name, "")), name);
}

}  // namespace
}  // namespace annulus::layout_test
