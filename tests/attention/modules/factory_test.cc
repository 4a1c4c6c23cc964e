// Tests of attention by name: the choice of auto and its reason, that every name computes exact attention of its
// pattern, unknown names, and that docs/reference/modules.md lists all names.
#include "attention/modules/factory.h"

#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>

#include "attention/plan/choice.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "tests/attention/modules/positions.h"
#include "tests/common/exactness.h"

namespace annulus::factory_test {
namespace {

AttentionFactoryOptions options(int64_t length, int ranks, const std::string& pattern = "{ kind = 'causal' }") {
  AttentionFactoryOptions o;
  o.attention.dim = 8, o.attention.heads = 4;
  o.attention.pattern = parse_pattern(pattern, "test");
  o.length = length, o.ranks = ranks;
  return o;
}

TEST(Factory, AutoTakesTheLeastPredictedTimeAndGivesItsReason) {
  const auto choose = [](AttentionFactoryOptions o, const std::string& machine) {
    o.attention.machine = machine;
    const AttentionChoice choice = choose_attention("auto", o);
    EXPECT_EQ(choice.options.pattern, o.attention.pattern) << "auto never changes what is computed";
    EXPECT_EQ(choice.reason.find('\n'), std::string::npos);
    return choice;
  };
  EXPECT_NE(choose(options(1 << 20, 1), "").reason.find("1048576 positions on 1 rank: ring: one rank, nothing is sent"),
            std::string::npos);
  for (const std::string machine : {"cpu", "h100"}) {
    for (const int64_t length : {1000, 65536}) {
      for (const char* pattern : {"{ kind = 'causal' }", "{ kind = 'window', left = 100, right = 0 }"}) {
        const AttentionFactoryOptions o = options(length, 4, pattern);
        PlanRequest request;
        request.shape = {1, 4, 4, length, length, 0};
        request.pattern = o.attention.pattern;
        request.ranks = 4;
        request.terms = terms_of(machine, "test", "cpu", 2, 4);
        const PlanChoice expected = choose_plan(request);
        const AttentionChoice choice = choose(o, machine);
        EXPECT_EQ(choice.options.schedule, expected.request.schedule);
        EXPECT_EQ(choice.options.within, expected.request.within);
        EXPECT_NE(choice.reason.find(expected.reason()), std::string::npos) << choice.reason;
      }
    }
  }
  EXPECT_NE(choose(options(1000, 4), "h100").reason.find(" predicted on h100 ("), std::string::npos);
}

// The layout says which rows the caller passes, so another layout would compute something else.
TEST(Factory, KeepsAndNamesTheCallersLayout) {
  const std::string window = "{ kind = 'window', left = 100, right = 0 }";
  for (const LayoutKind layout : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
    for (const std::string name : {"auto", "multihead", "ring", "dilated", "distributed"}) {
      for (const std::string& pattern : {std::string("{ kind = 'causal' }"), window}) {
        AttentionFactoryOptions o = options(8192, 4, pattern);
        o.attention.layout = layout;
        const AttentionChoice choice = choose_attention(name, o);
        EXPECT_EQ(choice.options.layout, layout) << choice.reason;
        EXPECT_NE(choice.reason.find("layout " + std::string(to_string(layout)) + " as given"), std::string::npos)
            << choice.reason;
      }
    }
  }
  EXPECT_NE(choose_attention("auto", options(8192, 4)).reason.find("zigzag would share"), std::string::npos);
  EXPECT_EQ(choose_attention("auto", options(8192, 1)).reason.find("zigzag"), std::string::npos);
}

TEST(Factory, AutoChoosesTheLayoutWhereAnyWillDo) {
  AttentionFactoryOptions o = options(65536, 4);
  o.attention.machine = "h100";
  o.any_layout = true;
  const AttentionChoice choice = choose_attention("auto", o);
  EXPECT_EQ(choice.options.layout, LayoutKind::kZigzag) << "the default, contiguous, leaves a half of the work idle";
  EXPECT_NE(choice.reason.find("; layout auto: zigzag, "), std::string::npos) << choice.reason;
  EXPECT_NE(choice.reason.find("; contiguous "), std::string::npos) << choice.reason;
}

TEST(Factory, EveryNameComputesItsPattern) {
  AttentionFactoryOptions o = options(64, 2, "{ kind = 'window', left = 20, right = 3 }");
  o.dilated.segment_lengths = {16, 32, 64};
  o.attention.layout = LayoutKind::kStriped;
  o.blocks.block = 16, o.blocks.window_blocks = 1, o.blocks.keep = 2;
  const at::Tensor x = at::randn({1, 64, 8}, at::kDouble);
  std::vector<std::string> names = {"auto"};
  for (const NamedAttention& n : named_attentions()) {
    names.emplace_back(n.name);
    names.insert(names.end(), n.classes.begin(), n.classes.end());
  }
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    std::string reason;
    MultiheadAttention m = make_attention(name, o, &reason);
    EXPECT_EQ(reason.rfind(name + ": ", 0), 0u) << reason;
    m->to(at::kDouble);
    const at::NoGradGuard no_gradients;
    MultiheadAttentionOptions alone = m->options();
    alone.layout = LayoutKind::kContiguous, alone.schedule = ScheduleKind::kAuto, alone.kernel = KernelKind::kReference;
    MultiheadAttention reference(alone);
    reference->to(at::kDouble);
    for (size_t i = 0; i < m->parameters().size(); ++i) reference->parameters()[i].copy_(m->parameters()[i]);
    const auto self = make_self_communicator();
    const at::Tensor want = reference->forward(x, {.comm = *self});
    run_ranks(2, [&](Communicator& comm) {
      const at::Tensor rows = positions_of(make_layout(LayoutKind::kStriped, 64, 2), comm.rank());
      const at::Tensor out = m->forward(x.index_select(1, rows), {.comm = comm});
      EXPECT_TRUE(testing::agrees(out, want.index_select(1, rows)));
    });
  }
}

TEST(Factory, NamesMapToTheirPatterns) {
  const auto pattern = [](const char* name) { return choose_attention(name, options(64, 2)).options.pattern; };
  EXPECT_EQ(pattern("ring"), causal_pattern());
  EXPECT_EQ(
      pattern("DilatedAttention").text(),
      parse_pattern("{ kind = 'dilated', segment_lengths = [2048, 4096, 8192], dilation_rates = [1, 2, 4], combine "
                    "= 'mean', causal = true }",
                    "test")
          .text());
  EXPECT_TRUE(is_adaptive(pattern("adaptive")));
  EXPECT_EQ(pattern("hierarchical").blocks.map, BlocksSpec::Map::kHierarchical);
  EXPECT_TRUE(pattern("hierarchical").causal);
}

TEST(Factory, UnknownNameSuggestsTheNearest) {
  const auto refused = [](const char* name, const std::string& text) {
    try {
      choose_attention(name, options(64, 2));
      ADD_FAILURE() << name;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kUsage);
      EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
    }
  };
  refused("rign", "unknown attention \"rign\"; did you mean \"ring\"? (known: auto, multihead,");
  refused("RingDilatedAttentionV3", "did you mean \"RingDilatedAttentionV2\"?");
}

TEST(Factory, DocumentationListsEveryName) {
  std::ifstream file("docs/reference/modules.md");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  ASSERT_FALSE(text.empty());
  for (const NamedAttention& n : named_attentions()) {
    EXPECT_NE(text.find("| `" + std::string(n.name) + "` |"), std::string::npos) << n.name;
    for (const auto& c : n.classes) EXPECT_NE(text.find("`" + std::string(c) + "`"), std::string::npos) << c;
  }
}

}  // namespace
}  // namespace annulus::factory_test
