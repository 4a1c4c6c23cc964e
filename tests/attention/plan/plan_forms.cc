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

PlanRequest with_named_mask(PlanRequest request) {
  if (request.pattern.mask.given) request.pattern.mask.file = "mask.safetensors";
  return request;
}

PlanFormSource with_mask_of(const PlanRequest& request) {
  PlanFormSource source{"plan.json"};
  source.load = [mask = request.pattern.mask](PatternSpec spec, const AttentionShape&) {
    if (!spec.mask.file.empty()) spec.mask = mask;
    return spec;
  };
  return source;
}

}  // namespace annulus::testing
