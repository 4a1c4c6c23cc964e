// Tests of attention/execution/plan_svg.h: the picture is well-formed XML whose texts do not overlap, it has each pair,
// tile and transfer of the plan once, and says what it leaves out.
#include "attention/execution/plan_svg.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <regex>
#include <string>
#include <vector>

#include "attention/pattern/pattern.h"
#include "attention/testing/any_request.h"
#include "common/error.h"
#include "tests/common/expect_error.h"
#include "tests/common/svg/parsed_svg.h"

namespace annulus::plan_svg_test {
namespace {

using testing::ParsedSvg;

PlanRequest request_of(int ranks, int64_t length, LayoutKind layout = LayoutKind::kZigzag,
                       ScheduleKind schedule = ScheduleKind::kRing, const std::string& machine = "h100") {
  PlanRequest request;
  request.shape.q_len = request.shape.k_len = length;
  request.pattern = causal_pattern();
  request.layout = layout;
  request.schedule = schedule;
  request.ranks = ranks;
  request.terms = TermsPointer({.machine = built_in_machine(machine)});
  return request;
}

std::string svg_of(const PlanRequest& request) {
  PlanPicture picture;
  for_each_program(request, [&](const Program& program) { picture.add(program); });
  return picture.svg();
}

// Reads a picture, and finds what is wrong with any.
ParsedSvg sound(const PlanRequest& request) {
  const std::string svg = svg_of(request);
  EXPECT_EQ(testing::xml_fault(svg), "");
  ParsedSvg picture = testing::parse_svg(svg);
  EXPECT_EQ(testing::layout_fault(picture), "") << request.text();
  EXPECT_FALSE(picture.description.empty());
  return picture;
}

// The sum of the numbers that `form` finds in titles, and how many titles have it.
std::pair<int64_t, int> sum_of(const ParsedSvg& picture, const std::string& form) {
  const std::regex expression(form);
  std::pair<int64_t, int> sum = {0, 0};
  for (const std::string& title : picture.titles) {
    std::smatch match;
    if (!std::regex_search(title, match, expression)) continue;
    std::string number = match[1];
    number.erase(std::remove(number.begin(), number.end(), ','), number.end());
    sum.first += std::atoll(number.c_str());
    ++sum.second;
  }
  return sum;
}

bool says(const ParsedSvg& picture, const std::string& part) {
  std::string all;
  for (const auto& word : picture.words) all += word.text + " ";
  return all.find(part) != std::string::npos;
}

void expect_counts(const PlanRequest& request) {
  const ParsedSvg picture = sound(request);
  int64_t tiles[2] = {0, 0};
  int bars[2] = {0, 0}, sends[2] = {0, 0}, receives[2] = {0, 0};
  for (const Program& program : make_programs(request)) {
    for (int way = 0; way < 2; ++way) {
      for (const Step& step : way == 0 ? program.forward : program.backward) {
        tiles[way] += static_cast<int64_t>(step.tiles.size());
        bars[way] += step.tiles.empty() ? 0 : 1;
        sends[way] += step.sends.empty() ? 0 : 1;
        receives[way] += step.receives.empty() ? 0 : 1;
      }
    }
  }
  for (int way = 0; way < 2; ++way) {
    const std::string step = way == 0 ? "forward step [0-9]+: " : "backward step [0-9]+: ";
    EXPECT_EQ(sum_of(picture, step + "computes ([0-9,]+) tile"), std::pair(tiles[way], bars[way])) << request.text();
    EXPECT_EQ(sum_of(picture, step + "sends ([0-9]+)").second, sends[way]) << request.text();
    EXPECT_EQ(sum_of(picture, step + "receives ([0-9]+)").second, receives[way]) << request.text();
  }
  const int64_t pairs = count_pairs(*cached_pattern(request));
  if (!says(picture, "several ranks")) {
    EXPECT_EQ(sum_of(picture, "rank [0-9]+ computes ([0-9,]+) pair").first, pairs) << request.text();
  }
  EXPECT_EQ(sum_of(picture, "step [0-9]+: ([0-9,]+) pair").first, pairs) << request.text();
}

TEST(PlanSvg, HasEachPairTileAndTransferOnce) {
  expect_counts(request_of(8, 512));
  for (const int ranks : {1, 2, 5}) {
    for (const LayoutKind layout : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped,
                                    LayoutKind::kBalanced, LayoutKind::kPerDocument}) {
      expect_counts(request_of(ranks, 16 * ranks, layout));
    }
  }
  for (const ScheduleKind schedule :
       {ScheduleKind::kAllGather, ScheduleKind::kGroupCast, ScheduleKind::kDoubleRing, ScheduleKind::kMesh}) {
    expect_counts(request_of(4, 1000, LayoutKind::kZigzag, schedule, "cpu"));
  }
  PlanRequest dilated = request_of(4, 1 << 20);
  dilated.pattern = parse_pattern(
      "{ kind = \"dilated\", segment_lengths = [2048, 65536], dilation_rates = [1, 32], causal = true }", "a test");
  expect_counts(dilated);
}

TEST(PlanSvg, DrawsTheFirstHeadWhereRanksDivideHeads) {
  PlanRequest request = request_of(4, 256, LayoutKind::kContiguous, ScheduleKind::kUlysses);
  request.shape.heads = request.shape.kv_heads = 8;
  const ParsedSvg picture = sound(request);
  EXPECT_EQ(sum_of(picture, "rank 0 computes ([0-9,]+) pair").first, 256 * 257 / 2);
  EXPECT_EQ(sum_of(picture, "rank [1-9] computes ([0-9,]+) pair").second, 0);
  EXPECT_TRUE(says(picture, "Other ranks compute other heads."));
  EXPECT_TRUE(says(picture, "of the first head"));
}

TEST(PlanSvg, SaysWhichRanksAndStepsItLeavesOut) {
  const ParsedSvg picture = sound(request_of(72, 1 << 20));
  EXPECT_TRUE(says(picture, "8 of 72 ranks are shown: 0, ")) << "by their numbers";
  EXPECT_TRUE(says(picture, "The first 16 of 7"));
  std::vector<std::string> ranks;
  for (const auto& word : picture.words) {
    if (std::regex_match(word.text, std::regex("rank [0-9]+")) && word.box.x < 30) ranks.push_back(word.text);
  }
  EXPECT_EQ(ranks.size(), 16U + 1) << "eight in each timeline, and one in the legend";
  EXPECT_FALSE(says(sound(request_of(8, 1 << 12)), "are shown"));
}

TEST(PlanSvg, SizeDependsOnWhatAScreenShows) {
  const size_t small = svg_of(request_of(4, 4096)).size(), large = svg_of(request_of(4, 1 << 22)).size();
  EXPECT_LT(large, small * 3 / 2);
  EXPECT_LT(large, 120000U);
}

TEST(PlanSvg, NamesWhatItShows) {
  PlanRequest request = request_of(4, 4096);
  request.pattern = parse_pattern("{ kind = \"window\", left = 1023, right = 0 }", "a test");
  const ParsedSvg picture = sound(request);
  EXPECT_EQ(picture.count("Attention over 4 ranks, layout zigzag, schedule ring"), 1);
  for (const char* part : {"left = 1023", "h100", "4,096 tokens", "ends last", "not counted"}) {
    EXPECT_TRUE(says(picture, part)) << part;
  }
  EXPECT_NE(picture.description.find("Rank 3 takes "), std::string::npos);
}

TEST(PlanSvg, NeedsAllRanks) {
  PlanPicture picture;
  const PlanRequest request = request_of(2, 64);
  picture.add(make_program(request, 0));
  expect_error(ErrorKind::kInternal, {"all ranks"}, [&] { picture.svg(); });
}

RC_GTEST_PROP(PlanSvg, AnyPlanGivesASoundPicture, ()) {
  if (*rc::gen::inRange(0, 5) > 0) return;  // twenty pictures suffice, which take some seconds to read
  const PlanRequest request = resolve_schedule(testing::any_request());
  const std::string svg = svg_of(request);
  RC_ASSERT(testing::xml_fault(svg) == "");
  RC_ASSERT(testing::layout_fault(testing::parse_svg(svg)) == "");
}

}  // namespace
}  // namespace annulus::plan_svg_test
