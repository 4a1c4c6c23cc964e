// See plan_forms.h.
#include "tests/attention/plan/plan_forms.h"

#include <sstream>
#include <utility>

namespace annulus::testing {

std::string form_of(const std::vector<Program>& programs, Held held) {
  std::string text;
  PlanFormWriter writer([&](std::string_view part) { text += part; });
  for (const Program& p : programs) writer.add(p, held == Held::kSaid ? held_rows(p) : HeldRows());
  writer.finish();
  return text;
}

PlanForm read_form(const std::string& text, const PlanFormSource& source) {
  std::istringstream in(text);
  return read_plan_form(in, source);
}

namespace {

// Of a pattern one member at most has a mask.
void name_mask(PatternSpec& spec) {
  for (PatternSpec& member : spec.members) name_mask(member);
  if (spec.mask.given) spec.mask.file = "mask.safetensors";
}

MaskSpec mask_of(const PatternSpec& spec) {
  for (const PatternSpec& member : spec.members) {
    if (MaskSpec mask = mask_of(member); !mask.empty()) return mask;
  }
  return spec.mask;
}

PatternSpec with_mask(PatternSpec spec, const MaskSpec& mask) {
  for (PatternSpec& member : spec.members) member = with_mask(std::move(member), mask);
  if (!spec.mask.file.empty()) spec.mask = mask;
  return spec;
}

}  // namespace

PlanRequest with_named_mask(PlanRequest request) {
  name_mask(request.pattern);
  return request;
}

PlanFormSource with_mask_of(const PlanRequest& request) {
  PlanFormSource source{"plan.json"};
  source.load = [mask = mask_of(request.pattern)](PatternSpec spec, const AttentionShape&) {
    return with_mask(std::move(spec), mask);
  };
  return source;
}

}  // namespace annulus::testing
