// Tests of the JSON form of plans: what is written is read back, wrong plans are found through it, and nothing that
// comes from outside can do harm.
#include "attention/proof/plan_form.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "attention/testing/any_request.h"
#include "common/error.h"
#include "tests/attention/plan/plan_forms.h"
#include "tests/attention/plan/planted_mistakes.h"

namespace annulus::plan_form_test {
namespace {

using Json = nlohmann::json;
using testing::form_of;
using testing::Held;
using testing::kForeignForm;
using testing::Mistake;
using testing::planted_mistakes;
using testing::programs_of;
using testing::read_form;
using testing::ring_of_four;
using testing::with_mask_of;
using testing::with_named_mask;

// The message with which a form is refused as input; "" if it is read.
std::string refusal(const std::string& text) {
  try {
    read_form(text);
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput) << error.what();
    return std::string(error.message());
  }
}

std::string all_faults(const Proof& proof) {
  std::string text;
  for (const std::string& fault : proof.faults) text += fault + "\n";
  return text;
}

// Calls visit(span) for every span of a program.
template <typename Visit>
void for_each_span_of(Program& p, const Visit& visit) {
  const auto of_list = [&](std::vector<Span>& spans) {
    for (Span& s : spans) visit(s);
  };
  const auto of_rows = [&](RowSet& rows) {
    for (RowBlock& block : rows.blocks) {
      visit(block.batch);
      visit(block.heads);
      of_list(block.positions);
    }
  };
  of_list(p.query_spans);
  of_list(p.key_spans);
  for (Buffer& b : p.buffers) of_rows(b.rows);
  for (auto* steps : {&p.forward, &p.backward}) {
    for (Step& step : *steps) {
      for (Transfer& t : step.sends) of_rows(t.rows);
      for (Transfer& t : step.receives) of_rows(t.rows);
      for (Tile& t : step.tiles) {
        for (Span Tile::*s : {&Tile::batch, &Tile::heads, &Tile::query_rows, &Tile::query_positions, &Tile::key_rows,
                              &Tile::key_positions, &Tile::grad_rows}) {
          visit(t.*s);
        }
      }
    }
  }
}

// What reading makes of a program: a single member has no stride, and the layout stands in the spans alone.
Program as_read(Program program, const PlanRequest& request) {
  program.request = request;
  for_each_span_of(program, [](Span& s) {
    if (s.count == 1) s.stride = 1;
  });
  return program;
}

RC_GTEST_PROP(PlanForm, ReadsBackWhatItWritesAndProvesIt, ()) {
  const PlanRequest request = with_named_mask(testing::any_request());
  const std::vector<Program> programs = make_programs(request);
  const PlanFormSource source = with_mask_of(request);
  const PlanForm form = read_form(form_of(programs), source);
  RC_ASSERT(form.request.shape == request.shape);
  if (testing::written_out(request).pattern == request.pattern) {
    RC_ASSERT(form.request.pattern.text() == request.pattern.text());
  }
  RC_ASSERT(form.schedule == to_string(programs[0].request.schedule));
  RC_ASSERT(form.programs.size() == programs.size());
  for (size_t r = 0; r < programs.size(); ++r) {
    RC_ASSERT(form.programs[r] == as_read(programs[r], form.programs[r].request));
    RC_ASSERT(form.queries.spans[r] == form.programs[r].query_spans);
    RC_ASSERT(form.keys.spans[r] == form.programs[r].key_spans);
  }
  const Proof proof = prove(form), direct = verify(programs);
  RC_ASSERT(proof.faults == std::vector<std::string>{});
  RC_ASSERT(proof.pairs == direct.pairs);
  RC_ASSERT(proof.tiles == direct.tiles);
  RC_ASSERT(proof.transfers == direct.transfers);
  // What was read is written alike.
  RC_ASSERT(form_of(form.programs) == form_of(read_form(form_of(form.programs), source).programs));
}

TEST(PlanForm, CannotNameAMaskThatAProgramHasMade) {
  PlanRequest request = ring_of_four();
  const std::vector<uint8_t> shown(64 * 64, 1);
  request.pattern.mask =
      given_mask(std::make_shared<const TokenMask>(token_mask_from_dense(shown.data(), 1, 1, 64, 64)));
  request.pattern.causal = false;
  try {
    form_of(programs_of(request));
    FAIL() << "a mask that cannot be read back was written";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kPlan);
    EXPECT_NE(error.message().find("write the mask to a file"), std::string_view::npos) << error.what();
  }
}

class PlantedInTheForm : public ::testing::TestWithParam<Mistake> {};

// A mistake is a fault that the verifier finds, or something that no form may say. Either way the rank is named.
TEST_P(PlantedInTheForm, IsFound) {
  const PlanRequest request = with_named_mask(GetParam().request);
  std::vector<Program> programs = programs_of(request);
  EXPECT_TRUE(prove(read_form(form_of(programs), with_mask_of(request))).holds());
  GetParam().plant(programs);
  const std::string text = form_of(programs, Held::kUnsaid);
  try {
    const Proof proof = prove(read_form(text, with_mask_of(request)));
    // The ranks of a form own what it says, so it cannot differ from another layout. The bits of a mask are in its
    // file.
    if (GetParam().name == "AnotherLayout" || GetParam().name == "AnotherBitOfAMask") {
      EXPECT_TRUE(proof.holds()) << all_faults(proof);
      return;
    }
    ASSERT_FALSE(proof.holds());
    const bool of_layout = GetParam().name == "AnotherLayoutOfKeys";
    EXPECT_NE(all_faults(proof).find(of_layout ? "rank 1: its first buffer is not" : GetParam().finding),
              std::string::npos)
        << all_faults(proof);
    // Where queries travel, only all ranks together compute the pattern's pairs.
    for (const std::string& fault : proof.faults) {
      EXPECT_TRUE(fault.rfind("rank ", 0) == 0 || fault.find("the tiles of all ranks") != std::string::npos) << fault;
    }
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput) << error.what();
    EXPECT_TRUE(error.message().rfind("plan.json: programs[", 0) == 0 ||
                error.message().rfind("plan.json: no rank has ", 0) == 0)
        << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(Each, PlantedInTheForm, ::testing::ValuesIn(planted_mistakes()),
                         [](const auto& info) { return info.param.name; });

TEST(PlanForm, ProvesAPlanThatSomebodyElseHasMade) {
  const PlanForm form = read_form(std::string(kForeignForm));
  EXPECT_EQ(form.schedule, "ours");
  const Proof proof = prove(form);
  EXPECT_TRUE(proof.holds()) << all_faults(proof);
  EXPECT_EQ(proof.pairs, 2 * (4 * 5 / 2));
  EXPECT_EQ(proof.transfers / 2, 3);
}

TEST(PlanForm, TakesAnyLayout) {
  // Ranks 0 and 2 exchange all that they own, so no named layout fits.
  PlanRequest request = ring_of_four();
  request.layout = LayoutKind::kContiguous;
  request.schedule = ScheduleKind::kAllGather;
  request.pattern = {};
  request.pattern.kind = PatternSpec::Kind::kSlices;  // no pairs, so that only the spans matter
  std::vector<Program> programs = programs_of(request);
  for (Program& p : programs) {
    p.query_spans = p.key_spans = {{p.rank, 4, 16}};
    if (p.rank % 2 == 0) p.query_spans = p.key_spans = {{2 - p.rank, 4, 16}};
    p.buffers[0].rows.blocks[0].positions = p.buffers[1].rows.blocks[0].positions = p.key_spans;
  }
  const Proof proof = prove(read_form(form_of(programs)));
  EXPECT_TRUE(proof.holds()) << all_faults(proof);
}

TEST(PlanForm, ComparesWhatRanksHoldWithWhatTheySay) {
  Json form = Json::parse(form_of(programs_of(ring_of_four())));
  const int64_t held = form["programs"][2]["held"]["backward"]["grad"];
  EXPECT_GT(held, 0);
  form["programs"][2]["held"]["backward"]["grad"] = held - 2;
  const Proof proof = prove(read_form(form.dump()));
  ASSERT_EQ(proof.faults.size(), 1u);
  EXPECT_EQ(proof.faults[0], "rank 2, backward: holds at most " + std::to_string(held) +
                                 " rows of gradients, not the " + std::to_string(held - 2) + " that the plan says");
  form["programs"][2].erase("held");
  EXPECT_TRUE(prove(read_form(form.dump())).holds());
}

TEST(PlanForm, NamesWhatIsWrongWithAForm) {
  const Json good = Json::parse(form_of(programs_of(ring_of_four())));
  const auto with = [&](const char* pointer, const Json& value) {
    Json form = good;
    form[Json::json_pointer(pointer)] = value;
    return form.dump();
  };
  const auto without = [&](const char* object, const char* key) {
    Json form = good;
    form[Json::json_pointer(object)].erase(key);
    return form.dump();
  };
  const std::string text = good.dump();
  const std::string at_tile = "programs[1].forward[0].tiles[0]";
  const std::pair<std::string, std::string> cases[] = {
      {"", "not JSON, or cut off"},
      {"7", "the whole should be an object, not 7"},
      {"{}", "annulus_plan is missing"},
      {text.substr(0, text.size() / 2), "not JSON, or cut off, at byte"},
      {text + "x", "not JSON, or cut off, at byte"},
      {with("/annulus_plan", 2), "it is of version 2, and this annulus reads version 1"},
      {with("/annulus_plan", "1"), "annulus_plan should be a whole number from 1"},
      {with("/plans", 1), R"(the whole has an unknown key "plans")"},
      {without("", "problem"), "problem is missing; it must stand before programs"},
      {without("", "programs"), "programs is missing"},
      {with("/programs", Json::object()), "programs should be a list, not an object"},
      {with("/programs/1", 5), "programs[1] should be an object, not 5"},
      {without("/problem", "heads"), "problem.heads is missing"},
      {with("/problem/kv_head", 1), R"(problem has an unknown key "kv_head"; did you mean "kv_heads"?)"},
      {with("/problem/ranks", 0), "expected at least one rank"},
      {with("/problem/ranks", 5), "programs should be those of all 5 ranks of problem.ranks, not of 4"},
      {with("/problem/ranks", 3), "peer should be a whole number from 0 to 2, not 3"},
      {with("/programs/4", good["programs"][3]), "of the 4 ranks of problem.ranks, but there are more"},
      {with("/problem/within", 3), "must divide the 4 ranks"},
      {with("/problem/kv_heads", 3), "multiple of the kv heads"},
      {with("/problem/queries", -1), "problem.queries should be a whole number from 0 to 1099511627776, not -1"},
      {with("/problem/pattern", "{ kind = \"casual\" }"), "did you mean \"causal\"?"},
      {with("/problem/pattern", std::string(5000, 'x') + "\n"), "problem: pattern: expected an inline table"},
      {with("/problem/pattern", 3), "problem.pattern should be a list, not 3"},
      {with("/problem/pattern", Json::array({{{"queries", {0, 1, 65}}, {"keys", {0, 1, 64}}}})),
       "problem.pattern[0].queries should be [begin, stride, count] within 0 to 64"},
      {with("/problem/pattern", "{ kind = \"blocks\", map = \"adaptive\", keep = 2, block = 16 }"), "adaptive"},
      {without("/programs/2", "buffers"), "programs[2].buffers is missing"},
      {with("/programs/2/forwards", 1), R"(programs[2] has an unknown key "forwards"; did you mean "forward"?)"},
      {with("/programs/2/forward", Json::array()), "programs[2].forward should be a list of at least one step"},
      {with("/programs/1/saved", 99), "programs[1].saved should be a whole number from 0 to "},
      {with("/programs/1/buffers/0/kind", "own_kv"),
       R"(programs[1].buffers[0].kind should be a kind of buffer; did you mean "own-kv"?)"},
      {with("/programs/1/forward/0/sends/0/peer", 4),
       "programs[1].forward[0].sends[0].peer should be a whole number from 0 to 3, not 4"},
      {with("/programs/1/forward/0/tiles/0/key_rows", "all"),
       at_tile + ".key_rows should be [begin, stride, count], three whole numbers"},
      {with("/programs/1/forward/0/tiles/0/key_rows/2", 1.5),
       at_tile + ".key_rows[2] should be a whole number from 1 to 1099511627776, not 1.5"},
      {with("/programs/1/forward/0/tiles/0/key_rows/2", 1e300), at_tile + ".key_rows[2] should be a whole number"},
      {with("/programs/1/forward/0/tiles/0/key_rows/0", ~uint64_t{0}),
       at_tile + ".key_rows[0] should be a whole number"},
      {with("/programs/1/forward/0/tiles/0/key_rows/1", 0), at_tile + ".key_rows[1] should be a whole number from 1"},
      {with("/programs/1/forward/0/tiles/0/tile", 0), at_tile + R"( has an unknown key "tile")"},
      {with("/programs/1/forward/0/tiles/0/mask", 0), at_tile + ".mask names something of which there is none"},
      {with("/programs/1/forward/0/tiles/0/heads", {0, 1, 3}),
       at_tile + ".heads should be [begin, stride, count] within 0 to 2"},
      {with("/programs/1/backward/0/zero", 1), "programs[1].backward[0].zero should be a list, not 1"},
      {with("/programs/1/backward/1/adds", Json::array({Json::array({1})})),
       "programs[1].backward[1].adds[0] should be the numbers of two buffers"},
      {with("/programs/3/queries", good["programs"][1]["queries"]),
       "programs[3].queries has query 8, which programs[1] has as well"},
      {with("/programs/3/keys", {{24, 1, 15}}), "no rank has key 39 in its \"keys\""},
      {R"({"annulus_plan":1,"problem":{"batch":1048576,"heads":1048576,"queries":1048576,"ranks":1,"pattern":[]},)"
       R"("programs":[{"queries":[[0,1,1048576]],"buffers":[{"kind":"own-kv"}]}]})",
       "programs[0].buffers[0] makes the rows of this rank's buffers and transfers more than 2^58"},
      {R"({"annulus_plan":1,"problem":{"heads":1,"heads":2}})", "problem.heads appears twice"},
      {R"({"annulus_plan":1,"problem":{"heads":1e999}})", "a number is too large (problem.heads)"},
      {std::string(100, '['), "is nested too deeply"},
  };
  EXPECT_EQ(refusal(text), "");
  for (const auto& [form, message] : cases) {
    const std::string got = refusal(form);
    EXPECT_EQ(got.rfind("plan.json: ", 0), 0u) << got;
    EXPECT_NE(got.find(message), std::string::npos) << "expected: " << message << "\ngot: " << got;
    EXPECT_EQ(got.find('\n'), std::string::npos) << got;
    EXPECT_LT(got.size(), 1100u) << got;
  }
}

// A mask has bits of the pairs in some of its blocks only. A tile of other pairs would read beyond them.
TEST(PlanForm, RefusesAMaskWhereItHasNoBits) {
  // Of three blocks of keys, the mask shows every second key of the first and of the last, and all of the second.
  PlanRequest request = ring_of_four();
  request.shape.q_len = request.shape.k_len = 3 * TokenMask::kBlock;
  std::vector<uint8_t> shown(static_cast<size_t>(request.shape.q_len * request.shape.k_len), 1);
  for (size_t i = 0; i < shown.size(); i += 2) shown[i] = i / TokenMask::kBlock % 3 == 1;
  request.pattern = {};
  request.pattern.mask = given_mask(std::make_shared<const TokenMask>(
      token_mask_from_dense(shown.data(), 1, 1, request.shape.q_len, request.shape.k_len)));
  request = with_named_mask(request);
  Json form = Json::parse(form_of(programs_of(request)));
  const int64_t keys = request.shape.k_len;
  for (Json& program : form["programs"]) {
    for (Json& tile : program["forward"][0]["tiles"]) {
      if (tile.contains("mask")) tile["keys"] = {0, 1, keys};
    }
  }
  try {
    read_form(form.dump(), with_mask_of(request));
    FAIL() << "the mask has bits for all keys";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    EXPECT_NE(error.message().find(".mask cuts keys [0.."), std::string_view::npos) << error.what();
  }
}

TEST(PlanForm, RefusesWhatDoesNotFitBeforeItTakesMemory) {
  const auto refused = [](const std::string& text, int64_t free) {
    PlanFormSource source{"plan.json"};
    source.free = AvailableMemory{free, "the test's limit"};
    try {
      read_form(text, source);
      return std::string();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kResource) << error.what();
      return std::string(error.message());
    }
  };
  const std::string text = form_of(programs_of(ring_of_four()));
  EXPECT_EQ(refused(text, 1 << 20), "");
  EXPECT_NE(refused(text, 1000).find("the plan and its proof take at least"), std::string::npos);
  // A few bytes that claim a sequence of 2^40 positions, and a text that is much larger than what is free.
  const std::string huge =
      R"({"annulus_plan":1,"problem":{"heads":1,"queries":1099511627776,"ranks":1,"pattern":"{ kind = 'causal' }"},)"
      R"("programs":[{"queries":[[0,1,1099511627776]],"buffers":[],"forward":[{}],"backward":[{}]}]})";
  EXPECT_NE(refused(huge, int64_t{1} << 36).find("(the test's limit)"), std::string::npos);
  std::string lists = R"({"annulus_plan":1,"problem":[)";
  for (int i = 0; i < 1'000'000; ++i) lists += "[],";
  EXPECT_NE(refused(lists, 1 << 22).find("4.2 MB are free"), std::string::npos);
}

}  // namespace
}  // namespace annulus::plan_form_test
