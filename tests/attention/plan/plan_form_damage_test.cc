// Draws damage to plans in their JSON form: whatever the text is, there is an answer.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "attention/proof/plan_form.h"
#include "common/error.h"
#include "tests/attention/plan/plan_forms.h"
#include "tests/attention/plan/planted_mistakes.h"

namespace annulus::plan_form_damage_test {
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

// Returns the values of a tree, in an arbitrary order.
void collect(Json& value, std::vector<Json*>& all) {
  all.push_back(&value);
  if (value.is_structured()) {
    for (Json& part : value) collect(part, all);
  }
}

Json any_value() {
  return *rc::gen::element<Json>(-1, 0, 1, 2, 3, 7, 63, 64, 65, 1 << 20, int64_t{1} << 40, (int64_t{1} << 50) + 1,
                                 INT64_MAX, INT64_MIN, ~uint64_t{0}, 0.5, 1e30, nullptr, true, "text", Json::array(),
                                 Json::object(), Json::array({0, 1, 1}), Json::array({63, 1, 1}),
                                 Json::array({0, int64_t{1} << 39, 2}), Json::array({{{"peer", 0}, {"buffer", 0}}}));
}

void damage(Json& form) {
  std::vector<Json*> all;
  collect(form, all);
  Json& value = *all[*rc::gen::inRange<size_t>(0, all.size())];
  const int way = *rc::gen::inRange(0, 5);
  if (way == 0 && value.is_object() && !value.empty()) {
    auto it = value.begin();
    std::advance(it, *rc::gen::inRange<std::ptrdiff_t>(0, static_cast<std::ptrdiff_t>(value.size())));
    value.erase(it);
  } else if (way == 1 && value.is_array() && !value.empty()) {
    value.erase(*rc::gen::inRange<size_t>(0, value.size()));
  } else if (way == 2 && value.is_array() && !value.empty()) {
    value.push_back(Json(value[*rc::gen::inRange<size_t>(0, value.size())]));
  } else if (way == 3) {
    value = Json(*all[*rc::gen::inRange<size_t>(0, all.size())]);
  } else {
    value = any_value();
  }
}

// Whatever the text is, it is proved, refuted or refused by one line that names the file.
void expect_an_answer(const std::string& text, PlanFormSource source) {
  source.free = AvailableMemory{int64_t{64} << 20, "the test's limit"};
  try {
    const PlanForm form = read_form(text, source);
    prove(form);
    form_of(form.programs, Held::kUnsaid);
  } catch (const Error& error) {
    RC_ASSERT(error.kind() == ErrorKind::kInput || error.kind() == ErrorKind::kResource);
    RC_ASSERT(error.message().rfind("plan.json: ", 0) == 0);
    RC_ASSERT(error.message().find('\n') == std::string_view::npos);
    RC_ASSERT(error.message().size() < 2000);
  }
}

struct Undamaged {
  std::string text;
  PlanFormSource source;
};

const Undamaged& any_undamaged() {
  static const std::vector<Undamaged> forms = [] {
    std::vector<Undamaged> all = {{std::string(kForeignForm), {"plan.json"}}};
    const auto add = [&](const PlanRequest& given) {
      const PlanRequest request = with_named_mask(given);
      all.push_back({form_of(programs_of(request)), with_mask_of(request)});
    };
    add(ring_of_four());
    for (const ScheduleKind schedule : {ScheduleKind::kRing, ScheduleKind::kAllGather, ScheduleKind::kGroupCast,
                                        ScheduleKind::kUlysses, ScheduleKind::kMesh}) {
      add(testing::several_blocks(schedule));
    }
    for (const Mistake& mistake : planted_mistakes()) {
      if (mistake.name == "ATileWithoutItsMask") add(mistake.request);
    }
    return all;
  }();
  return forms[*rc::gen::inRange<size_t>(0, forms.size())];
}

RC_GTEST_PROP(DamagedPlanForm, SurvivesWrongValues, ()) {
  for (int round = 0; round < 20; ++round) {
    const Undamaged& whole = any_undamaged();
    Json form = Json::parse(whole.text);
    for (int n = *rc::gen::inRange(1, 4); n > 0; --n) damage(form);
    expect_an_answer(form.dump(), whole.source);
  }
}

RC_GTEST_PROP(DamagedPlanForm, SurvivesWrongBytes, ()) {
  for (int round = 0; round < 20; ++round) {
    const Undamaged& whole = any_undamaged();
    std::string text = whole.text;
    for (int n = *rc::gen::inRange(1, 4); n > 0; --n) {
      const auto at = *rc::gen::inRange<size_t>(0, text.size());
      switch (*rc::gen::inRange(0, 4)) {
        case 0:
          text.resize(at);
          break;
        case 1:
          text[at] = *rc::gen::arbitrary<char>();
          break;
        case 2:
          text[at] = *rc::gen::elementOf(std::string("0123456789[]{},:\"-e."));
          break;
        default:
          text.erase(at, *rc::gen::inRange<size_t>(1, 20));
      }
      if (text.empty()) break;
    }
    expect_an_answer(text, whole.source);
  }
}

}  // namespace
}  // namespace annulus::plan_form_damage_test
