// See any_request.h.
#include "attention/testing/any_request.h"

#include <rapidcheck.h>

#include <memory>
#include <utility>
#include <vector>

#include "attention/testing/any_pattern.h"

namespace annulus::testing {
namespace {

PatternSpec any_with_given_map(const AttentionShape& shape) {
  PatternSpec spec;
  spec.kind = PatternSpec::Kind::kBlocks;
  spec.causal = *rc::gen::arbitrary<bool>();
  spec.blocks = given_map(std::make_shared<const BlockMap>(any_block_map(shape, 16)));
  if (*rc::gen::arbitrary<bool>()) return spec;
  PatternSpec both;
  both.kind = PatternSpec::Kind::kUnion;
  both.causal = *rc::gen::arbitrary<bool>();
  both.members = {causal_pattern(), spec};
  return both;
}

PatternSpec with_slices(PatternSpec spec, const AttentionShape& shape) {
  for (PatternSpec& member : spec.members) member = with_slices(std::move(member), shape);
  if (spec.kind != PatternSpec::Kind::kBlocks || !spec.blocks.given) return spec;
  PatternSpec slices;
  slices.kind = PatternSpec::Kind::kSlices;
  slices.slices = make_pattern(spec, shape).slices;
  return slices;
}

int any_within(const PlanRequest& request) {
  if (request.schedule == ScheduleKind::kRing || request.schedule == ScheduleKind::kAllGather) return 0;
  std::vector<int> fitting = {0};
  for (int n = 1; n <= request.ranks; ++n) {
    if (request.ranks % n == 0) fitting.push_back(n);
  }
  return *rc::gen::elementOf(fitting);
}

// Whether the schedule divides the query heads among the ranks of an inner group.
bool divides_heads(ScheduleKind schedule) {
  return schedule == ScheduleKind::kUlysses || schedule == ScheduleKind::kUlyssesRing;
}

}  // namespace

AttentionShape any_shape() {
  const auto length = [] {
    return *rc::gen::oneOf(rc::gen::element<int64_t>(0, 1, 2, 63, 64, 65, 97, 127, 128, 129, 160),
                           rc::gen::inRange<int64_t>(0, 130));
  };
  const int64_t q = length(), k = *rc::gen::inRange(0, 4) ? q : length();
  const int64_t kv_heads = *rc::gen::inRange(1, 4);
  return {*rc::gen::inRange(1, 4),
          kv_heads * *rc::gen::inRange(1, 4),
          kv_heads,
          q,
          k,
          *rc::gen::inRange(0, 3) ? 0 : *rc::gen::element<int64_t>(-32, -16, -7, 16, 48, 51)};
}

PlanRequest any_request(const AttentionShape& shape) {
  PlanRequest request;
  request.shape = shape;
  const int kind = *rc::gen::inRange(0, 7);
  request.pattern = kind == 0   ? any_with_given_map(request.shape)
                    : kind == 1 ? with_any_mask(any_pattern(request.shape), request.shape)
                    : kind == 2 ? any_masked_union(request.shape)
                                : any_pattern(request.shape);
  request.layout = *rc::gen::element(LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped,
                                     LayoutKind::kBalanced, LayoutKind::kPerDocument);
  if (*rc::gen::inRange(0, 4) == 0) request.balance_by = any_pattern(request.shape);
  request.schedule = *rc::gen::element(ScheduleKind::kRing, ScheduleKind::kAllGather, ScheduleKind::kGroupCast,
                                       ScheduleKind::kDoubleRing, ScheduleKind::kUlysses, ScheduleKind::kUlyssesRing,
                                       ScheduleKind::kMesh, ScheduleKind::kAuto);
  request.ranks = *rc::gen::inRange(1, 17);
  request.within = any_within(request);
  if (divides_heads(request.schedule)) {
    const auto fits = [&](int n) { return request.shape.heads % n == 0; };
    request.within = *rc::gen::suchThat(rc::gen::inRange(1, 10), fits);
    request.ranks = request.within * *rc::gen::inRange(1, 16 / request.within + 1);
    if (fits(request.ranks) && *rc::gen::inRange(0, 4) == 0) request.within = 0;
  }
  request.keep_last = *rc::gen::inRange(0, 4) != 0;
  if (shape.q_len == shape.k_len && *rc::gen::inRange(0, 5) == 0) {  // any lengths that add up
    request.uneven_lengths = any_documents(shape.q_len, request.ranks);
  }
  return request;
}

void fit_heads(PlanRequest& request) {
  const int within = request.within > 0 ? request.within : request.ranks;
  if (divides_heads(request.schedule) && request.shape.heads % within != 0) request.within = 1;
}

PlanRequest written_out(PlanRequest request) {
  request.pattern = with_slices(std::move(request.pattern), request.shape);
  if (request.balance_by) request.balance_by = with_slices(std::move(*request.balance_by), request.shape);
  return request;
}

}  // namespace annulus::testing
